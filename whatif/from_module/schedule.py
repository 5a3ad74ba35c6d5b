"""Schedule the operations of some steps: the host calls them in order, and one stream runs their kernels."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct, field

from whatif.from_module.cpu_costs import CpuCosts
from whatif.from_module.operations import OperatorGraph
from whatif.graph.recorded import Optimizer
from whatif.graph.types import Phase
from whatif.ingest.gpu_side import DEFAULT_LAUNCH_LAG_NS, DEFAULT_QUEUE_DEPTH, DEFAULT_STREAM_LAG_NS
from whatif.ingest.recorded import recorded_of

# Operators that read a value back: the host waits until the GPU has computed it.
READ_BACK = "aten::_local_scalar_dense"
# PyTorch copies a single number to pinned memory (aten/src/ATen/native/cuda/CUDAScalar.cu).
COPY_NAME = "Memcpy DtoH (Device -> Pinned)"
# A copy of one number over PCIe: the shortest ones in the public recordings take 1 to 2 us.
_COPY_NS = 1500


class Span(msgspec.Struct, frozen=True, gc=False):  # a schedule has 100,000: dataclasses are several times slower
    """A named interval, ns."""

    name: str
    start_ns: int
    end_ns: int
    operation: int = -1
    correlation: int = 0


class Schedule(Struct):
    """Spans of each kind, in the order of their starts; ``operations`` has one span for each operation of a step."""

    steps: list[Span] = field(default_factory=list)
    layers: list[Span] = field(default_factory=list)
    nodes: list[Span] = field(default_factory=list)
    marks: list[Span] = field(default_factory=list)
    operations: list[Span] = field(default_factory=list)
    calls: list[Span] = field(default_factory=list)
    kernels: list[Span] = field(default_factory=list)


class _Stream:
    """A stream that runs kernels in launch order; a launch blocks while its queue is full."""

    def __init__(self, schedule: Schedule, costs: CpuCosts) -> None:
        self._schedule, self._costs = schedule, costs
        self._free_ns = -DEFAULT_STREAM_LAG_NS
        self._starts: deque[int] = deque(maxlen=DEFAULT_QUEUE_DEPTH)
        self._correlation = 0

    def launch(self, now_ns: int, name: str, duration_ns: int, operation: int, call: str = "cudaLaunchKernel") -> int:
        """Launch a kernel at ``now_ns``; returns the end of the call, ns."""
        self._correlation += 1
        end_ns = now_ns + self._costs.launch_ns
        if len(self._starts) == self._starts.maxlen:
            end_ns = max(end_ns, self._starts[0] + self._costs.launch_ns)  # waits until there is room
        start_ns = max(end_ns + DEFAULT_LAUNCH_LAG_NS, self._free_ns + DEFAULT_STREAM_LAG_NS)
        self._starts.append(start_ns)
        self._free_ns = start_ns + duration_ns
        self._schedule.calls.append(Span(call, now_ns, end_ns, operation, self._correlation))
        self._schedule.kernels.append(Span(name, start_ns, self._free_ns, operation, self._correlation))
        return end_ns

    def read_back(self, now_ns: int, operation: int) -> int:
        """Copy a number to the host and wait for it."""
        now_ns = self.launch(now_ns, COPY_NAME, _COPY_NS, operation, "cudaMemcpyAsync")
        self._correlation += 1
        end_ns = max(now_ns, self._free_ns) + self._costs.launch_ns
        self._schedule.calls.append(Span("cudaStreamSynchronize", now_ns, end_ns, operation, self._correlation))
        return end_ns


def schedule_steps(
    graph: OperatorGraph, kernels: Sequence[Sequence[tuple[str, int]]], work_ns: Sequence[int], costs: CpuCosts, *,
    steps: int,
) -> Schedule:  # fmt: skip
    """Schedule ``steps`` equal steps one after the other.

    ``kernels`` are (name, duration in ns) of each operation; ``work_ns`` is the host's own computation in each
    operation (on a CPU all of it), in addition to the cost of calling it.
    """
    found = Schedule()
    stream = _Stream(found, costs)
    opens, closes = _by_operation(graph)
    optimizer = recorded_of(graph.metadata)[0].optimizer or Optimizer(type="Optimizer")
    # The final None also precedes the first one, at index -1.
    nodes = [*((o.node, o.sequence) if o.node else None for o in graph.operations), None]
    now_ns = 0
    for number in range(steps):
        begin_ns = now_ns
        update_ns = -1
        starts: dict[int, int] = {}
        for place, operation in enumerate(graph.operations):
            if operation.phase == Phase.UPDATE and update_ns < 0:
                update_ns = now_ns
                now_ns += costs.parameter_ns * (optimizer.parameter_tensors or 0)
            for call in opens.get(place, ()):
                starts[call] = now_ns
                now_ns += costs.layer_call_ns // 2
            if operation.node and nodes[place - 1] != nodes[place]:
                node_ns = now_ns
                now_ns += costs.node_ns
            start_ns = now_ns
            operation_kernels = kernels[place]
            own_ns = costs.operation_ns(operation, len(operation_kernels))
            now_ns += own_ns // 2
            for name, duration_ns in operation_kernels:
                now_ns = stream.launch(now_ns, name, duration_ns, place)
            if operation.name == READ_BACK and operation.on_device and found.kernels:
                now_ns = stream.read_back(now_ns, place)
            now_ns += own_ns - own_ns // 2 + work_ns[place]
            found.operations.append(Span(operation.name, start_ns, now_ns, place))
            if operation.node and nodes[place + 1] != nodes[place]:
                found.nodes.append(Span(operation.node, node_ns, now_ns, place))
            for call in closes.get(place, ()):
                now_ns += costs.layer_call_ns // 2
                found.layers.append(Span(graph.layer_calls[call].name, starts[call], now_ns, place))
        if update_ns >= 0:
            found.marks.append(Span(f"Optimizer.step#{optimizer.type}.step", update_ns, now_ns))
        found.steps.append(Span(f"ProfilerStep#{number}", begin_ns, now_ns))
    return found


def _by_operation(graph: OperatorGraph) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The layer calls that begin at each operation, outermost first, and that end at each, innermost first."""
    opens: dict[int, list[int]] = {}
    closes: dict[int, list[int]] = {}
    # A call that ends later, or was recorded later if both end together, encloses the other.
    order = sorted(range(len(graph.layer_calls)), key=lambda c: (-graph.layer_calls[c].last, -c))
    for call in order:
        opens.setdefault(graph.layer_calls[call].first, []).append(call)
    for call in sorted(range(len(graph.layer_calls)), key=lambda c: (-graph.layer_calls[c].first, c)):
        closes.setdefault(graph.layer_calls[call].last - 1, []).append(call)
    return opens, closes


def memory_events(graph: OperatorGraph, schedule: Schedule) -> Iterator[tuple[int, int, int, int]]:
    """Yield (time in ns, address, bytes allocated or -bytes freed, bytes then in use) of all steps, in order."""
    n = len(graph.operations)
    for first in range(0, len(schedule.operations), n):
        changes = []
        for number, block in enumerate(graph.allocations):
            birth = schedule.operations[first + min(block.birth, n - 1)].start_ns
            death = schedule.operations[first + min(max(block.death, 1), n) - 1].end_ns
            address = (number + 1) << 12
            changes += [(birth, 1, address, block.size_bytes), (max(death, birth), 0, address, -block.size_bytes)]
        held = graph.resident_bytes
        for time_ns, _, address, size in sorted(changes):
            held += size
            yield time_ns, address, size, held
