"""The recorder's metadata of a recording, with typed fields; ingest reads it once.

``None`` and empty mean unknown. ``other`` keeps fields that no code reads, unchanged, for writing them back.
``present`` names the settings in the file, including those that are ``None``: torch's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

Setting = str | bool | tuple[str, ...] | None
Other = Mapping[str, Any]


class Layer(Struct, frozen=True):
    """A module of the model and its parameters, without inner modules'."""

    name: str = ""
    type: str = ""
    parameters: int | None = None
    gradient_bytes: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of each parameter by its name in the layer
    other: Other = field(default_factory=dict)


class Gradient(Struct, frozen=True):
    """A parameter's gradient. The backward pass completes gradients in the order of the list."""

    name: str = ""
    layer: str = ""
    size_bytes: int | None = None
    other: Other = field(default_factory=dict)


class Bucket(Struct, frozen=True):
    """Parameters whose gradients DistributedDataParallel sends together."""

    parameters: tuple[str, ...] = ()
    other: Other = field(default_factory=dict)


class Ddp(Struct, frozen=True):
    """The buckets of DistributedDataParallel in the order of sending, and the number of workers."""

    world_size: int | None = None  # None unless there are several
    buckets: tuple[Bucket, ...] | None = None
    other: Other = field(default_factory=dict)


class Precision(Struct, frozen=True):
    """The number formats of a run, by torch's names."""

    parameters: Setting = None
    autocast: Setting = None
    matmul: Setting = None
    conv: Setting = None
    cudnn_allow_tf32: Setting = None
    present: frozenset[str] = frozenset()
    other: Other = field(default_factory=dict)

    def with_formats(self, formats: Mapping[str, str]) -> Precision:
        """Return the precision with some settings replaced."""
        return replace(self, **{**formats, "present": self.present | formats.keys()})


class Optimizer(Struct, frozen=True):
    """The optimizer: its class, torch's implementation flags, its tensors and the size of its state."""

    type: str | None = None
    foreach: Setting = None
    fused: Setting = None
    capturable: Setting = None
    parameter_tensors: int | None = None
    state_bytes: int | None = None
    present: frozenset[str] = frozenset()
    other: Other = field(default_factory=dict)


class StepTimes(Struct, frozen=True):
    """Quartiles of step times, ms; None for an invalid entry."""

    median_ms: float | None = None
    q25_ms: float | None = None
    q75_ms: float | None = None
    other: Other = field(default_factory=dict)


class MachineLoad(Struct, frozen=True):
    """The recorder's counters during ``steps`` steps; None for an invalid entry."""

    steps: int | None = None
    wall_s: float | None = None
    cpu_s: float | None = None
    load: float | None = None  # the load average of the minute before
    involuntary_switches: int | None = None
    minor_faults: int | None = None
    other: Other = field(default_factory=dict)


class ProfilerCost(Struct, frozen=True):
    """The cost of a profiler event to the profiled program, ns; None for an invalid entry."""

    per_event_ns: float | None = None
    other: Other = field(default_factory=dict)


class ProfilerEstimate(Struct, frozen=True):
    """The profiler's cost, estimated from the trace; the column ``profiler_ns`` has it by task.

    ``low`` and ``high`` are the ends of its range over that column. ``operator_us`` is the mean cost of an operator,
    ``read_from_trace`` is whether the trace shows it; else it is a constant.
    """

    low: float
    high: float
    operator_us: float
    read_from_trace: bool


class Rates(Struct, frozen=True):
    """Rates that the recorder measured on the machine: products, copies in memory, copies between host and GPU."""

    fp32_gflops: float | None = None
    bf16_gflops: float | None = None
    copy_gbyte_s: float | None = None
    h2d_pinned_gbyte_s: float | None = None
    d2h_pinned_gbyte_s: float | None = None
    other: Other = field(default_factory=dict)


class MeasuredOperator(Struct, frozen=True):
    """An operator measured alone: its call in the profiler's format, and its time and spread by form."""

    op: str = ""
    dims: Any = None
    types: Any = None
    concrete: Any = None
    ns: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)  # quartile range over median
    other: Other = field(default_factory=dict)


class Execution(Struct, frozen=True):
    """Whether modules were compiled and CUDA graphs launched."""

    compiled: bool | None = None
    cuda_graph: bool | None = None
    other: Other = field(default_factory=dict)


class DataLoading(Struct, frozen=True):
    """How batches were loaded."""

    workers: int | None = None
    other: Other = field(default_factory=dict)


class Flops(Struct, frozen=True):
    """The floating-point operations of a step's forward pass."""

    forward: float | None = None
    other: Other = field(default_factory=dict)


# The attached columns of a predicted step's kernels: see ``PredictedRanges``. 0: not known.
AUTOCAST_SHARE, AUTOCAST_CASTS = "share under autocast", "cast by autocast"


class PredictedRanges(Struct, frozen=True):
    """Ranges of a predicted step's kernels, in their order, ns, and the factor of the host's range."""

    cpu_range_factor: float | None = None
    low_ns: tuple[int, ...] | None = None  # None if the entries are invalid
    high_ns: tuple[int, ...] | None = None
    # For each kernel, the share of its bytes left under autocast, and the elements cast before it.
    autocast_share: tuple[float, ...] | None = None
    autocast_casts: tuple[int, ...] | None = None
    other: Other = field(default_factory=dict)


class Simulated(Struct, frozen=True):
    """The what-ifs of a saved simulated graph, and whether its times are without the profiler's cost."""

    what_ifs: str = ""
    without_profiler: bool = False
    untraced_step: StepTimes | None = None  # of the recording: its quartiles give the spread of steps
    other: Other = field(default_factory=dict)


class Recorded(Struct, frozen=True):
    """All metadata of the recorder, except those in ``GraphInfo``: device and batch size."""

    # The machine and its software.
    cpu: str | None = None
    cpu_cores: int | None = None
    threads: int | None = None
    driver: str | int | None = None
    torch: str | int | None = None
    cuda: str | int | None = None
    cudnn: str | int | None = None
    python: str | int | None = None
    date: str | int | None = None
    clocks: Mapping[str, Any] | None = None
    rates: Rates | None = None
    # The model and how it is trained.
    layers: tuple[Layer, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    ddp: Ddp | None = None
    precision: Precision | None = None
    optimizer: Optimizer | None = None
    execution: Execution | None = None
    data_loading: DataLoading | None = None
    input_shape: tuple[int, ...] | None = None
    input_dtype: str | int | None = None
    samples_per_step: int | None = None  # of all forward passes of a step
    flops: Flops | None = None
    # What was measured.
    untraced_step: StepTimes | None = None
    untraced_cpu: StepTimes | None = None
    parts_ms: Mapping[str, float] = field(default_factory=dict)  # CPU time of a step's parts, by their name
    traced_step: StepTimes | None = None
    traced_cpu: StepTimes | None = None
    untraced_load: MachineLoad | None = None
    traced_load: MachineLoad | None = None
    profiler_cost: ProfilerCost | None = None
    peak_memory_bytes: int | None = None
    allocator_retries: tuple[int, ...] = ()  # by recorded step
    operator_times: tuple[MeasuredOperator, ...] = ()
    update_times_ns: Mapping[str, float] = field(default_factory=dict)  # of the update alone, by implementation
    # A step that was not run.
    predicted: PredictedRanges | None = None
    simulated: Simulated | None = None
    other: Other = field(default_factory=dict)

    def on_another_device(self) -> Recorded:
        """Return the metadata without fields that are valid for the recorded machine only."""
        return replace(
            self, rates=None, operator_times=(), update_times_ns={}, clocks=None, driver=None, peak_memory_bytes=None,
            allocator_retries=(),
        )  # fmt: skip

    def without_untraced_step(self) -> Recorded:
        """Return the metadata without step times, machine loads and the profiler's cost."""
        return replace(
            self,
            untraced_step=None,
            untraced_cpu=None,
            parts_ms={},
            traced_step=None,
            traced_cpu=None,
            profiler_cost=None,
            untraced_load=None,
            traced_load=None,
        )
