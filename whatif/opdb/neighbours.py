"""The nearest measured operators of each asked one, exactly, with ties broken by position."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from whatif.graph.types import Float64, Int64

# Fewer pairs than this are compared before the compiler is loaded.
_PLAIN_PAIRS = 30_000_000


def nearest(measured: Float64, asked: Float64, count: int, *, itself: Int64 | None = None) -> tuple[Int64, Float64]:
    """Return the ``count`` nearest rows of ``measured`` (n, p) for each of ``asked`` (q, p), nearest first.

    Returns their positions and distances, shape (q, count) both; equal distances come in the order of the positions.
    ``itself``, shape (q,), names a row of ``measured`` that is no neighbour of an asked one (-1: none). There have to
    be more rows than ``count``.
    """
    banned = np.full(len(asked), -1, dtype=np.int64) if itself is None else itself
    if len(measured) * len(asked) > _PLAIN_PAIRS:
        positions, squares = _compiled()(np.ascontiguousarray(measured), np.ascontiguousarray(asked), count, banned)
    else:
        positions, squares = _plain(measured, asked, count, banned)
    return positions, np.sqrt(squares)


def _plain(measured: Float64, asked: Float64, count: int, banned: Int64) -> tuple[Int64, Float64]:
    positions = np.empty((len(asked), count), dtype=np.int64)
    squares = np.empty((len(asked), count))
    for row, point in enumerate(asked):
        square = np.zeros(len(measured))
        for axis in range(measured.shape[1]):  # in the order in which the compiled loop adds up
            square += (measured[:, axis] - point[axis]) ** 2
        if banned[row] >= 0:
            square[banned[row]] = np.inf
        within = np.flatnonzero(square <= np.partition(square, count - 1)[count - 1])
        chosen = within[np.argsort(square[within], kind="stable")[:count]]
        positions[row], squares[row] = chosen, square[chosen]
    return positions, squares


@lru_cache(maxsize=1)
def _compiled() -> Any:
    from whatif.simulation.jit import jit  # loads the compiler

    return jit(_nearest_loop)


def _nearest_loop(measured: Float64, asked: Float64, count: int, banned: Int64) -> tuple[Int64, Float64]:
    """Brute force with a short sorted list a query: a tree is no faster for the few thousand rows of a group."""
    positions = np.empty((len(asked), count), dtype=np.int64)
    squares = np.empty((len(asked), count))
    for row in range(len(asked)):
        filled = 0
        for other in range(len(measured)):
            if other == banned[row]:
                continue
            square = 0.0
            for axis in range(measured.shape[1]):
                square += (measured[other, axis] - asked[row, axis]) ** 2
            if filled == count and square >= squares[row, count - 1]:
                continue
            place = min(filled, count - 1)
            while place > 0 and squares[row, place - 1] > square:
                squares[row, place] = squares[row, place - 1]
                positions[row, place] = positions[row, place - 1]
                place -= 1
            squares[row, place] = square
            positions[row, place] = other
            filled = min(filled + 1, count)
    return positions, squares
