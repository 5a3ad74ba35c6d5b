"""What a training step keeps in the memory of its device, and the most of it at one moment.

The step is told layer by layer: the forward pass keeps each layer's activations, the backward pass goes the layers in
reverse, needs room for what it computes with, leaves gradients and gives the activations back; then comes the update.
What optimizations make of it is in ``whatif.models.memory_effects``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from whatif.types import Phase


# Rows are tuples: a what-if makes new ones of hundreds of them, and a frozen dataclass takes five times as long.
class LayerMemory(NamedTuple):
    """One visit of a layer, bytes: a layer whose work other layers interrupt has a row for each piece of it.

    ``workspace`` is what exists only while the layer runs, beyond what it keeps.
    """

    name: str
    activations: int  # kept from its forward to its backward work: what the backward work of this visit frees
    gradients: int  # of its own parameters
    forward_workspace: int = 0
    backward_workspace: int = 0
    # Of the activations: what a layer before it made, and what autocast would leave in full precision.
    kept_input: int = 0
    full_precision: int = 0
    # What flows in, whether this layer keeps it or one before it does.
    input: int = 0
    # Of the backward workspace: what is as large as parameters, whatever the batch.
    fixed_workspace: int = 0
    # Parameters that its products and convolutions read.
    weights: int = 0
    # Full-precision tensors that are kept elsewhere, of which autocast keeps a copy in 16 bits for its products.
    copied: int = 0
    # Of the activations: what is as large as an attention's scores, which a fused attention does not keep.
    scores: int = 0


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
    # The last step's gradients are there until the backward pass begins (they are zeroed right before it).
    gradients_in_forward: bool = False
    # A layer's gradients are gone when its backward work ends (the update is made there).
    gradients_leave: bool = False
    # Where the numbers come from: "allocations" (recorded) or "shapes" (of operators and parameters).
    source: str = "shapes"
    # Of ``inputs``: what does not grow with the batch.
    buffers: int = 0
    # What-ifs that were applied and whose effect on memory nobody modelled.
    not_modelled: tuple[str, ...] = ()

    @property
    def gradients(self) -> int:
        """Gradients of all layers, bytes."""
        return sum(layer.gradients for layer in self.layers)

    @property
    def activations(self) -> int:
        """What all layers keep at the end of the forward pass, bytes."""
        return sum(layer.activations for layer in self.layers)

    def with_layers(self, layers: Sequence[LayerMemory]) -> Memory:
        """Give this memory with other layers."""
        return replace(self, layers=tuple(layers))


class Moment(NamedTuple):
    """What is in memory while one layer works (the update has none), bytes."""

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
        """All of it, bytes."""
        return self.parameters + self.optimizer_state + self.inputs + self.gradients + self.activations + self.workspace


def moments(memory: Memory) -> Iterator[Moment]:
    """Walk through a step: give the fullest moment of each layer's forward, then backward work, then the update."""
    resident = memory.parameters, memory.optimizer_state, memory.inputs
    gradients = memory.gradients if memory.gradients_stay or memory.gradients_in_forward else 0
    activations = 0
    for layer in memory.layers:
        activations += layer.activations
        yield Moment(Phase.FORWARD, layer.name, *resident, gradients, activations, layer.forward_workspace)
    gradients = memory.gradients if memory.gradients_stay else 0
    for layer in reversed(memory.layers):
        if memory.gradients_stay:  # the new gradient is there until it is added to the old one
            workspace = layer.backward_workspace + layer.gradients
            yield Moment(Phase.BACKWARD, layer.name, *resident, gradients, activations, workspace)
        else:
            now = gradients + layer.gradients
            yield Moment(Phase.BACKWARD, layer.name, *resident, now, activations, layer.backward_workspace)
            gradients = gradients if memory.gradients_leave else now
        activations -= layer.activations
    yield Moment(Phase.UPDATE, "", *resident, gradients, activations, memory.update_workspace)


def peak(memory: Memory) -> Moment:
    """Give the moment of a step at which most memory is taken, the first of equals."""
    return max(moments(memory), key=lambda moment: moment.total)
