"""How PyTorch divides lists of tensors among kernels: ``multi_tensor_apply`` of MultiTensorApply.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

# Tensors of a launch, by the number of lists that it reads and writes; blocks of a launch; elements of a block
# (PyTorch, aten/src/ATen/native/cuda/MultiTensorApply.cuh: depth_to_max_tensors, depth_to_max_blocks, kChunkSize).
_MOST_TENSORS = (110, 64, 48, 36, 30)
_MOST_BLOCKS = 320
CHUNK_ELEMENTS = 65_536


def launches_of(elements: Sequence[int], depth: int) -> tuple[int, ...]:
    """Return the elements of each launch, for tensors of ``elements`` elements in each of ``depth`` lists.

    A launch is full when it reaches its limit of tensors, or of blocks of 65,536 elements.
    """
    return _launches(tuple(elements), min(max(depth, 1), len(_MOST_TENSORS)))


@lru_cache(maxsize=64)
def _launches(elements: tuple[int, ...], depth: int) -> tuple[int, ...]:
    most_tensors = _MOST_TENSORS[depth - 1]
    found: list[int] = []
    tensors = blocks = handled = 0
    for size in elements:
        if not size:
            continue
        tensors += 1
        chunks = -(-size // CHUNK_ELEMENTS)
        for chunk in range(chunks):
            last = chunk == chunks - 1
            handled += size - chunk * CHUNK_ELEMENTS if last else CHUNK_ELEMENTS
            blocks += 1
            if (tensors == most_tensors and last) or blocks == _MOST_BLOCKS:
                found.append(handled)
                # An unfinished tensor continues in the next launch.
                tensors, blocks, handled = 0 if last else 1, 0, 0
    return (*found, handled) if handled else tuple(found)
