# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# mypy: disable-error-code="valid-type, no-any-return, untyped-decorator"
"""The longest path in id order, of one scenario or of many: one source for both forms (whatif.runtime.loops).

Uncompiled, numpy processes the row of all scenarios at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import cython  # what the compiler reads; nothing imports Cython at run time
else:
    from whatif.runtime import uncompiled as cython

COMPILED = cython.compiled


def _whole(n: int, value: int = 0) -> Any:
    """Scratch of int64: uncompiled, a list is faster than an array."""
    return np.full(n, value, dtype=np.int64) if cython.compiled else [value] * n


def sweep(
    thread: cython.const[cython.int][::1],
    duration_ns: cython.const[cython.longlong][::1],
    offsets: cython.const[cython.int][::1],
    points: cython.const[cython.int][::1],
    lags_ns: cython.const[cython.longlong][::1],
    thread_lag_ns: cython.const[cython.longlong][::1],
    times: cython.longlong[::1],
) -> None:
    """Fill ``times`` with start (first half) and end (second half) of every task: the longest path in id order.

    ``points`` index ``times``: a dependency counts from the start or from the end of its source.
    """
    n: cython.Py_ssize_t = len(thread)
    task: cython.Py_ssize_t
    row: cython.Py_ssize_t
    t: cython.int
    start_ns: cython.longlong
    end_ns: cython.longlong
    reached_ns: cython.longlong
    free_ns: cython.longlong[::1] = _whole(len(thread_lag_ns))
    with cython.nogil:
        for task in range(n):
            t = thread[task]
            start_ns = free_ns[t]
            for row in range(offsets[task], offsets[task + 1]):
                reached_ns = times[points[row]] + lags_ns[row]
                if reached_ns > start_ns:
                    start_ns = reached_ns
            end_ns = start_ns + duration_ns[task]
            times[task] = start_ns
            times[n + task] = end_ns
            end_ns += thread_lag_ns[t]
            free_ns[t] = end_ns if end_ns > 0 else 0


def live_rows(
    offsets: cython.const[cython.int][::1],
    points: cython.const[cython.int][::1],
    last: cython.int[::1],
    spare: cython.int[::1],
    rows: cython.int[::1],
) -> int:
    """Fill ``rows``: each task's row for its ends, reused after the last task that waits for it.

    Returns the number of rows. Row 0 takes the ends without dependents. ``last`` and ``spare``, shape (n_tasks,),
    are scratch.
    """
    n: cython.Py_ssize_t = len(offsets) - 1
    task: cython.Py_ssize_t
    row: cython.Py_ssize_t
    source: cython.Py_ssize_t
    n_spare: cython.Py_ssize_t = 0
    n_rows: cython.int = 1
    with cython.nogil:
        for task in range(n):
            last[task] = -1
        for task in range(n):
            for row in range(offsets[task], offsets[task + 1]):
                source = points[row]
                last[source - n if source >= n else source] = task  # a division takes ten times as long
        for task in range(n):
            rows[task] = 0
            if last[task] >= 0:
                if n_spare:
                    n_spare -= 1
                    rows[task] = spare[n_spare]
                else:
                    rows[task] = n_rows
                    n_rows += 1
            for row in range(offsets[task], offsets[task + 1]):
                source = points[row]
                if source >= n:
                    source -= n
                if last[source] == task:
                    last[source] = -1  # released once, though a task may wait twice for another
                    spare[n_spare] = rows[source]
                    n_spare += 1
    return n_rows


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _reach(
    free: cython.double[:, ::1],
    t: cython.Py_ssize_t,
    ends: cython.double[:, ::1],
    source: cython.Py_ssize_t,
    lag: cython.double,
) -> cython.void:
    """Raise the row ``t`` to at least a source's ends plus the lag."""
    s: cython.Py_ssize_t
    reached: cython.double
    if cython.compiled:
        for s in range(free.shape[1]):
            reached = ends[source, s] + lag
            free[t, s] = reached if reached > free[t, s] else free[t, s]
    else:
        np.maximum(ends[source] + lag, free[t], out=free[t])


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _reach_start(
    free: cython.double[:, ::1],
    t: cython.Py_ssize_t,
    ends: cython.double[:, ::1],
    source: cython.Py_ssize_t,
    slope: cython.double,
    x: cython.const[cython.double][:, ::1],
    lag: cython.double,
) -> cython.void:
    """The same from a source's start: its end less its duration, which is included in ``slope * x`` and in the lag."""
    s: cython.Py_ssize_t
    reached: cython.double
    if cython.compiled:
        for s in range(free.shape[1]):
            reached = ends[source, s] - slope * x[0, s] + lag
            free[t, s] = reached if reached > free[t, s] else free[t, s]
    else:
        np.maximum(ends[source] - slope * x[0] + lag, free[t], out=free[t])


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _run(
    free: cython.double[:, ::1],
    t: cython.Py_ssize_t,
    base: cython.double,
    slope: cython.double,
    x: cython.const[cython.double][:, ::1],
    ends: cython.double[:, ::1],
    own: cython.Py_ssize_t,
) -> cython.void:
    """Turn the row ``t`` from a task's starts into its ends, and store them."""
    s: cython.Py_ssize_t
    done: cython.double
    if cython.compiled:
        for s in range(free.shape[1]):
            done = free[t, s] + base + slope * x[0, s]
            free[t, s] = done
            ends[own, s] = done
    else:
        free[t] += base
        free[t] += slope * x[0]
        ends[own] = free[t]


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _run_fixed(
    free: cython.double[:, ::1],
    t: cython.Py_ssize_t,
    base: cython.double,
    ends: cython.double[:, ::1],
    own: cython.Py_ssize_t,
) -> cython.void:
    """The same for a task with one duration in all scenarios."""
    s: cython.Py_ssize_t
    done: cython.double
    if cython.compiled:
        for s in range(free.shape[1]):
            done = free[t, s] + base
            free[t, s] = done
            ends[own, s] = done
    else:
        free[t] += base
        ends[own] = free[t]


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _reach_and_run(
    free: cython.double[:, ::1],
    t: cython.Py_ssize_t,
    ends: cython.double[:, ::1],
    one: cython.Py_ssize_t,
    lag: cython.double,
    other: cython.Py_ssize_t,
    other_lag: cython.double,
    base: cython.double,
    own: cython.Py_ssize_t,
) -> cython.void:
    """``_reach``, from two sources that may be equal, and ``_run_fixed`` in one pass: the case of most tasks."""
    s: cython.Py_ssize_t
    done: cython.double
    second: cython.double
    if cython.compiled and one == other and lag == other_lag:
        for s in range(free.shape[1]):
            second = ends[other, s] + other_lag
            done = (second if second > free[t, s] else free[t, s]) + base
            free[t, s] = done
            ends[own, s] = done
    elif cython.compiled:
        for s in range(free.shape[1]):
            done = ends[one, s] + lag
            second = ends[other, s] + other_lag
            done = done if done > second else second
            done = (done if done > free[t, s] else free[t, s]) + base
            free[t, s] = done
            ends[own, s] = done
    else:
        np.maximum(ends[one] + lag, free[t], out=free[t])
        np.maximum(ends[other] + other_lag, free[t], out=free[t])
        free[t] += base
        ends[own] = free[t]


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _keep(
    to: cython.double[:, ::1], row: cython.Py_ssize_t, free: cython.double[:, ::1], t: cython.Py_ssize_t
) -> cython.void:
    s: cython.Py_ssize_t
    if cython.compiled:
        for s in range(free.shape[1]):
            to[row, s] = free[t, s]
    else:
        to[row] = free[t]


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _keep_most(
    to: cython.double[:, ::1], row: cython.Py_ssize_t, free: cython.double[:, ::1], t: cython.Py_ssize_t
) -> cython.void:
    s: cython.Py_ssize_t
    if cython.compiled:
        for s in range(free.shape[1]):
            to[row, s] = free[t, s] if free[t, s] > to[row, s] else to[row, s]
    else:
        np.maximum(free[t], to[row], out=to[row])


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _keep_least(
    to: cython.double[:, ::1], row: cython.Py_ssize_t, free: cython.double[:, ::1], t: cython.Py_ssize_t
) -> cython.void:
    s: cython.Py_ssize_t
    if cython.compiled:
        for s in range(free.shape[1]):
            to[row, s] = free[t, s] if free[t, s] < to[row, s] else to[row, s]
    else:
        np.minimum(free[t], to[row], out=to[row])


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _delay(free: cython.double[:, ::1], t: cython.Py_ssize_t, lag: cython.double) -> cython.void:
    """Add the lag of the thread, down to 0."""
    s: cython.Py_ssize_t
    after: cython.double
    if cython.compiled:
        for s in range(free.shape[1]):
            after = free[t, s] + lag
            free[t, s] = after if after > 0.0 else 0.0
    else:
        np.maximum(free[t] + lag, 0.0, out=free[t])


def sweep_scenarios(
    thread: cython.const[cython.int][::1],
    duration_ns: cython.const[cython.longlong][::1],
    slope_ns: cython.const[cython.double][::1],
    x: cython.const[cython.double][:, ::1],
    offsets: cython.const[cython.int][::1],
    points: cython.const[cython.int][::1],
    lags_ns: cython.const[cython.longlong][::1],
    thread_lag_ns: cython.const[cython.longlong][::1],
    rows: cython.const[cython.int][::1],
    watched: cython.const[cython.longlong][::1],
    ends: cython.double[:, ::1],
    free: cython.double[:, ::1],
    makespan: cython.double[:, ::1],
    seen: cython.double[:, ::1],
) -> None:
    """Sweep all scenarios at once; durations are ``duration_ns + slope_ns * x[0, s]``.

    ``rows`` come from ``live_rows``; ``watched`` are ids in order. Zero at first, of shape (..., n_scenarios): ``ends``
    (n_rows) and ``free`` (n_threads) are scratch, ``makespan`` (1) and ``seen`` (n_watched), the ends of the watched
    tasks, are the results.
    """
    n: cython.Py_ssize_t = len(thread)
    n_watched: cython.Py_ssize_t = len(watched)
    next_watched: cython.Py_ssize_t = 0
    task: cython.Py_ssize_t
    row: cython.Py_ssize_t
    last: cython.Py_ssize_t
    t: cython.Py_ssize_t
    point: cython.Py_ssize_t
    lag: cython.double
    slope: cython.double
    delay: cython.double
    with cython.nogil:
        for task in range(n):
            t = thread[task]
            slope, delay = slope_ns[task], thread_lag_ns[t]
            if slope != 0.0 and delay == 0.0:
                # With a negative slope the end of a task may be before those of earlier ones.
                _keep_most(makespan, 0, free, t)
            # If possible, the last one or two dependencies share a pass with the duration.
            last = offsets[task + 1]
            if slope == 0.0:
                while last > offsets[task] and points[last - 1] >= n and offsets[task + 1] - last < 2:
                    last -= 1
            for row in range(offsets[task], last):
                point, lag = points[row], lags_ns[row]
                if point >= n:
                    _reach(free, t, ends, rows[point - n], lag)
                else:
                    # Only ends are kept: a start is the end less the duration.
                    lag = lag - duration_ns[point]
                    _reach_start(free, t, ends, rows[point], slope_ns[point], x, lag)
            if slope != 0.0:
                _run(free, t, duration_ns[task], slope, x, ends, rows[task])
            elif last < offsets[task + 1]:
                row = offsets[task + 1] - 1
                _reach_and_run(
                    free, t, ends, rows[points[last] - n], lags_ns[last], rows[points[row] - n], lags_ns[row],
                    duration_ns[task], rows[task],
                )  # fmt: skip
            else:
                _run_fixed(free, t, duration_ns[task], ends, rows[task])
            if next_watched < n_watched and watched[next_watched] == task:
                _keep(seen, next_watched, free, t)
                next_watched += 1
            if delay != 0.0:
                _keep_most(makespan, 0, free, t)
            if delay != 0.0 or slope != 0.0:
                _delay(free, t, delay)
        for t in range(len(thread_lag_ns)):
            if thread_lag_ns[t] == 0:  # the thread is free when its last task ends
                _keep_most(makespan, 0, free, t)


@cython.cfunc
@cython.nogil
@cython.inline
@cython.exceptval(check=False)
def _rounded(value: cython.double) -> cython.double:
    """Round to a whole number, halves to even: doubles of 2^52 and more have no fraction."""
    return (value + 4503599627370496.0) - 4503599627370496.0 if value < 4503599627370496.0 else value


def sweep_groups(
    thread: cython.const[cython.int][::1],
    duration_ns: cython.const[cython.longlong][::1],
    groups: cython.const[cython.int][:, ::1],
    first: cython.Py_ssize_t,
    n_groups: cython.Py_ssize_t,
    factors: cython.const[cython.double][::1],
    offsets: cython.const[cython.int][::1],
    points: cython.const[cython.int][::1],
    lags_ns: cython.const[cython.longlong][::1],
    thread_lag_ns: cython.const[cython.longlong][::1],
    rows: cython.const[cython.int][::1],
    watched: cython.const[cython.longlong][::1],
    counted: cython.const[cython.uchar][::1],
    ends: cython.double[:, ::1],
    free: cython.double[:, ::1],
    begin: cython.double[:, ::1],
    until: cython.double[:, ::1],
    seen_start: cython.double[:, ::1],
    seen_end: cython.double[:, ::1],
) -> None:
    """Sweep the scenarios (group, factor) of ``n_groups`` groups from ``first`` on; each scales its group's durations.

    ``groups`` has shape (n_columns, n_tasks): a task is in one group of each column, -1 for none. Factors are at most
    1. ``rows`` and ``watched`` are those of ``sweep_scenarios``, ``ends`` and ``free`` scratch as there. Results are
    the starts and the ends of the watched tasks, shape (n_watched, n_scenarios), and the least start (given as
    infinity) and the last end of the counted tasks, (1, n_scenarios). Whole numbers below 2^53 ns are exact.
    """
    n: cython.Py_ssize_t = len(thread)
    n_columns: cython.Py_ssize_t = len(groups)
    n_factors: cython.Py_ssize_t = len(factors)
    n_watched: cython.Py_ssize_t = len(watched)
    next_watched: cython.Py_ssize_t = 0
    is_watched: cython.bint
    task: cython.Py_ssize_t
    row: cython.Py_ssize_t
    t: cython.Py_ssize_t
    s: cython.Py_ssize_t
    f: cython.Py_ssize_t
    column: cython.Py_ssize_t
    group: cython.Py_ssize_t
    point: cython.Py_ssize_t
    source: cython.Py_ssize_t
    lag: cython.double
    lasted: cython.double
    reached: cython.double
    with cython.nogil:
        for task in range(n):
            t = thread[task]
            for row in range(offsets[task], offsets[task + 1]):
                point, lag = points[row], lags_ns[row]
                if point >= n:
                    _reach(free, t, ends, rows[point - n], lag)
                    continue
                # Only ends are kept: a start is the end less the duration.
                source, lasted = rows[point], duration_ns[point]
                _reach(free, t, ends, source, lag - lasted)
                # If the source is scaled, it starts later than that: factors are at most 1.
                for column in range(n_columns):
                    group = groups[column, point] - first
                    if 0 <= group < n_groups:
                        for f in range(n_factors):
                            s = group * n_factors + f
                            reached = ends[source, s] - _rounded(lasted * factors[f]) + lag
                            free[t, s] = reached if reached > free[t, s] else free[t, s]
            if counted[task]:
                _keep_least(begin, 0, free, t)
            is_watched = next_watched < n_watched and watched[next_watched] == task
            if is_watched:
                _keep(seen_start, next_watched, free, t)
            lasted = duration_ns[task]
            for column in range(n_columns):
                group = groups[column, task] - first
                if 0 <= group < n_groups:
                    for f in range(n_factors):
                        free[t, group * n_factors + f] += _rounded(lasted * factors[f]) - lasted
            _run_fixed(free, t, lasted, ends, rows[task])
            if counted[task]:
                _keep_most(until, 0, free, t)
            if is_watched:
                _keep(seen_end, next_watched, free, t)
                next_watched += 1
            if thread_lag_ns[t] != 0:
                _delay(free, t, thread_lag_ns[t])
