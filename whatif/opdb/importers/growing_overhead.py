"""Remove an overhead that grew while a table was measured.

NeuSight's convolutions need it. Their shapes come in random order, yet on all five GPUs times grow from row to row by
a constant, whatever the shape: 0.28 ms over the 4,958 rows of the V100, 0.7 ms on the P100, where the
smallest take 0.07 ms in the first rows. So it is time between the two events and not the kernel's. Its cause
is unknown. It can be distinguished only if the order of the rows is independent of their sizes.
"""

from __future__ import annotations

import numpy as np

from whatif.graph.types import Float64
from whatif.opdb.linear_model import fit_shares

# The overhead is linear in each of this many parts of the table.
PARTS = 8
# Fewer rows do not determine a line in each part (50 a part: our estimate).
FEWEST_ROWS = 400
# Growth below this share of the shortest time is noise.
_LEAST_GROWTH = 0.2
# Growth has to reduce the error of the model by this share to be accepted.
_LEAST_GAIN = 0.05
# Above this rank correlation of row order and FLOPs, growth cannot be distinguished from larger operators.
_MOST_ORDER = 0.1


def growing_overhead(flops: Float64, moved_bytes: Float64, t_s: Float64) -> Float64:
    """Return the overhead of each of n rows, in measuring order, over the top of the table, seconds, shape (n,).

    Fits time = floor + FLOPs / rate + bytes / rate + overhead(row), least absolute log error, where the
    overhead never falls. No corrected time is below the shortest of the first part. All zeros if nothing
    grew, or the table does not determine it.
    """
    rows = len(t_s)
    none = np.zeros(rows)
    if rows < FEWEST_ROWS or abs(_rank_correlation(flops)) > _MOST_ORDER:
        return none
    ramps = np.clip(np.arange(rows)[:, None] / rows * PARTS - np.arange(PARTS), 0, 1)
    work = [amount / np.max(amount / t_s) for amount in (flops, moved_bytes)]
    constant = np.column_stack([np.full(rows, t_s.min()), *work])
    terms = np.column_stack([constant, ramps * t_s.min()])
    start = np.array([1.0, 1.3, 1.3])
    shares = fit_shares(terms, t_s, np.append(start, np.full(PARTS, 1.0 / PARTS)))
    overhead = np.asarray(ramps @ shares[3:] * t_s.min())
    miss, plain_miss = _miss(terms, shares, t_s), _miss(constant, fit_shares(constant, t_s, start), t_s)
    if overhead[-1] < _LEAST_GROWTH * t_s.min() or miss > (1 - _LEAST_GAIN) * plain_miss:
        return none
    first = slice(0, rows // PARTS)
    shortest = float(np.min(t_s[first] - np.minimum(overhead[first], 0.5 * t_s[first])))
    return np.asarray(np.clip(t_s - shortest, 0, overhead))


def _miss(terms: Float64, shares: Float64, t_s: Float64) -> float:
    return float(np.mean(np.abs(np.log(terms @ shares / t_s))))


def _rank_correlation(values: Float64) -> float:
    """Spearman's correlation of values with their position."""
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1]) if len(values) > 1 else 0.0
