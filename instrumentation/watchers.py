"""All observers of the warm-up steps; before the untraced steps they are removed, but for a few timestamps on a CPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .ddp_buckets import describe_buckets
from .layers import GradientOrder
from .loaders import LoaderWatch
from .metadata import FirstInput, describe_precision
from .step_parts import StepParts


class WarmupWatchers:
    """Watches the model's input, the order of its gradients and the data loading, until `before_untraced`.

    Gradients are watched in the first step. On a CPU the parts of a step are timed in the later ones, and again, until
    `remove`, in the untraced ones if they are long enough.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        other_optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self._model = model
        self._optimizer, self._other_optimizers = optimizer, other_optimizers
        self._input = FirstInput(model, trained=optimizer is not None)
        self._gradients = GradientOrder(model)
        self._loaders = LoaderWatch()
        self._parts: StepParts | None = None

    def after_first_step(self, *, cuda: bool) -> None:
        """Switch to timing the parts of a step after the first one."""
        self._gradients.remove()
        if self._optimizer is not None and not cuda:
            self._parts = StepParts(self._model, self._optimizer, self._loaders, self._other_optimizers)

    def before_untraced(self) -> None:
        """Stop watching, but time the parts of the untraced steps where that takes little."""
        self._input.remove()
        self._gradients.remove()
        if self._parts is not None and self._parts.are_cheap:
            self._parts.begin_anew()
        else:
            self.remove()

    def remove(self) -> None:
        """Stop watching and timing."""
        for watcher in (self._input, self._gradients, self._loaders, self._parts):
            if watcher is not None:
                watcher.remove()

    def summary(self, steps: int) -> dict[str, Any]:
        """Return the metadata about input, precision, gradients, buckets and data loading, after `steps` steps."""
        shape, gradients, loading = self._input.shape, self._gradients.rows(), self._loaders.summary()
        return {
            # A compiled function calls no module whose hook would see the input.
            "batch_size": shape[0] if shape else (loading or {}).get("batch_size"),
            "samples_per_step": self._samples_per_step(steps),
            "input_shape": shape,
            "input_dtype": self._input.dtype,
            "precision": describe_precision(self._model, self._input.autocast),
            "grad_ready_order": gradients,
            "ddp": describe_buckets(self._model, gradients),
            "data_loading": loading,
            "parts_ms": self._parts.summary() if self._parts is not None else None,
        }

    def _samples_per_step(self, steps: int) -> int | None:
        """Return the samples of all forward passes of a step, several if gradients are accumulated."""
        if self._input.samples or self._optimizer is None or not self._input.shape:
            return round(self._input.samples / steps) or None
        # The model itself is not called. If there are more optimizers, each has a backward pass of the same batch.
        updated = {id(tensor) for group in self._optimizer.param_groups for tensor in group["params"]}
        several = any(tensor.requires_grad and id(tensor) not in updated for tensor in self._model.parameters())
        return self._input.shape[0] if several else None
