"""What kernels sustain on a device: bytes and FLOPs a second, the shortest kernel, the gap inside a CUDA graph.

The one roofline of the package: its shares of the data sheets' peaks are in ``architectures.toml``, a source beside
each. Source: Williams et al., "Roofline", CACM 2009.
"""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib import resources
from typing import Literal, NamedTuple

from whatif.hardware.gpu import Gpu

# What multiplies on the matrix units. "vector" and "conv_vector" are of the formats that run beside these.
MatrixWork = Literal[
    "matmul", "matmul_backward", "conv", "conv_backward", "grouped", "attention", "attention_backward", "rnn"
]
_TENSOR_DTYPES = ("tf32", "fp16", "bf16", "fp8")
# Whose architecture stands for a device that is not known, or named.
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
    """Return the bytes that large kernels read and write, GB/s (1 GB/s is 1 byte/ns)."""
    return gpu.memory_gbyte_s * memory_share(gpu).centre


def normalization_share(gpu: Gpu | None, name: str) -> float:
    """Return the share of ``memory_share`` that a normalization reaches, which reads its input more than once."""
    return _fact(gpu, name if name == "layer_norm" else "softmax").centre


def cast_gbyte_s(gpu: Gpu) -> float:
    """Return the bytes that kernels read and write which change the number format, GB/s."""
    return memory_gbyte_s(gpu) * _fact(gpu, "cast").centre


def over_other_devices(gpu: Gpu, name: str, dtype: str) -> float:
    """Return what kernels take over what the measurements of other devices say of them, as whole steps show it.

    ``name`` is a family's or an operator's. 1 where no steps of the device are known.
    """
    if name == "matmul" and dtype not in ("fp16", "bf16"):
        return 1.0
    return _fact(gpu, f"{name}_over_others").centre


def on_tensor_cores(gpu: Gpu, dtype: str) -> bool:
    """Say whether a device has tensor cores for the format."""
    return dtype in _TENSOR_DTYPES and getattr(gpu, f"{dtype}_tensor_tflops", None) is not None


def compute_share(gpu: Gpu | None, dtype: str, what: MatrixWork = "matmul") -> Spread:
    """Return the share of the device's peak in ``dtype`` (of ``MATRIX_DTYPES``) that large kernels reach.

    An unknown device counts as one of NVIDIA's with units for the format. Products whose rate a GPU's file gives take
    that one.
    """
    if what == "matmul_backward":
        # Operands of 16 bits are transposed on the way to the units, those of TF32 are not.
        if dtype == "tf32" and (gpu is None or on_tensor_cores(gpu, dtype)):
            return _fact(gpu, "tf32_gradients")
        what = "matmul"
    units = gpu is None or on_tensor_cores(gpu, dtype)
    if what == "matmul" and gpu is not None and (measured := _measured_share(gpu, dtype)):
        return Spread(measured, measured, measured)
    if what == "matmul" and not units:
        return _fact(gpu, "vector")
    if what in ("conv", "conv_backward") and not units:
        # Clocks that sag under load slow convolutions as well.
        share = _fact(gpu, "conv_vector").centre * compute_share(gpu, dtype).centre / _fact(gpu, "vector").centre
        return Spread(share, share, share)
    return _fact(gpu, what)


def sustained_tflops(gpu: Gpu, dtype: str, what: MatrixWork = "matmul") -> float:
    """Return the rate that large kernels sustain in ``dtype``, of ``MATRIX_DTYPES``, TFLOP/s."""
    return gpu.matrix_tflops(dtype) * compute_share(gpu, dtype, what).centre


def sustained_vector_tflops(gpu: Gpu, dtype: str) -> float:
    """Return the rate that arithmetic outside of the matrix units sustains, TFLOP/s."""
    return gpu.vector_tflops(dtype) * _fact(gpu, "vector").centre


def kernel_floor_ns(gpu: Gpu | None) -> int:
    """Return what the shortest kernels take on a device, ns."""
    return round(_fact(gpu, "kernel_floor_us").centre * 1e3)


def graph_gap_ns(gpu: Gpu | None) -> Spread:
    """Return the time between two kernels of a CUDA graph, ns."""
    return Spread(*(round(us * 1e3) for us in _fact(gpu, "graph_gap_us")))


def _measured_share(gpu: Gpu, dtype: str) -> float | None:
    """The share of the peak that the best measured products reach, where the GPU's file has it."""
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
