"""Convolutions on tensor cores: their layout, what changes it around them, and the time of each in either layout.

Tensor cores convolve with channels innermost (NHWC; NVIDIA, "Convolutional Layers User's Guide"). Around a convolution
of tensors in PyTorch's usual layout (NCHW) cuDNN transposes what is read and what is written; depthwise and grouped
ones have kernels of their own in either layout, which are bound by what they load, and some of which are very slow.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from whatif.graph.described import DTYPE_BYTES, Described
from whatif.graph.types import Bool, Float64
from whatif.hardware.gpu import Gpu
from whatif.hardware.roofline import memory_gbyte_s, on_tensor_cores, sustained_tflops
from whatif.opdb.rows import Operators
from whatif.opdb.work import output_size, work

NHWC = "nhwc"

# All factors below: chosen on timm's training steps under AMP (RTX 3090, PyTorch 1.12, 430 models, both layouts) by
# `python -m benchmarks.published.fit_timm`, which reports their error on families of models that were left out.
#
# Time of a dense convolution over that of its tiles at the sustained rate or of its bytes: kernels of 1x1, and others.
DENSE_1X1, DENSE = 0.87, 0.93
# Rows and columns of a tile of the product, and the step of its sum.
_TILE, _TILE_SUM = 64, 32
# Time of a depthwise convolution over that of its bytes, by the kernel's side and for strides of 1 and more. NCHW:
# PyTorch's own kernels, and cuDNN's for sides of 1, 3 and 5; NHWC: cuDNN's, which has none for sides above 7.
DEPTHWISE = {
    "nchw": {3: (2.7, 3.4), 5: (6.7, 9.9), 7: (16.0, 31.0), 9: (24.0, 31.0)},
    "nhwc": {3: (3.4, 3.5), 5: (3.2, 4.5), 7: (7.7, 28.0), 9: (86.0, 86.0)},
}
# Time of a grouped convolution over that of its bytes, beside its FLOPs at the sustained rate, by the channels of a
# group. cuDNN has fast NHWC kernels for groups of 4, 8, 16 or 32 channels in 32 groups or a multiple of that.
GROUPED = {
    "nchw": {"fast": 2.2, "thin": 12.0, "middle": 6.4, "wide": 6.5, "unequal": 5.0},
    "nhwc": {"fast": 2.0, "thin": 21.0, "middle": 30.0, "wide": 75.0, "unequal": 31.0},
}
_FAST_WIDTHS, _FAST_GROUPS, _THIN, _MIDDLE = (4, 8, 16, 32), 32, 8, 32
# What has no kernel for NHWC, over its time in NCHW: group norm (it copies), and operators of other libraries (that of
# in-place activated batch norm strides through the image).
GROUP_NORM_NHWC, CUSTOM_NHWC = 2.1, 12.0
# Either way of the estimate, nominal 90 %: dense ones by what models differ by, the others by what their classes do.
DENSE_SPREAD, OTHER_SPREAD = 1.4, 2.0


def tensor_convolutions(gpu: Gpu, ops: Operators) -> tuple[Float64, Float64, Float64]:
    """Return the time of n convolutions on tensor cores and its nominal 90 % range, seconds, shape (n,) each.

    Without what changes the layout around them (``layout_changes``). NaN in formats that the device has no tensor
    cores for. One call that gives both gradients takes as long as both.
    """
    dtypes = ops.texts["dtype"]
    rates = np.array(
        [sustained_tflops(gpu, d) * 1e12 if on_tensor_cores(gpu, d) else np.nan for d in dtypes.table] or [np.nan]
    )[dtypes.codes]
    both = _of_text(ops, "phase", "bwd") + 1.0
    memory_s = work(ops)[1] / 1e9 / memory_gbyte_s(gpu)
    nhwc = _of_text(ops, "layout", NHWC)
    taps = ops.integers["kernel_h"] * ops.integers["kernel_w"]
    dense = np.maximum(_tiled_flops(ops) * both / rates, memory_s) * np.where(taps == 1, DENSE_1X1, DENSE)
    flops_s = work(ops)[0] / rates
    apart = [_depthwise(ops, layout) * memory_s for layout in ("nchw", NHWC)]
    grouped = [_grouped(ops, layout) * memory_s + flops_s for layout in ("nchw", NHWC)]
    groups, depthwise = ops.integers["groups"] > 1, is_depthwise(ops)
    t = np.where(depthwise, np.where(nhwc, apart[1], apart[0]), np.where(nhwc, grouped[1], grouped[0]))
    t = np.where(groups, t, dense) + np.where(np.isnan(rates), np.nan, 0.0)
    spread = np.where(groups, OTHER_SPREAD, DENSE_SPREAD)
    return t, t / spread, t * spread


def is_depthwise(ops: Operators) -> Bool:
    """Return a mask of the convolutions that have a group for each channel of the input, shape (n,)."""
    groups = ops.integers["groups"]
    return np.asarray((groups > 1) & (groups == ops.integers["in_channels"]), dtype=np.bool_)


def layout_changes(gpu: Gpu, what: Described) -> list[tuple[str, float]]:
    """Return what is transposed around one convolution of tensors in NCHW: the way, and the bytes of the tensor.

    Its larger tensors; weights are small beside them. Nothing around depthwise and grouped convolutions, and without
    tensor cores. On GPUs of other vendors none is known.
    """
    c = {name: np.array(float(value)) for name, value in what.integers}
    tensor_cores = gpu.vendor == "nvidia" and on_tensor_cores(gpu, what.dtype)
    if what.family != "conv" or not tensor_cores or what.layout == NHWC or c["groups"] > 1:
        return []
    size = DTYPE_BYTES[what.dtype]
    x = float(c["batch"] * c["in_channels"] * c["in_h"] * c["in_w"] * size)
    y = float(c["batch"] * c["out_channels"] * output_size(c, "h") * output_size(c, "w") * size)
    read, written = {
        "fwd": ([x], [y]), "dgrad": ([y], [x]), "wgrad": ([x, y], []), "bwd": ([x, y, y], [x]),
    }[what.phase]  # fmt: skip
    return [("nchwToNhwc", size) for size in read] + [("nhwcToNchw", size) for size in written]


def converted(what: Described, dtype: str, layout: str) -> Described:
    """Return the same operator in another number format and layout ("nhwc", or "" for NCHW)."""
    return replace(what, dtype=dtype, layout=layout if what.family == "conv" else what.layout)


def _of_text(ops: Operators, column: str, text: str) -> Bool:
    texts = ops.texts[column]
    return np.array([told == text for told in texts.table] or [False])[texts.codes]


def _tiled_flops(ops: Operators) -> Float64:
    """The operations of whole tiles, of one gradient where a call gives both: an implicit product's."""
    c = {name: column.astype(np.float64) for name, column in ops.integers.items()}
    taps, outputs = c["kernel_h"] * c["kernel_w"], c["batch"] * output_size(c, "h") * output_size(c, "w")
    dgrad, wgrad = _of_text(ops, "phase", "dgrad"), _of_text(ops, "phase", "wgrad")
    inputs = c["batch"] * c["in_h"] * c["in_w"]
    strides = np.maximum(c["stride_h"] * c["stride_w"], 1)
    m = np.where(wgrad, c["in_channels"] * taps, np.where(dgrad, inputs, outputs))
    n = np.where(dgrad, c["in_channels"], c["out_channels"])
    k = np.where(wgrad, outputs, np.where(dgrad, c["out_channels"] * taps / strides, c["in_channels"] * taps))
    whole = [np.ceil(size / tile) * tile for size, tile in ((m, _TILE), (n, _TILE), (k, _TILE_SUM))]
    return np.asarray(2 * whole[0] * whole[1] * whole[2])


def _depthwise(ops: Operators, layout: str) -> Float64:
    c = ops.integers
    side, strided = np.maximum(c["kernel_h"], c["kernel_w"]), c["stride_h"] > 1
    factors = [np.where(strided, *DEPTHWISE[layout][of][::-1]) for of in (3, 5, 7, 9)]
    return np.select([side <= 3, side <= 5, side <= 7], factors[:3], factors[3])


def _grouped(ops: Operators, layout: str) -> Float64:
    c, factor = ops.integers, GROUPED[layout]
    groups = np.maximum(c["groups"], 1)
    width = c["in_channels"] // groups
    fast = np.isin(width, _FAST_WIDTHS) & (groups % _FAST_GROUPS == 0)
    classes = [c["in_channels"] != c["out_channels"], fast, width <= _THIN, width <= _MIDDLE]
    found = [factor[name] for name in ("unequal", "fast", "thin", "middle")]
    return np.select(classes, found, factor["wide"])
