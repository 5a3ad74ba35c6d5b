"""Simulate many values of one option at once, if they change durations only, and linearly.

Most swept options are rates and factors: a transfer takes latency + size / rate. Then four graphs determine and
check the durations at every value, as a line over the value or over its reciprocal. Values without such a line are
split into pieces that have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    Dependencies,
    Float64,
    Int64,
)
from whatif.prediction.ranges import error_sums_between
from whatif.simulation.sharing import in_fixed_order
from whatif.simulation.simulator import simulate_scenarios
from whatif.simulation.steps import (
    edge_tasks,
    edge_times_ns,
    span_tasks,
    steady,
)

# Fewer values are simulated one by one: finding the line takes four graphs.
LEAST_VALUES = 6
# Durations are whole nanoseconds, so those on a line are within one of it; the relative bound is for large ones.
ROUNDED_NS, ROUNDED = 1.0, 1e-9
_DURATIONS = ("duration_ns", "low_ns", "high_ns")


class Steps(NamedTuple):
    """The step of each value by one clock, ns, shape (n_values,): as predicted, and at the low and high bounds."""

    predicted_ns: Array
    low_ns: Array
    high_ns: Array


class Piece(NamedTuple):
    """Positions of values over which durations are linear, the graph at the first one, and their steps."""

    places: Int64
    first: TaskGraph
    steps: Steps
    sums: Float64  # error sums that determine the width of each value's range, one row per value


def pieces(
    numbers: Array, graph_at: Callable[[int], TaskGraph], clock: str, places: Int64 | None = None
) -> Iterator[Piece]:
    """Yield the pieces that could be simulated at once; values in no piece have to be simulated one by one.

    ``numbers`` (n_values,) are the values, each above 0 and ascending; ``graph_at`` gives the checked graph of a
    position; ``places`` are the positions to simulate, by default all.
    """
    places = np.arange(len(numbers)) if places is None else places
    if len(places) < LEAST_VALUES or numbers[places[0]] == numbers[places[-1]]:  # 1Gbps and 1000Mbps are one value
        return
    at = [int(places[share * (len(places) - 1) // 3]) for share in range(4)]
    graphs = [graph_at(place) for place in at]
    # Tasks that slow one another have no common order of events in all scenarios.
    if all(len(graph) and in_fixed_order(graph) for graph in graphs):
        for over in (numbers, 1.0 / numbers):
            if _are_lines(graphs, over[at]):
                steps = _simulated(graphs[0], graphs[-1], over[at], over[places], clock)
                along = (over[places] - over[at[0]]) / (over[at[-1]] - over[at[0]])
                yield Piece(places, graphs[0], steps, error_sums_between(graphs[0], graphs[-1], along))
                return
    middle = len(places) // 2
    yield from pieces(numbers, graph_at, clock, places[:middle])
    yield from pieces(numbers, graph_at, clock, places[middle:])


def _are_lines(graphs: Sequence[TaskGraph], x: Array) -> bool:
    """Whether the graphs differ in durations only, and those lie on lines through the first and the last."""
    first, last = graphs[0], graphs[-1]
    if not all(_same_structure(first, graph) for graph in graphs[1:]):
        return False
    for name in _DURATIONS:
        a, b = getattr(first, name), getattr(last, name)
        for graph, x_here in zip(graphs[1:-1], x[1:-1].tolist(), strict=True):
            expected = a + (b - a) * ((x_here - x[0]) / (x[-1] - x[0]))
            missed = np.abs(getattr(graph, name) - expected)
            if bool((missed > ROUNDED_NS + ROUNDED * np.abs(expected)).any()):
                return False
    return True


def _same_structure(a: TaskGraph, b: TaskGraph) -> bool:
    same = len(a) == len(b) and a.threads == b.threads and a.info.queue_depth == b.info.queue_depth
    facts = [(graph.info.samples, graph.info.steady, len(graph.dependencies)) for graph in (a, b)]
    if not same or facts[0] != facts[1]:
        return False
    tables = [(getattr(a, name), getattr(b, name)) for name in ("thread", "step", "kind", "correlation_id")]
    tables += [(getattr(a.dependencies, name), getattr(b.dependencies, name)) for name in Dependencies.__slots__]
    tables += [(getattr(a.waits, name), getattr(b.waits, name)) for name in ("task", "scope", "lag_ns")]
    return all(one is other or np.array_equal(one, other) for one, other in tables)


def _simulated(first: TaskGraph, last: TaskGraph, ends: Array, x: Array, clock: str) -> Steps:
    """The steps of all values; ``ends`` are the abscissas of the two graphs, ``x`` those of the values."""
    tasks, by_start = _observed(first, clock)
    found: list[Array] = []
    for name in _DURATIONS:
        a, b = getattr(first, name).astype(np.float64), getattr(last, name).astype(np.float64)
        slope = (b - a) / (ends[-1] - ends[0])
        if name != "duration_ns" and np.array_equal(a, first.duration_ns) and np.array_equal(b, last.duration_ns):
            found.append(found[0])
            continue
        base = a - slope * ends[0]
        # A line begins within half a nanosecond of a whole number, which durations are.
        graph = first.replace(duration_ns=np.rint(base).astype(np.int64))
        end_ns, _ = simulate_scenarios(graph, slope, x, tasks)
        start_ns = end_ns - (graph.duration_ns[tasks, None] + slope[tasks, None] * x[None, :])
        found.append(_steps(first, clock, start_ns, end_ns, by_start))
    return Steps(*found)


def _observed(graph: TaskGraph, clock: str) -> tuple[Int64, Bool]:
    """The tasks whose times delimit the steps: the edges, or for the span a thread's first and last counted ones."""
    if clock != "span":
        return edge_tasks(graph, clock)
    counted = np.flatnonzero(span_tasks(graph))
    threads = graph.thread[counted]
    firsts = np.unique(threads, return_index=True)[1]
    lasts = len(threads) - 1 - np.unique(threads[::-1], return_index=True)[1]
    return counted[np.append(firsts, lasts)], np.arange(2 * len(firsts)) < len(firsts)


def _steps(graph: TaskGraph, clock: str, start_ns: Array, end_ns: Array, by_start: Bool) -> Array:
    if clock == "span":
        return np.asarray(end_ns[~by_start].max(axis=0) - start_ns[by_start].min(axis=0))
    times_ns = np.diff(edge_times_ns(graph, start_ns, end_ns, clock), axis=0)
    chosen = steady(tuple(range(len(times_ns))), graph, clock)
    return np.asarray(np.median(times_ns[list(chosen)], axis=0) if chosen else np.zeros(end_ns.shape[1]))
