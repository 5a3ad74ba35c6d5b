"""Unions of intervals."""

from __future__ import annotations

import numpy as np

from whatif.graph.order import places
from whatif.graph.types import Bool, Int64


def union(start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64]:
    """Return the starts and ends of the union of intervals that are sorted by start."""
    if not len(start_ns):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    reach = np.maximum.accumulate(end_ns)
    first = np.flatnonzero(np.append(True, start_ns[1:] >= reach[:-1]))
    last = np.append(first[1:] - 1, len(start_ns) - 1)
    return start_ns[first], reach[last]


def covered_until(start_ns: Int64, end_ns: Int64, time_ns: Int64) -> Int64:
    """Return how much of disjoint, ascending intervals lies before each time, ns, shape (n,)."""
    before_ns = np.concatenate(([0], np.cumsum(end_ns - start_ns)))
    started = np.searchsorted(start_ns, time_ns)
    # The last interval that began before a time may end after it; before the first there is none.
    last_end_ns = np.concatenate(([np.iinfo(np.int64).min], end_ns))[started]
    return np.asarray(before_ns[started] - np.where(last_end_ns > time_ns, last_end_ns - time_ns, 0))


def interval_of(time_ns: Int64, start_ns: Int64, end_ns: Int64) -> Int64:
    """Return the interval that contains each time, shape (n,), -1 for none; starts and ends are ascending."""
    if not len(start_ns):
        return np.full(len(time_ns), -1, dtype=np.int64)
    at = places(start_ns, time_ns, side="right") - 1
    # -1 reads the appended end, which is before every time.
    at[np.flatnonzero(time_ns >= np.append(end_ns, np.iinfo(np.int64).min)[at])] = -1
    return at


def lies_inside(time_ns: Int64, start_ns: Int64, end_ns: Int64) -> Bool:
    """Return a mask of the ascending times that lie in one of a few disjoint intervals, which are ascending as well."""
    if not len(start_ns):
        return np.zeros(len(time_ns), dtype=np.bool_)
    edges_ns = np.stack([start_ns, end_ns], axis=1).ravel()
    counts = np.diff(places(time_ns, edges_ns), prepend=0, append=len(time_ns))
    return np.repeat(np.arange(len(counts)) % 2 == 1, counts)
