"""Memory in use before a step begins: parameters, optimizer state, the batch, buffers."""

from __future__ import annotations

from math import prod

from msgspec import Struct

from whatif.graph.recorded import Layer, Recorded
from whatif.ingest.recorded import MOST_BYTES

# Bytes of an element, by torch's names of types.
_TYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1,
}  # fmt: skip
# Optimizers of torch.optim that keep two values a parameter, and one.
_TWO_MOMENTS = frozenset(("adam", "adamw", "nadam", "radam", "adamax", "lamb", "fusedadam"))
_ONE_MOMENT = frozenset(("rmsprop", "adagrad", "lion", "rprop"))


class Resident(Struct, frozen=True):
    """Sizes from the recorder's metadata, bytes; ``gradients`` by layer, ``sizes`` of single parameters' gradients."""

    parameters: int
    optimizer_state: int
    inputs: int
    buffers: int
    gradients: dict[str, int]
    sizes: frozenset[int]
    element: int = 0  # bytes per element of the parameters; 0 if unknown


def resident(recorded: Recorded) -> Resident:
    """Add up the sizes in the recorder's metadata; 0 for unknown ones."""
    parameters, buffers = 0, 0
    dtype = recorded.precision.parameters if recorded.precision is not None else None
    element = _element(recorded)
    gradients: dict[str, int] = {}
    sizes: set[int] = set()
    for layer in recorded.layers:
        count, gradient = layer.parameters or 0, layer.gradient_bytes or 0
        parameters += own_bytes(recorded, layer)
        if layer.name:
            gradients[layer.name] = gradients.get(layer.name, 0) + gradient
        sizes.update(min(prod(shape), MOST_BYTES) * element for shape in layer.shapes.values())
        if "BatchNorm" in layer.type and count:
            buffers += count * element + 8  # running mean and variance as large as weight and bias; a counter
    return Resident(
        parameters,
        _state(recorded, parameters),
        _batch(recorded),
        buffers,
        gradients,
        frozenset(sizes - {0}),
        _TYPE_BYTES.get(str(dtype), 0),
    )


def own_bytes(recorded: Recorded, layer: Layer) -> int:
    """Return the bytes of a layer's own parameters, also of frozen ones."""
    return max((layer.parameters or 0) * _element(recorded), layer.gradient_bytes or 0)


def _element(recorded: Recorded) -> int:
    return _TYPE_BYTES.get(str(recorded.precision.parameters if recorded.precision is not None else None), 4)


def _state(recorded: Recorded, parameters: int) -> int:
    optimizer = recorded.optimizer
    if optimizer is None:
        return 0
    return state_of(optimizer.type, parameters) if optimizer.state_bytes is None else optimizer.state_bytes


def state_of(optimizer: str | None, parameters: int) -> int:
    """Return the bytes of state that an optimizer of a class keeps for ``parameters`` bytes of parameters."""
    name = (optimizer or "").lower()
    return parameters * (2 if name in _TWO_MOMENTS else 1 if name in _ONE_MOMENT else 0)


def _batch(recorded: Recorded) -> int:
    """The first input of the model; targets and further inputs are unknown."""
    if recorded.input_shape is None:
        return 0
    return min(prod(recorded.input_shape) * _TYPE_BYTES.get(str(recorded.input_dtype), 4), MOST_BYTES)
