"""The inputs of a recorded call, parsed as data: shapes, strides, types and numbers; nothing is evaluated."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

# Bytes of an element by the profiler's name of its type. "TensorList" hides the types: see `_tensor_list`.
ELEMENT_BYTES = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}
FLOATING = frozenset({"float", "double", "c10::BFloat16", "c10::Half"})
FP32, BF16 = "float", "c10::BFloat16"

_INTEGER = re.compile(r"-?\d{1,19}")
_LITERALS = {"True": True, "False": False, "inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class NotReplayable(Exception):  # noqa: N818
    """A call cannot be replayed alone; the message is a short reason, by which calls are counted."""


class RecordedCall(NamedTuple):
    """One call as recorded in a trace: "Input Dims", "Input type", "Concrete Inputs" and "Input Strides", unchecked."""

    name: str
    dims: Any
    types: Any
    concrete: Any
    strides: Any = None
    backward: bool = False


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides in elements (None: contiguous) and type of one tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str

    @property
    def is_floating(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return self.dtype in FLOATING

    @property
    def storage_elements(self) -> int:
        """Elements from the first to the last one in memory."""
        if 0 in self.shape:
            return 0
        if self.strides is None:
            return math.prod(self.shape)
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def storage_bytes(self) -> int:
        """Bytes from the first to the last element in memory."""
        return self.storage_elements * ELEMENT_BYTES[self.dtype]

    def scaled(self, axis: int, factor: float) -> Self | None:
        """Return the spec with one axis `factor` times as long, in the same memory order; None if not an integer."""
        length = self.shape[axis] * factor
        if length != int(length) or length < 1:
            return None
        shape = (*self.shape[:axis], int(length), *self.shape[axis + 1 :])
        if self.strides is None:
            return replace(self, shape=shape)
        # Strides outside the axis in memory grow with it.
        span = self.strides[axis] * self.shape[axis]
        strides = tuple(
            int(stride * factor) if position != axis and span and stride >= span else stride
            for position, stride in enumerate(self.strides)
        )
        return replace(self, shape=shape, strides=strides)


@dataclass(frozen=True)
class Argument:
    """One input of a call: a tensor, a list of tensors, or a value (None: not given)."""

    name: str
    tensors: tuple[TensorSpec, ...] = ()
    is_list: bool = False
    value: Any = None

    @property
    def tensor(self) -> TensorSpec | None:
        """The tensor, if it is a single one."""
        return self.tensors[0] if self.tensors and not self.is_list else None


@dataclass(frozen=True)
class Call:
    """An operator's name without "aten::", its inputs by the names of its schema, and whether it runs backward."""

    op: str
    arguments: tuple[Argument, ...]
    backward: bool

    def argument(self, *names: str) -> Argument | None:
        """Return the first argument that has one of the names."""
        return next((argument for name in names for argument in self.arguments if argument.name == name), None)

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield all tensors."""
        return itertools.chain.from_iterable(argument.tensors for argument in self.arguments)

    @property
    def input_bytes(self) -> int:
        """Bytes of all input tensors."""
        return sum(tensor.storage_bytes for tensor in self.tensors())


def read_inputs(call: RecordedCall) -> list[Argument | None]:
    """Return the inputs of a call, still without names; None for an absent input.

    Raises NotReplayable if they are missing or malformed.
    """
    _, dims, types, concrete, strides, _ = call
    lists = (dims, types, concrete)
    if not all(isinstance(entry, list) for entry in lists) or len({len(entry) for entry in lists}) != 1:
        raise NotReplayable("inputs not recorded")
    if not isinstance(strides, list) or len(strides) != len(dims):
        strides = [None] * len(dims)
    return [_read_input(*entry) for entry in zip(dims, types, concrete, strides, strict=True)]


def _read_input(dims: Any, kind: Any, concrete: Any, strides: Any) -> Argument | None:
    if kind in ("Scalar", "ScalarList"):
        return Argument("", value=parse_value(concrete))
    if kind == "":
        return None
    if kind == "TensorList":
        return Argument("", _tensor_list(dims, strides), is_list=True)
    return Argument("", (_tensor(dims, kind, strides),))


def _tensor(dims: Any, dtype: Any, strides: Any) -> TensorSpec:
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise NotReplayable("type of a tensor not known")
    shape = _sizes(dims)
    if shape is None:
        raise NotReplayable("shape of a tensor not known")
    steps = _sizes(strides)
    return TensorSpec(shape, steps if steps is not None and len(steps) == len(shape) else None, dtype)


def _tensor_list(dims: Any, strides: Any) -> tuple[TensorSpec, ...]:
    """Assume fp32: the profiler omits types in lists, and layers' lists (states, weights, pieces) mostly hold it."""
    if not isinstance(dims, list) or not dims:
        raise NotReplayable("shapes of a list of tensors not known")
    if not isinstance(strides, list) or len(strides) != len(dims):
        strides = [None] * len(dims)
    return tuple(_tensor(sizes, FP32, steps) for sizes, steps in zip(dims, strides, strict=True))


def _sizes(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        return None
    return tuple(value)


def parse_value(text: Any) -> Any:
    """Return the number, bool or list of them that the profiler wrote as text.

    Raises NotReplayable for any other text.
    """
    if not isinstance(text, str):
        raise NotReplayable("value of an input not known")
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].strip()
        return [_parse_scalar(part.strip()) for part in inner.split(",")] if inner else []
    return _parse_scalar(text)


def _parse_scalar(text: str) -> Any:
    if text in _LITERALS:
        return _LITERALS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        raise NotReplayable("value of an input not known") from None
