"""A few measurements on a device that was not learned from: how its times compare with what the others' model says.

The log of measured over predicted time is fitted by ridge on [1, log of the law's time]: a level, and a slope that few
measurements hardly move. From ten on the range is that of the anchors themselves, each predicted from the others.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from whatif.graph.types import Float64
from whatif.opdb.interpolate import COVERAGE

FEWEST_ANCHORS, FEWEST_THAT_TELL = 5, 10
# So many measurements weigh as much as the belief that the model is right: as to its level, and as to its slope.
_RIDGE = np.array([1.0, 4.0])
# A stray anchor counts no more than one that is off by this, log, from the middle one.
_FARTHEST = 0.5


class Anchors(Struct, frozen=True):
    """What to add to a prediction's log: ``level`` and ``slope`` times the law's log time less ``middle``.

    ``half`` is the half-width of the 90 % range, log; None where there are too few anchors.
    """

    level: float
    slope: float
    middle: float
    half: float | None

    def correction(self, log_law: Float64) -> Float64:
        """Return what to add to the log of predicted times, shape (n,)."""
        return np.asarray(self.level + self.slope * (log_law - self.middle))


def fit_anchors(miss: Float64, log_law: Float64) -> Anchors | None:
    """Learn from n anchors: log of measured over predicted time, and of the law's time; None where they are too few."""
    if len(miss) < FEWEST_ANCHORS:
        return None
    middle = float(log_law.mean())
    level, slope = _ridge(miss, log_law - middle)
    half = None
    if len(miss) >= FEWEST_THAT_TELL:
        rest = np.empty(len(miss))
        for one in range(len(miss)):
            others = np.arange(len(miss)) != one
            own_middle = float(log_law[others].mean())
            own_level, own_slope = _ridge(miss[others], log_law[others] - own_middle)
            rest[one] = miss[one] - own_level - own_slope * (log_law[one] - own_middle)
        half = _surely(np.abs(rest))
    return Anchors(level, slope, middle, half)


def _surely(rest: Float64) -> float:
    """The quantile that holds nine of ten with few anchors as well: one standard deviation above the usual one.

    How much of the future the r-th of k scores holds is beta-distributed, Beta(r, k + 1 - r): with twenty anchors the
    usual quantile holds 0.9 give or take 0.06.
    """
    whole = len(rest) + 1
    rank = int(np.ceil(COVERAGE * whole + np.sqrt(COVERAGE * (1 - COVERAGE) * whole)))
    return float(np.sort(rest)[min(rank, len(rest)) - 1])


def _ridge(miss: Float64, centred: Float64) -> tuple[float, float]:
    centre = float(np.median(miss))
    kept = np.clip(miss, centre - _FARTHEST, centre + _FARTHEST)
    design = np.stack([np.ones(len(kept)), centred], axis=1)
    level, slope = np.linalg.solve(design.T @ design + np.diag(_RIDGE), design.T @ kept).tolist()
    return level, slope
