"""Interpolation of log-utilisation between measured neighbours: the residual of a group's linear model over its sizes.

Utilisation is the model's time over the measured one. Around an asked operator it is a plane in the logarithms of the
sizes, fitted to the sixteen nearest operators, weighted by proximity. The error of such a plane is learned from the
group itself: each measured operator is estimated from its neighbours alone (split conformal prediction:
Lei et al., "Distribution-Free Predictive Inference for Regression", JASA 2018, with locally scaled residuals).
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from whatif.graph.types import Float64, Int64
from whatif.opdb.linear_model import LinearModel, fit_linear_model
from whatif.opdb.neighbours import nearest

NEIGHBOURS = 16
# Fewer measured operators do not determine a plane.
FEWEST = 8
# Growth of the error of a group's model with each doubling outside the measured sizes, as a factor, if the group
# is too small to tell. Our estimate: products and convolutions of NeuSight's data lose 1.2 to 2.
FACTOR_A_DOUBLING = 1.5
# Otherwise a group's larger operators are estimated from its smaller ones, up to this quantile of each size.
INNER_QUANTILE, _FEWEST_INNER = 0.6, 50
# Even if those errors are small, the next doubling is less certain.
LEAST_GROWTH = 0.05
COVERAGE = 0.9
# Rows whose errors give the range; more make it slower and no better.
_MOST_PROBES = 1000
# Ridge, in doublings: limits the slope of a plane whose neighbours disagree.
_RIDGE = 0.3
_NEAREST_DISTANCE = 0.05
# Neighbours may agree by chance: the least spread of a plane, and its growth with their distance.
_LEAST_SPREAD, _SPREAD_A_DOUBLING = 0.002, 0.02


class Group(Struct, frozen=True):
    """Measured operators that differ only in their sizes, and the linear model and range fitted to them."""

    model: LinearModel
    sizes: Float64  # log2, shape (n, p)
    residual: Float64  # log of measured time over the model's, shape (n,)
    quantile: float  # of the errors, in units of the local spread
    growth: float  # of the range, log a doubling outside of the measured box
    most_bytes: float  # that a measured operator moves

    def __len__(self) -> int:
        return len(self.residual)

    def estimate(self, sizes: Float64, work: tuple[Float64, Float64]) -> tuple[Float64, Float64, Float64, Float64]:
        """Return time, low and high end of its 90 % range, seconds, and doublings outside of the measured box.

        ``sizes`` has shape (q, p), FLOPs and bytes (``work``) and all results (q,).
        """
        low, high = self.sizes.min(axis=0), self.sizes.max(axis=0)
        inside = np.clip(sizes, low, high)
        outside = np.asarray(np.abs(sizes - inside).max(axis=1, initial=0.0))
        # Beyond the box the plane is not extrapolated: only the linear model continues from the box's edge.
        miss, spread = _planes(self.sizes, self.residual, inside)
        centre = self.model.time_s(*work) * np.exp(miss)
        half = self.quantile * spread + self.growth * outside
        return centre, centre * np.exp(-half), centre * np.exp(half), outside


class Measured(Struct, frozen=True):
    """The n measurements that a group is fitted to: sizes (log2, (n, p)), work and time, shape (n,).

    ``representatives`` lists one row for each operator, and ``operator``, shape (n,), the index into it of every
    row's operator (-1: it has only strays). All rows count when the range is learned: a new operator may turn out
    to be a stray or a conflicting measurement as well.
    """

    sizes: Float64
    flops: Float64
    moved_bytes: Float64
    t_s: Float64
    representatives: Int64
    operator: Int64


def fit_group(rows: Measured) -> Group | None:
    """Fit a group; None if fewer than ``FEWEST`` operators were measured, or they have no sizes."""
    chosen = rows.representatives
    if len(chosen) < FEWEST or not rows.sizes.shape[1]:
        return None
    model = fit_linear_model(rows.flops[chosen], rows.moved_bytes[chosen], rows.t_s[chosen])
    residual = np.log(rows.t_s / model.time_s(rows.flops, rows.moved_bytes))
    probes = _spread_out(np.arange(len(residual)))
    estimate, spread = _planes(rows.sizes[chosen], residual[chosen], rows.sizes[probes], itself=rows.operator[probes])
    quantile = conformal(np.abs(residual[probes] - estimate) / spread)
    most_bytes = float(rows.moved_bytes[chosen].max())
    return Group(model, rows.sizes[chosen], residual[chosen], quantile, _growth(rows), most_bytes)


def _growth(rows: Measured) -> float:
    """Growth of the error with each doubling outside, from estimating larger operators from the smaller ones."""
    sizes, flops, moved, t_s = (c[rows.representatives] for c in (rows.sizes, rows.flops, rows.moved_bytes, rows.t_s))
    edge = np.quantile(sizes, INNER_QUANTILE, axis=0)
    inner = (sizes <= edge).all(axis=1)
    outer = _spread_out(np.flatnonzero(~inner))
    if inner.sum() < _FEWEST_INNER or len(outer) < _FEWEST_INNER:
        return float(np.log(FACTOR_A_DOUBLING))
    model = fit_linear_model(flops[inner], moved[inner], t_s[inner])
    residual = np.log(t_s / model.time_s(flops, moved))
    edges = sizes[inner].min(axis=0), sizes[inner].max(axis=0)
    clipped = np.clip(sizes[outer], *edges)
    outside = np.abs(sizes[outer] - clipped).max(axis=1)
    estimate, _ = _planes(sizes[inner], residual[inner], clipped)
    # Half a doubling at the least: close to the edge the error is the plane's, not the linear model's.
    return max(conformal(np.abs(residual[outer] - estimate) / np.maximum(outside, 0.5)), LEAST_GROWTH)


def _spread_out(rows: Int64) -> Int64:
    """At most ``_MOST_PROBES`` of ``rows``, evenly spaced: a fair sample, since rows are sorted by key."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _MOST_PROBES)).astype(np.int64))]


def conformal(score: Float64) -> float:
    """The finite-sample quantile of split conformal prediction; the largest score if there are few."""
    rank = min(int(np.ceil(COVERAGE * (len(score) + 1))) - 1, len(score) - 1)
    return float(np.sort(score)[rank])


def left_out(sizes: Float64, residual: Float64, pool: Int64) -> Float64:
    """Return the log error of each of n operators, estimated from those of ``pool`` (ids) except itself, shape (n,)."""
    place = np.full(len(residual), -1, dtype=np.int64)
    place[pool] = np.arange(len(pool))
    estimate, _ = _planes(sizes[pool], residual[pool], sizes, itself=place)
    return residual - estimate


def _planes(
    measured: Float64, residual: Float64, asked: Float64, itself: Int64 | None = None
) -> tuple[Float64, Float64]:
    """Value and local spread of the weighted ridge plane through each asked point's neighbours, shape (q,) both."""
    count = min(NEIGHBOURS, len(measured) - 1)
    at, distance = nearest(measured, asked, count, itself=itself)
    weight = 1 / (distance + _NEAREST_DISTANCE)
    weight /= weight.sum(axis=1, keepdims=True)
    values, offset = residual[at], measured[at] - asked[:, None]
    mean, middle = (weight * values).sum(axis=1), np.einsum("qk,qkp->qp", weight, offset)
    values, offset = values - mean[:, None], offset - middle[:, None]
    curvature = np.einsum("qkp,qkr,qk->qpr", offset, offset, weight) + _RIDGE**2 * np.eye(offset.shape[2])
    tilt = np.linalg.solve(curvature, np.einsum("qkp,qk,qk->qp", offset, values, weight)[..., None])[..., 0]
    remainder = values - np.einsum("qkp,qp->qk", offset, tilt)
    spread = np.sqrt(np.einsum("qk,qk->q", weight, remainder**2)) + _LEAST_SPREAD
    spread += _SPREAD_A_DOUBLING * np.einsum("qk,qk->q", weight, distance)
    return mean - np.einsum("qp,qp->q", middle, tilt), spread
