"""A plan as a task graph: a thread for every processor and link, simulated like any other graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from whatif.graph.columns import filled
from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Change,
    Dependencies,
    DependencyKind,
    Int64,
    Phase,
    TaskKind,
    Thread,
    ThreadKind,
    Waits,
)
from whatif.models.dts.plan import Activity, run
from whatif.models.durations.estimator import ESTIMATED, Source
from whatif.simulation.transfers import LATENCY, WORKERS

# A recording of one worker does not show the cost of sending and receiving: our estimate of its upper end, chosen after
# the lab's rounds took up to a tenth longer than their parts (docs/dts.md).
UNSEEN = 0.1
BEGIN, END = "a round begins", "a round is over"


def step_graph(graph: TaskGraph, activities: Sequence[Activity], processors: Sequence[str]) -> TaskGraph:
    """Return a graph whose steps are rounds of a plan, as many as ``graph`` has steps.

    ``processors`` are those with a role; the first one's thread has the marks between rounds. Processors are streams in
    a GPU recording and CPU threads in a CPU recording; links are channels. The schedule decides the order on each.
    """
    on_gpu = graph.has_gpu
    places = list(dict.fromkeys([*processors, *(activity.place for activity in activities)]))
    computing = set(processors)
    kind = ThreadKind.STREAM if on_gpu else ThreadKind.CPU
    threads = tuple(
        Thread(place, kind, 0 if on_gpu else -1, at if on_gpu else -1, ordered=False)
        if place in computing
        else Thread(place, ThreadKind.CHANNEL, ordered=False)
        for at, place in enumerate(places)
    )
    unit = _Round(list(activities), places, graph.kernel_kind, computing)
    n_steps = max(graph.info.n_steps, 1)
    size = len(unit.duration_ns)
    step = np.repeat(np.arange(n_steps), size)

    def repeated(column: Array) -> Array:
        return np.tile(column, n_steps)

    per_round = {
        "name": unit.name, "kind": unit.kind, "thread": unit.thread, "duration_ns": unit.duration_ns,
        "low_ns": unit.low_ns, "high_ns": unit.high_ns, "phase": unit.phase, "size_bytes": unit.size_bytes,
        "family": unit.family,
    }  # fmt: skip
    columns = filled(size * n_steps, {**{name: repeated(column) for name, column in per_round.items()}, "step": step})
    shift = np.arange(n_steps) * size
    source, target = (np.add.outer(shift, ids).ravel() for ids in (unit.source, unit.target))
    between = Dependencies.of(shift[1:] - 1, shift[1:], DependencyKind.USER)
    moved = repeated(unit.kind == TaskKind.COMMUNICATION)
    return TaskGraph(
        **columns,
        dependencies=Dependencies.concatenate([Dependencies.of(source, target, DependencyKind.USER), between]),
        waits=Waits(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64)),
        names=unit.names,
        threads=threads,
        layers=("",),
        info=replace(graph.info, memory=None),
        attached={
            LATENCY: repeated(unit.latency_ns),
            WORKERS: np.where(moved, 2, 0),
            ESTIMATED: np.where(moved, int(Source.PAPER), int(Source.RECORDED)).astype(np.int8),
        },
        notes=graph.notes,
        declined=graph.declined,
    ).with_change(Change.ON_SEVERAL_PROCESSORS)


class _Round:
    """The columns of one round, including its begin and end marks, in the order of their starts."""

    def __init__(self, activities: list[Activity], places: list[str], work: TaskKind, computing: set[str]) -> None:
        start_ns = run(activities).start_ns
        order = sorted(range(len(activities)), key=lambda number: (start_ns[number], number))
        # An empty task may start together with its predecessor: ids then follow the numbers.
        rank = {number: place + 1 for place, number in enumerate(order)}
        rows = [activities[number] for number in order]
        names = list(dict.fromkeys([BEGIN, *(row.name for row in rows), END]))
        code = {name: number for number, name in enumerate(names)}
        self.names = tuple(names)
        index = {place: number for number, place in enumerate(places)}
        self.name = np.array([0, *(code[row.name] for row in rows), code[END]])
        self.thread = np.array([0, *(index[row.place] for row in rows), 0])
        computes = np.array([True, *(row.place in computing for row in rows), True])
        self.kind = np.where(computes, int(work), int(TaskKind.COMMUNICATION))
        self.duration_ns = _framed([row.duration_ns for row in rows])
        self.latency_ns = _framed([row.latency_ns for row in rows])
        self.phase = np.array([Phase.FORWARD, *(row.phase for row in rows), Phase.UPDATE])
        self.size_bytes = np.array([-1, *(row.size_bytes for row in rows), -1])
        self.family = np.where(computes, int(KernelFamily.OTHER), int(KernelFamily.COMMUNICATION))
        part = np.array([0.0, *(row.fluctuation for row in rows), 0.0])
        varying = self.duration_ns - self.latency_ns
        self.low_ns = self.latency_ns + np.floor(varying / (1 + part)).astype(np.int64)
        slower = np.where(computes, 1 + UNSEEN, 1.0) / (1 - part)
        self.high_ns = self.latency_ns + np.ceil(varying * slower).astype(np.int64)
        last = len(rows) + 1
        source = [0] * len(rows) + list(range(1, last))
        target = list(range(1, last)) + [last] * len(rows)
        for number in order:
            source += [rank[before] for before in activities[number].after]
            target += [rank[number]] * len(activities[number].after)
        self.source, self.target = np.array(source), np.array(target)


def _framed(values: list[int]) -> Int64:
    return np.array([0, *values, 0], dtype=np.int64)
