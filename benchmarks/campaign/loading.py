"""Data loading as expensive as decoding: the CPU decompresses every sample, and nothing sleeps."""

import random
import zlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .models import Batch

# Decompressed bytes of the baseline's batch, whatever its number of samples: about 40 ms on one core.
DECODED_BYTES_PER_BATCH = 6 << 20


class CompressedSamples(Dataset[tuple[Tensor, ...]]):
    """Endless copies of one sample; each access decodes compressed data of `decoded_bytes` first.

    A sample is its inputs and its target; images are bytes, as from a decoder.
    """

    def __init__(self, sample: tuple[Tensor, ...], decoded_bytes: int) -> None:
        # A few symbols in random order: no repeats, so every byte is decoded by its code, as in an image.
        noise = bytes(random.Random(0).choices(range(16), k=decoded_bytes))
        self._compressed = zlib.compress(noise, level=1)
        self._sample = sample

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        zlib.decompress(self._compressed)
        return tuple(tensor.clone() for tensor in self._sample)


def load(
    batch: Batch, *, samples: int, baseline_samples: int, workers: int, device: torch.device
) -> Generator[Batch, None, None]:
    """Yield endless batches of the first sample on the device, decoded by `workers` processes (0: by this one)."""
    inputs, target = batch
    sample = (*(_as_decoded(tensor[0]) for tensor in inputs), target[0].clone())
    dataset = CompressedSamples(sample, DECODED_BYTES_PER_BATCH // baseline_samples)
    loader: DataLoader[Any] = DataLoader(dataset, samples, num_workers=workers, pin_memory=device.type == "cuda")
    for tensors in loader:
        *on_device, answer = (tensor.to(device, non_blocking=True) for tensor in tensors)
        yield tuple(_as_input(tensor) for tensor in on_device), answer


def _as_decoded(tensor: Tensor) -> Tensor:
    return (tensor * 40 + 128).clamp(0, 255).to(torch.uint8) if tensor.is_floating_point() else tensor.clone()


def _as_input(tensor: Tensor) -> Tensor:
    return (tensor.float() - 128) / 40 if tensor.dtype == torch.uint8 else tensor
