"""The time of a convolution on a device in a number format, over all kernels of its call.

With and without tensor cores a library uses different algorithms and tensor layouts, so that the recorded time says
little about the new one: then the model gives the time itself, not a ratio.

Sources: a public recording of VGG-13 on an H100 in TF32 (docs/device.md) for the efficiency of shapes and the time of
layout changes; one of ResNet-50 on a V100 for convolutions without tensor cores.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from whatif.graph.types import Bool, Float64
from whatif.hardware.gpu import Gpu
from whatif.hardware.roofline import compute_share, memory_gbyte_s, on_tensor_cores, sustained_tflops
from whatif.opdb.rows import Operators, Texts
from whatif.opdb.tensor_convolutions import NHWC
from whatif.opdb.work import output_size, work

# 64 channels reach about half of the rate of 128 (forward 0.39 and 0.43, gradients 0.27 and 0.37).
_WIDE_CHANNELS, _NARROW_EXPONENT, _NARROWEST_SHARE = 128, 0.85, 0.1
# Tensor cores need channels last: every tensor of the call is read and written once more, at 1.47 of 3.35 TB/s in each
# direction. With this few channels (images) none is.
_IMAGE_CHANNELS = 4
# Rows and columns of the tiles of its product. Our estimate: the usual ones.
_TILE = 128


def convolution_ns(ops: Operators, gpu: Gpu, dtype: str, *, channels_last: Bool | bool = False) -> Float64:
    """Return the time of n convolutions in ``dtype`` on a device, ns, shape (n,): product and layout changes.

    ``dtype`` replaces the operators' recorded format. Those in ``channels_last`` (a mask), or recorded so, need no
    layout change.
    """
    flops, moved = work(replace(ops, texts={**ops.texts, "dtype": Texts.same(dtype, len(ops))}))
    memory = moved / memory_gbyte_s(gpu)
    c = ops.integers
    grouped = c["groups"] > 1
    rates = sustained_tflops(gpu, "fp32", "grouped"), sustained_tflops(gpu, "fp32", "conv")
    vector = flops / (np.where(grouped, *rates) * 1e3)
    if not on_tensor_cores(gpu, dtype):
        return np.asarray(np.maximum(vector, memory), dtype=np.float64)
    forward = ops.texts["phase"].among("fwd")
    narrow = np.minimum(c["in_channels"], c["out_channels"]) / _WIDE_CHANNELS
    share = np.where(forward, *(compute_share(gpu, dtype, family).centre for family in ("conv", "conv_backward")))
    share = share * np.clip(narrow**_NARROW_EXPONENT, _NARROWEST_SHARE, 1.0) * _whole_waves(ops, gpu)
    product = np.where(grouped, vector, flops / (gpu.matrix_tflops(dtype) * 1e3 * share))
    recorded = ops.texts["layout"].among(NHWC)
    changes = (c["in_channels"] > _IMAGE_CHANNELS) & ~grouped & ~recorded & ~np.asarray(channels_last, dtype=np.bool_)
    return np.asarray(np.maximum(product, memory) + np.where(changes, 2 * memory, 0.0), dtype=np.float64)


def _whole_waves(ops: Operators, gpu: Gpu) -> Float64:
    """The share of the device that whole waves of tiles fill; weight gradients split their sum instead."""
    c = ops.floats
    weights = ops.texts["phase"].among("wgrad")
    rows = np.ceil(c["batch"] * output_size(c, "h") * output_size(c, "w") / _TILE)
    tiles = np.maximum(rows * np.ceil(c["out_channels"] / _TILE), 1)
    # Smaller tiles and split sums fill half of the remaining device: our estimate.
    filled = tiles / (np.ceil(tiles / gpu.sm_count) * gpu.sm_count)
    return np.where(weights, 1.0, np.maximum(filled, 0.5))
