"""Operators that a device runs fused and meta tensors in parts: dropout, attention, RNNs; chosen as on the device."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .recurrent import cudnn_rnn, onednn_lstm, runs_in_cudnn, runs_in_onednn

# FlashAttention's kernels take these; memory-efficient attention takes the others, all masks, and values of another
# size than queries (sdp_utils.cpp of PyTorch 2.x). cuDNN's kernels, which Hopper may use instead, take about the same
# time.
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_HEAD, _FLASH_CAPABILITY = 256, 8.0


class AsOnDevice(TorchFunctionMode):
    """A mode in which dropout, ``scaled_dot_product_attention`` and recurrent layers call the device's operators.

    ``capability`` is the GPU's compute capability (8.0); None: a CPU. ``cudnn``: whether the GPU is of NVIDIA.
    """

    def __init__(self, capability: float | None, *, cudnn: bool = True) -> None:
        super().__init__()
        self._capability = capability
        self._cudnn = cudnn and capability is not None

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout and self._capability is not None:
            return _dropout(*args, **kwargs)
        if func is nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is nn.functional.multi_head_attention_forward:
            # The mode is off inside a function that it handles: patch the attention called there.
            with mock.patch.object(nn.functional, "scaled_dot_product_attention", self._attention):
                return func(*args, **kwargs)
        if func is torch.lstm and self._capability is None and runs_in_onednn(args[0], args[1]):
            return onednn_lstm(*args, **kwargs)
        if self._cudnn and not kwargs and runs_in_cudnn(func, args):
            return cudnn_rnn(func, args)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        aten = torch.ops.aten
        flash = (
            self._capability is not None
            and self._capability >= _FLASH_CAPABILITY
            and attn_mask is None
            and query.dtype in _FLASH_DTYPES
            and query.size(-1) == value.size(-1) <= _FLASH_HEAD
        )
        shared = enable_gqa and query.dim() == 4 and key.size(1) != query.size(1)
        if shared and not flash:  # the only fused kernel on a GPU that reads heads which several queries share
            key, value = (t.repeat_interleave(query.size(1) // t.size(1), dim=1) for t in (key, value))
        values_differ = query.size(-1) != value.size(-1)  # MLA
        unsupported = values_differ if self._capability is None else shared and not flash
        if query.dim() != 4 or unsupported:
            result: torch.Tensor = aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale
            )[0]
            return result
        mask = None if attn_mask is None else _as_bias(attn_mask, query)
        if self._capability is None:
            outputs = aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
            )
        elif flash:
            outputs = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
        else:
            if mask is not None:
                mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
            with_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            outputs = aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, with_backward, dropout_p, is_causal, scale=scale
            )
        attended: torch.Tensor = outputs[0]
        return attended


def _as_bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return a bool mask as the bias added to scores, the only form that the fused kernels accept."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:  # noqa: A002
    if not training or p == 0.0:
        return input
    if p == 1.0:
        return input * 0.0
    dropped: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return dropped
