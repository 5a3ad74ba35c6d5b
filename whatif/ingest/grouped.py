"""Rows grouped by a code, with one sort: a recording may have tens of thousands of threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from whatif.graph.types import Array, Bool, Int64
from whatif.ingest.events import Events


class Grouped:
    """The ``rows`` of each code: ``grouped[code]`` are its rows, ascending; ``codes`` has the shape of ``rows``."""

    def __init__(self, rows: Int64, codes: Array) -> None:
        order = np.argsort(codes, kind="stable")
        self._rows = rows[order]
        counts = np.bincount(codes) if len(codes) else np.zeros(1, dtype=np.int64)
        self._ends: list[int] = np.cumsum(counts).tolist()

    def items(self) -> Iterator[tuple[int, Int64]]:
        """Yield each code that has rows, and its rows."""
        for code, (begin, end) in enumerate(itertools.pairwise([0, *self._ends])):
            if end > begin:
                yield code, self._rows[begin:end]

    def values(self) -> Iterator[Int64]:
        """Yield the rows of each code that has any."""
        return (rows for _, rows in self.items())

    def __getitem__(self, code: int) -> Int64:
        if code >= len(self._ends):
            return self._rows[:0]
        return self._rows[self._ends[code - 1] if code else 0 : self._ends[code]]


def by_track(events: Events, chosen: Bool) -> Grouped:
    """Return the rows of the events ``chosen``, shape (n_events,), by track."""
    rows = np.flatnonzero(chosen)
    return Grouped(rows, events.track[rows])
