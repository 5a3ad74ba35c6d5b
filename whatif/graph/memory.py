"""The device memory of a training step by layer, and its peak.

The forward pass keeps each layer's activations. The backward pass visits the layers in reverse, needs workspace, leaves
gradients and frees the activations; then comes the update. The effects of optimizations are in
``whatif.models.layers.memory_effects``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from whatif.graph.types import Int64, Phase


# Rows are tuples: a what-if replaces hundreds of them, and a frozen dataclass takes five times as long.
class LayerMemory(NamedTuple):
    """The memory of one visit of a layer, bytes; a layer that other layers interrupt has a row for each piece.

    The forward pass adds ``activations``, which stay until the backward work of this visit. While the layer runs,
    ``forward_workspace`` or ``backward_workspace`` exists in addition. The backward pass leaves ``gradients``. These
    four decide the peak of a step. The other fields are parts of these, for later what-ifs; set them if known, and
    change them together with their total.
    """

    name: str  # as in ``graph.layers``; in a recording without layers, of an operator
    activations: int  # kept from its forward to its backward work
    gradients: int  # of the layer's parameters, without inner layers'
    forward_workspace: int = 0  # exists only during its forward work
    backward_workspace: int = 0  # exists only during its backward work, without its gradients
    kept_input: int = 0  # part of ``activations``: its input, the output of an earlier layer
    full_precision: int = 0  # part of ``activations``: what autocast leaves in full precision
    input: int = 0  # size of its input, whichever layer keeps it
    fixed_workspace: int = 0  # part of ``backward_workspace``: as large as parameters, independent of the batch
    weights: int = 0  # parameters that its products and convolutions read
    copied: int = 0  # full-precision tensors kept elsewhere; autocast keeps a 16-bit copy of them for its products
    scores: int = 0  # part of ``activations``: the size of attention scores, which a fused attention does not keep
    fixed_forward: int = 0  # part of ``forward_workspace``: as large as parameters, independent of the batch


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a step, bytes; ``layers`` in the order of the forward pass."""

    parameters: int
    optimizer_state: int
    inputs: int  # the batch, and buffers such as running statistics
    layers: tuple[LayerMemory, ...]
    update_workspace: int = 0
    # Gradients live from one step to the next (zero_grad(set_to_none=False), or accumulation over passes).
    gradients_stay: bool = False
    # The last step's gradients exist until the backward pass begins (they are zeroed right before it).
    gradients_in_forward: bool = False
    # A layer's gradients are freed when its backward work ends (with its update).
    gradients_leave: bool = False
    # The source of the numbers: "allocations" (recorded) or "shapes" (of operators and parameters).
    source: str = "shapes"
    # The part of ``inputs`` that does not grow with the batch.
    buffers: int = 0
    # Applied what-ifs whose effect on memory is not modelled.
    not_modelled: tuple[str, ...] = ()

    @property
    def gradients(self) -> int:
        """Gradients of all layers, bytes."""
        return sum(layer.gradients for layer in self.layers)

    @property
    def activations(self) -> int:
        """Activations of all layers at the end of the forward pass, bytes."""
        return sum(layer.activations for layer in self.layers)

    def with_layers(self, layers: Sequence[LayerMemory]) -> Memory:
        """Return this memory with other layers."""
        return replace(self, layers=tuple(layers))


class Moment(NamedTuple):
    """Memory in use while one layer works (no layer during the update), bytes."""

    phase: Phase
    layer: str
    parameters: int
    optimizer_state: int
    inputs: int
    gradients: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """The total, bytes."""
        return self.parameters + self.optimizer_state + self.inputs + self.gradients + self.activations + self.workspace


def moments(memory: Memory) -> Iterator[Moment]:
    """Yield the peak moment of each layer's forward, then backward work, then of the update."""
    return (_moment(memory, number, *in_use) for number, in_use in enumerate(_in_use(memory).tolist()))


def _moment(memory: Memory, number: int, gradients: int, activations: int, workspace: int) -> Moment:
    """The moment of the row ``number`` of ``_in_use``."""
    n = len(memory.layers)
    phase = Phase.FORWARD if number < n else Phase.BACKWARD if number < 2 * n else Phase.UPDATE
    layer = memory.layers[min(number, 2 * n - 1 - number)].name if number < 2 * n else ""
    resident = memory.parameters, memory.optimizer_state, memory.inputs
    return Moment(phase, layer, *resident, gradients, activations, workspace)


def _in_use(memory: Memory) -> Int64:
    """Gradients, activations and workspace in use, bytes, (2 * n_layers + 1, 3): a row for each of ``moments``."""
    columns = tuple(zip(*memory.layers, strict=True)) or ((),) * 5
    activations, gradients, forward_workspace, backward_workspace = (np.array(c, dtype=np.int64) for c in columns[1:5])
    n, every = len(activations), memory.gradients
    kept, left = np.cumsum(activations), np.cumsum(gradients[::-1])
    found = np.zeros((2 * n + 1, 3), dtype=np.int64)
    forward, backward, update = found[:n], found[n : 2 * n], found[2 * n]
    forward[:, 0] = every if memory.gradients_stay or memory.gradients_in_forward else 0
    forward[:, 1], forward[:, 2] = kept, forward_workspace
    backward[:, 1], backward[:, 2] = kept[::-1], backward_workspace[::-1]
    update[2] = memory.update_workspace
    if memory.gradients_stay:  # the new gradient exists until it is added to the old one
        found[n:, 0] = every
        backward[:, 2] += gradients[::-1]
    elif memory.gradients_leave:
        backward[:, 0] = gradients[::-1]
    else:
        backward[:, 0], update[0] = left, every
    return found


def peak(memory: Memory) -> Moment:
    """Return the moment of a step with the most memory in use, in bytes by what holds it; the first of equals."""
    return _fullest(replace(memory, not_modelled=()))


@lru_cache(maxsize=64)
def _fullest(memory: Memory) -> Moment:
    """The peak moment, cached: most what-ifs keep the memory, and each reads its peak."""
    in_use = _in_use(memory)
    number = int(in_use.sum(axis=1).argmax())
    return _moment(memory, number, *in_use[number].tolist())


def fullest(memories: Sequence[Memory | None]) -> tuple[int, Memory | None]:
    """Return the place and the memory of the rank with the highest peak."""
    return max(enumerate(memories), key=lambda each: peak(each[1]).total if each[1] else -1)


def recomputed(memory: Memory, runs: Sequence[tuple[int, int]]) -> Memory:
    """Let each of ``runs``, rows [first, end) in ascending order, keep only the input of its first row."""
    rows = list(memory.layers)
    ended = -1
    for first, end in runs:
        # The gradient of its output, as large as the next layer's input, exists throughout.
        gradient = rows[end].input if end < len(rows) else 0
        rows[first:end] = _recomputed(rows[first:end], gradient, from_segment=first == ended)
        ended = end
    return memory.with_layers(rows)


def _recomputed(rows: Sequence[LayerMemory], gradient: int, *, from_segment: bool) -> list[LayerMemory]:
    """The rows of one recomputed segment; ``from_segment``: the layer that computed its input no longer keeps it."""
    kept = rows[0].input if from_segment else min(rows[0].input, rows[0].kept_input)
    rebuilt = most = 0
    found: list[LayerMemory] = []
    for row in rows:
        rebuilt += max(row.activations - kept, 0)
        most = max(most, rebuilt + row.forward_workspace + gradient)
        found.append(
            row._replace(
                activations=kept,
                kept_input=kept,
                full_precision=min(row.full_precision, kept),
                forward_workspace=row.forward_workspace + row.activations - min(kept, row.activations),
                backward_workspace=row.backward_workspace + rebuilt,
                scores=0,
            )
        )
        kept = 0  # the layers after the first one keep nothing
    # The forward work of the whole segment runs before the backward work of its last layer.
    found[-1] = found[-1]._replace(backward_workspace=max(found[-1].backward_workspace, most))
    return found


# Adam keeps a list of denominators as large as the parameters; torch.optim's other foreach forms work in place (torch
# 2.13, torch/optim/adam.py, sgd.py).
_FOREACH_COPIES = {"adam": 1, "adamw": 1, "nadam": 1, "radam": 1, "adamax": 1, "rmsprop": 1, "adagrad": 1}
# Parameter by parameter, Adam allocates a square root and its quotient.
_LOOP_COPIES = {"adam": 2, "adamw": 2, "nadam": 2, "radam": 2, "adamax": 1, "rmsprop": 1, "adagrad": 1}


def update_workspace(optimizer: str | None, implementation: str, parameters: int, largest: int) -> int:
    """Return the workspace of an update of ``parameters`` bytes, bytes; ``largest`` is the largest single parameter.

    ``implementation`` is one of for_loop, foreach and fused.
    """
    name = (optimizer or "").lower()
    if implementation == "foreach":
        return _FOREACH_COPIES.get(name, 0) * parameters
    return _LOOP_COPIES.get(name, 0) * largest if implementation == "for_loop" else 0
