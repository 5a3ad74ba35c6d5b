"""The recorder's metadata of a recording: parsed into typed facts, and written back.

The metadata is not trusted: values that the recorder does not write are left out, and their names are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import asdict

from whatif.graph.recorded import (
    Bucket,
    DataLoading,
    Ddp,
    Execution,
    Flops,
    Gradient,
    Layer,
    MachineLoad,
    MeasuredOperator,
    Optimizer,
    Precision,
    PredictedRanges,
    ProfilerCost,
    Rates,
    Recorded,
    Simulated,
    StepTimes,
)

T = TypeVar("T")

# No parameter, gradient or state of any model is larger, bytes.
MOST_BYTES = 2**44
MOST_PARAMETERS = 10**13
# 30 years in ms, 11 days in ns: no step takes as long, and no operator.
MOST_MS, MOST_NS = 1e12, 1e15
# Ten times the cost of an event in the costliest of torch's observers (ExecutionTraceObserver: 10 to 12 us).
LARGEST_EVENT_COST_NS = 100_000.0
# Rates outside these bounds are damage: no machine of today copies as slowly, or as fast.
SLOWEST_COPY_GBYTE_S, FASTEST_COPY_GBYTE_S, FASTEST_LINK_GBYTE_S = 0.01, 1e5, 1e4
MOST_GFLOPS = 1e9
MOST_WORKERS = 10**6
MOST_LOADERS = 1000
MOST_FLOPS = 1e24

# Keys of the fields that have another name in the file.
_KEYS = {
    "gradients": "grad_ready_order", "size_bytes": "bytes", "median_ms": "median", "q25_ms": "q25", "q75_ms": "q75",
    "untraced_step": "untraced_step_ms", "untraced_cpu": "untraced_cpu_ms", "traced_step": "traced_step_ms",
    "traced_cpu": "traced_cpu_ms", "profiler_cost": "profiler_cost_ns", "per_event_ns": "per_event",
}  # fmt: skip


def recorded_of(header: Any) -> tuple[Recorded, tuple[str, ...]]:
    """Return the facts in a file's metadata, and the names of the entries that the recorder does not write so."""
    damaged: list[str] = []
    table = _Table(dict(header) if isinstance(header, dict) else {}, damaged)
    return _recorded(table), tuple(dict.fromkeys(damaged))


def written(facts: Struct) -> dict[str, Any]:
    """Return facts (``Recorded`` or a part of it) in the recorder's format."""
    columns = asdict(facts)
    result, present = dict(columns.pop("other")), columns.pop("present", frozenset())
    for name, value in columns.items():
        if name in present or not (value is None or value in ((), "", {})):
            result[_KEYS.get(name, name)] = _plain(value)
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        return written(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


class _Table(Struct):
    """A table of the file, from which facts are removed as they are read; names of damaged ones go to ``damaged``."""

    left: dict[str, Any]
    damaged: list[str] = field(default_factory=list)
    within: str = ""

    def take(self, key: str, fits: Callable[[Any], bool]) -> Any:
        """Remove and return a value that ``fits``; None if there is none, or it does not fit."""
        value = self.left.get(key)
        if value is None:
            return None
        if not fits(value):
            self.damaged.append(self.within or key)
            return None
        return self.left.pop(key)

    def integer(self, key: str, least: int = 0, below: int = MOST_BYTES) -> int | None:
        value: int | None = self.take(key, lambda found: type(found) is int and least <= found < below)
        return value

    def number(self, key: str, above: float = 0.0, most: float = MOST_MS) -> float | None:
        value: float | None = self.take(key, lambda found: _is_number(found) and above < found <= most)
        return value

    def text(self, key: str) -> str | None:
        value: str | None = self.take(key, lambda found: isinstance(found, str))
        return value

    def name(self, key: str) -> str | int | None:
        """A name or a version, which some libraries write as a number."""
        value: str | int | None = self.take(key, lambda found: isinstance(found, str) or type(found) is int)
        return value

    def flag(self, key: str) -> bool | None:
        value: bool | None = self.take(key, lambda found: isinstance(found, bool))
        return value

    def table(self, key: str) -> dict[str, Any] | None:
        value: dict[str, Any] | None = self.take(key, lambda found: isinstance(found, dict))
        return value

    def rows(self, key: str) -> list[Any]:
        """The rows of a list; empty if there is none."""
        return [] if self.left.get(key) == [] else self.take(key, lambda found: isinstance(found, list)) or []

    def shape(self, key: str) -> tuple[int, ...] | None:
        value: list[int] | None = self.take(key, _is_shape)
        return None if value is None else tuple(value)

    def part(self, key: str, read: Callable[[_Table], T]) -> T | None:
        """Read a table within this one."""
        value = self.table(key)
        return None if value is None else read(self.inner(value, key))

    def parts(self, key: str, read: Callable[[_Table], T], *, empty: Callable[[], T] | None = None) -> tuple[T, ...]:
        """Read a list of tables; other rows are left out, or become ``empty()`` so that rows keep their numbers."""
        found: list[T] = []
        for row in self.rows(key):
            if isinstance(row, dict):
                found.append(read(self.inner(row, key)))
                continue
            self.damaged.append(self.within or key)
            if empty is not None:
                found.append(empty())
        return tuple(found)

    def inner(self, value: dict[str, Any], key: str) -> _Table:
        return _Table(dict(value), self.damaged, self.within or key)

    def by_name(self, key: str, fits: Callable[[Any], bool]) -> dict[str, Any]:
        """The entries of a table that fit; the others are left out."""
        value = {} if self.left.get(key) == {} else self.table(key) or {}
        entries = {name: entry for name, entry in value.items() if fits(entry)}
        if len(entries) < len(value):
            self.damaged.append(self.within or key)
        return entries

    def settings(self, *keys: str) -> dict[str, Any]:
        """Settings by name, and under ``present`` the names of those in the file; null is a setting too."""
        found: dict[str, Any] = {}
        for key in keys:
            if key not in self.left:
                continue
            if self.left[key] is None:
                found[key] = self.left.pop(key)
                continue
            value = self.take(key, _is_setting)
            if value is not None:
                found[key] = tuple(value) if isinstance(value, list) else value
        return {**found, "present": frozenset(found)}


def _recorded(table: _Table) -> Recorded:
    for in_graph_info in ("gpu", "batch_size"):
        table.left.pop(in_graph_info, None)
    return Recorded(
        cpu=table.text("cpu"),
        cpu_cores=table.integer("cpu_cores"),
        threads=table.integer("threads"),
        driver=table.name("driver"),
        torch=table.name("torch"),
        cuda=table.name("cuda"),
        cudnn=table.name("cudnn"),
        python=table.name("python"),
        date=table.name("date"),
        clocks=table.table("clocks"),
        rates=table.part("rates", _rates),
        layers=table.parts("layers", _layer),
        gradients=table.parts("grad_ready_order", _gradient),
        ddp=table.part("ddp", _ddp),
        precision=table.part("precision", _precision),
        optimizer=table.part("optimizer", _optimizer),
        execution=table.part("execution", _execution),
        data_loading=table.part("data_loading", _data_loading),
        samples_per_step=table.integer("samples_per_step"),
        input_shape=table.shape("input_shape"),
        input_dtype=table.name("input_dtype"),
        flops=table.part("flops", _flops),
        untraced_step=_step_times(table, "untraced_step_ms"),
        untraced_cpu=_step_times(table, "untraced_cpu_ms"),
        parts_ms=table.by_name("parts_ms", _is_ms) or table.by_name("warmup_parts_ms", _is_ms),  # the older name
        traced_step=_step_times(table, "traced_step_ms"),
        traced_cpu=_step_times(table, "traced_cpu_ms"),
        untraced_load=table.part("untraced_load", _machine_load),
        traced_load=table.part("traced_load", _machine_load),
        profiler_cost=_profiler_cost(table),
        peak_memory_bytes=table.integer("peak_memory_bytes", 1, 2**63),
        allocator_retries=_tuple(table.take("allocator_retries", _is_ns_column)) or (),
        operator_times=table.parts("operator_times", _measured_operator, empty=MeasuredOperator),
        update_times_ns=table.by_name("update_times_ns", _is_ns),
        predicted=table.part("predicted", _predicted),
        simulated=table.part("simulated", _simulated),
        other=table.left,
    )


def _rates(table: _Table) -> Rates:
    return Rates(
        fp32_gflops=table.number("fp32_gflops", most=MOST_GFLOPS),
        bf16_gflops=table.number("bf16_gflops", most=MOST_GFLOPS),
        copy_gbyte_s=table.number("copy_gbyte_s", SLOWEST_COPY_GBYTE_S, FASTEST_COPY_GBYTE_S),
        h2d_pinned_gbyte_s=table.number("h2d_pinned_gbyte_s", SLOWEST_COPY_GBYTE_S, FASTEST_LINK_GBYTE_S),
        d2h_pinned_gbyte_s=table.number("d2h_pinned_gbyte_s", SLOWEST_COPY_GBYTE_S, FASTEST_LINK_GBYTE_S),
        other=table.left,
    )


def _layer(table: _Table) -> Layer:
    shapes = table.by_name("shapes", _is_shape)
    return Layer(
        name=table.text("name") or "",
        type=table.text("type") or "",
        parameters=table.integer("parameters", below=MOST_PARAMETERS),
        gradient_bytes=table.integer("gradient_bytes"),
        shapes={name: tuple(shape) for name, shape in shapes.items()},
        other=table.left,
    )


def _gradient(table: _Table) -> Gradient:
    return Gradient(table.text("name") or "", table.text("layer") or "", table.integer("bytes"), table.left)


def _ddp(table: _Table) -> Ddp:
    # One worker alone exchanges nothing, and counts as unknown.
    return Ddp(
        world_size=table.integer("world_size", 2, MOST_WORKERS) if table.left.get("world_size") != 1 else None,
        buckets=table.parts("buckets", _bucket, empty=Bucket) if isinstance(table.left.get("buckets"), list) else None,
        other=table.left,
    )


def _bucket(table: _Table) -> Bucket:
    return Bucket(tuple(name for name in table.rows("parameters") if isinstance(name, str)), table.left)


def _precision(table: _Table) -> Precision:
    found = table.settings("parameters", "autocast", "matmul", "conv", "cudnn_allow_tf32")
    return Precision(**found, other=table.left)


def _optimizer(table: _Table) -> Optimizer:
    return Optimizer(
        type=table.text("type"),
        **table.settings("foreach", "fused", "capturable"),
        parameter_tensors=table.integer("parameter_tensors"),
        state_bytes=table.integer("state_bytes"),
        other=table.left,
    )


def _execution(table: _Table) -> Execution:
    return Execution(table.flag("compiled"), table.flag("cuda_graph"), table.left)


def _data_loading(table: _Table) -> DataLoading:
    return DataLoading(table.integer("workers", below=MOST_LOADERS), table.left)


def _flops(table: _Table) -> Flops:
    return Flops(table.number("forward", most=MOST_FLOPS), table.left)


def _step_times(table: _Table, key: str) -> StepTimes | None:
    """Read a summary of step times; anything else gives one without times, which its user reports."""
    summary = table.left.pop(key, None)
    if summary is None:
        return None
    inner = _Table(dict(summary) if isinstance(summary, dict) else {})
    return StepTimes(inner.number("median"), inner.number("q25"), inner.number("q75"), inner.left)


def _machine_load(table: _Table) -> MachineLoad:
    counts = {key: table.integer(key) for key in ("steps", "involuntary_switches", "minor_faults")}
    seconds = {
        key: table.take(key, lambda found: _is_number(found) and found >= 0) for key in ("wall_s", "cpu_s", "load")
    }
    return MachineLoad(**counts, **seconds, other=table.left)


def _profiler_cost(table: _Table) -> ProfilerCost | None:
    """Read a table, or the cost alone; an unusable cost becomes None, which its user reports."""
    cost = table.left.pop("profiler_cost_ns", None)
    if cost is None:
        return None
    inner = _Table(dict(cost) if isinstance(cost, dict) else {"per_event": cost})
    return ProfilerCost(inner.number("per_event", most=LARGEST_EVENT_COST_NS), inner.left)


def _measured_operator(table: _Table) -> MeasuredOperator:
    left = table.left
    return MeasuredOperator(
        op=table.text("op") or "",
        dims=left.pop("dims", None),
        types=left.pop("types", None),
        concrete=left.pop("concrete", None),
        ns=table.by_name("ns", _is_ns),
        spread=table.by_name("spread", _is_spread),
        other=left,
    )


def _predicted(table: _Table) -> PredictedRanges:
    low, high = (table.take(key, _is_ns_column) for key in ("low_ns", "high_ns"))
    return PredictedRanges(
        cpu_range_factor=table.take("cpu_range_factor", _is_factor),
        low_ns=_tuple(low),
        high_ns=_tuple(high),
        autocast_share=_tuple(table.take("autocast_share", _is_column_of_shares)),
        autocast_casts=_tuple(table.take("autocast_casts", _is_ns_column)),
        other=table.left,
    )


def _simulated(table: _Table) -> Simulated:
    what_ifs, without_profiler = table.text("what_ifs") or "", table.flag("without_profiler") or False
    return Simulated(what_ifs, without_profiler, _step_times(table, "untraced_step_ms"), table.left)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_setting(value: Any) -> bool:
    return isinstance(value, str | bool) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < MOST_BYTES for size in value)


def _is_ms(value: Any) -> bool:
    return _is_number(value) and 0 <= value < MOST_MS


def _is_ns(value: Any) -> bool:
    return _is_number(value) and 0 < value < MOST_NS


def _is_spread(value: Any) -> bool:
    return _is_number(value) and 0 <= value < MOST_NS


def _is_ns_column(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**60 for item in value)


def _is_column_of_shares(value: Any) -> bool:
    return isinstance(value, list) and all(_is_number(item) and 0 <= item <= 10 for item in value)


def _tuple(column: Any) -> tuple[Any, ...] | None:
    return None if column is None else tuple(column)


def _is_factor(value: Any) -> bool:
    return _is_number(value) and 1 <= value <= 100
