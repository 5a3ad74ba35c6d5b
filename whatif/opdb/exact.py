"""Combine several measurements of one operator: a weighted median, and a range that covers each of them."""

from __future__ import annotations

import numpy as np

from whatif.graph.types import Float64, Int64
from whatif.opdb.keys import UInt64

# Spread of a measurement that gives none: library versions change the same shape by 1 to 5 % at the median.
UNKNOWN_SIGMA = 0.05
# The least spread: however many repeats, another day and process change a time by more (NCCL sweeps: 1.5 %).
LEAST_SIGMA = 0.01
# Sigmas of a normal distribution at 10 to 90 % (the range of the repeats), and at a nominal 90 % range, which is wider.
_SIGMAS_IN_RANGE, SIGMAS_OF_90 = 2.563, 1.645


def weighted_medians(
    query: Int64, t_s: Float64, low_s: Float64, high_s: Float64
) -> tuple[Int64, Float64, Float64, Float64, Int64]:
    """Combine n measurements (n > 0) by their ``query`` numbers, shape (n,).

    Returns the distinct queries, the inverse-variance-weighted median of their times, the ends of a nominal 90 %
    range, and how many measurements they rest on, shape (q,) each.
    """
    sigma = np.where(np.isnan(high_s - low_s), UNKNOWN_SIGMA, (high_s - low_s) / t_s / _SIGMAS_IN_RANGE)
    sigma = np.maximum(sigma, LEAST_SIGMA)
    order = np.lexsort((t_s, query))
    query, t, sigma = query[order], t_s[order], sigma[order]
    distinct, start = np.unique(query, return_index=True)
    # The weighted median: the first time at which half of the weight is reached.
    weight = 1 / sigma**2
    total = np.add.reduceat(weight, start)
    number = np.cumsum(np.append(0, np.diff(query) != 0))
    reached = np.cumsum(weight) - np.append(0, np.cumsum(total)[:-1])[number]
    half = np.flatnonzero(reached >= 0.5 * total[number] * (1 - 1e-9))
    middle = half[np.searchsorted(number[half], np.arange(len(distinct)))]
    # Conflicting measurements are a distribution: the range covers every one of them.
    low = np.minimum.reduceat(t * np.exp(-SIGMAS_OF_90 * sigma), start)
    high = np.maximum.reduceat(t * np.exp(SIGMAS_OF_90 * sigma), start)
    return distinct, t[middle], low, high, np.diff(np.append(start, len(query)))


def lower_medians(keys: UInt64, values: Float64) -> tuple[UInt64, Float64]:
    """Return the distinct keys of n values, sorted, and the median of each one's values: the lower of two."""
    order = np.lexsort((values, keys))
    distinct, first, count = np.unique(keys[order], return_index=True, return_counts=True)
    return distinct, values[order][first + (count - 1) // 2]
