"""Which DataLoader feeds the training, seen by watching what fetches a batch."""

from typing import Any

from torch.utils.data import dataloader

_Iterator: Any = dataloader._BaseDataLoaderIter  # Untyped; every DataLoader's iterator is one.


class LoaderWatch:
    """Watches every DataLoader of the process until `remove`, also one whose iteration has begun before."""

    def __init__(self) -> None:
        self._fetches: dict[int, int] = {}  # by the iterator's identity
        self._seen: dict[int, Any] = {}
        self._summary: dict[str, Any] | None = None
        self._watching = True
        self._next = inner = _Iterator.__next__

        def watched(iterator: Any) -> Any:
            batch = inner(iterator)
            if not self._watching:
                return batch
            self._seen[id(iterator)] = iterator
            self._fetches[id(iterator)] = self._fetches.get(id(iterator), 0) + 1
            return batch

        self._watched = watched
        _Iterator.__next__ = watched

    def summary(self) -> dict[str, Any] | None:
        """Return workers, batch size, pinning and prefetching of the loader used most; None where none was used."""
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
        """Stop watching and forget the iterators: one that is held keeps its workers alive."""
        self._summary = self.summary()
        self._seen.clear()
        self._watching = False
        if _Iterator.__next__ is self._watched:  # Somebody may have put theirs around it.
            _Iterator.__next__ = self._next
