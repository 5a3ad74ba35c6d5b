"""Nested intervals of one thread: which is the innermost one at a given time?"""

from __future__ import annotations

import numpy as np

from whatif.graph.types import Bool, Int64
from whatif.runtime.loops import Loops

loops = Loops("whatif.ingest._nesting")


class Nest:
    """Look-up of the innermost interval of a properly nested set; all arrays have shape (n_intervals,), times in ns.

    The intervals are sorted by start, longer ones first where several start together, as all rows of ``Events`` are.
    """

    def __init__(self, start_ns: Int64, end_ns: Int64) -> None:
        self._start_ns, self._end_ns = start_ns, end_ns
        self._ends_sorted = np.sort(end_ns, kind="stable")  # nearly sorted already

    def innermost(self, time_ns: Int64) -> Int64:
        """Return the index of the innermost interval with start <= time < end, shape of ``time_ns``; -1 where none."""
        found = np.full(len(time_ns), -1, dtype=np.int64)
        if not len(self._start_ns):
            return found
        if (time_ns[1:] < time_ns[:-1]).any():
            order = np.argsort(time_ns, kind="stable")
            found[order] = self.innermost(time_ns[order])
            return found
        loops.innermost(self._start_ns, self._end_ns, self._ends_sorted, time_ns, found)
        return found


def outermost(end_ns: Int64) -> Bool:
    """Return a mask of the intervals of one thread, sorted by start as in ``Nest``, that lie in no other."""
    return np.append(True, end_ns[1:] > np.maximum.accumulate(end_ns)[:-1])[: len(end_ns)]
