"""The rows that a group's interpolation is fitted to, and where its linear model is better than the data sheet."""

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

# An operator that moves this many times the size of the second-level cache runs from memory.
_CLEARLY_OUTSIDE = 4.0


def is_better_than_sheet(gpu: Gpu, group: Group, ops: Operators, t_s: Float64, ratio: Float64, *, launch: bool) -> Bool:
    """Mask, shape (n,), of the operators outside the measured sizes for which a group's model beats the data sheet.

    Its range must be the narrower one, and its time must be plausible: not below the device's lower bound, and not
    of an operator bound by memory if everything that was measured fits the second-level cache.
    """
    _, low, high = analytic_s(gpu, ops, launch=launch)
    cache_bytes = gpu.l2_mbyte * 1e6
    cached = (work(ops)[1] > cache_bytes) & (group.most_bytes < _CLEARLY_OUTSIDE * cache_bytes)
    cached &= memory_s(gpu, ops) > compute_s(gpu, ops)
    better = (ratio < high / low) & (t_s >= bound_s(gpu, ops, cold=False)) & ~cached
    return np.asarray(better | ~answers_analytically(gpu, ops), dtype=np.bool_)


def measured_in(family: FamilyIndex, rows: Int64) -> Measured:
    """The rows that a group is fitted to: all but the impossible ones; the middle sound row represents its operator."""
    aside = np.asarray(family.aside[rows])
    rows, aside = rows[aside != Aside.IMPOSSIBLE], aside[aside != Aside.IMPOSSIBLE]
    keys, t = np.asarray(family.keys[rows]), np.asarray(family.t_s[rows])
    order = np.lexsort((t, aside, keys))
    rows, aside, keys = rows[order], aside[order], keys[order]
    # Sound rows come first within an operator.
    distinct, start, operator = np.unique(keys, return_index=True, return_inverse=True)
    operator = operator.reshape(-1)
    sound = np.bincount(operator, weights=aside == Aside.SOUND, minlength=len(distinct)).astype(np.int64)
    middle = (start + (sound - 1) // 2)[sound > 0]
    place = np.where(sound > 0, np.cumsum(sound > 0) - 1, -1)
    return Measured(
        family.log_sizes[rows], family.flops[rows], family.moved_bytes[rows], family.t_s[rows], middle, place[operator]
    )
