"""New over old time of a recording's operators by the chains of two devices, from estimates of one source."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from whatif.graph.types import Int64
from whatif.hardware.gpu import Gpu
from whatif.models.durations.database import Ratios, estimator_of, gradients_apart, grouped_operators, same_source_ratio
from whatif.models.durations.device_scaling import has_units
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.rows import Operators

if TYPE_CHECKING:
    from whatif.graph.described import Described


# Families for which other devices' models with data sheets err less than those models alone: NeuSight's fp32 operators
# from each of five GPUs to each of the others, left out: elementwise 9.7 to 2.8 %, products 34.4 to 32.3 % (mean),
# normalizations 16.8 to 21.5 %, with the data sheets' answers. The kernel's roofline replaces these, with the same
# shares of peaks; where it does not apply, products go from 24.9 to 23.3 %.
_WITH_SHEET = ("elementwise", "matmul")


def by_operator(table: tuple[Described, ...], old: Gpu, new: Gpu) -> list[tuple[Int64, Ratios]]:
    """Return, for each family, places in a table of operators, and these operators' time on ``new`` over ``old``.

    Only operators in a format for which both devices have units, or neither. Sources go down to other devices'
    measurements, with data sheets for ``_WITH_SHEET``. Operators with data sheets alone are left to kernels' rooflines.
    """
    return _by_operator(table, (old, new), (estimator_of(old.name), estimator_of(new.name)))


@lru_cache(maxsize=64)
def _by_operator(
    table: tuple[Described, ...], gpus: tuple[Gpu, Gpu], sides: tuple[Estimator, Estimator]
) -> list[tuple[Int64, Ratios]]:
    """Cached ``by_operator``: the result depends only on devices, their databases and the operators."""
    (old, new), found = gpus, []
    for place, ops in grouped_operators(table):
        known = np.array([has_units(old, d) == has_units(new, d) for d in ops.texts["dtype"].table] or [True])
        rows = np.flatnonzero(known[ops.texts["dtype"].codes])
        if not len(rows):
            continue
        subset = ops.take(rows)
        if ops.family == "conv":
            ratios = _gradients_apart(subset, sides)
        else:
            worst = AnswerSource.ANALYTIC if ops.family in _WITH_SHEET else AnswerSource.LEARNED_ACROSS
            ratios = same_source_ratio(subset, subset, *sides, worst=worst)
            ratios.ratio[ratios.answered_by == AnswerSource.ANALYTIC] = np.nan
        found.append((place[rows], ratios))
    return found


def _gradients_apart(ops: Operators, sides: tuple[Estimator, Estimator]) -> Ratios:
    """The mean of both gradients' ratios: no measurement covers a convolution's call that computes both gradients."""
    parts = [same_source_ratio(one, one, *sides) for one in gradients_apart(ops)]
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    ratio, low, high = (np.sqrt(getattr(first, name) * getattr(second, name)) for name in ("ratio", "low", "high"))
    return Ratios(ratio, low, high, np.maximum(first.answered_by, second.answered_by))
