"""The op database's estimates for a graph's tasks, as ratios of two estimates of one source.

A ratio cancels the errors that both estimates share, so both must come from the same source: a measurement over a
model's answer has the model's full error.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.described import Described
from whatif.graph.kernels import MATRIX_FAMILIES, dtype_code
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Float64, Int8, Int64, among
from whatif.models.durations.estimator import Source, device
from whatif.opdb import data_sheet
from whatif.opdb.chain import Answers, AnswerSource, Estimator
from whatif.opdb.default import estimator as default_estimator
from whatif.opdb.importers.described import operators_of
from whatif.opdb.location import default_database
from whatif.opdb.rows import Operators, Texts

# The source of a duration that a ratio of two estimates counts as.
_DURATION_SOURCES = {
    AnswerSource.EXACT: Source.DATABASE,
    AnswerSource.INTERPOLATED: Source.DATABASE,
    AnswerSource.LEARNED: Source.LEARNED,
    AnswerSource.SAME_CHIP: Source.OTHER_DEVICES,
    AnswerSource.SAME_SHAPE: Source.OTHER_DEVICES,
    AnswerSource.LEARNED_ACROSS: Source.OTHER_DEVICES,
}
# The same, indexed by ``AnswerSource``; sources not listed are data sheets.
SOURCE_OF_ANSWER = np.array([_DURATION_SOURCES.get(one, Source.ROOFLINE) for one in AnswerSource], dtype=np.int8)
# Times measured with the launch say little about a kernel shorter than the launch: events around one kernel measure at
# least 24 us (NeuSight's five GPUs).
LEAST_WITH_LAUNCH_S = 20e-6


class Ratios(Struct, frozen=True):
    """New over old time of n operators, with a nominal 90 % range and the source of both estimates, shape (n,) each.

    NaN, with source NONE, if no source answers for both.
    """

    ratio: Float64
    low: Float64
    high: Float64
    answered_by: Int8


def estimator_of(device: str) -> Estimator:
    """Return a device's estimator chain, with the user's database and the shipped models; opened once per process."""
    return _opened(device, default_database())


@lru_cache(maxsize=64)
def _opened(device: str, _database: Path) -> Estimator:
    return default_estimator(device)


@lru_cache(maxsize=32)
def grouped_operators(table: tuple[Described, ...]) -> list[tuple[Int64, Operators]]:
    """Return ``operators_of`` a recording's table, cached: what-ifs call it often with the same table."""
    return operators_of(table)


def dtype_as_called(graph: TaskGraph) -> Int8:
    """Return the number format in which each task's operator was called, as a code, shape (n_tasks,); 0 if unknown."""
    codes = np.array([*(dtype_code(operator.dtype) for operator in graph.info.operators), 0], dtype=np.int8)
    return codes[graph.called]  # -1 is the last entry


def usual_calls_ns(graph: TaskGraph, tasks: Int64) -> tuple[Float64, Float64]:
    """Return the database's usual time for the call of each of ``tasks`` on its GPU, and the range's upper end, ns.

    Both have shape (n_tasks,), split as among the recorded call's kernels; NaN if the recording has no shapes or the
    database no answer. fp32 convolutions run in TF32 where cuDNN does so by default.
    """
    gpu = device(graph)
    has_call = (graph.called[tasks] >= 0) & (graph.operator[tasks] >= 0)
    # Changes of a product's layout, and its bias, are separate kernels.
    products = np.array([op.family in data_sheet.MATRIX_FAMILIES for op in graph.info.operators] + [False])
    has_call &= among(graph.family[tasks], MATRIX_FAMILIES) | ~products[graph.called[tasks]]
    usual_ns, high_ns = (np.full(len(graph), np.nan) for _ in range(2))
    if gpu is None or not has_call.any():
        return usual_ns, high_ns
    tasks = tasks[has_call]
    table = [
        replace(op, dtype="tf32") if gpu.tf32_by_default and (op.family, op.dtype) == ("conv", "fp32") else op
        for op in graph.info.operators
    ]
    by_row = np.full((2, len(table)), np.nan)
    side = estimator_of(gpu.name)
    for places, ops in operators_of(table):
        answers = side.estimate(ops)
        known = answers.answered_by != AnswerSource.NONE
        by_row[:, places[known]] = 1e9 * np.stack([answers.t_s, answers.high_s])[:, known]
    _, call = np.unique(graph.operator[tasks], return_inverse=True)
    call_ns = np.bincount(call, weights=graph.duration_ns[tasks])[call]
    share = graph.duration_ns[tasks] / np.maximum(call_ns, 1)
    usual_ns[tasks], high_ns[tasks] = by_row[:, graph.called[tasks]] * share
    return usual_ns, high_ns


def same_source_ratio(
    before: Operators,
    after: Operators,
    old: Estimator,
    new: Estimator,
    *,
    worst: AnswerSource = AnswerSource.LEARNED_ACROSS,
) -> Ratios:
    """Return the time of ``after`` on ``new``'s device over that of ``before`` on ``old``'s device.

    Row i of ``before`` becomes row i of ``after``; both have n operators of one family. The best source up to ``worst``
    that answers for both is used.
    """
    n = len(before)
    ratio, low, high = (np.full(n, np.nan) for _ in range(3))
    answered_by = np.full(n, AnswerSource.NONE, dtype=np.int8)
    allowed = np.zeros(n, dtype=np.int8)
    open_ = np.arange(n)
    # Each round moves at least one of the two answers down a source.
    while len(open_):
        floor = int(allowed[open_].min())
        rows = open_[allowed[open_] == floor]
        sources = [step for step in AnswerSource if floor <= step <= worst]
        queries = ((side.restricted(sources), ops.take(rows)) for side, ops in ((old, before), (new, after)))
        first, second = (side.estimate(ops) for side, ops in queries)
        answered = (first.answered_by <= worst) & (second.answered_by <= worst)
        agreed = answered & (first.answered_by == second.answered_by)
        little = _mostly_launch(first) | _mostly_launch(second)
        same = agreed & ~little
        done = rows[same]
        for column, values in zip((ratio, low, high), _between(first, second), strict=True):
            column[done] = values[same]
        answered_by[done] = first.answered_by[same]
        allowed[rows] = np.maximum(first.answered_by, second.answered_by) + (agreed & little)
        finished = same | ~answered | (allowed[rows] > worst)
        open_ = np.setdiff1d(open_, rows[finished], assume_unique=True)
    bad = (
        ~np.isfinite(ratio) | ~np.isfinite(low) | ~np.isfinite(high) | (ratio <= 0) | (answered_by == AnswerSource.NONE)
    )
    for column in (ratio, low, high):
        column[bad] = np.nan
    answered_by[bad] = AnswerSource.NONE
    return Ratios(ratio, low, high, answered_by)


def _between(first: Answers, second: Answers) -> tuple[Float64, Float64, Float64]:
    """The second over the first time, and its range: both may err in opposite directions, so that squares add up."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = second.t_s / first.t_s
        down = np.hypot(np.log(second.t_s / second.low_s), np.log(first.high_s / first.t_s))
        up = np.hypot(np.log(second.high_s / second.t_s), np.log(first.t_s / first.low_s))
        return ratio, ratio * np.exp(-down), ratio * np.exp(up)


def best_ratio(before: Operators, after: Operators, old: Estimator, new: Estimator) -> Ratios:
    """Return the times as ``same_source_ratio``, but each of its best source."""
    first, second = old.estimate(before), new.estimate(after)
    return Ratios(*_between(first, second), np.maximum(first.answered_by, second.answered_by))


def chain_ratio(before: Operators, after: Operators, old: Estimator, new: Estimator) -> Ratios:
    """Return the times as ``same_source_ratio`` of predicted operators: each of any source, and each end over its own.

    Times the estimate of the old chain, and its ends, it is the estimate of the new one: that of the old has no error.
    Both gradients of a convolution are estimated apart, as they were predicted.
    """
    first, second = (
        [side.estimate(part) for part in gradients_apart(ops)] for ops, side in ((before, old), (after, new))
    )
    ratio, low, high = (
        sum(getattr(answer, name) for answer in second) / sum(getattr(answer, name) for answer in first)
        for name in ("t_s", "low_s", "high_s")
    )
    return Ratios(ratio, low, high, np.max([answer.answered_by for answer in second], axis=0))


def gradients_apart(ops: Operators) -> tuple[Operators, ...]:
    """Return the operators with each gradient in place of convolutions' calls that compute both; else as they are."""
    if ops.family != "conv" or "bwd" not in ops.texts["phase"].table:
        return (ops,)
    phases = ops.texts["phase"]
    tables = (tuple(way if phase == "bwd" else phase for phase in phases.table) for way in ("dgrad", "wgrad"))
    return tuple(replace(ops, texts={**ops.texts, "phase": Texts(phases.codes, table)}) for table in tables)


def _mostly_launch(answers: Answers) -> Bool:
    """Mask of the answers whose measured times include a launch and are too short to subtract it, shape (n,)."""
    launched = np.array([basis.has_launch for basis in answers.bases] or [False])
    basis = answers.basis
    return np.asarray((basis >= 0) & launched[np.maximum(basis, 0)] & (answers.t_s < LEAST_WITH_LAUNCH_S))
