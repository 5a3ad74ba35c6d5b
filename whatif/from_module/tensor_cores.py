"""What tensor cores change: TF32 for products of fp32 numbers, and the layout of what is convolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from whatif.from_module.gpu_work import Kernel, named
from whatif.from_module.moved_bytes import traffic
from whatif.graph.described import DTYPE_BYTES, Described
from whatif.opdb.work import output_size

_TENSOR_CORES = ("tf32", "fp16", "bf16")


def on_tensor_cores(kernels: Sequence[Kernel], tf32_families: Sequence[str]) -> list[Kernel]:
    """Return an operation's kernels as a GPU with tensor cores runs them.

    Products of fp32 numbers of the families named may be computed in TF32. Tensor cores convolve in the layout NHWC,
    and PyTorch's own is NCHW: cuDNN transposes what is read and what is written (seen in recordings of an H100).
    """
    found = []
    for kernel in kernels:
        if kernel.what.dtype == "fp32" and kernel.what.family in tf32_families:
            kernel = replace(
                kernel, name=kernel.name.replace("_fp32", "_tf32"), what=replace(kernel.what, dtype="tf32")
            )
        found.append(kernel)
        if kernel.what.family == "conv" and kernel.what.dtype in _TENSOR_CORES:
            # Named by what they do, and of the format that lies in memory.
            element = replace(kernel.what, dtype="fp32") if kernel.what.dtype == "tf32" else kernel.what
            found += [
                named(f"{way}_{kernel.what.phase}", "transpose", traffic(size, size, element.dtype))
                for way, size in _transposed_bytes(kernel.what)
            ]
    return found


def _transposed_bytes(what: Described) -> list[tuple[str, float]]:
    """What is transposed around a convolution, bytes each: its larger tensors; weights are small beside them."""
    c = {name: np.array(float(value)) for name, value in what.integers}
    size = DTYPE_BYTES[what.dtype]
    x = float(c["batch"] * c["in_channels"] * c["in_h"] * c["in_w"] * size)
    y = float(c["batch"] * c["out_channels"] * output_size(c, "h") * output_size(c, "w") * size)
    read, written = {"fwd": ([x], [y]), "dgrad": ([y], [x]), "wgrad": ([x, y], [])}[what.phase]
    return [("nchwToNhwc", size) for size in read] + [("nhwcToNchw", size) for size in written]
