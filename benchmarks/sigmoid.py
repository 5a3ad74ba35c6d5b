"""Pei et al.'s throughput model: the throughput of a transfer as a sigmoid-like function of its size.

Source: Pei et al., "Iteration Time Prediction for CNN in Multi-GPU Platform: Modeling and Analysis", IEEE Access 2019,
        §III D, equations 20 and 21, figure 4: y = k / (a + exp(-w x)) GB/s, x the natural logarithm of the size in MB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whatif.graph.types import Float64
from whatif.runtime.errors import WhatifError

# The most Gauss-Newton steps; it stops earlier at convergence.
_MOST_STEPS = 500
_STILL = 1e-10


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """The model's three constants; the largest transfers reach k / a GB/s.

    With w = 1 it is a model of a latency, 1 / (1000 k) seconds, and a rate, k / a.
    """

    k: float
    a: float
    w: float

    @classmethod
    def of(cls, latency_ns: float, byte_s: float) -> Sigmoid:
        """Return the curve of a latency and a rate."""
        k = 1e6 / latency_ns
        return cls(k, k / (byte_s / 1e9), 1.0)

    def gbyte_s(self, size_bytes: npt.ArrayLike) -> Float64:
        """Return the throughput of each size, GB/s, shape (n,) (equation 21)."""
        x = np.log(np.maximum(np.atleast_1d(np.asarray(size_bytes, dtype=np.float64)), 1.0) / 1e6)
        return np.asarray(self.k / (self.a + np.exp(-self.w * x)), dtype=np.float64)

    def time_ns(self, size_bytes: npt.ArrayLike) -> Float64:
        """Return the time of each size, ns, shape (n,) (equation 20): 1 GB/s is 1 byte a nanosecond."""
        size = np.atleast_1d(np.asarray(size_bytes, dtype=np.float64))
        return np.asarray(size / self.gbyte_s(size), dtype=np.float64)


def fit_sigmoid(size_bytes: npt.ArrayLike, time_ns: npt.ArrayLike) -> Sigmoid:
    """Fit the curve to measured transfers, least squares of the logarithms of times (Gauss-Newton, damped).

    Raises WhatifError on fewer than three sizes, or on sizes and times that are not above 0.
    """
    size, time = (np.atleast_1d(np.asarray(values, dtype=np.float64)) for values in (size_bytes, time_ns))
    sound = size.shape == time.shape and bool(((size > 0) & (time > 0) & np.isfinite(size) & np.isfinite(time)).all())
    if not sound or len(np.unique(size)) < 3:
        raise WhatifError(f"sigmoid: expected three sizes or more with times, all above 0, got {len(np.unique(size))}.")
    x, target = np.log(size / 1e6), np.log(size / time)
    latency_ns, byte_s = float(time[np.argmin(size)]), float(np.max(size / time) * 1e9)
    start = Sigmoid.of(latency_ns, byte_s)
    # Logarithms keep all three positive.
    point, damping = np.log([start.k, start.a, start.w]), 1e-3
    error, slope = _residual(point, x, target)
    for _ in range(_MOST_STEPS):
        square = slope.T @ slope
        step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-12), -slope.T @ error)
        tried = point + np.clip(step, -2.0, 2.0)
        new_error, new_slope = _residual(tried, x, target)
        if new_error @ new_error < error @ error:
            point, error, slope, damping = tried, new_error, new_slope, damping / 3
        else:
            damping *= 4
        if np.abs(step).max() < _STILL or damping > 1e12:
            break
    k, a, w = (float(value) for value in np.exp(point))
    return Sigmoid(k, a, w)


def _residual(point: Float64, x: Float64, target: Float64) -> tuple[Float64, Float64]:
    """ln y minus its measurement, shape (n,), and the derivatives by ln k, ln a, ln w, shape (n, 3)."""
    log_k, log_a, log_w = point
    a, w = np.exp(log_a), np.exp(min(log_w, 5.0))
    falling = np.exp(np.clip(-w * x, -700.0, 700.0))
    error = log_k - np.log(a + falling) - target
    slope = np.stack([np.ones_like(x), -a / (a + falling), w * x * falling / (a + falling)], axis=1)
    return error, slope
