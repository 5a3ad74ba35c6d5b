"""Finds the DataLoader that feeds the training, by watching the fetches of batches."""

import threading
import time
from typing import Any

from torch.utils.data import dataloader

_Iterator: Any = dataloader._BaseDataLoaderIter  # Untyped; the base class of every DataLoader's iterator.


class LoaderWatch:
    """Watches every DataLoader of the process until `remove`, including those already being iterated.

    ``fetch_ns`` is the CPU time of all fetches so far on the watching thread; a nested loader is part of the outer
    one's time.
    """

    def __init__(self) -> None:
        self.fetch_ns = 0
        self._thread, self._fetching = threading.get_ident(), False
        self._fetches: dict[int, int] = {}  # by the iterator's identity
        self._seen: dict[int, Any] = {}
        self._summary: dict[str, Any] | None = None
        self._watching = True
        self._next = inner = _Iterator.__next__

        def watched(iterator: Any) -> Any:
            if not self._watching:
                return inner(iterator)
            if threading.get_ident() == self._thread and not self._fetching:
                self._fetching, began_ns = True, time.thread_time_ns()
                try:
                    batch = inner(iterator)
                finally:
                    self._fetching = False
                    self.fetch_ns += time.thread_time_ns() - began_ns
            else:
                batch = inner(iterator)
            self._seen[id(iterator)] = iterator
            self._fetches[id(iterator)] = self._fetches.get(id(iterator), 0) + 1
            return batch

        self._watched = watched
        _Iterator.__next__ = watched

    def summary(self) -> dict[str, Any] | None:
        """Return workers, batch size, pinning and prefetching of the loader used most; None if none was used."""
        if not self._seen:
            return self._summary
        iterator = self._seen[max(self._fetches, key=self._fetches.__getitem__)]
        return {
            "workers": iterator._num_workers,
            "batch_size": getattr(iterator._index_sampler, "batch_size", None),
            "pin_memory": bool(iterator._pin_memory),
            "prefetch_factor": getattr(iterator, "_prefetch_factor", None),
        }

    def remove(self) -> None:
        """Stop watching and drop the iterators, which would keep their workers alive."""
        self._summary = self.summary()
        self._seen.clear()
        self._watching = False
        if _Iterator.__next__ is self._watched:  # Something else may have wrapped it since.
            _Iterator.__next__ = self._next
