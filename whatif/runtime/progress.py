"""How far a long answer is: a function of the caller counts what is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

# Called with how many things are done and how many there are.
Progress = Callable[[int, int], None]
Thing = TypeVar("Thing")


def reported(things: Sequence[Thing], progress: Progress | None) -> Iterator[Thing]:
    """Yield each of ``things``, and report it to ``progress`` as done when the next one is asked for."""
    for done, thing in enumerate(things, 1):
        yield thing
        if progress is not None:
            progress(done, len(things))
