"""A group's rows as its interpolation learns from them, and where its law is more accurate than the data sheet."""

from __future__ import annotations

import numpy as np

from whatif.graph.types import Bool, Float64, Int64
from whatif.hardware.gpu import Gpu
from whatif.opdb.data_sheet import analytic_s, answers_analytically, bound_s, compute_s, memory_s
from whatif.opdb.family_index import FamilyIndex
from whatif.opdb.interpolate import Group, Measured
from whatif.opdb.quarantine import Aside
from whatif.opdb.rows import Operators
from whatif.opdb.work import work

# An operator that moves as often the bytes of the second-level cache runs from memory.
_CLEARLY_OUTSIDE = 4.0


def law_knows_better(gpu: Gpu, group: Group, ops: Operators, t_s: Float64, ratio: Float64, *, launch: bool) -> Bool:
    """Mask, shape (n,), of the operators outside of what was measured where its law beats a data sheet.

    It does where its range is the narrower one, and where it cannot be wrong in kind: not below what the device can
    do, and not bound by the device's memory when all that was measured fits the second-level cache.
    """
    _, low, high = analytic_s(gpu, ops, launch=launch)
    cache_bytes = gpu.l2_mbyte * 1e6
    cached = (work(ops)[1] > cache_bytes) & (group.most_bytes < _CLEARLY_OUTSIDE * cache_bytes)
    cached &= memory_s(gpu, ops) > compute_s(gpu, ops)
    better = (ratio < high / low) & (t_s >= bound_s(gpu, ops, cold=False)) & ~cached
    return np.asarray(better | ~answers_analytically(gpu, ops), dtype=np.bool_)


def measured_in(family: FamilyIndex, rows: Int64) -> Measured:
    """What a group learns from: its rows but the impossible ones; the middle sound one stands for each operator."""
    aside = np.asarray(family.aside[rows])
    rows, aside = rows[aside != Aside.IMPOSSIBLE], aside[aside != Aside.IMPOSSIBLE]
    keys, t = np.asarray(family.keys[rows]), np.asarray(family.t_s[rows])
    order = np.lexsort((t, aside, keys))
    rows, aside, keys = rows[order], aside[order], keys[order]
    # Sound rows come first within an operator.
    distinct, start, operator = np.unique(keys, return_index=True, return_inverse=True)
    operator = operator.reshape(-1)
    sound = np.bincount(operator, weights=aside == Aside.SOUND, minlength=len(distinct)).astype(np.int64)
    stands = (start + (sound - 1) // 2)[sound > 0]
    place = np.where(sound > 0, np.cumsum(sound > 0) - 1, -1)
    return Measured(
        family.log_sizes[rows], family.flops[rows], family.moved_bytes[rows], family.t_s[rows], stands, place[operator]
    )
