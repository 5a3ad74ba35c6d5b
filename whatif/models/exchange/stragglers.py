"""How much slower than the mean the slowest of many workers is, by order statistics, and the classes that follow."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

# Points at which the distribution of the slowest is read: with so many the mean of 100,000 workers is off by 0.01 %.
_POINTS = 2_000
# Ends of the range, as everywhere a nominal 90 % one.
_LOW, _HIGH = 0.05, 0.95


class Slowest(NamedTuple):
    """The time of the slowest of n workers over the mean time of one: its mean, and the ends of a 90 % range."""

    mean: float
    low: float
    high: float

    def times(self, factor: float) -> Slowest:
        """The same of workers that all take ``factor`` times as long."""
        return Slowest(self.mean * factor, self.low * factor, self.high * factor)


def slowest_of(workers: int, jitter_pct: float) -> Slowest:
    """Return how long the slowest of ``workers`` takes whose times are lognormal and independent, mean 1.

    ``jitter_pct`` is the standard deviation of one worker's time, percent of its mean. With s² = ln(1 + cv²) and the
    normal quantile z, the q-quantile of the slowest of n is exp(s z(q^(1/n)) - s²/2), because all n lie below it with
    the n-th power of the probability of one (David and Nagaraja, "Order Statistics", 2003, §2.1). Its mean is that of
    all quantiles, and has no closed form.
    """
    if workers < 1 or jitter_pct == 0:
        return Slowest(1.0, 1.0, 1.0)
    variance = math.log1p((jitter_pct / 100) ** 2)
    normal = NormalDist()

    def quantile(q: float) -> float:
        # 1 - q^(1/n) keeps its digits where q^(1/n) is next to 1.
        return math.exp(-math.sqrt(variance) * normal.inv_cdf(-math.expm1(math.log(q) / workers)) - variance / 2)

    middle = (np.arange(_POINTS) + 0.5) / _POINTS
    mean = float(np.mean([quantile(q) for q in middle.tolist()])) if workers > 1 else 1.0
    return Slowest(mean, quantile(_LOW), quantile(_HIGH))


def worker_classes(workers: int, count: int, slowdown: float, jitter_pct: float) -> list[Slowest]:
    """Return the classes of workers that one of ``workers`` meets: itself, the slowest of its like, and of the others.

    ``count`` of the workers take ``slowdown`` times as long. Only the slowest of a class is waited for.
    """
    found = [Slowest(1.0, 1.0, 1.0)]
    if jitter_pct and workers - count > 1:
        found.append(slowest_of(workers - count, jitter_pct))
    if count:
        found.append(slowest_of(count, jitter_pct).times(slowdown))
    return found
