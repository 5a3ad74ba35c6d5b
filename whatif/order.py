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
    source, target = dependencies.source, dependencies.target
    backward = source >= target
    order = np.arange(n_tasks, dtype=np.int32)
    kept = []
    done = 0
    # Only ids between the ends of a backward dependency can move, and none of them leaves its interval.
    for first, last in _merged(target[backward], source[backward]):
        inside = (source >= first) & (source <= last) & (target >= first) & (target <= last)
        local = _smallest_first(last - first + 1, source[inside] - first, target[inside] - first)
        kept += [order[done:first], local + np.int32(first)]
        done = last + 1
        if len(local) < last - first + 1:
            return np.concatenate(kept)
    return np.concatenate([*kept, order[done:]])


def _merged(first: Int32, last: Int32) -> list[tuple[int, int]]:
    """The union of the intervals [first, last], as disjoint intervals in order."""
    if not len(first):
        return []
    by_first = np.argsort(first, kind="stable")
    first, reach = first[by_first], np.maximum.accumulate(last[by_first])
    begins = np.append(True, first[1:] > reach[:-1])
    ends = np.append(begins[1:], True)
    return list(zip(first[begins].tolist(), reach[ends].tolist(), strict=True))


def _smallest_first(n_tasks: int, before: Int32, after: Int32) -> Int32:
    offsets, rows = _grouped(n_tasks, before)
    targets: list[int] = after[rows].tolist()
    starts = offsets.tolist()
    missing: list[int] = np.bincount(after, minlength=n_tasks).tolist()
    ready: list[int] = [task for task in range(n_tasks) if missing[task] == 0]
    order = []
    while ready:
        task = heapq.heappop(ready)
        order.append(task)
        for target in targets[starts[task] : starts[task + 1]]:
            missing[target] -= 1
            if missing[target] == 0:
                heapq.heappush(ready, target)
    return np.array(order, dtype=np.int32)
