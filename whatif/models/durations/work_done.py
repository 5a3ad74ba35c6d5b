"""Each task's work relative to its recorded operator after a what-if, as an attached column."""

from __future__ import annotations

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Float64, Int64

# The attached column of each task's work, as a multiple of its recorded operator's.
WORK = "work"
# Fits in an int64 with room for sums.
MOST_WORK = 2**60


def with_work(graph: TaskGraph, tasks: Bool, factor: float, *, wider: bool = False) -> TaskGraph:
    """Multiply the known operations and bytes of ``tasks`` by ``factor``.

    ``wider``: with ``factor`` times the thread blocks in parallel, not one after the other.
    """

    def grown(column: Int64) -> Int64:
        known = tasks & (column >= 0)
        return np.where(known, np.minimum(np.rint(column * float(factor)), MOST_WORK), column).astype(np.int64)

    graph = graph.replace(flops=grown(graph.flops), size_bytes=grown(graph.size_bytes))
    graph = graph.attach(**{WORK: np.where(tasks, factor, 1.0) * work_times(graph)})
    return graph.replace(warps=grown(graph.warps)) if wider else graph


def work_times(graph: TaskGraph) -> Float64:
    """Return each task's work as a multiple of its recorded operator's, shape (n_tasks,)."""
    factors = graph.attached.get(WORK)
    return np.ones(len(graph)) if factors is None else np.where(factors == 0, 1.0, factors)  # 0: an inserted task
