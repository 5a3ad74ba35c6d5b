"""Convolutions on tensor cores: the time of each in either layout, and the layout changes around it.

Tensor cores convolve with channels innermost (NHWC; NVIDIA, "Convolutional Layers User's Guide"). Around a convolution
of tensors in PyTorch's default layout (NCHW) cuDNN transposes the input and the output; depthwise and grouped
ones have dedicated kernels in either layout, which are bound by their loads, and some of which are very slow.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from msgspec.structs import replace

from whatif.graph.described import DTYPE_BYTES, Described
from whatif.graph.types import Bool, Float64, Int64
from whatif.hardware.gpu import Gpu
from whatif.hardware.roofline import memory_gbyte_s, on_tensor_cores, sustained_tflops
from whatif.opdb.rows import Operators
from whatif.opdb.work import output_size, work

NHWC = "nhwc"

# Rows and columns of a tile of the product, and the step of its sum.
_TILE, _TILE_SUM = 64, 32
# Time in NCHW and in NHWC over that of a convolution's bytes (dense: of its bytes, or of its tiles at the sustained
# rate). Chosen on timm's training steps under AMP (RTX 3090, PyTorch 1.12, both layouts) by `python -m
# benchmarks.published timm --fit`, which reports the error on held-out families of models.
FACTORS = {
    "dense 1x1": (0.76, 0.79),
    "dense": (0.93, 0.93),
    # Kernels load 16 bytes of a pixel of the input at once, or less where its channels do not divide by that.
    "dense, by 8 bytes": (0.93, 2.25),
    "dense, by 4 bytes": (1.4, 5.6),
    # By the kernel's longer side and stride. NCHW: PyTorch's own kernels, and cuDNN's for sides up to 5. NHWC: cuDNN's,
    # which has none above 7.
    "depthwise 3": (2.3, 3.0),
    "depthwise 3 strided": (4.0, 3.5),
    "depthwise 5": (4.2, 2.0),
    "depthwise 5 strided": (11.0, 5.5),
    "depthwise 7": (16.0, 3.5),
    "depthwise 7 strided": (31.0, 42.0),
    "depthwise large": (25.0, 84.0),
    # By the channels of a group, and by groups. Added to the operations at the sustained rate. cuDNN's kernels for
    # NHWC take 4, 8, 16 or 32 channels of many groups; other shapes run in ever slower ones.
    "grouped": (4.0, 1.6),
    "grouped, uneven": (5.3, 7.4),  # a number of groups that is no multiple of eight
    "grouped, odd": (9.0, 15.0),  # other widths, with at most eight groups
    "grouped, unequal": (5.5, 32.0),  # different numbers of outputs and inputs
    "grouped, few": (5.5, 47.0),
    "grouped, wide": (6.0, 72.0),
}
_KERNEL_WIDTHS = (4, 8, 16, 32)
_LOADED_BYTES, _FIRST_LAYERS = 16, 4  # cuDNN has kernels for the few channels of images
_NARROW_GROUP, _WIDE_GROUP, _FEW_GROUPS, _EIGHT = 8, 48, 4, 8
# Time in NHWC over NCHW of operators without an NHWC kernel: group norm (it copies), and other libraries' (that of
# in-place activated batch norm strides through the image).
GROUP_NORM_NHWC, CUSTOM_NHWC = 2.1, 25.0
# Factors of the nominal 90 % range: for dense ones from the spread over models, for the others over their classes.
DENSE_SPREAD, OTHER_SPREAD = 1.4, 2.0


def tensor_convolutions(gpu: Gpu, ops: Operators) -> tuple[Float64, Float64, Float64]:
    """Return the time of n convolutions on tensor cores and its nominal 90 % range, seconds, shape (n,) each.

    Excludes layout changes around them (``layout_changes``). NaN in formats that the device has no tensor
    cores for. A call that computes both gradients takes as long as both.
    """
    dtypes, forward = ops.texts["dtype"], ops.texts["phase"].among("fwd")
    sustained = np.array([_rates(gpu, dtype) for dtype in dtypes.table] or [(np.nan, np.nan)])[dtypes.codes]
    rates = np.where(forward, sustained[:, 0], sustained[:, 1])
    gradients = ops.texts["phase"].among("bwd") + 1.0
    memory_s = work(ops)[1] / 1e9 / memory_gbyte_s(gpu)
    groups = ops.integers["groups"] > 1
    table = np.array([FACTORS[name] for name in FACTORS])
    factor = table[kinds(ops), ops.texts["layout"].among(NHWC).astype(np.int64)]
    # Short loads slow the bytes, not the arithmetic.
    arithmetic_s = _tiled_flops(ops) * gradients / rates * np.minimum(factor, FACTORS["dense"][0])
    dense = np.maximum(arithmetic_s, memory_s * factor)
    # The arithmetic of a depthwise convolution is negligible beside its bytes.
    grouped = factor * memory_s + np.where(is_depthwise(ops), 0.0, work(ops)[0] / rates)
    t = np.where(groups, grouped, dense) + np.where(np.isnan(rates), np.nan, 0.0)
    spread = np.where(groups | (_loaded_bytes(ops) < _LOADED_BYTES), OTHER_SPREAD, DENSE_SPREAD)
    return t, t / spread, t * spread


def _rates(gpu: Gpu, dtype: str) -> tuple[float, float]:
    """Sustained FLOP/s of convolutions and their gradients; NaN without tensor cores for the format."""
    if not on_tensor_cores(gpu, dtype):
        return np.nan, np.nan
    return sustained_tflops(gpu, dtype, "conv") * 1e12, sustained_tflops(gpu, dtype, "conv_backward") * 1e12


def kinds(ops: Operators) -> Int64:
    """Return the kind of each convolution, shape (n,): an index into ``FACTORS``."""
    c = ops.integers
    side, strided = np.maximum(c["kernel_h"], c["kernel_w"]), np.where(c["stride_h"] > 1, " strided", "")
    groups = np.maximum(c["groups"], 1)
    width, outputs = c["in_channels"] // groups, c["out_channels"] // groups
    wide, few_groups = np.maximum(width, outputs) > _WIDE_GROUP, groups <= _FEW_GROUPS
    odd = ~np.isin(width, _KERNEL_WIDTHS) | ((groups <= _EIGHT) & (width < max(_KERNEL_WIDTHS)))
    loaded = _loaded_bytes(ops)
    dense = np.select(
        [loaded < _LOADED_BYTES // 2, loaded < _LOADED_BYTES, side == 1],
        ["dense, by 4 bytes", "dense, by 8 bytes", "dense 1x1"],
        "dense",
    )
    sides = np.select([side <= 3, side <= 5, side <= 7], ["3", "5", "7"], "large")
    depthwise = np.char.add(np.char.add("depthwise ", sides), np.where(side <= 7, strided, ""))
    named = np.select(
        [
            groups == 1, is_depthwise(ops), wide, few_groups & (width > _NARROW_GROUP), width != outputs, odd,
            groups % _EIGHT > 0,
        ],
        [
            dense, depthwise, "grouped, wide", "grouped, few", "grouped, unequal",
            "grouped, odd", "grouped, uneven",
        ],
        "grouped",
    )  # fmt: skip
    return np.array([list(FACTORS).index(name) for name in named.tolist()], dtype=np.int64)


def _loaded_bytes(ops: Operators) -> Int64:
    """Return the largest power of two, at most 16, that divides the bytes of a pixel of the input, shape (n,)."""
    channels, dtypes = ops.integers["in_channels"], ops.texts["dtype"]
    size = np.array([int(DTYPE_BYTES.get(dtype, 4)) for dtype in dtypes.table] or [4])[dtypes.codes]
    pixel = np.where(channels > _FIRST_LAYERS, channels * size, _LOADED_BYTES)
    return np.asarray(np.gcd(pixel, _LOADED_BYTES), dtype=np.int64)


def is_depthwise(ops: Operators) -> Bool:
    """Return a mask of the convolutions that have a group for each channel of the input, shape (n,)."""
    groups = ops.integers["groups"]
    return np.asarray((groups > 1) & (groups == ops.integers["in_channels"]), dtype=np.bool_)


@lru_cache(maxsize=4096)
def layout_changes(gpu: Gpu, conv: Described) -> tuple[tuple[str, float], ...]:
    """Return the transposes around one convolution of tensors in NCHW: direction, and bytes of the tensor.

    Only for input and output; weights are small beside them. None around depthwise and grouped convolutions, without
    tensor cores, or on GPUs of other vendors, for which they are unknown.
    """
    c = {name: np.array(float(value)) for name, value in conv.integers}
    tensor_cores = gpu.vendor == "nvidia" and on_tensor_cores(gpu, conv.dtype)
    if conv.family != "conv" or not tensor_cores or conv.layout == NHWC or c["groups"] > 1:
        return ()
    size = DTYPE_BYTES[conv.dtype]
    x = float(c["batch"] * c["in_channels"] * c["in_h"] * c["in_w"] * size)
    y = float(c["batch"] * c["out_channels"] * output_size(c, "h") * output_size(c, "w") * size)
    read, written = {
        "fwd": ([x], [y]), "dgrad": ([y], [x]), "wgrad": ([x, y], []), "bwd": ([x, y, y], [x]),
    }[conv.phase]  # fmt: skip
    return (*(("nchwToNhwc", size) for size in read), *(("nhwcToNchw", size) for size in written))


def converted(operator: Described, dtype: str, layout: str) -> Described:
    """Return the same operator in another number format and layout ("nhwc", or "" for NCHW)."""
    return replace(operator, dtype=dtype, layout=layout if operator.family == "conv" else operator.layout)


def _tiled_flops(ops: Operators) -> Float64:
    """The operations of the implicit product in whole tiles; of one gradient if a call computes both."""
    c = ops.floats
    taps, outputs = c["kernel_h"] * c["kernel_w"], c["batch"] * output_size(c, "h") * output_size(c, "w")
    dgrad, wgrad = ops.texts["phase"].among("dgrad"), ops.texts["phase"].among("wgrad")
    inputs = c["batch"] * c["in_h"] * c["in_w"]
    strides = np.maximum(c["stride_h"] * c["stride_w"], 1)
    m = np.where(wgrad, c["in_channels"] * taps, np.where(dgrad, inputs, outputs))
    n = np.where(dgrad, c["in_channels"], c["out_channels"])
    k = np.where(wgrad, outputs, np.where(dgrad, c["out_channels"] * taps / strides, c["in_channels"] * taps))
    padded = [np.ceil(size / tile) * tile for size, tile in ((m, _TILE), (n, _TILE), (k, _TILE_SUM))]
    return np.asarray(2 * padded[0] * padded[1] * padded[2])
