"""Anchors: a few measurements on a device outside a model's training data, which correct the model's predictions.

The log of measured over predicted time is fitted by ridge on [1, log of the reference time]: a level, and a slope that
few measurements hardly change. With ten or more, the range is that of the anchors, each predicted from the others.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from whatif.graph.types import Float64
from whatif.opdb.interpolate import COVERAGE

FEWEST_ANCHORS, FEWEST_FOR_RANGE = 5, 10
# Prior weight of the uncorrected model, in measurements: for its level, and for its slope.
_RIDGE = np.array([1.0, 4.0])
# Stray anchors are clipped to this distance, log, from the median one.
_FARTHEST = 0.5


class Anchors(Struct, frozen=True):
    """A correction of a prediction's log: ``level`` plus ``slope`` times (log reference time - ``middle``).

    ``half`` is the half-width of the 90 % range, log; None if there are too few anchors.
    """

    level: float
    slope: float
    middle: float
    half: float | None

    def correction(self, log_reference: Float64) -> Float64:
        """Return the correction to add to the log of predicted times, shape (n,)."""
        return np.asarray(self.level + self.slope * (log_reference - self.middle))


def fit_anchors(miss: Float64, log_reference: Float64) -> Anchors | None:
    """Fit n anchors: log of measured over predicted time, and of the reference time; None if they are too few."""
    if len(miss) < FEWEST_ANCHORS:
        return None
    middle = float(log_reference.mean())
    level, slope = _ridge(miss, log_reference - middle)
    half = None
    if len(miss) >= FEWEST_FOR_RANGE:
        residual = np.empty(len(miss))
        for left_out in range(len(miss)):
            kept = np.arange(len(miss)) != left_out
            kept_middle = float(log_reference[kept].mean())
            kept_level, kept_slope = _ridge(miss[kept], log_reference[kept] - kept_middle)
            residual[left_out] = miss[left_out] - kept_level - kept_slope * (log_reference[left_out] - kept_middle)
        half = _conservative(np.abs(residual))
    return Anchors(level, slope, middle, half)


def _conservative(residual: Float64) -> float:
    """A conservative 90 % quantile for few anchors: one standard deviation above the usual one.

    The coverage of the r-th of k scores is distributed as Beta(r, k + 1 - r): with twenty anchors the
    usual quantile covers 0.9 +- 0.06.
    """
    count = len(residual) + 1
    rank = int(np.ceil(COVERAGE * count + np.sqrt(COVERAGE * (1 - COVERAGE) * count)))
    return float(np.sort(residual)[min(rank, len(residual)) - 1])


def _ridge(miss: Float64, centred: Float64) -> tuple[float, float]:
    centre = float(np.median(miss))
    clipped = np.clip(miss, centre - _FARTHEST, centre + _FARTHEST)
    design = np.stack([np.ones(len(clipped)), centred], axis=1)
    level, slope = np.linalg.solve(design.T @ design + np.diag(_RIDGE), design.T @ clipped).tolist()
    return level, slope
