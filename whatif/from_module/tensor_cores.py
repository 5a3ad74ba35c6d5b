"""Changes for tensor cores: TF32 for fp32 products, and layout changes around convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from whatif.from_module.kernel import Kernel, named
from whatif.from_module.moved_bytes import traffic
from whatif.hardware.gpu import Gpu
from whatif.opdb.tensor_convolutions import layout_changes


def on_tensor_cores(
    kernels: Sequence[Kernel], gpu: Gpu, tf32_families: Sequence[str], *, backward: bool
) -> list[Kernel]:
    """Return an operation's kernels on a GPU with tensor cores.

    fp32 products of ``tf32_families`` may be computed in TF32. Around a convolution of images in NCHW
    cuDNN transposes the input and the output (as in recordings of an H100).
    """
    found = []
    for kernel in kernels:
        if kernel.what.dtype == "fp32" and kernel.what.family in tf32_families:
            operator = replace(kernel.what, dtype="tf32")
            if backward and operator.family == "matmul":
                operator = replace(operator, phase="bwd")
            kernel = replace(kernel, name=kernel.name.replace("_fp32", "_tf32"), what=operator)
        found.append(kernel)
        # Named by direction and phase; their format is the one in memory.
        element = "fp32" if kernel.what.dtype == "tf32" else kernel.what.dtype
        found += [
            named(f"{way}_{kernel.what.phase}", "transpose", traffic(size, size, element))
            for way, size in layout_changes(gpu, kernel.what)
        ]
    return found
