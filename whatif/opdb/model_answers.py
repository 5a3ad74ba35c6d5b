"""Answers of a learned model, with a range: never below the device's lower bound, wider outside its data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from whatif.graph.types import Bool, Float64
from whatif.hardware.gpu import Gpu
from whatif.hardware.roofline import kernel_floor_ns
from whatif.opdb.anchors import Anchors, fit_anchors
from whatif.opdb.data_sheet import analytic_s, answers_analytically, bound_s, under_load_s
from whatif.opdb.features import reference_s, sheet_of
from whatif.opdb.learned import LearnedModel
from whatif.opdb.rows import Operators


def anchors_of(model: LearnedModel, ops: Operators, t_s: Float64, gpu: Gpu) -> Anchors | None:
    """Fit the error of a model across devices to n operators measured on a device; None if they are too few.

    None also if the model does not cover one of them.
    """
    known, mapped, _ = model.covers(ops)
    if not len(ops) or not known.all():
        return None
    return fit_anchors(np.log(t_s) - model.predict(mapped, gpu), _log_reference(model, mapped, gpu))


def _log_reference(model: LearnedModel, ops: Operators, gpu: Gpu) -> Float64:
    """The log of the reference time of n operators, shape (n,): the anchors' correction is linear in it."""
    launch = model.facts.measured_as.has_launch
    return np.log(reference_s(ops, sheet_of(gpu, ops.family), launch=launch))


class Estimates(NamedTuple):
    """Seconds with a nominal 90 % range, and doublings outside the measured sizes; all columns have shape (n,)."""

    t_s: Float64
    low_s: Float64
    high_s: Float64
    outside: Float64 | float = 0.0

    def take(self, rows: Bool) -> Estimates:
        """The estimates ``rows``."""
        return Estimates(*(np.asarray(column)[rows] for column in self))


def ask_model(
    model: LearnedModel,
    ops: Operators,
    extra: Float64,
    gpu: Gpu | None,
    *,
    kernels_alone: bool,
    give_way: bool,
    anchors: Anchors | None,
) -> tuple[Estimates, Bool]:
    """Predict operators that a model covers, with ranges widened by ``extra`` (log).

    The mask, shape (n,), is false where the data sheet's range is narrower: far from the model's data, or where little
    is left after subtracting a launch.

    With ``kernels_alone`` the launch in the model's times is subtracted. With ``give_way`` the model yields to the data
    sheet outside of its data, or where times were mostly launch, if that is more accurate. ``anchors`` are this
    device's own measurements.
    """
    facts = model.facts
    launch = facts.measured_as.has_launch
    log_t = model.predict(ops, gpu)
    outside = model.outside(ops)
    half = model.of_name(ops, facts.half, max(facts.half.values()))
    if anchors is not None and gpu is not None:
        log_t = log_t + anchors.correction(_log_reference(model, ops, gpu))
        half = half if anchors.half is None else np.full(len(ops), anchors.half)
    t = np.exp(log_t)
    half = half + extra + facts.growth * outside
    if gpu is not None:
        t = np.maximum(t, np.maximum(bound_s(gpu, ops, cold=False), under_load_s(gpu, ops)))
    low, high = t * np.exp(-half), t * np.exp(half)
    certain = outside == 0
    if kernels_alone and launch:
        # The launch comes before the kernel, which takes at least the floor.
        held = model.of_name(ops, facts.launch_s, 0.0)
        # The rest of a time that was mostly launch is the difference of two imprecise times.
        certain &= t - held > held
        least = kernel_floor_ns(gpu) / 1e9
        t, low, high = (np.maximum(c - held, least) for c in (t, low, high))
        launch = False
    near = np.ones(len(ops), dtype=np.bool_)
    if gpu is not None:
        bound = bound_s(gpu, ops, cold=False)
        t = np.maximum(t, bound)
        low, high = np.minimum(np.maximum(low, bound), t), np.maximum(high, t)
        if give_way:
            _, sheet_low, sheet_high = analytic_s(gpu, ops, launch=launch)
            near &= certain | (high / low < sheet_high / sheet_low) | ~answers_analytically(gpu, ops)
    return Estimates(t, low, high, outside), near


def best_first(models: Sequence[tuple[LearnedModel, int]]) -> Iterator[tuple[LearnedModel, int, tuple[str, ...]]]:
    """Yield (model, rank, names) in the order of preference, each model with the operator names it answers for.

    ``models`` come with the rank of their basis, the preferred one first. Among models of one rank that cover a name,
    the user's come before the shipped ones, then the one with the smallest error on held-out data.
    """
    for rank in dict.fromkeys(rank for _, rank in models):
        rivals = [model for model, model_rank in models if model_rank == rank]
        turns: dict[tuple[int, int], list[str]] = {}
        for name in sorted({name for model in rivals for name in model.facts.names}):
            able = [place for place, model in enumerate(rivals) if name in model.facts.names]
            able.sort(key=lambda p: (rivals[p].shipped, rivals[p].facts.validation_pct.get(name, np.inf)))
            for turn, place in enumerate(able):
                turns.setdefault((turn, place), []).append(name)
        for (_, place), names in sorted(turns.items()):
            yield rivals[place], rank, tuple(names)
