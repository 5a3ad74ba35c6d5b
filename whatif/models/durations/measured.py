"""Times of a recording's operators measured alone on the recorded machine; what-ifs scale by their ratios.

The recorder's option ``--measure-operators`` runs every operator of the recording alone, as recorded and in other forms
(bf16, channels-last, another batch size, ...), and stores the times with the events. A what-if multiplies the recorded
duration by the ratio of two such times, so that the effect of running alone (cold caches) cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from whatif.graph.edit import as_index
from whatif.graph.order import each_once
from whatif.graph.recorded import Recorded
from whatif.graph.selection import Tasks
from whatif.graph.types import Array, Bool, Float64
from whatif.models.durations.estimator import Source, put, scaled

if TYPE_CHECKING:
    from whatif.graph.task_graph import TaskGraph


RECORDED = "recorded"
# Forms that are also measured in combination, and the name of each combination.
_FORM_NAMES = {
    frozenset(): RECORDED,
    frozenset({"bf16"}): "bf16",
    frozenset({"channels_last"}): "channels_last",
    frozenset({"bf16", "channels_last"}): "bf16_channels_last",
}
_FORMS = frozenset(_FORM_NAMES.values()) | {"eval"}
# Recordings are untrusted data: read no more batch factors than anyone would measure.
_MOST_BATCH_FACTORS, _LARGEST_BATCH_FACTOR = 16, 1e6
# An attached column of bits: the forms that a task already has.
_FORM_BITS = {"bf16": 1, "channels_last": 2, "eval": 4}
_ATTACHED = "measured_forms"
# Beyond the measured batches an operator's time grows at most with the square of the batch: our estimate.
_LARGEST_EXPONENT = 2.0
# Outside these bounds a ratio is damage, not a measurement.
SMALLEST_RATIO, LARGEST_RATIO = 1e-3, 1e3
# Caches in a step differ from those of an operator alone; two forms' ratio changes by less than this. Our estimate.
CONTEXT_SPREAD = 0.05
# A quartile range beyond the median is no measurement: a sum of "19 ns" lay between 0 and 2.6 us on a busy machine.
LARGEST_SPREAD = 1.0
# The 90 % range of the median of seven rounds, in quartile ranges: 1.645 * 1.253 / 1.349 / 7**0.5 (normal).
MEDIAN_OFF = 0.6
# The spread of a measurement without a recorded one.
UNKNOWN_SPREAD = 0.1


class OperatorTimes(Struct, frozen=True):
    """The table of measured operators: ``ns[form]`` and ``spread[form]`` have shape (n_rows,), NaN where not measured.

    ``spread`` is the quartile range over the median of repeated measurements; ``names`` are the operators' names.
    """

    names: tuple[str, ...]
    ns: dict[str, Float64]
    spread: dict[str, Float64]

    @staticmethod
    def of(recorded: Recorded) -> OperatorTimes:
        """Return the table of a recording; values that are not positive, or too uncertain, count as not measured."""
        rows = recorded.operator_times
        ns, spread = _columns([row.ns for row in rows]), _columns([row.spread for row in rows])
        for form, known in spread.items():
            if form in ns:
                ns[form] = np.where(known > LARGEST_SPREAD, np.nan, ns[form])
        return OperatorTimes(tuple(row.op for row in rows), ns, spread)

    def __len__(self) -> int:
        return len(self.names)

    def ratio(self, form: str, to: str = RECORDED) -> Float64:
        """Return time in ``form`` over time in ``to`` of each row, shape (n_rows,); NaN where one was not measured."""
        if form not in self.ns or to not in self.ns:
            return np.full(len(self), np.nan)
        ratio = self.ns[form] / self.ns[to]
        sane = (ratio >= SMALLEST_RATIO) & (ratio <= LARGEST_RATIO)
        return np.where(sane, ratio, np.nan)

    def batch_ratio(self, factor: float) -> tuple[Float64, Float64]:
        """Return time at ``factor`` times the batch over time as recorded, and the largest spread of what was measured.

        Both have shape (n_rows,), NaN where not measured. Between and beyond the measured factors the time follows the
        power law of the nearest two; beyond them it grows with the batch, however noisy those two are.
        """
        forms = {1.0: RECORDED} | {float(form.removeprefix("batch_x")): form for form in self.ns if _is_batch(form)}
        factors = sorted(forms)
        unknown = np.full(len(self), np.nan)
        at = min(max(int(np.searchsorted(factors, factor)), 1), len(factors) - 1) if len(factors) > 1 else 0
        if factor in forms:
            return self.ratio(forms[factor]), self.spread_of(forms[factor], RECORDED)
        if at == 0:
            return unknown, unknown
        low, high = factors[at - 1], factors[at]
        measured = {each: self.ratio(forms[each]) for each in (low, high)}
        exponent = np.log(measured[high] / measured[low]) / np.log(high / low)
        if not low < factor < high:
            exponent = np.clip(exponent, 0.0, _LARGEST_EXPONENT)
        nearest = high if factor > high else low
        ratio = np.asarray(measured[nearest] * (factor / nearest) ** exponent, dtype=np.float64)
        return ratio, self.spread_of(forms[low], forms[high], RECORDED)

    def spread_of(self, *forms: str) -> Float64:
        """Return the largest spread of the given forms, shape (n_rows,); NaN if none is known."""
        unknown = np.full(len(self), np.nan)
        return np.asarray(np.fmax.reduce([self.spread.get(form, unknown) for form in forms]))


def _columns(tables: Sequence[Mapping[str, float]]) -> dict[str, Float64]:
    forms = dict.fromkeys(form for table in tables for form in table)
    batches = [form for form in forms if _is_batch(form)][:_MOST_BATCH_FACTORS]
    columns = {form: np.full(len(tables), np.nan) for form in sorted({*batches, *(_FORMS & forms.keys())})}
    for position, table in enumerate(tables):
        for form, value in table.items():
            if form in columns and value > 0:
                columns[form][position] = value
    return columns


def _is_batch(form: str) -> bool:
    if not form.startswith("batch_x"):
        return False
    try:
        return 1 / _LARGEST_BATCH_FACTOR < float(form.removeprefix("batch_x")) < _LARGEST_BATCH_FACTOR
    except ValueError:
        return False


def form_ratio(graph: TaskGraph, form: str) -> tuple[Float64, Float64]:
    """Return the time ratio of converting each task to ``form`` ("bf16", "channels_last", "eval"), and its spread.

    Both have shape (n_tasks,), NaN where it was not measured. Forms of earlier transforms (``with_form``) are
    respected: bf16 of a channels-last convolution is relative to channels-last, a form that it already has gives 1, and
    eval, which is never measured in combination, keeps its ratio.
    """
    times = OperatorTimes.of(graph.info.recorded)
    ratio, spread = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
    if not len(times):
        return ratio, spread
    bits = _bits(graph)
    for present in each_once(bits).tolist():
        now = frozenset(name for name, bit in _FORM_BITS.items() if present & bit)
        before, after = _FORM_NAMES[now - {"eval"}], _FORM_NAMES.get((now - {"eval"}) | {form}, form)
        if after == "eval":
            before = RECORDED
        if form in now:
            after = before
        tasks = np.flatnonzero((bits == present) & (graph.measured >= 0))
        rows = graph.measured[tasks]
        ratio[tasks] = times.ratio(after, before)[rows]
        spread[tasks] = times.spread_of(after, before)[rows]
    return ratio, spread


def scale_measured(graph: TaskGraph, tasks: Tasks, ratio: Float64, spread: Float64) -> TaskGraph:
    """Multiply the durations of ``tasks`` by ``ratio``, shape (n_tasks,); the measurement's spread widens the range."""
    by = ratio[tasks]
    noise = np.minimum(np.nan_to_num(spread[tasks], nan=UNKNOWN_SPREAD) + CONTEXT_SPREAD, 0.9)
    noise[by == 1] = 0.0  # unchanged tasks keep their range
    source = np.where(by == 1, Source.RECORDED, Source.MEASURED)
    return put(graph, tasks, scaled(graph, tasks, by, source, low=by * (1 - noise), high=by * (1 + noise)))


def with_form(graph: TaskGraph, tasks: Tasks, form: str) -> TaskGraph:
    """Record that ``tasks`` now run in ``form`` ("bf16", "channels_last" or "eval")."""
    bits = _bits(graph).copy()
    bits[as_index(graph, tasks)] |= _FORM_BITS[form]
    return graph.attach(**{_ATTACHED: bits})


def without_form(graph: TaskGraph, tasks: Tasks, form: str) -> TaskGraph:
    """Remove ``form`` from the forms of ``tasks``."""
    bits = _bits(graph).copy()
    bits[as_index(graph, tasks)] &= ~_FORM_BITS[form]
    return graph.attach(**{_ATTACHED: bits})


def has_form(graph: TaskGraph, form: str) -> Bool:
    """Return a mask, shape (n_tasks,), of the tasks that transforms have already put into ``form``."""
    return np.asarray((_bits(graph) & _FORM_BITS[form]) != 0, dtype=np.bool_)


def task_batch_ratio(graph: TaskGraph, factor: float) -> tuple[Float64, Float64]:
    """Return the time of each task at ``factor`` times the batch over its present time, and the measurement's error.

    Both have shape (n_tasks,), the second one as a share of the time; NaN where not measured.
    """
    times = OperatorTimes.of(graph.info.recorded)
    found = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
    if len(times):
        known = graph.measured >= 0
        ratio, spread = times.batch_ratio(factor)
        off = np.where(ratio == 1, 0.0, MEDIAN_OFF * np.nan_to_num(spread, nan=UNKNOWN_SPREAD))
        for column, of_rows in zip(found, (ratio, off), strict=True):
            column[known] = of_rows[graph.measured[known]]
    return found


def _bits(graph: TaskGraph) -> Array:
    return graph.attached.get(_ATTACHED, np.zeros(len(graph), dtype=np.int8))
