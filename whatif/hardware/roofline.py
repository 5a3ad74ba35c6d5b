"""Sustained rates of kernels on a device: bytes and FLOPs per second, the shortest kernel, the gap in a CUDA graph.

The only roofline of the package: its shares of the data sheets' peaks are in ``architectures.toml``, with their
sources. Source: Williams et al., "Roofline", CACM 2009.
"""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib import resources
from typing import Literal, NamedTuple

from whatif.hardware.gpu import Gpu

# Work on the matrix units. "vector" and "conv_vector" are the facts for dtypes without such units.
MatrixWork = Literal[
    "matmul", "matmul_backward", "conv", "conv_backward", "grouped", "attention", "attention_backward", "rnn"
]
_ATTENTION = ("attention", "attention_backward")
_TENSOR_DTYPES = ("tf32", "fp16", "bf16", "fp8")
# The architecture assumed for an unknown or unnamed device.
_USUAL = "nvidia"


class Spread(NamedTuple):
    """A number and the ends of its nominal 90 % range."""

    centre: float
    low: float
    high: float


def memory_share(gpu: Gpu | None) -> Spread:
    """Return the share of the data sheet's bandwidth that kernels over large tensors reach."""
    return _fact(gpu, "memory")


def memory_gbyte_s(gpu: Gpu) -> float:
    """Return the rate at which large kernels read and write, GB/s (1 GB/s is 1 byte/ns)."""
    return gpu.memory_gbyte_s * memory_share(gpu).centre


def normalization_share(gpu: Gpu | None, name: str) -> float:
    """Return the share of ``memory_share`` that a normalization reaches, as it reads its input more than once."""
    return _fact(gpu, name if name == "layer_norm" else "softmax").centre


def cast_gbyte_s(gpu: Gpu) -> float:
    """Return the rate at which kernels that convert dtypes read and write, GB/s."""
    return memory_gbyte_s(gpu) * _fact(gpu, "cast").centre


def over_other_devices(gpu: Gpu, name: str, dtype: str) -> float:
    """Return the ratio of kernel times to the estimate from other devices' measurements, as seen in whole steps.

    ``name`` is that of a family or an operator. 1 without known steps of the device.
    """
    if name == "matmul" and dtype not in ("fp16", "bf16"):
        return 1.0
    return _fact(gpu, f"{name}_over_others").centre


def on_tensor_cores(gpu: Gpu, dtype: str) -> bool:
    """Return whether a device has tensor cores for the dtype."""
    return dtype in _TENSOR_DTYPES and getattr(gpu, f"{dtype}_tensor_tflops", None) is not None


def compute_share(gpu: Gpu | None, dtype: str, kind: MatrixWork = "matmul") -> Spread:
    """Return the share of the device's peak in ``dtype`` (of ``MATRIX_DTYPES``) that large kernels reach.

    An unknown device counts as an NVIDIA device with units for the dtype. A rate of matrix products in the GPU's file
    takes precedence.
    """
    if kind == "matmul_backward":
        # Operands of 16 bits are transposed while they are loaded, those of TF32 are not.
        if dtype == "tf32" and (gpu is None or on_tensor_cores(gpu, dtype)):
            return _fact(gpu, "tf32_gradients")
        kind = "matmul"
    units = gpu is None or on_tensor_cores(gpu, dtype)
    if kind == "matmul" and gpu is not None and (measured := _measured_share(gpu, dtype)):
        return Spread(measured, measured, measured)
    if kind == "matmul" and not units:
        return _fact(gpu, "vector")
    if kind in ("conv", "conv_backward", *_ATTENTION) and not units:
        # Lower clocks under load slow them as they slow products.
        slower = compute_share(gpu, dtype).centre / _fact(gpu, "vector").centre
        share = _fact(gpu, "conv_vector" if kind.startswith("conv") else f"{kind}_vector")
        return Spread(*(end * slower for end in share))
    if dtype == "tf32" and kind in _ATTENTION:
        return _fact(gpu, f"{kind}_tf32")
    return _fact(gpu, kind)


def sustained_tflops(gpu: Gpu, dtype: str, kind: MatrixWork = "matmul") -> float:
    """Return the rate that large kernels sustain in ``dtype``, of ``MATRIX_DTYPES``, TFLOP/s.

    Fused attention of operands without units multiplies on those for TF32 (three products for each one), else in fp32.
    """
    if kind in _ATTENTION and dtype in ("fp16", "bf16", "fp32") and not on_tensor_cores(gpu, dtype):
        dtype = "tf32" if gpu.tf32_by_default else "fp32"
    return gpu.matrix_tflops(dtype) * compute_share(gpu, dtype, kind).centre


def sustained_vector_tflops(gpu: Gpu, dtype: str) -> float:
    """Return the sustained rate of arithmetic outside the matrix units, TFLOP/s."""
    return gpu.vector_tflops(dtype) * _fact(gpu, "vector").centre


def kernel_floor_ns(gpu: Gpu | None) -> int:
    """Return the time of the shortest kernels on a device, ns."""
    return round(_fact(gpu, "kernel_floor_us").centre * 1e3)


def graph_gap_ns(gpu: Gpu | None) -> Spread:
    """Return the time between two kernels of a CUDA graph, ns."""
    return Spread(*(round(us * 1e3) for us in _fact(gpu, "graph_gap_us")))


def _measured_share(gpu: Gpu, dtype: str) -> float | None:
    """Return the share of the peak of the best measured products, None if the GPU's file does not have it."""
    if dtype == "fp8" and gpu.fp8_sustained_tflops and gpu.fp8_tensor_tflops:
        return gpu.fp8_sustained_tflops / gpu.fp8_tensor_tflops
    if dtype == "fp32" and gpu.fp32_sustained_tflops:
        return gpu.fp32_sustained_tflops / gpu.matrix_tflops("fp32")
    if on_tensor_cores(gpu, dtype) and dtype != "fp8" and gpu.bf16_sustained_tflops and gpu.bf16_tensor_tflops:
        # TF32 and fp16 run on the same units as bf16.
        return gpu.bf16_sustained_tflops / gpu.bf16_tensor_tflops
    return None


def _fact(gpu: Gpu | None, name: str) -> Spread:
    tables = _architectures()
    keys = (gpu.name, gpu.compute_capability, gpu.arch, gpu.vendor, _USUAL) if gpu else (_USUAL,)
    found = next(tables[key][name] for key in keys if name in tables.get(key, {}))
    return Spread(*found) if isinstance(found, list) else Spread(found, found, found)


@lru_cache(maxsize=1)
def _architectures() -> dict[str, dict[str, float | list[float]]]:
    text = (resources.files("whatif.hardware") / "architectures.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
