"""The building blocks of transform scripts.

    from whatif.models import KernelFamily, change_memory, step_kernels

Names load on first use, so that ``import whatif.models`` costs nothing. ``docs/writing-a-transform.md`` shows examples.
Durations and collectives are not exported here: import them from ``whatif.models.durations`` and
``whatif.models.exchange``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whatif.graph.kernels import KernelFamily
    from whatif.graph.memory import peak
    from whatif.models.kernels.batch import at_batch, batch_tasks, launches_kernels, with_batch_size
    from whatif.models.kernels.launches import capture, note_start_up
    from whatif.models.kernels.update_in_backward import needs_all_gradients, update_in_pieces
    from whatif.models.layers.added_gradients import add_gradients
    from whatif.models.layers.change_layers import merge_layers, remove_layers, resize_layers, scale_layers
    from whatif.models.layers.gradients import backward_ends, gradients
    from whatif.models.layers.layer_calls import CallRole, layer_calls
    from whatif.models.layers.layer_facts import gradient_bytes, in_layers
    from whatif.models.layers.memory_effects import (
        accumulated,
        change_memory,
        checkpointed,
        in_half,
        not_modelled,
        updated_as,
        updated_in_backward,
        with_batch,
        without_scores,
    )
    from whatif.models.layers.segments import are_classes, recompute, segments
    from whatif.models.layers.update_tasks import implementation, step_kernels
    from whatif.models.layers.weight_gradients import weight_gradients
    from whatif.simulation.steps import step_ns
    from whatif.units import Bandwidth, Size

_NAMES = {
    "whatif.units": ("Bandwidth", "Size"),
    "whatif.graph.kernels": ("KernelFamily",),
    "whatif.graph.memory": ("peak",),
    "whatif.models.kernels.batch": ("at_batch", "batch_tasks", "launches_kernels", "with_batch_size", "work_at_batch"),
    "whatif.models.kernels.launches": ("capture", "note_start_up"),
    "whatif.models.kernels.update_in_backward": ("needs_all_gradients", "update_in_pieces"),
    "whatif.models.layers.added_gradients": ("add_gradients",),
    "whatif.models.layers.change_layers": ("merge_layers", "remove_layers", "resize_layers", "scale_layers"),
    "whatif.models.layers.gradients": ("backward_ends", "gradients"),
    "whatif.models.layers.layer_calls": ("CallRole", "layer_calls"),
    "whatif.models.layers.layer_facts": ("gradient_bytes", "in_layers"),
    "whatif.models.layers.memory_effects": (
        "accumulated", "change_memory", "checkpointed", "in_half", "not_modelled", "updated_as", "updated_in_backward",
        "with_batch", "without_scores",
    ),
    "whatif.models.layers.segments": ("are_classes", "recompute", "segments"),
    "whatif.models.layers.update_tasks": ("implementation", "step_kernels"),
    "whatif.models.layers.weight_gradients": ("weight_gradients",),
    "whatif.simulation.steps": ("step_ns",),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    # Option types: parameters of transform() with a unit.
    "Bandwidth", "Size",
    # Selection of work: what a kernel does, which layer it belongs to, what grows with the batch.
    "KernelFamily", "in_layers", "weight_gradients", "batch_tasks", "launches_kernels",
    # Batch: durations and work at another batch size.
    "at_batch", "work_at_batch", "with_batch_size",
    # Launches: CUDA graphs.
    "capture", "note_start_up",
    # Layers: their calls and gradients; recompute, remove, resize or merge them.
    "layer_calls", "CallRole", "gradient_bytes", "gradients", "add_gradients", "backward_ends", "segments",
    "are_classes", "recompute", "remove_layers", "scale_layers", "resize_layers", "merge_layers",
    # Memory: change what a step keeps on the device; the functions behind the first two are effects.
    "change_memory", "not_modelled", "accumulated", "checkpointed", "in_half", "updated_as", "updated_in_backward",
    "with_batch", "without_scores", "peak",
    # Optimizer: the weight update.
    "step_kernels", "implementation", "needs_all_gradients", "update_in_pieces",
    # Steps.
    "step_ns",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'whatif.models' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
