"""The placement of new tasks: the task of a thread before them, their launch, and the time of a launch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from whatif.graph.edit import as_ids
from whatif.graph.insert import NewTasks, insert_all
from whatif.graph.selection import Tasks
from whatif.graph.structure_cache import of_columns
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Bool, Int64, Phase, TaskKind
from whatif.models.durations.estimator import mark
from whatif.runtime.errors import WhatifError


def task_before(graph: TaskGraph, tasks: Array) -> Int64:
    """Return the task before each of ``tasks`` (ids) on its thread, shape (n,); for a thread's first task, itself."""
    before = graph.neighbours[0][tasks]
    return np.where(before >= 0, before, tasks).astype(np.int64)


def calls_of(graph: TaskGraph, tasks: Array) -> Int64:
    """Return the call that launched each of ``tasks`` (ids of GPU tasks), shape (n,).

    If unknown: the latest call that launched an earlier task, else the CPU's task before it, else the CPU's first task.
    Raises WhatifError if the recording has no CPU task.
    """
    found = graph.launch_of[tasks].astype(np.int64)
    if (found >= 0).all():
        return found
    cpu = np.flatnonzero(graph.on_cpu)
    if not len(cpu):
        raise WhatifError("expected a recording with the CPU's calls, which launch what a what-if adds, got none.")
    found = np.where(found >= 0, found, np.maximum.accumulate(graph.launch_of)[tasks])
    return np.where(found >= 0, found, cpu[np.maximum(np.searchsorted(cpu, tasks) - 1, 0)])


def launches_of(graph: TaskGraph, tasks: Tasks) -> Bool:
    """Return a mask, shape (n_tasks,), of the calls that launched one of ``tasks`` (ids or a mask)."""
    found = np.zeros(len(graph) + 1, dtype=np.bool_)  # the last entry: tasks with an unknown launch (-1)
    found[graph.launch_of.take(as_ids(graph, tasks))] = True
    return found[:-1]


# CPU time of a launch if the recording has none: our estimate.
UNKNOWN_LAUNCH_NS = 5_000.0


def usual_launch_ns(graph: TaskGraph, tasks: Tasks) -> float:
    """Return the median time of the calls that launched ``tasks`` (ids or a mask)."""
    times_ns = graph.duration_ns[launches_of(graph, tasks)]
    return float(np.median(times_ns)) if len(times_ns) else UNKNOWN_LAUNCH_NS


# New tasks, and the source of their durations.
Lot = tuple[NewTasks, npt.ArrayLike]


def put_in(graph: TaskGraph, lots: list[Lot]) -> TaskGraph:
    """Return the graph with the new tasks of all ``lots`` and their sources."""
    done = insert_all(graph, [tasks for tasks, _ in lots])
    if not done:
        return graph
    sources = [np.broadcast_to(source, len(new.ids)) for new, (_, source) in zip(done, lots, strict=True)]
    return mark(done[0].graph, np.concatenate([new.ids for new in done]), np.concatenate(sources))


def operator_cost_ns(graph: TaskGraph) -> int:
    """Return the CPU time of one more small operator: the median launch and the lower quartile of the gaps, forward.

    Half of the gaps contain the Python code of a layer, which a cast inside autocast does not run.
    """
    launches, gaps = _forward_launches(graph)
    if not len(launches):
        return 10_000
    gaps_ns = graph.duration_ns[gaps]
    return int(np.median(graph.duration_ns[launches]) + (np.percentile(gaps_ns, 25) if len(gaps) else 0))


@of_columns("phase")
def _forward_launches(graph: TaskGraph) -> tuple[Int64, Array]:
    """The calls that launch forward work, and the gaps right behind them."""
    launches = np.flatnonzero(launches_of(graph, graph.on_gpu & (graph.phase == Phase.FORWARD)))
    behind = graph.neighbours[1][launches]
    return launches, behind[(behind >= 0) & (graph.kind[behind] == TaskKind.GAP)]


def last_gpu_before(graph: TaskGraph, tasks: Int64) -> Int64:
    """The last GPU task launched before each CPU task; the first one if none was."""
    gpu, launched = _by_launch(graph)
    latest = launched[np.maximum(np.searchsorted(launched, tasks, side="left") - 1, 0)]
    # For one launch the first task.
    found = gpu[np.searchsorted(launched, latest, side="left")]
    return np.where(latest < tasks, found, graph.on_gpu.ids[0]).astype(np.int64)


@of_columns()
def _by_launch(graph: TaskGraph) -> tuple[Int64, Array]:
    """The GPU tasks in the order of their launches, and the launch with which each counts."""
    gpu = graph.on_gpu.ids
    # Tasks without a launch, such as added collectives, count with the launch before them: the GPU may lag by steps.
    launched = np.maximum.accumulate(graph.launch_of[gpu])
    launched = np.where(graph.launch_of[gpu] >= 0, graph.launch_of[gpu], np.where(launched >= 0, launched, gpu))
    order = np.argsort(launched, kind="stable")
    return gpu[order], launched[order]
