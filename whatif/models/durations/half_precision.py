"""The kernels that autocast runs in half precision, the share of bytes left, and the speedup of bf16 on a CPU.

Sources: Micikevicius et al., "Mixed Precision Training", ICLR 2018 (what stays in fp32); Daydream, section 5.1 and
Algorithm 3 (memory-bound kernels twice, compute-bound kernels three times as fast); PyTorch's autocast op reference
(docs/source/amp.rst).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from whatif.graph.kernels import DTYPES, MATRIX_FAMILIES, KernelFamily
from whatif.graph.recorded import Rates
from whatif.graph.types import Bool, Float64, among


class _Shrink(NamedTuple):
    """The share of the time above the floor left with a family's operands in half: centre and nominal 90 % range."""

    centre: float
    low: float
    high: float


_UNCHANGED = _Shrink(1.0, 1.0, 1.0)

_SHRINK: dict[KernelFamily, _Shrink] = {
    # Daydream, section 5.1: memory-bound kernels move half the bits. The range: some operands stay fp32 (residuals,
    # losses).
    KernelFamily.ELEMENTWISE: _Shrink(0.5, 0.45, 0.8),
    # The int64 indices of a max-pooling do not shrink.
    KernelFamily.POOLING: _Shrink(0.5, 0.4, 0.9),
    # batch_norm is on no autocast list: it takes the half activations.
    KernelFamily.NORMALIZATION: _Shrink(0.5, 0.45, 0.75),
    # On autocast's fp32 list, with its input cast before: unchanged.
    KernelFamily.LAYER_NORM: _Shrink(1.0, 0.75, 1.1),
    # On autocast's fp32 list, but reads half and writes fp32 in one kernel (6 of 8 bytes; backward 10 of 12).
    KernelFamily.SOFTMAX: _Shrink(0.8, 0.7, 1.05),
    # `sum` and norms are on the fp32 list but read half operands; sums of a loss stay fp32.
    KernelFamily.REDUCTION: _Shrink(0.6, 0.5, 1.0),
    # `embedding` is on no list and its weight is fp32; index_put promotes to the widest.
    KernelFamily.INDEXING: _Shrink(1.0, 0.7, 1.0),
    # Tensor cores want NHWC: these kernels halve, vanish or appear as cuDNN picks other algorithms.
    KernelFamily.LAYOUT: _Shrink(0.5, 0.0, 1.3),
    KernelFamily.CAST: _Shrink(1.0, 0.5, 1.0),
    # Generated kernels are memory-bound; those that fuse a softmax or a norm keep part of their traffic in fp32.
    KernelFamily.FUSED: _Shrink(0.6, 0.5, 1.0),
    KernelFamily.OTHER: _Shrink(1.0, 0.5, 1.0),
    # Master weights and their gradients stay fp32 (Micikevicius et al., section 3.1); so do the bytes of copies and
    # collectives.
    KernelFamily.OPTIMIZER: _UNCHANGED,
    KernelFamily.COPY: _UNCHANGED,
    KernelFamily.MEMSET: _UNCHANGED,
    KernelFamily.COMMUNICATION: _UNCHANGED,
}


# The same as a table, shape (3, n_families + 1): centre, low, high; families without a row, and none (-1), stay.
_SHRINK_BY_FAMILY = np.array([_SHRINK.get(member, _UNCHANGED) for member in KernelFamily] + [_UNCHANGED]).T


def bytes_left(family: npt.NDArray[np.integer[Any]]) -> Float64:
    """Return the share of bytes that each kernel keeps under autocast, by family, and its range, shape (3, n)."""
    return _SHRINK_BY_FAMILY.take(family, axis=1)


def _code(*dtypes: str) -> list[int]:
    return [DTYPES.index(dtype) for dtype in dtypes]


def is_half(dtype: npt.NDArray[np.integer[Any]]) -> Bool:
    """Select kernels in half precision or less, shape of `dtype` (positions in `kernels.DTYPES`)."""
    return among(dtype, _code("fp16", "bf16", "fp8"))


def runs_half_already(
    family: npt.NDArray[np.integer[Any]], dtype: npt.NDArray[np.integer[Any]], duration_ns: npt.NDArray[Any]
) -> bool:
    """Return whether matrix work spends more time in half precision than in fp32 or TF32: a step under autocast."""
    matrix = among(family, MATRIX_FAMILIES)
    single = among(dtype, _code("fp32", "tf32"))
    return bool(duration_ns[matrix & is_half(dtype)].sum() > duration_ns[matrix & single].sum())


def runs_in_fp32(family: npt.NDArray[np.integer[Any]], dtype: npt.NDArray[np.integer[Any]], duration: Float64) -> Bool:
    """Select the kernels that autocast can change: fp32, TF32, and unnamed ones of a step that is not half already."""
    single = among(dtype, _code("fp32", "tf32"))
    # An unnamed attention kernel is assumed to be half: libraries name the format of their fp32 variants.
    unnamed = among(dtype, _code("")) & (family != KernelFamily.ATTENTION)
    # In a step under autocast, the kernels left in fp32 stay there; only a matrix kernel could still change.
    matrix = among(family, MATRIX_FAMILIES)
    return single & matrix if runs_half_already(family, dtype, duration) else single | unnamed


# Daydream, section 5.1: "up to 3x on the most compute-intensive workloads", for Volta and Turing, whose fp16 and
# fp32 peaks have the ratios 8 (V100) and 4 (RTX 2080 Ti with fp32 accumulation; Daydream's own device).
_DAYDREAM_MATRIX_SPEEDUP = 3.0
# Speedup = (ratio of the rates) ** exponent: 1 for equal rates, and Daydream's 3 half-way between those two.
SPEEDUP_EXPONENT = float(np.log(_DAYDREAM_MATRIX_SPEEDUP) / np.log(np.sqrt(4 * 8)))
# Our estimate, not measured: thin products gain little (2x of 8), large aligned ones nearly the ratio of the peaks
# (6.5x of 8).
SPEEDUP_EXPONENT_LOW, SPEEDUP_EXPONENT_HIGH = 0.33, 0.9
# AVX-512 BF16 multiplies twice as many pairs an instruction as fp32 (Intel's instruction set reference, VDPBF16PS).
_CPU_GAIN = 2.0
# AMX multiplies 16 times as many; without a measured rate the CPU may have either.
_CPU_GAIN_RANGE = (1.0, 16.0)
# CPUs without bf16 instructions emulate it 50 to 80 times slower than fp32; far less is damage.
_CPU_GAIN_DAMAGED = 1e-4
# Half of an operator's operands come from a cache, where smaller operands gain nothing: our estimate, not measured.
_CPU_MEMORY = _Shrink(0.75, 0.45, 1.3)


def cpu_bf16_gain(rates: Rates | None) -> float | None:
    """Return bf16 over fp32 rate of a CPU, below 1 if it emulates bf16; None if the recording lacks the rates."""
    if rates is None or rates.fp32_gflops is None or rates.bf16_gflops is None:
        return None
    gain = rates.bf16_gflops / rates.fp32_gflops
    return gain if gain > _CPU_GAIN_DAMAGED else None


def cpu_half_precision_ratio(
    family: npt.NDArray[np.integer[Any]], dtype: npt.NDArray[np.integer[Any]], rates: Rates | None
) -> tuple[Float64, Float64, Float64]:
    """Return predicted / recorded duration of CPU operators under bf16 autocast, and a nominal 90 % range of it.

    All arrays have shape (n,). `rates` are measured with a product that fits a cache. An operator's speedup grows with
    the ratio of the rates as on a GPU (`SPEEDUP_EXPONENT`); a ratio below 1 (emulated bf16) slows it down.
    """
    measured = cpu_bf16_gain(rates)
    gain = _CPU_GAIN if measured is None else measured
    best, worst = _CPU_GAIN_RANGE[::-1] if measured is None else (gain, gain)
    centre, low, high = (np.ones(len(family)) for _ in range(3))
    single = among(dtype, _code("fp32", ""))
    matrix = single & among(family, MATRIX_FAMILIES)
    centre[matrix] = gain**-SPEEDUP_EXPONENT
    low[matrix], high[matrix] = sorted((best**-SPEEDUP_EXPONENT_HIGH, worst**-SPEEDUP_EXPONENT_LOW))
    moved = (KernelFamily.ELEMENTWISE, KernelFamily.POOLING, KernelFamily.NORMALIZATION, KernelFamily.COPY)
    memory = single & among(family, moved)
    centre[memory], low[memory], high[memory] = _CPU_MEMORY
    return centre, low, high
