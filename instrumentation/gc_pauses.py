"""Marks in the trace where Python's garbage collector stopped the program for a full collection."""

import gc
from typing import Any

from torch.profiler import record_function

# The reader knows pauses by this name (whatif/ingest/marks.py).
NAME = "whatif::gc generation {}"
# Younger generations are collected several times a step, within microseconds: a mark would take longer.
FULL = 2


class GcMarks:
    """An annotation around each full collection, until `remove`."""

    def __init__(self) -> None:
        self._mark: record_function | None = None
        gc.callbacks.append(self._collects)

    def remove(self) -> None:
        """Stop marking."""
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)

    def _collects(self, moment: str, what: dict[str, Any]) -> None:
        if what["generation"] < FULL:
            return
        if moment == "start":
            self._mark = record_function(NAME.format(what["generation"]))
            self._mark.__enter__()  # type: ignore[no-untyped-call]
        elif self._mark is not None:
            mark, self._mark = self._mark, None
            mark.__exit__(None, None, None)
