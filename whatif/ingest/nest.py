"""Nested intervals of one thread: which is the innermost one at a given time?"""

from __future__ import annotations

import numpy as np

from whatif.graph.order import order_by, places
from whatif.graph.types import Int64


class Nest:
    """Look-up of the innermost interval of a properly nested set; all arrays have shape (n_intervals,), times in ns.

    The depth at a time is the number of intervals opened minus those closed, and the innermost interval is the last
    one that opened at that depth: two binary searches a query, no stack.
    """

    def __init__(self, start_ns: Int64, end_ns: Int64) -> None:
        # Longer intervals first where several start together: the outer one opens first.
        self._order = order_by(start_ns, -end_ns)
        self._start_ns, self._end_ns = start_ns[self._order], end_ns[self._order]
        self._ends_sorted = np.sort(end_ns, kind="stable")  # nearly sorted already
        n = len(start_ns)
        opened = np.arange(n, dtype=np.int64)
        # Empty intervals close at once and cover nothing.
        depth = opened - places(self._ends_sorted, self._start_ns, side="right")
        self._origin = int(self._start_ns[0]) if n else 0
        self._span = (int(self._ends_sorted[-1]) - self._origin + 2) if n else 1
        keys = np.maximum(depth, 0) * self._span + (self._start_ns - self._origin)
        self._by_depth = np.argsort(keys, kind="stable")
        self._keys = keys[self._by_depth]

    def innermost(self, time_ns: Int64) -> Int64:
        """Return the index of the innermost interval with start <= time < end, shape of ``time_ns``; -1 where none."""
        if not len(self._start_ns):
            return np.full(len(time_ns), -1, dtype=np.int64)
        opened = places(self._start_ns, time_ns, side="right")
        depth = opened - places(self._ends_sorted, time_ns, side="right") - 1
        key = np.maximum(depth, 0) * self._span + np.clip(time_ns - self._origin, -1, self._span - 1)
        found = self._by_depth[np.maximum(places(self._keys, key, side="right") - 1, 0)]
        # Intervals that cross instead of nesting can mislead the count: then say nothing.
        inside = (depth >= 0) & (self._start_ns[found] <= time_ns) & (time_ns < self._end_ns[found])
        return np.where(inside, self._order[found], -1).astype(np.int64)
