"""What a training step keeps in the memory of its device, and the most of it at one moment.

The step is told layer by layer: the forward pass keeps each layer's activations, the backward pass goes the layers in
reverse, needs room for what it computes with, leaves gradients and gives the activations back; then comes the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """One layer's part, bytes. ``workspace`` is what exists only while the layer runs, beyond what it keeps."""

    name: str
    activations: int  # kept from its forward to its backward work
    gradients: int  # of its own parameters
    forward_workspace: int = 0
    backward_workspace: int = 0


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
    # Where the numbers come from: "allocations" (recorded) or "shapes" (of operators and parameters).
    source: str = "shapes"

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
