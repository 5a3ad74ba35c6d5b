"""Which measurements are set aside: kept, listed, and not answered with.

It depends on all rows together, not on their order, and is recomputed for every index.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from whatif.graph.described import FAMILIES
from whatif.graph.types import Float64, Int8, Int64
from whatif.hardware.gpu import Gpu
from whatif.opdb.data_sheet import bound_s
from whatif.opdb.interpolate import left_out
from whatif.opdb.linear_model import fit_linear_model
from whatif.opdb.rows import Operators
from whatif.opdb.work import work


class Aside(IntEnum):
    """Why a measurement is set aside; SOUND ones are not."""

    SOUND = 0
    IMPOSSIBLE = 1  # faster than the device can be
    STRAY = 2  # far from all of its neighbours


# A data sheet's clocks and bandwidth are exceeded by some percent (a boost above the listed one), never by 30 %.
IMPOSSIBLE_SHARE = 0.7
# Three robust sigma alone would set aside 6 % of NeuSight's honest rows (24 % of P4's additions): misses have heavy
# tails where a library switches its algorithm from shape to shape. So a row has to be a factor of two off as well,
# which leaves 0 to 3 %. The factor is our estimate.
STRAY_SIGMAS, STRAY_FACTOR = 3.0, 2.0
# Fewer rows have no typical value.
FEWEST_ROWS = 30
# Neighbours are searched among at most this many rows; keys are hashes, so every n-th row is a fair sample.
_POOL = 2048
# The standard deviation of a normal distribution over its median absolute deviation.
_SIGMA_OF_MEDIAN = 1.4826


def set_aside(ops: Operators, t_s: Float64, group: Int64, devices: list[Gpu | None], cold: list[bool]) -> Int8:
    """Return the ``Aside`` of each measurement, shape (n,), sorted by key.

    ``group``, shape (n,), is each row's group of comparable operators; ``devices`` and ``cold`` describe each group.
    """
    result = np.zeros(len(ops), dtype=np.int8)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(len(devices) + 1))
    for number, gpu in enumerate(devices):
        rows = order[starts[number] : starts[number + 1]]
        if gpu is not None:
            bound = bound_s(gpu, ops.take(rows), cold=cold[number])
            result[rows[t_s[rows] < IMPOSSIBLE_SHARE * bound]] = Aside.IMPOSSIBLE
        sound = rows[result[rows] == Aside.SOUND]
        if len(sound) >= FEWEST_ROWS and FAMILIES[ops.family].sizes:
            result[sound[_strays(ops.take(sound), t_s[sound])]] = Aside.STRAY
    return result


def _strays(ops: Operators, t_s: Float64) -> npt.NDArray[np.bool_]:
    flops, moved = work(ops)
    residual = np.log(t_s / fit_linear_model(flops, moved, t_s).time_s(flops, moved))
    pool = np.arange(0, len(t_s), -(-len(t_s) // _POOL))
    miss = np.abs(left_out(log_sizes(ops), residual, pool))
    sigma = _SIGMA_OF_MEDIAN * float(np.median(miss))
    return np.asarray((miss > STRAY_SIGMAS * sigma) & (miss > np.log(STRAY_FACTOR)), dtype=np.bool_)


def log_sizes(ops: Operators) -> Float64:
    """Return the logarithm to the base 2 of each operator's sizes, shape (n, sizes of the family)."""
    sizes = [ops.integers[name] for name in FAMILIES[ops.family].sizes]
    return np.log2(np.maximum(np.stack(sizes, axis=1), 1)) if sizes else np.zeros((len(ops), 0))
