"""How much of its recorded operator's work a task does after a what-if, as an attached column."""

from __future__ import annotations

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Float64, Int64

# The attached column that says how many times the work of its recorded operator a task does.
WORK = "work"
# Fits in an int64 with room for sums.
MOST_WORK = 2**60


def with_work(graph: TaskGraph, tasks: Bool, factor: float, *, wider: bool = False) -> TaskGraph:
    """Let ``tasks`` do ``factor`` times as many operations and move as many bytes, where these are known.

    ``wider``: with as many times the thread blocks at once, and not one after the other.
    """

    def grown(column: Int64) -> Int64:
        known = tasks & (column >= 0)
        return np.where(known, np.minimum(np.rint(column * float(factor)), MOST_WORK), column).astype(np.int64)

    graph = graph.replace(flops=grown(graph.flops), size_bytes=grown(graph.size_bytes))
    graph = graph.attach(**{WORK: np.where(tasks, factor, 1.0) * work_times(graph)})
    return graph.replace(warps=grown(graph.warps)) if wider else graph


def work_times(graph: TaskGraph) -> Float64:
    """Return how many times the work of its recorded operator each task does, shape (n_tasks,)."""
    told = graph.attached.get(WORK)
    return np.ones(len(graph)) if told is None else np.where(told == 0, 1.0, told)  # 0: an inserted task
