"""The update inside the backward pass: each parameter as soon as its gradient is ready, which is then freed.

Source: PyTorch, "How to save memory by fusing an optimizer step into the backward pass" (tutorial).
"""

from typing import Any

import torch
from torch import nn


class UpdateInBackward:
    """One optimizer per parameter, called by the hook of its accumulated gradient."""

    def __init__(self, model: nn.Module, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        make: Any = optimizer
        # foreach needs more than one tensor.
        parameter_options = {**options, "foreach": False} if options.get("foreach") else options
        self._optimizers: dict[torch.Tensor, Any] = {p: make([p], **parameter_options) for p in model.parameters()}
        for parameter in self._optimizers:
            hooked: Any = parameter  # Partly untyped.
            hooked.register_post_accumulate_grad_hook(self._update)

    @property
    def state(self) -> Any:
        """The optimizers' state, by parameter."""
        return {parameter: optimizer.state[parameter] for parameter, optimizer in self._optimizers.items()}

    def _update(self, parameter: torch.Tensor) -> None:
        optimizer = self._optimizers[parameter]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
