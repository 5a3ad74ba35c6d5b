"""Rows grouped by a code in one pass: a recording may have tens of thousands of threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from whatif.graph.order import loops
from whatif.graph.types import Array, Bool, Int64
from whatif.ingest.events import EventCategory, Events


class Grouped:
    """The ``rows`` of each code: ``grouped[code]`` are its rows, ascending; ``codes`` has the shape of ``rows``.

    The attribute ``rows`` has the rows of all codes, one code after the other. No code is negative.
    """

    def __init__(self, rows: Int64, codes: Array) -> None:
        codes = np.ascontiguousarray(codes, dtype=np.int32)
        offsets = np.zeros(int(codes.max(initial=-1)) + 3, dtype=np.int64)
        self.rows: Int64 = np.empty(len(rows), dtype=np.int64)
        loops.group_rows(rows, codes, offsets, self.rows)
        self._offsets: list[int] = offsets[:-1].tolist()

    def items(self) -> Iterator[tuple[int, Int64]]:
        """Yield each code that has rows, and its rows."""
        for code, (begin, end) in enumerate(itertools.pairwise(self._offsets)):
            if end > begin:
                yield code, self.rows[begin:end]

    def values(self) -> Iterator[Int64]:
        """Yield the rows of each code that has any."""
        return (rows for _, rows in self.items())

    def __getitem__(self, code: int) -> Int64:
        return self.rows[self.span(code)]

    def span(self, code: int) -> slice:
        """Return the places of a code's rows among ``rows``."""
        return slice(*self._offsets[code : code + 2]) if code + 1 < len(self._offsets) else slice(0, 0)


def by_track(events: Events, rows: Int64) -> Grouped:
    """Return some rows of events, ascending, by track."""
    return Grouped(rows, events.track[rows])


def rows_marked(events: Events, marked: Bool) -> Int64:
    """Return the rows of the events whose name is marked, shape (n_names,); most traces lack most marks."""
    return np.flatnonzero(marked.take(events.name)) if marked.any() else np.empty(0, dtype=np.int64)


def rows_named(events: Events, category: EventCategory, marked: Bool) -> Int64:
    """Return the rows of the events of one category whose name is marked, shape (n_names,)."""
    return named(events, events.of_category[category], marked)


def named(events: Events, rows: Int64, marked: Bool) -> Int64:
    """Return those of the rows whose event has a marked name; ``marked`` has the shape (n_names,)."""
    return rows[np.flatnonzero(marked.take(events.name[rows]))] if marked.any() else rows[:0]
