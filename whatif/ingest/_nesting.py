# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# mypy: disable-error-code="valid-type, no-any-return, untyped-decorator"
"""Hot loops over events: nesting of intervals, pieces of threads, and waits between streams (runtime.loops).

Intervals come in the order of ``Events``: by start, longer ones first. ``ends_ns`` are their ends, sorted. The depth at
a time is the number of intervals opened minus those closed, and the innermost one is the last that opened at that
depth: one pass without a stack. If intervals cross instead of nesting, the one found may not contain the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import cython  # what the compiler reads; nothing imports Cython at run time
else:
    from whatif.runtime import uncompiled as cython

COMPILED = cython.compiled


def _counts(n: int) -> Any:
    """Scratch of int64: a list is quicker than an array where nothing is compiled."""
    return np.zeros(n, dtype=np.int64) if cython.compiled else [0] * n


def innermost(
    start_ns: cython.const[cython.longlong][::1],
    end_ns: cython.const[cython.longlong][::1],
    ends_ns: cython.const[cython.longlong][::1],
    time_ns: cython.const[cython.longlong][::1],
    found: cython.longlong[::1],
) -> None:
    """Fill ``found`` with the innermost interval that contains each of the sorted times; -1 for none.

    Empty intervals contain nothing. If intervals cross, and after an empty one, it may be -1 although others contain
    the time.
    """
    n: cython.Py_ssize_t = len(start_ns)
    i: cython.Py_ssize_t
    opened: cython.Py_ssize_t = 0
    closed: cython.Py_ssize_t = 0  # by the start of the interval that opens
    ended: cython.Py_ssize_t = 0  # by the time that is looked up
    depth: cython.Py_ssize_t
    at: cython.Py_ssize_t
    time: cython.longlong
    latest: cython.longlong[::1] = _counts(n + 1)  # by depth, the last interval that opened there
    with cython.nogil:
        for i in range(len(time_ns)):
            time = time_ns[i]
            while opened < n and start_ns[opened] <= time:
                while closed < n and ends_ns[closed] <= start_ns[opened]:
                    closed += 1
                depth = opened - closed
                latest[depth if depth > 0 else 0] = opened
                opened += 1
            while ended < n and ends_ns[ended] <= time:
                ended += 1
            depth = opened - ended - 1
            found[i] = -1
            if depth >= 0:
                at = latest[depth]
                if time < end_ns[at]:
                    found[i] = at


def overlapping(
    track: cython.const[cython.int][::1],
    start_ns: cython.const[cython.longlong][::1],
    end_ns: cython.const[cython.longlong][::1],
    group: cython.longlong[::1],
    first: cython.longlong[::1],
    reach_ns: cython.longlong[::1],
) -> int:
    """Group the intervals of each track, sorted by (track, start), that overlap; return the number of groups.

    ``group`` is that of each interval; ``first`` and ``reach_ns`` are each group's first interval and its end.
    """
    i: cython.Py_ssize_t
    n: cython.Py_ssize_t = 0
    reach: cython.longlong = 0
    with cython.nogil:
        for i in range(len(start_ns)):
            if i == 0 or track[i] != track[i - 1] or start_ns[i] >= reach:
                first[n] = i
                n += 1
                reach = end_ns[i]
            elif end_ns[i] > reach:
                reach = end_ns[i]
            group[i] = n - 1
            reach_ns[n - 1] = reach
    return n


def busy(
    start_ns: cython.const[cython.longlong][::1],
    end_ns: cython.const[cython.longlong][::1],
    call_start_ns: cython.const[cython.longlong][::1],
    call_end_ns: cython.const[cython.longlong][::1],
    from_ns: cython.longlong[::1],
    to_ns: cython.longlong[::1],
) -> int:
    """Fill in the union of two sets of intervals, each sorted by start; return how many intervals it has."""
    i: cython.Py_ssize_t = 0
    called: cython.Py_ssize_t = 0
    n: cython.Py_ssize_t = 0
    start: cython.longlong
    end: cython.longlong
    with cython.nogil:
        while i < len(start_ns) or called < len(call_start_ns):
            if called == len(call_start_ns) or (i < len(start_ns) and start_ns[i] <= call_start_ns[called]):
                start = start_ns[i]
                end = end_ns[i]
                i += 1
            else:
                start = call_start_ns[called]
                end = call_end_ns[called]
                called += 1
            if n == 0 or start >= to_ns[n - 1]:
                from_ns[n] = start
                to_ns[n] = end
                n += 1
            elif end > to_ns[n - 1]:
                to_ns[n - 1] = end
    return n


def wrappers(
    start_ns: cython.const[cython.longlong][::1],
    duration_ns: cython.const[cython.longlong][::1],
    ends_ns: cython.const[cython.longlong][::1],
    counted: cython.const[cython.uchar][::1],
    begin_ns: cython.double,
    own_ns: cython.longlong[::1],
) -> int:
    """Fill in the exclusive time of each interval with exactly one child; return how many there are.

    Both are ``counted``, and the outer one begins at ``begin_ns`` or later. No interval is empty: each ends after its
    start, whatever its duration.
    """
    n: cython.Py_ssize_t = len(start_ns)
    i: cython.Py_ssize_t
    closed: cython.Py_ssize_t = 0
    depth: cython.Py_ssize_t
    parent: cython.Py_ssize_t
    found: cython.Py_ssize_t = 0
    latest: cython.longlong[::1] = _counts(n + 1)
    # The only child of each interval, counted from 1; -1 if there are several or it is not ``counted``.
    inner: cython.longlong[::1] = _counts(n)
    with cython.nogil:
        for i in range(n):
            while closed < n and ends_ns[closed] <= start_ns[i]:
                closed += 1
            depth = i - closed
            latest[depth] = i
            if depth > 0:
                parent = latest[depth - 1]
                inner[parent] = i + 1 if counted[i] and inner[parent] == 0 else -1
        for i in range(n):
            if counted[i] and inner[i] > 0 and start_ns[i] >= begin_ns:
                own_ns[found] = duration_ns[i] - duration_ns[inner[i] - 1]
                if own_ns[found] < 0:
                    own_ns[found] = 0
                found += 1
    return found


def newest_of_others(
    ends: cython.const[cython.longlong][::1],
    launched_ns: cython.const[cython.longlong][::1],
    stream: cython.const[cython.int][::1],
    target: cython.const[cython.longlong][::1],
    done: cython.const[cython.longlong][::1],
    asked_ns: cython.const[cython.longlong][::1],
    n_looked_at: cython.Py_ssize_t,
    source: cython.longlong[::1],
) -> None:
    """Fill ``source`` with the GPU task of another stream launched last before the wait call of each target.

    ``ends`` are the tasks in the order of their ends, of which the first ``done`` may have been waited for; the last
    ``n_looked_at`` of these are searched. If none fits, ``source`` is unchanged.
    """
    row: cython.Py_ssize_t
    at: cython.Py_ssize_t
    first: cython.Py_ssize_t
    task: cython.longlong
    latest_ns: cython.longlong = 0
    found: cython.bint
    with cython.nogil:
        for row in range(len(target)):
            first = done[row] - n_looked_at
            if first < 0:
                first = 0
            found = False
            for at in range(first, done[row]):
                task = ends[at]
                if stream[task] == stream[target[row]] or launched_ns[task] >= asked_ns[row]:
                    continue
                if not found or launched_ns[task] > latest_ns:
                    found = True
                    latest_ns = launched_ns[task]
                    source[row] = task


def carry_layers(
    own: cython.int[::1],
    passing: cython.uchar[::1],
    empty: cython.const[cython.uchar][::1],
    ends: cython.const[cython.uchar][::1],
    between: cython.bint,
) -> None:
    """Fill each 0 of ``own`` with the layer of the piece before, within runs of ``passing``; ``ends`` take none.

    With ``between``, a run of ``empty`` pieces between two passing ones becomes passing as well, in place.
    """
    n: cython.Py_ssize_t = len(own)
    i: cython.Py_ssize_t = 0
    first: cython.Py_ssize_t
    layer: cython.int = 0
    with cython.nogil:
        while between and i < n:
            if not empty[i]:
                i += 1
                continue
            first = i
            while i < n and empty[i]:
                i += 1
            if first > 0 and i < n and passing[first - 1] and passing[i]:
                while first < i:
                    passing[first] = 1
                    first += 1
        for i in range(n):
            if own[i] > 0 or not passing[i] or ends[i]:
                layer = own[i]
            own[i] = layer


def cut(
    points: cython.const[cython.longlong][::1],
    call_start_ns: cython.const[cython.longlong][::1],
    call_end_ns: cython.const[cython.longlong][::1],
    out_start_ns: cython.const[cython.longlong][::1],
    out_end_ns: cython.const[cython.longlong][::1],
    first_call: cython.longlong,
    start_ns: cython.longlong[::1],
    end_ns: cython.longlong[::1],
    call: cython.longlong[::1],
) -> int:
    """Fill in the calls and the pieces between ``points`` that lie outside them, in order; return how many there are.

    ``points`` are sorted, may repeat, and include the ends of all calls, which do not overlap. Pieces that begin in an
    interval to be left out are dropped. ``call`` is the number of a call from ``first_call`` on, -1 for a piece.
    """
    i: cython.Py_ssize_t
    n: cython.Py_ssize_t = 0
    called: cython.Py_ssize_t = 0
    left: cython.Py_ssize_t = 0
    n_points: cython.Py_ssize_t = len(points)
    n_calls: cython.Py_ssize_t = len(call_start_ns)
    n_left: cython.Py_ssize_t = len(out_start_ns)
    point: cython.longlong
    with cython.nogil:
        for i in range(n_points):
            point = points[i]
            # An empty call comes before the piece that starts with it.
            while called < n_calls and call_start_ns[called] <= point:
                start_ns[n] = call_start_ns[called]
                end_ns[n] = call_end_ns[called]
                call[n] = first_call + called
                called += 1
                n += 1
            while left < n_left and out_start_ns[left] <= point:
                left += 1
            if i + 1 == n_points or points[i + 1] == point:
                continue
            if called > 0 and point < call_end_ns[called - 1]:
                continue
            if left > 0 and point < out_end_ns[left - 1]:
                continue
            start_ns[n] = point
            end_ns[n] = points[i + 1]
            call[n] = -1
            n += 1
    return n
