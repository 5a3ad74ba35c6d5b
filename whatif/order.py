"""A topological order that changes as little as possible."""

from __future__ import annotations

import heapq

import numpy as np

from whatif.types import Dependencies, Int32, Int64


def incoming(n_tasks: int, dependencies: Dependencies) -> tuple[Int64, Int64]:
    """Group dependencies by target: the row offsets, shape (n_tasks + 1,), and the rows in target order."""
    return _grouped(n_tasks, dependencies.target)


def outgoing(n_tasks: int, dependencies: Dependencies) -> tuple[Int64, Int64]:
    """Group dependencies by source: the row offsets, shape (n_tasks + 1,), and the rows in source order."""
    return _grouped(n_tasks, dependencies.source)


def _grouped(n_tasks: int, ends: Int32) -> tuple[Int64, Int64]:
    offsets = np.zeros(n_tasks + 1, dtype=np.int64)
    np.cumsum(np.bincount(ends, minlength=n_tasks), out=offsets[1:])
    return offsets, np.argsort(ends, kind="stable")


def topological_order(n_tasks: int, dependencies: Dependencies) -> Int32:
    """Give the tasks so that sources come before targets, smallest id first; shorter than n_tasks on a cycle."""
    offsets, rows = outgoing(n_tasks, dependencies)
    targets = dependencies.target[rows].tolist()
    starts = offsets.tolist()
    missing = np.bincount(dependencies.target, minlength=n_tasks).tolist()
    ready = [task for task in range(n_tasks) if missing[task] == 0]
    order = []
    while ready:
        task = heapq.heappop(ready)
        order.append(task)
        for target in targets[starts[task] : starts[task + 1]]:
            missing[target] -= 1
            if missing[target] == 0:
                heapq.heappush(ready, target)
    return np.array(order, dtype=np.int32)
