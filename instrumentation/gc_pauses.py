"""Marks the pauses for full collections of Python's garbage collector in the trace."""

import gc
from typing import Any

from torch.profiler import record_function

# The reader knows pauses by this name (whatif/ingest/marks.py).
NAME = "whatif::gc generation {}"
# Younger generations are collected several times a step, in microseconds each: a mark would take longer.
FULL = 2


class GcMarks:
    """An annotation around each full collection, until `remove`."""

    def __init__(self) -> None:
        self._mark: record_function | None = None
        gc.callbacks.append(self._on_collection)

    def remove(self) -> None:
        """Stop marking."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] < FULL:
            return
        if phase == "start":
            self._mark = record_function(NAME.format(info["generation"]))
            self._mark.__enter__()  # type: ignore[no-untyped-call]
        elif self._mark is not None:
            mark, self._mark = self._mark, None
            mark.__exit__(None, None, None)
