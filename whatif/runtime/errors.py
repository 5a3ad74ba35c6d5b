"""The exception whose message is a sentence for the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class WhatifError(Exception):
    """An error with a message for the user, one sentence: expected, got, where, what to do."""


@contextmanager
def expecting(sentence: str, *errors: type[Exception], hint: str = "") -> Iterator[None]:
    """Turn ``errors`` raised inside into WhatifError: ``sentence``, then the error's message, then the ``hint``."""
    try:
        yield
    except errors as error:
        lines = str(getattr(error, "strerror", None) or error).splitlines() or [type(error).__name__]
        raise WhatifError(f"{sentence}, got '{lines[0][:120]}'{hint}.") from error


def closest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return "did you mean 'x'?" with the known word most similar to ``word``; ``otherwise`` if none is similar."""
    close = close_names(word, known, 1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def close_names(word: str, known: Iterable[str], most: int, similarity: float = 0.6) -> list[str]:
    """Return the known words with at least this similarity to ``word`` (1: equal), the most similar first."""
    import difflib  # takes 5 ms to load

    return difflib.get_close_matches(word, list(known), most, similarity)


def in_short(error: Exception) -> str:
    """Return the message of another library's error in one line; its type if the message is empty."""
    return " ".join(str(error).split())[:160] or type(error).__name__
