"""The loss at which a backward pass starts, from any output of a model."""

from typing import Any

import torch
from torch import nn

from whatif.runtime.errors import WhatifError


def loss_of(output: Any, kind: str) -> tuple[torch.Tensor, str]:
    """Return the loss of a model's output and a sentence on what it is.

    "auto" is the model's own loss if it returns one, else cross entropy over the last dimension of (rows, classes) or
    (batch, positions, classes), else the sum. Raises WhatifError if there is nothing to differentiate.
    """
    own_loss = _own_loss(output)
    if kind == "auto" and own_loss is not None:
        return own_loss, "the loss is the model's own"
    scores = _scores(output)
    if scores is None or not scores.requires_grad:
        raise WhatifError(
            "predict: expected a model that returns a tensor with a gradient, got none; give a function that returns "
            "the model with its loss inside, or use --inference."
        )
    if kind == "auto":
        kind = "cross_entropy" if scores.dim() in (2, 3) and scores.size(-1) > 1 else "sum"
    if scores.dim() == 0:
        return scores, "the loss is what the model returns"
    if kind == "cross_entropy":
        rows = scores.reshape(-1, scores.size(-1))
        targets = torch.empty(rows.size(0), dtype=torch.int64, device=rows.device)
        return nn.functional.cross_entropy(rows, targets), (
            f"the loss is assumed to be cross entropy over {rows.size(0):,} rows of {rows.size(-1):,} classes"
        )
    if kind == "mse":
        return nn.functional.mse_loss(scores, torch.empty_like(scores)), "the loss is assumed to be the squared error"
    return scores.sum(), "the loss is assumed to be the sum of the output"


def _own_loss(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) and loss.dim() == 0 else None


def _scores(output: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor of a model's output; of a transformers model its logits."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return next((found for value in values if (found := _scores(value)) is not None), None)
