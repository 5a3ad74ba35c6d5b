# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# mypy: disable-error-code="valid-type, no-any-return, untyped-decorator"
"""The loop of ``whatif.opdb.neighbours``: one source for both forms (see loops.py); uncompiled, numpy runs a query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import cython  # what the compiler reads; nothing imports Cython at run time
else:
    from whatif.runtime import uncompiled as cython

COMPILED = cython.compiled


def nearest(
    measured: cython.const[cython.double][:, ::1],
    asked: cython.const[cython.double][:, ::1],
    banned: cython.const[cython.longlong][::1],
    positions: cython.longlong[:, ::1],
    squares: cython.double[:, ::1],
) -> None:
    """Fill ``positions`` and ``squares``, shape (q, count): brute force with a short sorted list for each query.

    A tree is no faster for the few thousand rows of a group.
    """
    row: cython.Py_ssize_t
    other: cython.Py_ssize_t
    axis: cython.Py_ssize_t
    place: cython.Py_ssize_t
    filled: cython.Py_ssize_t
    count: cython.Py_ssize_t = positions.shape[1]
    square: cython.double
    if not cython.compiled:
        for row in range(len(asked)):
            _row(measured, asked[row], banned[row], positions[row], squares[row])
        return
    with cython.nogil:
        for row in range(asked.shape[0]):
            filled = 0
            for other in range(measured.shape[0]):
                if other == banned[row]:
                    continue
                square = 0.0
                for axis in range(measured.shape[1]):
                    square += (measured[other, axis] - asked[row, axis]) * (measured[other, axis] - asked[row, axis])
                if filled == count and square >= squares[row, count - 1]:
                    continue
                place = filled if filled < count - 1 else count - 1
                while place > 0 and squares[row, place - 1] > square:
                    squares[row, place] = squares[row, place - 1]
                    positions[row, place] = positions[row, place - 1]
                    place -= 1
                squares[row, place] = square
                positions[row, place] = other
                if filled < count:
                    filled += 1


def _row(measured: Any, point: Any, banned: int, positions: Any, squares: Any) -> None:
    count = len(positions)
    square = np.zeros(len(measured))
    for axis in range(measured.shape[1]):  # the same order of summation as the compiled loop
        square += (measured[:, axis] - point[axis]) ** 2
    if banned >= 0:
        square[banned] = np.inf
    within = np.flatnonzero(square <= np.partition(square, count - 1)[count - 1])
    positions[:] = within[np.argsort(square[within], kind="stable")[:count]]
    squares[:] = square[positions]
