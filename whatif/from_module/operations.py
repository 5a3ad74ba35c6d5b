"""The neutral operator graph: the operators that a step calls, in order, from any source (a module, Chakra, ONNX)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from msgspec import Struct, field

from whatif.graph.types import Phase


class Operation(Struct, frozen=True):
    """One call of an operator: ``dims``, ``types`` and ``concrete`` are inputs in the format of PyTorch's profiler.

    ``outputs`` are (shape, type) of the tensors that it creates or changes, without views.
    ``autocast_share`` is the share of its bytes that is left under autocast (0: unknown), and ``autocast_casts`` the
    elements that are cast for it.
    """

    name: str  # "aten::mm"
    dims: list[Any]
    types: list[str]
    concrete: list[str]
    phase: Phase
    outputs: tuple[tuple[tuple[int, ...], str], ...] = ()
    sequence: int = -1  # links a node of the backward pass to the operator that created it
    node: str = ""  # the autograd node that calls it ("AddmmBackward0"); "" in the forward pass
    on_device: bool = True  # False: all its tensors are in the host's memory
    autocast_share: float = 0.0
    autocast_casts: int = 0
    recomputes: int = -1  # the sequence number of an operator of the forward pass that a node runs again

    @property
    def recorded_types(self) -> list[str]:
        """The types as a profiler writes them: without those of a list's tensors."""
        return ["TensorList" if kind.startswith("TensorList") else kind for kind in self.types]


class LayerCall(Struct, frozen=True):
    """One forward call of a layer: operations [first, last)."""

    name: str
    first: int
    last: int


class Allocation(Struct, frozen=True):
    """A tensor's memory, bytes: allocated in operation ``birth``, freed after operation ``death`` - 1."""

    birth: int
    death: int
    size_bytes: int


class OperatorGraph(Struct, frozen=True):
    """The operations of one step in calling order, and other facts about the step.

    ``metadata`` is what the recorder would add to a recording: layers, optimizer, batch size, input shape.
    ``resident_bytes`` is the device memory in use before the step begins.
    """

    source: str
    operations: Sequence[Operation]
    layer_calls: Sequence[LayerCall] = ()
    allocations: Sequence[Allocation] = ()
    resident_bytes: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        """The peak of the device's memory in the step, bytes; None if no allocations are known."""
        if not self.allocations:
            return None
        # At the same operation, frees come before allocations.
        changes = [(a.birth, 1, a.size_bytes) for a in self.allocations]
        changes += [(a.death, 0, -a.size_bytes) for a in self.allocations]
        return self.resident_bytes + max(accumulate(size for *_, size in sorted(changes)))


# Bytes of an element, by the profiler's names of types.
ELEMENT_BYTES = {
    "double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
    "c10::complex<float>": 8, "long int": 8, "int": 4, "short int": 2, "signed char": 1, "unsigned char": 1, "bool": 1,
}  # fmt: skip
FORMATS = {
    "double": "fp64", "float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16", "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}  # fmt: skip


def tensors_of(operation: Operation) -> list[tuple[tuple[int, ...], str]]:
    """Return shape and type of every input tensor, including those of lists."""
    found: list[tuple[tuple[int, ...], str]] = []
    for shape, spelled in zip(operation.dims, operation.types, strict=True):
        if spelled in ELEMENT_BYTES:
            found.append((tuple(shape), spelled))
        elif spelled.startswith("TensorList"):
            # "TensorList:float" names the type, which a plain list does not.
            kind = spelled.partition(":")[2] or "float"
            found += [(tuple(member), kind) for member in shape]
    return found
