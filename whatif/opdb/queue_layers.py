"""Convolutions and products as kernels of the abstract instruction queue.

Source: Pei et al., IEEE Access 2019, §III A (the faster of im2col and FFT for a convolution, equations 4 and 5) and B.
FFT: Mathieu, Henaff and LeCun, "Fast Training of Convolutional Networks through FFTs", 2013: transform inputs, weights
and outputs, multiply point by point. Here a transform is of a tile of the image (cuDNN's FFT_TILING), the best size of
tile is searched, and of a real image half of the points are enough. Each part is a kernel, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from whatif.graph.described import DTYPE_BYTES
from whatif.graph.types import Float64
from whatif.hardware.gpu import Gpu
from whatif.opdb.instruction_queue import Units, product_s, stream_s, units_of
from whatif.opdb.rows import Operators
from whatif.opdb.work import output_size, work

Columns = Mapping[str, Float64]

# Formats of the model's SP units. With a tensor core's rate instead, its error is larger than that of a
# roofline (fp16 convolutions of an A100's recording: 72 against 65 %).
_FORMATS = ("fp32", "fp64")
# Sides of the tiles that are transformed.
_TRANSFORMED = (8, 16, 32, 64, 128, 256)
_COMPLEX_BYTES = 8.0
# A complex product is four real ones.
_COMPLEX_PRODUCTS = 4.0
# A transform of n real numbers: half of the 5 n log2 n FLOPs of a complex one (Mathieu et al. leave the factor open).
_TRANSFORM_FLOPS = 2.5


def queue_s(gpu: Gpu, ops: Operators) -> Float64:
    """Return each operator's time by the queue model, seconds, shape (n,); NaN for operators without a kernel in it.

    Covers convolutions and products, forward and backward; unknown formats and devices are NaN.
    """
    found = np.full(len(ops), np.nan)
    if ops.family not in ("conv", "matmul"):
        return found
    texts = ops.texts
    for code, dtype in enumerate(texts["dtype"].table):
        units = units_of(gpu, dtype) if dtype in _FORMATS else None
        rows = np.flatnonzero(texts["dtype"].codes == code)
        if units is None or not len(rows):
            continue
        part = ops.take(rows)
        c = part.floats
        if ops.family == "matmul":
            found[rows] = product_s(
                units, c["batch"], c["m"], c["n"], c["k"], element_bytes=DTYPE_BYTES[dtype],
                moved_bytes=work(part)[1],
            )  # fmt: skip
            continue
        for number, phase in enumerate(texts["phase"].table):
            chosen = part.texts["phase"].codes == number
            if chosen.any():
                sizes = {name: column[chosen] for name, column in c.items()}
                found[rows[chosen]] = conv_s(units, sizes, phase, element_bytes=DTYPE_BYTES[dtype])
    return found


def conv_s(units: Units, c: Columns, phase: str = "fwd", *, element_bytes: float = 4.0, tiled: bool = True) -> Float64:
    """Return n convolutions' times, s, shape (n,): the faster of im2col and FFT. ``phase`` "bwd" is both gradients.

    ``c`` has the attributes of the family ``conv``, shape (n,) each. FFT is for fp32 alone.
    """
    if phase == "bwd":
        both = (conv_s(units, c, gradient, element_bytes=element_bytes, tiled=tiled) for gradient in ("dgrad", "wgrad"))
        return np.asarray(sum(both))
    direct = im2col_s(units, c, phase, element_bytes=element_bytes)
    return np.minimum(direct, fft_s(units, c, phase, tiled=tiled)) if element_bytes == 4 else direct


def im2col_s(units: Units, c: Columns, phase: str = "fwd", *, element_bytes: float = 4.0) -> Float64:
    """Return n convolutions as one matrix product each, seconds, shape (n,).

    The columns are never written out: each block gathers its own (cuDNN's implicit GEMM).
    """
    groups = np.maximum(c["groups"], 1)
    taps = c["kernel_h"] * c["kernel_w"]
    c_in, c_out = c["in_channels"] / groups, c["out_channels"] / groups
    inputs = c["batch"] * c["in_h"] * c["in_w"]
    outputs = c["batch"] * output_size(c, "h") * output_size(c, "w")
    m, n, k = {
        "fwd": (c_out, outputs, c_in * taps),
        # A stride leaves the share outputs / inputs of the outputs that an input contributes to.
        "dgrad": (c_in, inputs, c_out * taps * outputs / np.maximum(inputs, 1)),
        "wgrad": (c_out, c_in * taps, outputs),
    }[phase]
    elements = groups * (c_in * inputs + c_out * outputs + c_in * c_out * taps)
    return product_s(units, groups, m, n, k, element_bytes=element_bytes, moved_bytes=elements * element_bytes)


def fft_s(units: Units, c: Columns, phase: str = "fwd", *, tiled: bool = True) -> Float64:
    """Return n convolutions by transforms, seconds, shape (n,); infinite with strides, dilations or groups.

    If not ``tiled``, the whole image is transformed, with as many points as its side, padding and kernel need, a power
    of two.
    """
    out_h, out_w = output_size(c, "h"), output_size(c, "w")
    is_plain = (c["stride_h"] == 1) & (c["stride_w"] == 1) & (c["dilation_h"] == 1) & (c["dilation_w"] == 1)
    is_plain &= c["groups"] == 1
    full_side = np.maximum(out_h + c["kernel_h"], out_w + c["kernel_w"]) - 1
    best = np.full(np.shape(out_h), np.inf)
    for side in _TRANSFORMED:
        kept_h, kept_w = side - c["kernel_h"] + 1, side - c["kernel_w"] + 1
        able = is_plain & (kept_h > 0) & (kept_w > 0)
        if not tiled:
            able &= (side >= full_side) & (side < 2 * full_side)
        if not able.any():
            continue
        tiles = np.ceil(out_h / np.maximum(kept_h, 1)) * np.ceil(out_w / np.maximum(kept_w, 1))
        best = np.where(able, np.minimum(best, _transformed_s(units, c, phase, side, tiles)), best)
    return best


def _transformed_s(units: Units, c: Columns, phase: str, side: int, tiles: Float64) -> Float64:
    points = float(side * (side // 2 + 1))
    images = c["batch"] * tiles
    m, n, k = {
        "fwd": (c["out_channels"], images, c["in_channels"]),
        "dgrad": (c["in_channels"], images, c["out_channels"]),
        "wgrad": (c["out_channels"], c["in_channels"], images),
    }[phase]
    # Both operands are transformed, and their product is transformed back.
    parts = (m * k, k * n, m * n)
    transforms = sum(
        stream_s(
            units, read_bytes=part * side * side * 4, written_bytes=part * points * _COMPLEX_BYTES,
            flops=part * _TRANSFORM_FLOPS * side * side * np.log2(side * side),
        )
        for part in parts
    )  # fmt: skip
    pointwise = product_s(
        units, np.full(np.shape(tiles), points), m, n, k, element_bytes=_COMPLEX_BYTES,
        moved_bytes=(parts[0] + parts[1] + parts[2]) * points * _COMPLEX_BYTES, products=_COMPLEX_PRODUCTS,
    )  # fmt: skip
    return np.asarray(transforms + pointwise)
