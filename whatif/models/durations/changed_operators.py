"""Op database estimates for operators that a what-if changes on the recorded device: another batch or size.

The answer is new over old time, two estimates of one source, if measurements of that device cover it. Otherwise the
what-if's own model answers, which uses the efficiency of the recorded kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from whatif.graph.edit import as_ids
from whatif.graph.order import each_once
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    Float64,
    Int8,
    Int64,
    Phase,
    TaskKind,
    among,
)
from whatif.models.durations.database import (
    SOURCE_OF_ANSWER,
    chain_ratio,
    dtype_as_called,
    estimator_of,
    grouped_operators,
    same_source_ratio,
)
from whatif.models.durations.estimator import Estimates, Source, device
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.devices import cpu_called
from whatif.opdb.rows import Operators
from whatif.opdb.work import work

# The worst source accepted: the next are measurements of other devices, which describe the recorded kernel less well
# than the what-if's model does.
WORST = AnswerSource.LEARNED
# Integers that grow with the batch. In the forward pass these are the rows of a matrix product; in the backward pass a
# weight gradient sums over them instead.
_BATCH = {"conv": "batch", "attention": "batch", "normalization": "rows", "elementwise": "elements"}


class Changed(NamedTuple):
    """New over recorded time of n tasks, its nominal 90 % range and its source; NaN without a measurement."""

    ratio: Float64
    low: Float64
    high: Float64
    source: Int8

    @property
    def known(self) -> Bool:
        """Mask of the tasks with a measured ratio, shape (n,)."""
        return np.isfinite(self.ratio)

    def put(self, rows: Array, others: Changed) -> None:
        """Overwrite the places ``rows``."""
        self.ratio[rows], self.low[rows], self.high[rows], self.source[rows] = others

    def take(self, rows: Array) -> Changed:
        """Return the given ``rows``: places or a mask."""
        return Changed(self.ratio[rows], self.low[rows], self.high[rows], self.source[rows])


def measured_first(graph: TaskGraph, tasks: Array, found: Changed, able: Bool, model: Estimates) -> Estimates:
    """Return the estimates ``model`` of ``tasks``; under the mask ``able`` known measurements replace them."""
    better = found.known & able
    if not better.any():
        return model
    columns = zip(
        (model.duration_ns, model.low_ns, model.high_ns), (graph.duration_ns, graph.low_ns, graph.high_ns), found[:3],
        strict=True,
    )  # fmt: skip
    times = [np.where(better, now[tasks] * by, old) for old, now, by in columns]
    return Estimates.of(times[0], np.where(better, found.source, model.source), times[1], times[2])


def at_batch(graph: TaskGraph, tasks: Array, factor: float) -> Changed:
    """Return the times of ``tasks`` (a mask or ids) with ``factor`` times the samples on the recorded device."""
    rows = _rows_of_samples(graph)
    forward = _called_in_forward(graph)

    def grown(ops: Operators, places: Int64) -> tuple[Operators, Bool]:
        integers, able = dict(ops.integers), np.zeros(len(ops), dtype=np.bool_)
        if ops.family in _BATCH:
            names, able = {_BATCH[ops.family]: np.ones(len(ops), dtype=np.bool_)}, np.ones(len(ops), dtype=np.bool_)
        elif ops.family == "matmul":
            names, able = _growing(ops, rows, forward[places])
        else:
            return ops, able
        for name, mask in names.items():
            new = ops.integers[name] * factor
            able &= ~mask | ((new >= 1) & (new == np.rint(new)))
            integers[name] = np.where(mask, np.maximum(np.rint(new), 1), ops.integers[name]).astype(np.int64)
        return replace(ops, integers=integers), able

    return _changed(graph, tasks, grown)


def resized(graph: TaskGraph, tasks: Array, sizes: Mapping[str, int]) -> Changed:
    """Return the times of ``tasks`` (ids, one layer) with other ``sizes``, by any source down to the data sheet.

    ``sizes`` are integers of the database's operators, such as ``out_channels``. In a product's gradient they are other
    integers, found by the recorded value. If no source answers, as on a CPU without measurements, the time scales with
    FLOPs or bytes, with our estimate of a range.
    """
    used = each_once(graph.called[tasks][graph.called[tasks] >= 0]).tolist()
    forward = _called_in_forward(graph)
    known_integers = [dict(graph.info.operators[row].integers) for row in used if forward[row]]
    olds = {name: {row[name] for row in known_integers if name in row} for name in sizes}
    work_ratio = np.full(len(graph.info.operators) + 1, np.nan)

    def changed(ops: Operators, places: Int64) -> tuple[Operators, Bool]:
        integers, touched = dict(ops.integers), np.zeros(len(ops), dtype=np.bool_)
        for name, new in sizes.items():
            if name not in ops.integers:
                continue
            by_name = forward[places] if ops.family == "matmul" else np.ones(len(ops), dtype=np.bool_)
            for other in ("m", "n", "k") if ops.family == "matmul" else ():
                has_old_size = np.isin(ops.integers[other], list(olds[name])) & ~forward[places]
                integers[other] = np.where(has_old_size, new, integers[other])
                touched |= has_old_size
            integers[name] = np.where(by_name, new, integers[name])
            touched |= by_name
        after = replace(ops, integers=integers)
        (flops, moved), (new_flops, new_moved) = work(ops), work(after)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(flops > 0, new_flops / flops, new_moved / moved)
        work_ratio[places] = np.where(touched & np.isfinite(ratio) & (ratio > 0), ratio, np.nan)
        return after, touched

    for places, ops in grouped_operators(graph.info.operators):
        changed(ops, places)  # also if the device is unknown
    answer = _changed(graph, tasks, changed, worst=AnswerSource.ANALYTIC)
    by_work = work_ratio[graph.called[tasks]]
    ends = [by_work**exponent for exponent in _WORK_EXPONENTS]
    return Changed(
        np.where(answer.known, answer.ratio, by_work),
        np.where(answer.known, answer.low, np.minimum(*ends)),
        np.where(answer.known, answer.high, np.maximum(*ends)),
        np.where(answer.known, answer.source, Source.ASSUMED).astype(np.int8),
    )


# Time grows more slowly or faster than work as a size fills the machine better or worse. Our estimate.
_WORK_EXPONENTS = (0.6, 1.3)


def _rows_of_samples(graph: TaskGraph) -> set[int]:
    """The row counts of forward products: samples, or samples times their length."""
    used = each_once(graph.called[(graph.phase == Phase.FORWARD) & (graph.called >= 0)]).tolist()
    operators = (graph.info.operators[row] for row in used)
    return {dict(op.integers)["m"] for op in operators if op.family == "matmul" and dict(op.integers)["batch"] == 1}


def _called_in_forward(graph: TaskGraph) -> Bool:
    forward = np.zeros(len(graph.info.operators), dtype=np.bool_)
    forward[graph.called[(graph.phase == Phase.FORWARD) & (graph.called >= 0)]] = True
    return forward


def _growing(ops: Operators, rows: set[int], forward: Bool) -> tuple[dict[str, Bool], Bool]:
    """The integer of each product that grows with the batch, and a mask of the products for which that is certain."""
    several = ops.integers["batch"] > 1
    m, k = (np.isin(ops.integers[name], list(rows)) for name in ("m", "k"))
    of_rows = ~several & (forward | (m & ~k))
    of_sum = ~several & ~forward & k & ~m
    return {"batch": several, "m": of_rows, "k": of_sum}, several | of_rows | of_sum


def _changed(
    graph: TaskGraph,
    tasks: Array,
    change: Callable[[Operators, Int64], tuple[Operators, Bool]],
    *,
    worst: AnswerSource = WORST,
) -> Changed:
    """The ratio of each task whose operator ``change`` can convert; of predicted ones by any source."""
    ids = as_ids(graph, tasks)
    table, predicted = graph.info.operators, graph.info.is_predicted
    side = side_of(graph) if table else None
    if side is None or not (predicted or worst > WORST or _was_measured(side)):
        nothing = np.full(len(ids), np.nan)
        return Changed(nothing, nothing, nothing, np.zeros(len(ids), dtype=np.int8))
    called = graph.called[ids]
    used = np.zeros(len(table) + 1, dtype=np.bool_)
    used[called] = True
    by_row = [np.full(len(table) + 1, np.nan) for _ in range(3)]  # -1 is the last entry
    source_by_row = np.zeros(len(table) + 1, dtype=np.int8)
    for places, ops in grouped_operators(table):
        changed, able = change(ops, places)
        rows = np.flatnonzero(able & used[places])
        if ops.family == "other" or not len(rows):
            continue
        both = ops.take(rows), changed.take(rows), side, side
        ratios = chain_ratio(*both) if predicted else same_source_ratio(*both, worst=worst)
        for column, values in zip(by_row, (ratios.ratio, ratios.low, ratios.high), strict=True):
            column[places[rows]] = values
        source_by_row[places[rows]] = SOURCE_OF_ANSWER[ratios.answered_by]
    # An earlier what-if may have put a task into another format than its operator was recorded in.
    recorded = dtype_as_called(graph)[ids]
    same = (graph.dtype[ids] == recorded) | (graph.dtype[ids] == 0) | (recorded == 0)
    good = same & among(graph.kind[ids], (TaskKind.KERNEL, TaskKind.CPU_OP))
    ratio, low, high = (np.where(good, column[called], np.nan) for column in by_row)
    return Changed(ratio, low, high, source_by_row[called])


def side_of(graph: TaskGraph) -> Estimator | None:
    """Return the estimator chain of the recorded device; None if the device is unknown."""
    name = _device_name(graph)
    return estimator_of(name) if name else None


def _device_name(graph: TaskGraph) -> str:
    """The database's name of the recorded device; "" if unknown."""
    if graph.has_gpu:
        gpu = device(graph)
        return gpu.name if gpu is not None else ""
    recorded = graph.info.recorded
    return cpu_called(recorded.cpu, recorded.threads).name if recorded.cpu is not None else ""


def _was_measured(side: Estimator) -> bool:
    """Whether the database has measurements of this device."""
    rows = any(group.device == side.device for groups in side.index.groups.values() for group in groups)
    return rows or any(not model.facts.across for model in side.able_models)
