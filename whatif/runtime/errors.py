"""The one exception that carries a sentence meant for the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class WhatifError(Exception):
    """An error with a message for the user, one sentence: expected, got, where, what to do."""


@contextmanager
def expecting(sentence: str, *errors: type[Exception], hint: str = "") -> Iterator[None]:
    """Raise one of ``errors`` inside as WhatifError: ``sentence``, then what the error says, then the ``hint``."""
    try:
        yield
    except errors as error:
        lines = str(getattr(error, "strerror", None) or error).splitlines() or [type(error).__name__]
        raise WhatifError(f"{sentence}, got '{lines[0][:120]}'{hint}.") from error


def closest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return "did you mean 'x'?" of what is known and most like the word; ``otherwise`` where nothing is."""
    close = close_names(word, known, 1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def close_names(word: str, known: Iterable[str], most: int, likeness: float = 0.6) -> list[str]:
    """Return what is known and at least so much like the word (1: equal), the most alike first."""
    import difflib  # takes 5 ms to load

    return difflib.get_close_matches(word, list(known), most, likeness)


def in_short(error: Exception) -> str:
    """Return what an error of another library says, in one line; its kind where it says nothing."""
    return " ".join(str(error).split())[:160] or type(error).__name__
