"""Order: a topological one that changes as little as possible, and the dependencies that follow from position.

Derived dependencies are recomputed for every edited graph and never stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from whatif.graph.types import ALL_STREAMS, Anchor, Array, Dependencies, DependencyKind, Int32, Int64, ThreadKind
from whatif.runtime.errors import WhatifError
from whatif.runtime.loops import Loops

if TYPE_CHECKING:
    from whatif.graph.task_graph import TaskGraph

loops = Loops("whatif.graph._loops")


def places(ordered: Array, wanted: Array, side: Literal["left", "right"] = "left") -> Int64:
    """Return the same as ``np.searchsorted``; faster for int64 if ``wanted`` is nearly sorted."""
    if not loops.compiled or not ordered.dtype == wanted.dtype == np.int64:
        return np.searchsorted(ordered, wanted, side=side)
    found = np.empty(len(wanted), dtype=np.int64)
    loops.places(np.ascontiguousarray(ordered), np.ascontiguousarray(wanted), side == "right", found)
    return found


def spread(column: Array, skipped: Int64, n: int) -> Array:
    """Return an array of ``n`` entries: the column's values in order, except at the indices ``skipped`` (ascending).

    The caller sets the skipped entries.
    """
    result = np.empty(n, dtype=column.dtype)
    if loops.compiled and column.dtype.kind in "biuf":
        contiguous = np.ascontiguousarray(column)
        loops.spread(contiguous.view(np.uint8), skipped, column.itemsize, result.view(np.uint8))
    else:
        kept = np.ones(n, dtype=np.bool_)
        kept[skipped] = False
        result[np.flatnonzero(kept)] = column
    return result


def each_once(values: Array) -> Array:
    """Return the same as ``np.unique`` for integers, without its hash table and the module that it imports."""
    ordered = np.sort(values)
    found: Array = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return found


def quartiles(values: npt.ArrayLike) -> tuple[float, float, float]:
    """Return the 25th, 50th and 75th percentiles, as ``np.percentile`` without the module that it imports."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    low, median, high = np.interp((0.25, 0.5, 0.75), np.linspace(0, 1, len(ordered)), ordered).tolist()
    return low, median, high


def order_by(first: Array, *then: Array) -> Int64:
    """Return the stable order by ``first``, ties by ``then``; fast if ``first`` consists of runs."""
    order = np.argsort(first, kind="stable")
    ordered = first[order]
    same = ordered[1:] == ordered[:-1]
    if same.any():
        tied = np.append(False, same) | np.append(same, False)
        rows = order[tied]
        order[tied] = rows[np.lexsort([column[rows] for column in (*reversed(then), first)])]
    return order


def numbered(*columns: Array) -> Int64:
    """Number the rows, shape (n,): rows that are equal in all ``columns`` (integers) get the same number."""
    order = np.lexsort(columns)
    number = np.zeros(len(order), dtype=np.int64)
    for column in columns:
        number[1:] |= column[order[1:]] != column[order[:-1]]
    number[order] = np.cumsum(number)
    return number


def before_on_thread(graph: TaskGraph, tasks: Array) -> Int64:
    """Return the task before each of a few ``tasks`` (ids) on its thread, shape (n,); -1 if there is none."""
    found, thread = np.full(len(tasks), -1, dtype=np.int64), graph.thread[tasks]
    for code in each_once(thread).tolist():
        rows, of_thread = thread == code, np.flatnonzero(graph.thread == code)
        place = np.searchsorted(of_thread, tasks[rows])
        found[rows] = np.where(place > 0, of_thread[place - 1], -1)
    return found


def outgoing(n_tasks: int, dependencies: Dependencies) -> tuple[Int64, Int64]:
    """Group dependencies by source: the row offsets, shape (n_tasks + 1,), and the rows in source order."""
    return grouped(n_tasks, dependencies.source)


def grouped(n_codes: int, codes: Int32) -> tuple[Int64, Int64]:
    """Group rows by their entry in ``codes``: the row offsets, shape (n_codes + 1,), and the rows in that order."""
    if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < n_codes:
        raise WhatifError(f"graph: a code lies outside its table of {n_codes} entries; see graph.check().")
    offsets, rows = np.zeros(n_codes + 2, dtype=np.int64), np.empty(len(codes), dtype=np.int64)
    loops.group_rows(np.arange(len(codes)), codes, offsets, rows)
    return offsets[:-1], rows


def topological_order(n_tasks: int, dependencies: Dependencies, thread: Int32 | None = None) -> Int32:
    """Return the tasks, sources before targets and smallest id first; shorter than n_tasks on a cycle.

    Tasks of one ``thread``, shape (n_tasks,), stay in the order of their ids; -1 is no thread.
    """
    source, target = dependencies.source, dependencies.target
    backward = source >= target
    # Only ids between the ends of a backward dependency can move, and none of them leaves its interval.
    change = np.zeros(n_tasks + 1, dtype=np.int64)
    np.add.at(change, target[backward], 1)
    np.add.at(change, source[backward] + 1, -1)
    moving = np.cumsum(change[:-1]) > 0
    order = np.arange(n_tasks, dtype=np.int32)
    ids = order[moving]
    local = np.cumsum(moving, dtype=np.int32) - np.int32(1)
    inside = moving.take(source) & moving.take(target)
    before, after = local[source[inside]], local[target[inside]]
    if thread is not None:
        on_thread = np.argsort(thread[ids], kind="stable").astype(np.int32)
        code = thread[ids][on_thread]
        same = (code[1:] == code[:-1]) & (code[1:] >= 0)
        before, after = np.append(before, on_thread[:-1][same]), np.append(after, on_thread[1:][same])
    found = _smallest_first(len(ids), before, after)
    if len(found) < len(ids):
        return ids[found]
    order[moving] = ids[found]
    return order


def _smallest_first(n_tasks: int, before: Int32, after: Int32) -> Int32:
    offsets, rows = grouped(n_tasks, before)
    missing = np.bincount(after, minlength=n_tasks).astype(np.int32)
    order = np.empty(n_tasks, dtype=np.int32)
    return order[: loops.smallest_first(offsets, after[rows], missing, order)]


def derived_dependencies(graph: TaskGraph) -> Dependencies:
    """Return the dependencies of waits on all earlier launches, and of launches that a full queue blocks.

    They follow from the order of each thread alone. If ids are out of order, as right after an insertion, some point
    backward; ``reorder`` corrects that.
    """
    if not len(graph.waits.task) and not graph.info.queue_depth:
        return Dependencies.concatenate([])
    queues = streams(graph)
    return Dependencies.concatenate([_waits(graph, queues), _back_pressure(graph, queues)])


def thread_dependencies(graph: TaskGraph) -> Dependencies:
    """Return the order of each ordered thread as dependencies between neighbours, with the thread's lag."""
    order = graph.by_thread
    thread = graph.thread[order]
    ordered = np.array([t.ordered for t in graph.threads], dtype=np.bool_)
    lag_ns = np.array([t.lag_ns for t in graph.threads], dtype=np.int64)
    same = (thread[1:] == thread[:-1]) & ordered[thread[1:]]
    return Dependencies.of(order[:-1][same], order[1:][same], DependencyKind.THREAD, lag_ns[thread[1:][same]])


def streams(graph: TaskGraph) -> list[tuple[int, Int32, Int64]]:
    """Each stream's tasks in order, and for each the CPU task after which it counts as launched."""
    n, on_gpu = len(graph.threads), graph.on_gpu.ids
    is_stream = np.array([thread.kind == ThreadKind.STREAM for thread in graph.threads], dtype=np.uint8)
    offsets, newest = np.zeros(n + 2, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    tasks, launched = np.empty(len(on_gpu), dtype=np.int32), np.empty(len(on_gpu), dtype=np.int64)
    # A task without a known launch was launched with or before the one that precedes it on its stream.
    loops.queues(on_gpu, is_stream, graph.thread, graph.launch_of, newest, offsets, tasks, launched)
    bounds = list(enumerate(zip(offsets[:-2].tolist(), offsets[1:-1].tolist(), strict=True)))
    return [(code, tasks[begin:end], launched[begin:end]) for code, (begin, end) in bounds if end > begin]


def _waits(graph: TaskGraph, queues: list[tuple[int, Int32, Int64]]) -> Dependencies:
    parts = []
    waits = graph.waits
    rank = np.array([thread.rank for thread in graph.threads], dtype=np.int32)
    for stream, tasks, launched in queues:
        same_rank = rank[graph.thread[waits.task]] == rank[stream]  # all streams of a machine, not of others
        in_scope = ((waits.scope == ALL_STREAMS) & same_rank) | (waits.scope == stream)
        wait = waits.task[in_scope]
        # The last task that was launched before the wait, if there is one.
        last = np.searchsorted(launched, wait, side="left") - 1
        found = last >= 0
        parts.append(
            Dependencies.of(tasks[last[found]], wait[found], DependencyKind.SYNC, waits.lag_ns[in_scope][found])
        )
    return Dependencies.concatenate(parts)


def _back_pressure(graph: TaskGraph, queues: list[tuple[int, Int32, Int64]]) -> Dependencies:
    """The call that launches the k-th task of a stream waits until task k - queue_depth has started."""
    depth = graph.info.queue_depth
    if not depth:
        return Dependencies.concatenate([])
    parts, last_stream = [], np.full(len(graph), -1, dtype=np.int32)
    for code, tasks, _ in queues:
        if len(tasks) <= depth:
            continue
        # A graph launch puts many tasks into the queue with one call: only its first one counts.
        first, source, target = (np.empty(len(tasks), dtype=np.int32) for _ in range(3))
        n = loops.held_back(tasks, graph.launch_of, depth, code, last_stream, first, source, target)
        parts.append(Dependencies.of(source[:n], target[:n], DependencyKind.QUEUE, anchor=Anchor.START))
    return Dependencies.concatenate(parts)
