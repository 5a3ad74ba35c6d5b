"""The linear model of a group: time = floor + bytes / rate + FLOPs / rate, fitted robustly to its operators.

Its residual is a small, smooth factor, which neighbours interpolate well. (A time itself
spans six decades; its ratio to a data sheet's roofline still bends where small operators meet the floor.)
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from whatif.graph.types import Float64

_ROUNDS = 40
# Residuals below this count as equal: a median would chase noise.
_SMALLEST_RESIDUAL = 0.02
# No iteration moves a rate further than this, so that a poor start does not overshoot.
_LONGEST_STEP = 0.5
# A small weight on the start keeps parameters that the measurements do not determine (no FLOPs at all) there.
_PULL = 1e-5


class LinearModel(Struct, frozen=True):
    """Time = ``floor_s`` + FLOPs / ``flops_per_s`` + bytes / ``bytes_per_s``."""

    floor_s: float
    flops_per_s: float
    bytes_per_s: float

    def time_s(self, flops: Float64, moved_bytes: Float64) -> Float64:
        """Return the predicted time, seconds, shape (n,)."""
        return np.asarray(self.floor_s + flops / self.flops_per_s + moved_bytes / self.bytes_per_s)


def fit_linear_model(flops: Float64, moved_bytes: Float64, t_s: Float64) -> LinearModel:
    """Fit n measured times: least absolute log error, by reweighted Gauss-Newton steps on log parameters."""
    # Start at the fastest observed rate of each term, so that no unit and no data sheet is needed.
    rates = [float(np.max(amount / t_s, initial=0.0)) for amount in (flops, moved_bytes)]
    amounts = zip((flops, moved_bytes), rates, strict=True)
    works = [amount / rate if rate > 0 else np.zeros(len(t_s)) for amount, rate in amounts]
    terms = np.stack([np.full(len(t_s), t_s.min()), *works], axis=1)
    floor, *shares = fit_shares(terms, t_s, np.array([1.0, 1.3, 1.3])).tolist()
    flops_rate, bytes_rate = (rate / share if rate > 0 else np.inf for rate, share in zip(rates, shares, strict=True))
    return LinearModel(floor * float(t_s.min()), float(flops_rate), float(bytes_rate))


def fit_shares(terms: Float64, t_s: Float64, start: Float64) -> Float64:
    """Return positive factors, shape (p,), of the columns of ``terms``, (n, p), whose sum comes closest to n times.

    Least absolute log error, by reweighted Gauss-Newton steps on the factors' logarithms from ``start``.
    """
    from_ = np.log(start)
    logs = from_.copy()
    for _ in range(_ROUNDS):
        parts = terms * np.exp(logs)
        total = parts.sum(axis=1)
        residual = np.log(t_s / total)
        weight = 1 / np.maximum(np.abs(residual), _SMALLEST_RESIDUAL)
        slope = parts / total[:, None]
        pull = _PULL * weight.sum()
        curvature = (slope * weight[:, None]).T @ slope + pull * np.eye(len(logs))
        step = np.linalg.solve(curvature, (slope * weight[:, None]).T @ residual + pull * (from_ - logs))
        logs += np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)
        if np.abs(step).max() < 1e-4:
            break
    return np.exp(logs)
