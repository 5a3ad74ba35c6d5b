"""Exact nearest-neighbour search among measured operators, with ties broken by position."""

from __future__ import annotations

import numpy as np

from whatif.graph.types import Float64, Int64
from whatif.runtime.loops import Loops

_loops = Loops("whatif.opdb._nearest")


def nearest(measured: Float64, asked: Float64, count: int, *, itself: Int64 | None = None) -> tuple[Int64, Float64]:
    """Return the ``count`` nearest rows of ``measured`` (n, p) for each of ``asked`` (q, p), nearest first.

    Returns their positions and distances, shape (q, count) both; equal distances come in the order of the positions.
    ``itself``, shape (q,), is a row of ``measured`` to exclude for each asked one (-1: none). There have to
    be more rows than ``count``.
    """
    banned = np.full(len(asked), -1, dtype=np.int64) if itself is None else itself
    positions = np.empty((len(asked), count), dtype=np.int64)
    squares = np.empty((len(asked), count))
    columns = (np.ascontiguousarray(part, dtype=np.float64) for part in (measured, asked))
    _loops.nearest(*columns, np.asarray(banned, dtype=np.int64), positions, squares)
    return positions, np.sqrt(squares)
