"""What is in memory before a step begins: parameters, optimizer state, the batch, buffers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

MOST_BYTES = 2**44
# Bytes of an element, by torch's names of types.
_TYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1,
}  # fmt: skip
# Optimizers of torch.optim that keep two values a parameter, and one.
_TWO_MOMENTS = frozenset(("adam", "adamw", "nadam", "radam", "adamax", "lamb", "fusedadam"))
_ONE_MOMENT = frozenset(("rmsprop", "adagrad", "lion", "rprop"))


@dataclass(frozen=True, slots=True)
class Resident:
    """What the recorder's metadata tells, bytes; ``gradients`` by layer, ``sizes`` of single parameters' gradients."""

    parameters: int
    optimizer_state: int
    inputs: int
    buffers: int
    gradients: dict[str, int]
    sizes: frozenset[int]
    element: int = 0  # bytes of one number of the parameters; 0 where nothing tells


def resident(metadata: dict[str, Any]) -> Resident:
    """Read what a recording says beside its events; 0 where it says nothing."""
    rows = metadata.get("layers")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    parameters, buffers = 0, 0
    precision = metadata.get("precision")
    told = precision.get("parameters") if isinstance(precision, dict) else None
    element = _TYPE_BYTES.get(str(told), 4)
    gradients: dict[str, int] = {}
    sizes = set()
    for row in rows:
        count, gradient = _size(row.get("parameters")), _size(row.get("gradient_bytes"))
        parameters += max(count * element, gradient)
        name = str(row.get("name"))
        gradients[name] = gradients.get(name, 0) + gradient
        shapes = row.get("shapes")
        for shape in shapes.values() if isinstance(shapes, dict) else ():
            if isinstance(shape, list) and all(type(size) is int and 0 <= size < MOST_BYTES for size in shape):
                sizes.add(min(prod(shape), MOST_BYTES) * element)
        if "BatchNorm" in str(row.get("type")) and count:
            buffers += count * element + 8  # running mean and variance as large as weight and bias; a counter
    return Resident(
        parameters,
        _state(metadata, parameters),
        _batch(metadata),
        buffers,
        gradients,
        frozenset(sizes - {0}),
        _TYPE_BYTES.get(str(told), 0),
    )


def _size(value: Any) -> int:
    return value if type(value) is int and 0 <= value < MOST_BYTES else 0


def _state(metadata: dict[str, Any], parameters: int) -> int:
    optimizer = metadata.get("optimizer")
    if not isinstance(optimizer, dict):
        return 0
    told = optimizer.get("state_bytes")
    if type(told) is int and 0 <= told < MOST_BYTES:
        return told
    return state_of(str(optimizer.get("type")), parameters)


def state_of(optimizer: str | None, parameters: int) -> int:
    """Give the state that an optimizer of a class keeps for parameters of so many bytes."""
    name = (optimizer or "").lower()
    return parameters * (2 if name in _TWO_MOMENTS else 1 if name in _ONE_MOMENT else 0)


def _batch(metadata: dict[str, Any]) -> int:
    """The first input of the model; targets and further inputs are not told."""
    shape, dtype = metadata.get("input_shape"), metadata.get("input_dtype")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < MOST_BYTES for size in shape):
        return 0
    return min(prod(shape) * _TYPE_BYTES.get(str(dtype), 4), MOST_BYTES)
