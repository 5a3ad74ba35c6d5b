"""Offload saved activations to host memory and back on a separate stream, as in vDNN (Rhu et al., MICRO 2016)."""

from typing import Any

import torch
from torch import Tensor, nn
from whatif.instrumentation.gpu import GPU

# Copying a smaller tensor costs more than the memory it saves.
SMALLEST_BYTES = 1 << 20


class StreamOffload:
    """Hooks for saved tensors on a CUDA device: each large one is copied out when saved and back when needed.

    There is no prefetch: the backward pass waits for each copy. A tensor saved by two operators is copied twice.
    """

    def __init__(self, model: nn.Module) -> None:
        self._stream = GPU.stream()
        # Parameters stay: they are needed on the device anyway.
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def hooks(self) -> Any:
        """A context manager for the forward pass."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor:
        small = tensor.numel() * tensor.element_size() < SMALLEST_BYTES
        if small or tensor.untyped_storage().data_ptr() in self._parameters:
            return tensor
        self._stream.wait_stream(GPU.current_stream())
        with GPU.on_stream(self._stream):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # Its memory is not reused before the copy is done.
        return host

    def _unpack(self, packed: Tensor) -> Tensor:
        if packed.is_cuda:
            return packed
        current = GPU.current_stream()
        with GPU.on_stream(self._stream):
            tensor = packed.to("cuda", non_blocking=True)
        current.wait_stream(self._stream)
        tensor.record_stream(current)
        return tensor
