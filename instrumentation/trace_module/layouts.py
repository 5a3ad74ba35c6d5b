"""The layout of convolutions' outputs: always NCHW on meta tensors, that of the inputs on a GPU.

Source: PyTorch's `cudnn_conv_suggest_memory_format` (aten/src/ATen/native/ConvUtils.h): channels last if the input or
the weight is; the gradient of the input has the same layout.
"""

from typing import Any

import torch
from torch import Tensor


def as_on_device(name: str, args: Any, result: Any) -> Any:
    """Return an operator's result with the layout that it has on a GPU."""
    if name == "aten::convolution" and _suggests(args[0], args[1]):
        return _channels_last(result)
    if name == "aten::convolution_backward" and result[0] is not None and _suggests(args[1], args[2]):
        return (_channels_last(result[0]), *result[1:])
    return result


def is_channels_last(tensor: Tensor) -> bool:
    """Return whether a tensor of images is channels last, and not contiguous in NCHW as well."""
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _suggests(read: Tensor, weight: Tensor) -> bool:
    return read.is_meta and (is_channels_last(read) or is_channels_last(weight))


def _channels_last(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.channels_last)
