"""Progress of a long computation, reported to a function of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

# Called with the number of finished items and the total.
Progress = Callable[[int, int], None]
Thing = TypeVar("Thing")


def reported(items: Sequence[Thing], progress: Progress | None) -> Iterator[Thing]:
    """Yield each of ``items``, and report it to ``progress`` as done when the next one is requested."""
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, len(items))
