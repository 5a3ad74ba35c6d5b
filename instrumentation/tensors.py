"""Tensors among a call's inputs and results, and the names of their types."""

from collections.abc import Iterable
from typing import Any

import torch


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors in ``values``, including nested lists, tuples and dicts, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
