"""Times of a recording's operators measured alone, on the machine of the recording: what a what-if multiplies by.

The recorder's option ``--measure-operators`` runs every operator of the recording by itself, as recorded and in other
forms (bf16, channels-last, another batch size, ...), and writes the times beside the events. A what-if multiplies the
recorded duration by the ratio of two such times, so that what one operator alone misses (cold caches) cancels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from whatif.types import Array, Bool

if TYPE_CHECKING:
    from whatif.graph import TaskGraph

Float64 = npt.NDArray[np.float64]

RECORDED = "recorded"
# Forms that can be combined, and the name under which each combination is measured.
_FORM_NAMES = {
    frozenset(): RECORDED,
    frozenset({"bf16"}): "bf16",
    frozenset({"channels_last"}): "channels_last",
    frozenset({"bf16", "channels_last"}): "bf16_channels_last",
}
# A form bits column that transforms attach: which forms a task already has.
_FORM_BITS = {"bf16": 1, "channels_last": 2}
_ATTACHED = "measured_forms"
# Outside these bounds a ratio is damage, not a measurement.
_SMALLEST_RATIO, _LARGEST_RATIO = 1e-3, 1e3
# In a step an operator meets other caches than alone; the ratio of two forms moves by less than this. Our estimate.
CONTEXT_SPREAD = 0.05
# Where the measurement does not tell its own spread.
UNKNOWN_SPREAD = 0.1


@dataclass(frozen=True)
class OperatorTimes:
    """The table of measured operators: ``ns[form]`` and ``spread[form]`` have shape (n_rows,), NaN where not measured.

    ``spread`` is the quartile range over the median of repeated measurements; ``names`` are the operators' names.
    """

    names: tuple[str, ...]
    ns: dict[str, Float64]
    spread: dict[str, Float64]

    @staticmethod
    def of(metadata: dict[str, Any]) -> OperatorTimes:
        """Read the table from a recording's metadata; what is no positive number counts as not measured."""
        rows = metadata.get("operator_times")
        rows = rows if isinstance(rows, list) else []
        names = tuple(str(row.get("op", "")) if isinstance(row, dict) else "" for row in rows)
        return OperatorTimes(names, _columns(rows, "ns"), _columns(rows, "spread"))

    def __len__(self) -> int:
        return len(self.names)

    def ratio(self, form: str, to: str = RECORDED) -> Float64:
        """Give time in ``form`` over time in ``to`` of each row, shape (n_rows,); NaN where one was not measured."""
        if form not in self.ns or to not in self.ns:
            return np.full(len(self), np.nan)
        ratio = self.ns[form] / self.ns[to]
        sane = (ratio >= _SMALLEST_RATIO) & (ratio <= _LARGEST_RATIO)
        return np.where(sane, ratio, np.nan)

    def batch_ratio(self, factor: float) -> Float64:
        """Give time at ``factor`` times the batch over time as recorded, shape (n_rows,); NaN where not measured.

        Between and beyond the measured factors the time follows the power law of the nearest two.
        """
        measured = {1.0: np.ones(len(self))}
        for form in self.ns:
            if form.startswith("batch_x"):
                measured[float(form.removeprefix("batch_x"))] = self.ratio(form)
        factors = sorted(measured)
        if factor in measured:
            return measured[factor]
        at = min(max(int(np.searchsorted(factors, factor)), 1), len(factors) - 1) if len(factors) > 1 else 0
        if at == 0:
            return np.full(len(self), np.nan)
        low, high = factors[at - 1], factors[at]
        exponent = np.log(measured[high] / measured[low]) / np.log(high / low)
        return np.asarray(measured[low] * (factor / low) ** exponent, dtype=np.float64)


def _columns(rows: list[Any], key: str) -> dict[str, Float64]:
    tables = [row.get(key) if isinstance(row, dict) else None for row in rows]
    forms = {form for table in tables if isinstance(table, dict) for form in table if _is_form(form)}
    columns = {form: np.full(len(rows), np.nan) for form in sorted(forms)}
    for position, table in enumerate(tables):
        for form, value in table.items() if isinstance(table, dict) else ():
            if form in columns and isinstance(value, int | float) and 0 < value < 1e15:
                columns[form][position] = value
    return columns


def _is_form(form: Any) -> bool:
    if not isinstance(form, str):
        return False
    if not form.startswith("batch_x"):
        return True
    try:
        return 0 < float(form.removeprefix("batch_x")) < 1e6
    except ValueError:
        return False


def form_ratio(graph: TaskGraph, form: str) -> tuple[Float64, Float64]:
    """Give the ratio that putting each task into ``form`` ("bf16", "channels_last", "eval") takes, and its spread.

    Both have shape (n_tasks,), NaN where it was not measured. Forms that a transform before has put a task into
    (``with_form``) are respected: bf16 of a channels-last convolution is that over the channels-last one.
    """
    times = OperatorTimes.of(graph.info.metadata)
    ratio, spread = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
    if not len(times):
        return ratio, spread
    bits = _bits(graph)
    for present in np.unique(bits).tolist():
        now = frozenset(name for name, bit in _FORM_BITS.items() if present & bit)
        before, after = _FORM_NAMES[now], _FORM_NAMES.get(now | {form}, form)
        tasks = np.flatnonzero((bits == present) & (graph.measured >= 0))
        rows = graph.measured[tasks]
        ratio[tasks] = times.ratio(after, before)[rows]
        spread[tasks] = np.fmax(_spread(times, after)[rows], _spread(times, before)[rows])
    return ratio, spread


def scale_measured(graph: TaskGraph, tasks: Bool, ratio: Float64, spread: Float64) -> TaskGraph:
    """Multiply the durations of ``tasks`` by ``ratio``, shape (n_tasks,); the range is the measurement's spread."""
    now_ns, by = graph.duration_ns[tasks], ratio[tasks]
    noise = np.minimum(np.nan_to_num(spread[tasks], nan=UNKNOWN_SPREAD) + CONTEXT_SPREAD, 0.9)
    return graph.with_duration(tasks, now_ns * by, low_ns=now_ns * by * (1 - noise), high_ns=now_ns * by * (1 + noise))


def with_form(graph: TaskGraph, tasks: Bool, form: str) -> TaskGraph:
    """Remember that ``tasks`` now run in ``form`` ("bf16" or "channels_last")."""
    bits = _bits(graph).copy()
    bits[tasks] |= _FORM_BITS[form]
    return graph.attach(**{_ATTACHED: bits})


def task_batch_ratio(graph: TaskGraph, factor: float) -> Float64:
    """Give the time of each task at ``factor`` times the batch over now, shape (n_tasks,); NaN where not measured."""
    times = OperatorTimes.of(graph.info.metadata)
    ratio = np.full(len(graph), np.nan)
    if len(times):
        known = graph.measured >= 0
        ratio[known] = times.batch_ratio(factor)[graph.measured[known]]
    return ratio


def _bits(graph: TaskGraph) -> Array:
    return graph.attached.get(_ATTACHED, np.zeros(len(graph), dtype=np.int8))


def _spread(times: OperatorTimes, form: str) -> Float64:
    return times.spread.get(form, np.full(len(times), np.nan))
