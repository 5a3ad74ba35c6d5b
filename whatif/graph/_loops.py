# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# mypy: disable-error-code="valid-type, no-any-return, untyped-decorator"
"""The hot loops of the task graph: one source, compiled ahead of time if a compiler is available (runtime.loops)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import cython  # what the compiler reads; nothing imports Cython at run time
else:
    from whatif.runtime import uncompiled as cython

COMPILED = cython.compiled


def _small(n: int) -> Any:
    """Scratch of int32: uncompiled, a list is faster than an array."""
    return np.zeros(n, dtype=np.int32) if cython.compiled else [0] * n


def _reals(n: int) -> Any:
    """Scratch of doubles, likewise."""
    return np.zeros(n) if cython.compiled else [0.0] * n


def group_by_target(
    n_tasks: cython.Py_ssize_t,
    source: cython.const[cython.int][::1],
    target: cython.const[cython.int][::1],
    lags_ns: cython.const[cython.longlong][::1],
    anchors: cython.const[cython.schar][::1],
    offsets: cython.int[::1],
    points: cython.int[::1],
    lags: cython.longlong[::1],
) -> bool:
    """Fill ``offsets`` and, by target, the indices into (starts, ends) and the lags, with a counting sort.

    ``offsets``, shape (n_tasks + 1,) and zero at first, become the begin of each target's rows and the end of the last
    one's. ``lags`` are zero at first: most stay so and are not written. Return whether every source comes before its
    target.
    """
    row: cython.Py_ssize_t
    task: cython.Py_ssize_t
    at: cython.int = 0
    forward: cython.bint = True
    n_rows: cython.Py_ssize_t = len(target)
    with cython.nogil:
        for row in range(n_rows):
            offsets[target[row]] += 1
        for task in range(n_tasks + 1):
            at += offsets[task]
            offsets[task] = at
        # From the last row to the first: the end of each target's rows moves down to their begin.
        for row in range(n_rows - 1, -1, -1):
            if source[row] >= target[row]:
                forward = False
            at = offsets[target[row]] - 1
            offsets[target[row]] = at
            points[at] = source[row] + (n_tasks if anchors[row] == 0 else 0)
            if lags_ns[row] != 0:
                lags[at] = lags_ns[row]
    return forward


def group_rows(
    rows: cython.const[cython.longlong][::1],
    codes: cython.const[cython.int][::1],
    offsets: cython.longlong[::1],
    grouped: cython.longlong[::1],
) -> None:
    """Fill ``grouped`` with the rows by their code, in order.

    ``offsets``, shape (n_codes + 2,) and zero at first, become the begin of each code's rows and the end of the last
    one's; the last entry is scratch. Codes come in runs: within one the counter stays in a register.
    """
    i: cython.Py_ssize_t
    first: cython.Py_ssize_t
    at: cython.longlong = 0
    code: cython.int
    n_rows: cython.Py_ssize_t = len(rows)
    with cython.nogil:
        i = 0
        while i < n_rows:
            code = codes[i]
            first = i
            while i < n_rows and codes[i] == code:
                i += 1
            offsets[code + 2] += i - first
        for i in range(2, len(offsets) - 1):
            at += offsets[i]
            offsets[i] = at
        i = 0
        while i < n_rows:
            code = codes[i]
            at = offsets[code + 1]
            while i < n_rows and codes[i] == code:
                grouped[at] = rows[i]
                at += 1
                i += 1
            offsets[code + 1] = at


def queues(
    on_gpu: cython.const[cython.longlong][::1],
    is_stream: cython.const[cython.uchar][::1],
    thread: cython.const[cython.int][::1],
    launch: cython.const[cython.int][::1],
    newest: cython.longlong[::1],
    offsets: cython.longlong[::1],
    tasks: cython.int[::1],
    launched: cython.longlong[::1],
) -> None:
    """Fill ``tasks`` with those of each stream in order, and ``launched`` with the latest launch up to each of them.

    ``on_gpu`` are ids, ascending. ``offsets`` are where the streams begin, by thread, as ``group_rows`` fills them.
    ``newest``, shape (n_threads,), is scratch of -1.
    """
    row: cython.Py_ssize_t
    task: cython.Py_ssize_t
    t: cython.Py_ssize_t
    at: cython.longlong = 0
    n: cython.Py_ssize_t = len(on_gpu)
    with cython.nogil:
        for row in range(n):
            task = on_gpu[row]
            if is_stream[thread[task]]:
                offsets[thread[task] + 2] += 1
        for t in range(2, len(offsets) - 1):
            at += offsets[t]
            offsets[t] = at
        for row in range(n):
            task = on_gpu[row]
            t = thread[task]
            if is_stream[t]:
                at = offsets[t + 1]
                offsets[t + 1] = at + 1
                if launch[task] > newest[t]:
                    newest[t] = launch[task]
                tasks[at] = task
                launched[at] = newest[t]


def held_back(
    tasks: cython.const[cython.int][::1],
    launch: cython.const[cython.int][::1],
    depth: cython.Py_ssize_t,
    stream: cython.int,
    seen: cython.int[::1],
    first: cython.int[::1],
    source: cython.int[::1],
    target: cython.int[::1],
) -> int:
    """Fill ``target`` with the calls that a full queue of a stream blocks, ``source`` with the task each waits for.

    Return their number. ``first`` is scratch for the tasks that count, the first of each call. ``seen``, shape
    (n_tasks,), is the stream that each call launched on last.
    """
    task: cython.int
    call: cython.int
    i: cython.Py_ssize_t
    found: cython.Py_ssize_t = 0
    n: cython.Py_ssize_t = 0
    with cython.nogil:
        for i in range(len(tasks)):
            task = tasks[i]
            call = launch[task]
            if call >= 0:
                if seen[call] == stream:
                    continue
                seen[call] = stream
                if n >= depth:
                    source[found] = first[n - depth]
                    target[found] = call
                    found += 1
            first[n] = task
            n += 1
    return found


def kept_neighbours(
    thread: cython.const[cython.int][::1],
    gone: cython.const[cython.uchar][::1],
    newest: cython.int[::1],
    previous: cython.int[::1],
    following: cython.int[::1],
) -> None:
    """Fill in the nearest tasks that are not ``gone`` before and after each task on its thread, itself if kept.

    -1 if there is none. ``newest``, shape (n_threads,), is scratch of -1.
    """
    task: cython.Py_ssize_t
    n: cython.Py_ssize_t = len(thread)
    with cython.nogil:
        for task in range(n):
            if not gone[task]:
                newest[thread[task]] = task
            previous[task] = newest[thread[task]]
        for task in range(len(newest)):
            newest[task] = -1
        for task in range(n - 1, -1, -1):
            if not gone[task]:
                newest[thread[task]] = task
            following[task] = newest[thread[task]]


def smallest_first(
    offsets: cython.const[cython.longlong][::1],
    targets: cython.const[cython.int][::1],
    missing: cython.int[::1],
    order: cython.int[::1],
) -> int:
    """Fill ``order`` with the tasks, sources before targets and the smallest id first; return their number.

    ``targets`` are those of each task's dependencies; ``missing``, each task's number of predecessors, is consumed. A
    task that is next in id order is taken at once; only others go through a heap.
    """
    n: cython.Py_ssize_t = len(missing)
    first: cython.Py_ssize_t = 0  # no task before this one is waiting outside the heap
    done: cython.Py_ssize_t = 0
    size: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t
    other: cython.Py_ssize_t
    row: cython.Py_ssize_t
    task: cython.int
    last: cython.int
    target: cython.int
    heap: cython.int[::1] = _small(n)
    with cython.nogil:
        while True:
            # Tasks from ``first`` on have not been visited; earlier ones enter the heap when they become ready.
            if first < n and (size == 0 or first <= heap[0]):
                task = first
                first += 1
                if missing[task] != 0:
                    continue  # it enters the heap when it becomes ready
            elif size > 0:
                task = heap[0]
                size -= 1
                last = heap[size]
                at = 0
                while True:
                    other = 2 * at + 1
                    if other >= size:
                        break
                    if other + 1 < size and heap[other + 1] < heap[other]:
                        other += 1
                    if heap[other] >= last:
                        break
                    heap[at] = heap[other]
                    at = other
                heap[at] = last
            else:
                break
            missing[task] = -1
            order[done] = task
            done += 1
            for row in range(offsets[task], offsets[task + 1]):
                target = targets[row]
                missing[target] -= 1
                if missing[target] == 0 and target < first:
                    at = size
                    size += 1
                    while at > 0:
                        other = (at - 1) >> 1
                        if heap[other] <= target:
                            break
                        heap[at] = heap[other]
                        at = other
                    heap[at] = target
    return done


def walk_back(
    start_ns: cython.const[cython.longlong][::1],
    end_ns: cython.const[cython.longlong][::1],
    thread: cython.const[cython.int][::1],
    ordered: cython.const[cython.uchar][::1],
    thread_lag_ns: cython.const[cython.longlong][::1],
    offsets: cython.const[cython.int][::1],
    points: cython.const[cython.int][::1],
    lags_ns: cython.const[cython.longlong][::1],
    before: cython.int[::1],
    last: cython.Py_ssize_t,
    seen: cython.uchar[::1],
    path: cython.longlong[::1],
) -> int:
    """Fill ``path`` with ``last``, the task that lets it start when it does, and so on; return their number.

    Of several, the one on the same thread comes first, then the one with the smallest id. Dependencies are grouped as
    by ``group_by_target``. ``before`` is the task before each on its thread, -1 if there is none: given for threads
    that are not ``ordered``, filled in for the others. ``seen``, zero at first, ends the walk at a cycle.
    """
    n: cython.Py_ssize_t = len(thread)
    task: cython.Py_ssize_t
    source: cython.Py_ssize_t
    found: cython.Py_ssize_t
    row: cython.Py_ssize_t
    reached_ns: cython.longlong
    near: cython.bint  # the task found is on the same thread
    done: cython.Py_ssize_t = 0
    newest: cython.int[::1] = _small(len(ordered))
    with cython.nogil:
        for task in range(len(ordered)):
            newest[task] = -1
        for task in range(n):
            if ordered[thread[task]]:
                before[task] = newest[thread[task]]
                newest[thread[task]] = task
        task = last
        while task >= 0 and not seen[task]:
            path[done] = task
            done += 1
            seen[task] = 1
            found = before[task]
            if found >= 0 and end_ns[found] + thread_lag_ns[thread[task]] != start_ns[task]:
                found = -1
            near = found >= 0
            for row in range(offsets[task], offsets[task + 1]):
                source = points[row] if points[row] < n else points[row] - n
                reached_ns = (start_ns[source] if points[row] < n else end_ns[source]) + lags_ns[row]
                if reached_ns != start_ns[task]:
                    continue
                if thread[source] == thread[task]:
                    if not near or source < found:
                        found = source
                    near = True
                elif not near and (found < 0 or source < found):
                    found = source
            task = found
    return done


def without_cost(
    thread: cython.const[cython.int][::1],
    works: cython.const[cython.uchar][::1],
    duration_ns: cython.const[cython.longlong][::1],
    cost_ns: cython.const[cython.int][::1],
    factor: cython.double,
    n_threads: cython.Py_ssize_t,
    left_ns: cython.double[::1],
) -> None:
    """Fill ``left_ns`` with the time of each task that ``works`` without ``factor`` times its cost, others' with 0.

    Cost beyond a task's time is carried over to the next ones that work on its thread.
    """
    task: cython.Py_ssize_t
    t: cython.Py_ssize_t
    time: cython.double
    cost: cython.double
    reached: cython.double
    left: cython.double
    # Of each thread up to here: all costs less all times, its minimum so far, all costs, and those of them taken.
    balance: cython.double[::1] = _reals(n_threads)
    least: cython.double[::1] = _reals(n_threads)
    costs: cython.double[::1] = _reals(n_threads)
    taken: cython.double[::1] = _reals(n_threads)
    with cython.nogil:
        for task in range(len(thread)):
            left_ns[task] = 0.0
            if not works[task]:
                continue
            t = thread[task]
            time = duration_ns[task]
            cost = factor * cost_ns[task]
            balance[t] += cost - time
            if balance[t] < least[t]:
                least[t] = balance[t]
            costs[t] += cost
            # What the balance is above its minimum is still owed.
            reached = costs[t] - (balance[t] - least[t])
            left = time - (reached - taken[t])
            taken[t] = reached
            if left < 0:
                left = 0.0
            left_ns[task] = left if left < time else time


def spread(
    column: cython.const[cython.uchar][::1],
    skipped: cython.const[cython.longlong][::1],
    size: cython.Py_ssize_t,
    result: cython.uchar[::1],
) -> None:
    """Copy values of ``size`` bytes in their order to the places of ``result`` that are not ``skipped`` (ascending)."""
    row: cython.Py_ssize_t
    end: cython.Py_ssize_t
    at: cython.Py_ssize_t = 0
    done: cython.Py_ssize_t = 0
    n: cython.Py_ssize_t = len(skipped)
    with cython.nogil:
        for row in range(n + 1):
            end = size * skipped[row] if row < n else len(result)
            while at < end:
                result[at] = column[done]
                at += 1
                done += 1
            at += size


def places(
    ordered: cython.const[cython.longlong][::1],
    wanted: cython.const[cython.longlong][::1],
    right: cython.bint,
    found: cython.longlong[::1],
) -> None:
    """Fill ``found`` with each wanted value's insertion point among the ordered ones, after equal ones if ``right``.

    Each search begins at the previous insertion point: nearly sorted values take a few steps.
    """
    n: cython.Py_ssize_t = len(ordered)
    i: cython.Py_ssize_t
    low: cython.Py_ssize_t = 0
    high: cython.Py_ssize_t
    middle: cython.Py_ssize_t
    step: cython.Py_ssize_t
    value: cython.longlong
    with cython.nogil:
        for i in range(len(wanted)):
            value = wanted[i]
            step = 1
            if low < n and (ordered[low] < value or (right and ordered[low] == value)):
                high = low + 1
                while high < n and (ordered[high] < value or (right and ordered[high] == value)):
                    low = high
                    high += step
                    step += step
                low += 1
                if high > n:
                    high = n
            else:
                high = low
                low -= 1
                while low >= 0 and not (ordered[low] < value or (right and ordered[low] == value)):
                    high = low
                    low -= step
                    step += step
                low = low + 1 if low >= 0 else 0
            # All before ``low`` are before the value, all from ``high`` on after it.
            while low < high:
                middle = (low + high) >> 1
                if ordered[middle] < value or (right and ordered[middle] == value):
                    low = middle + 1
                else:
                    high = middle
            found[i] = low
