"""Layers beside convolutions as kernels of the abstract instruction queue: products, pooling, what only moves."""

from __future__ import annotations

import numpy as np

from whatif.graph.types import Float64
from whatif.opdb.instruction_queue import Units, product_s, stream_s


def linear_s(units: Units, batch: Float64, inputs: Float64, outputs: Float64, phase: str = "fwd") -> Float64:
    """Return n fully connected layers' time, seconds, shape (n,), in fp32; ``phase`` "bwd" is both gradients."""
    shapes = {"fwd": ((outputs, batch, inputs),), "bwd": ((inputs, batch, outputs), (outputs, inputs, batch))}[phase]
    moved_bytes = 4 * (batch * inputs + inputs * outputs + batch * outputs)
    one = np.ones(np.shape(batch))
    products = [product_s(units, one, m, n, k, element_bytes=4, moved_bytes=moved_bytes) for m, n, k in shapes]
    return np.asarray(sum(products))


def pool_s(units: Units, inputs: Float64, outputs: Float64, phase: str = "fwd") -> Float64:
    """Return n pooling layers' time, seconds, shape (n,), in fp32.

    Backward the two tensors are read again, to find each maximum, beside the output's gradient.
    """
    if phase == "fwd":
        return stream_s(units, read_bytes=4 * inputs, written_bytes=4 * outputs)
    return stream_s(units, read_bytes=4 * (inputs + 2 * outputs), written_bytes=4 * inputs)


# Tensors of the layer's size that its kernels read and write, by kernel. Batch normalization reads its input for the
# statistics, then to apply them; backward the gradient as well, both times. The update is that of SGD with momentum.
LAYER_TRAFFIC: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {
    ("relu", "fwd"): ((1, 1),),
    ("relu", "bwd"): ((2, 1),),
    ("batch_norm", "fwd"): ((1, 0), (1, 1)),
    ("batch_norm", "bwd"): ((2, 0), (2, 1)),
    ("residual", "fwd"): ((2, 1),),
    ("residual", "bwd"): ((2, 1),),
    ("update", "fwd"): ((3, 2),),
}


def moving_s(units: Units, kind: str, elements: Float64, phase: str = "fwd") -> Float64:
    """Return times of n memory-bound layers by their fp32 elements, seconds, shape (n,): one of ``LAYER_TRAFFIC``."""
    kernels = [
        stream_s(units, read_bytes=4 * reads * elements, written_bytes=4 * writes * elements)
        for reads, writes in LAYER_TRAFFIC[kind, phase]
    ]
    return np.asarray(sum(kernels))
