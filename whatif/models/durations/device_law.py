"""What becomes of a kernel on another device, by data sheets and by what the recording tells of it alone.

A kernel's time has a part that any device takes (start, first wave, tail) and a part that follows the law max(FLOPs /
rate, bytes / bandwidth). The recorded time times the ratio of two laws cancels what the law misses on both devices.

Sources: Williams et al., "Roofline", CACM 2009; Yu et al., "Habitat", USENIX ATC 2021 (wave scaling: a kernel that
does not fill the device gains nothing from more multiprocessors).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whatif.graph.kernels import KERNEL_FLOOR_NS, MATRIX_FAMILIES, KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Float64, Int8, Int64, among
from whatif.hardware.gpu import Gpu
from whatif.models.durations.roofline import RATE_DTYPES, filled

# The shortest kernels on AMD devices: 3.4 us in a recording of ResNet training on MI300X (normalizations; elementwise
# kernels of a few bytes: 3.6), where NVIDIA's take 1 to 3.
AMD_FLOOR_NS = 3_400.0
# Of the bandwidth, what large elementwise kernels reach: 0.91 on V100, 0.86 on A100-SXM-80, 0.91 on H100 (medians over
# the public recordings of docs/device.md); on MI300X a quarter of them reach 0.74.
MEMORY_SHARE = {"nvidia": 0.89, "amd": 0.74}
# Of the peak of matrix products, where no best product was ever measured: our estimate for either vendor, between
# MAMF's 0.80 to 0.87 on A100 and H100, and its 0.51 on MI300X.
MATRIX_SHARE = {"nvidia": 0.8, "amd": 0.51}
# So much of the places for warps has to be filled for memory to be busy: our estimate.
_BUSY_MEMORY_FILL = 0.5
# A nominal 90 % range of a ratio of two laws: between boards of one architecture, between a vendor's architectures,
# between vendors, whose libraries are others; and by how much more where the work is not known. Our estimate;
# docs/device.md says how often it holds.
SPREADS, UNKNOWN_SPREAD = (1.2, 1.45, 2.0), 1.4
# What the shortest kernels take differs by clocks and drivers too: 1 to 3 us on NVIDIA's devices alone.
FLOOR_SPREADS = (1.2, 1.4, 1.6)
# Multiprocessors and clocks of an unknown device: from a T4's to an H100's, so that a ratio may be anything within.
NO_FACTS_SPREAD = 4.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """New over recorded time of n kernels, and a nominal 90 % range of it, shape (n,) each."""

    centre: Float64
    low: Float64
    high: Float64

    def put(self, at: Int64, other: Ratio) -> None:
        """Let the kernels ``at`` (places) have the ratios of ``other``, one each."""
        self.centre[at], self.low[at], self.high[at] = other.centre, other.low, other.high


def floor_ns(gpu: Gpu) -> float:
    """Return what the shortest kernels take on a device, ns."""
    return AMD_FLOOR_NS if gpu.vendor == "amd" else float(KERNEL_FLOOR_NS)


def reached_tflops(gpu: Gpu, dtype: str) -> float:
    """Return the rate that good matrix products in ``dtype`` reach, TFLOP/s: measured, or a usual share of the peak."""
    peak = gpu.matrix_tflops(dtype)
    measured = {"fp8": gpu.fp8_sustained_tflops, "fp32": gpu.fp32_sustained_tflops}.get(dtype)
    if dtype in ("fp16", "bf16", "tf32") and gpu.bf16_sustained_tflops and gpu.bf16_tensor_tflops:
        # TF32 and fp16 run on the same units as bf16.
        measured = gpu.bf16_sustained_tflops / gpu.bf16_tensor_tflops * peak
    return measured or MATRIX_SHARE.get(gpu.vendor, MATRIX_SHARE["nvidia"]) * peak


def memory_bytes_per_ns(gpu: Gpu) -> float:
    """Return the rate at which large kernels move bytes on a device; 1 GB/s is 1 byte/ns."""
    return gpu.memory_gbyte_s * MEMORY_SHARE.get(gpu.vendor, MEMORY_SHARE["nvidia"])


def law_ratio(graph: TaskGraph, tasks: Int64, old: Gpu, new: Gpu, dtype: Int8, new_dtype: Int8) -> Ratio:
    """Return new over recorded time of kernels ``tasks`` (ids), computing in ``dtype`` and then in ``new_dtype``.

    Formats are positions in ``kernels.DTYPES``, the shape of ``tasks``. What a kernel computes and moves counts where
    the recording tells it; else its family says what bounds it.
    """
    family, recorded = graph.family[tasks], graph.duration_ns[tasks].astype(np.float64)
    flops, moved = graph.flops[tasks].astype(np.float64), graph.size_bytes[tasks].astype(np.float64)
    matrix = among(family, MATRIX_FAMILIES)
    laws = []
    for gpu, form in ((old, dtype), (new, new_dtype)):
        share = filled(graph, gpu, tasks)
        # A library chooses the tiles of products by the device; other kernels start as many threads on any.
        share = np.where(among(family, (KernelFamily.GEMM, KernelFamily.CONVOLUTION)), np.nan, share)
        rates = np.array([reached_tflops(gpu, name) * 1e3 for name in RATE_DTYPES])
        rate, bandwidth = rates[form] * _waves(share), memory_bytes_per_ns(gpu) * _busy(share)
        # Where the work is not known any amount does: it cancels in the ratio.
        compute = np.where(matrix, np.where(flops > 0, flops, 1.0), 0.0) / rate
        memory = np.where(moved > 0, moved, ~matrix) / bandwidth
        laws.append(np.where(matrix & (flops <= 0), compute, np.maximum(compute, memory)))
    ratio = laws[1] / laws[0]
    known = np.where(matrix, flops > 0, moved > 0)
    spread = spread_between(old, new) * np.where(known, 1.0, UNKNOWN_SPREAD)
    found = with_range(recorded, ratio, spread, old, new)
    # Far above its own law a kernel waits for something else, which clocks and multiprocessors shorten at best.
    other = old.sm_count * old.boost_mhz / (new.sm_count * new.boost_mhz)
    ends = (
        with_range(recorded, np.minimum(ratio, other), spread, old, new),
        with_range(recorded, np.maximum(ratio, other), spread, old, new),
    )
    slow = known & (recorded > _FAR_ABOVE * laws[0])
    return Ratio(found.centre, np.where(slow, ends[0].low, found.low), np.where(slow, ends[1].high, found.high))


# What a kernel's law has to be exceeded by before it counts as bound by something else: our estimate.
_FAR_ABOVE = 3.0


def _tier(old: Gpu, new: Gpu) -> int:
    return 0 if old.arch == new.arch else 1 if old.vendor == new.vendor else 2


def spread_between(old: Gpu, new: Gpu) -> float:
    """Return the factor either way that a nominal 90 % range of a ratio of two laws is wide."""
    return SPREADS[_tier(old, new)]


def with_range(recorded_ns: Float64, ratio: npt.ArrayLike, spread: npt.ArrayLike, old: Gpu, new: Gpu) -> Ratio:
    """Return new over recorded time where ``ratio``, within ``spread`` either way, holds above the floor."""
    floor = FLOOR_SPREADS[_tier(old, new)]
    by = np.asarray(ratio)
    return Ratio(
        above_floor(recorded_ns, by, old, new),
        above_floor(recorded_ns, by / np.asarray(spread), old, new, floor_by=1 / floor),
        above_floor(recorded_ns, by * np.asarray(spread), old, new, floor_by=floor),
    )


def above_floor(recorded_ns: Float64, ratio: npt.ArrayLike, old: Gpu, new: Gpu, *, floor_by: float = 1.0) -> Float64:
    """Return new over recorded time where only what is above the floor follows ``ratio``; shape of ``recorded_ns``.

    A kernel at half of the floor stays at half of the new one, which is ``floor_by`` times what it is known as.
    """
    fixed = np.minimum(recorded_ns, floor_ns(old))
    new_ns = fixed * (floor_ns(new) / floor_ns(old) * floor_by) + (recorded_ns - fixed) * np.asarray(ratio)
    return np.asarray(np.where(recorded_ns > 0, new_ns / np.maximum(recorded_ns, 1.0), 1.0))


def _waves(share: Float64) -> Float64:
    """The share of the multiprocessors' time that whole waves leave useful; 1 where the fill is not known."""
    known = np.isfinite(share) & (share > 0)
    safe = np.where(known, share, 1.0)
    return np.where(known, safe / np.ceil(safe), 1.0)


def _busy(share: Float64) -> Float64:
    """The share of the bandwidth that so many threads can ask for; 1 where the fill is not known."""
    known = np.isfinite(share) & (share > 0)
    return np.where(known, np.minimum(np.where(known, share, 1.0) / _BUSY_MEMORY_FILL, 1.0), 1.0)


def no_facts(n: int) -> Ratio:
    """Return the ratio of ``n`` kernels where the recorded device is not known: anything from a T4's to an H100's."""
    return Ratio(np.ones(n), np.full(n, 1 / NO_FACTS_SPREAD), np.full(n, NO_FACTS_SPREAD))


def has_units(gpu: Gpu, dtype: str) -> bool:
    """Say whether a device multiplies ``dtype`` on units of its own, and not by falling back to another format."""
    return dtype in ("fp32", "fp64") or getattr(gpu, f"{dtype}_tensor_tflops", None) is not None


def counts_as(gpu: Gpu, dtype: str) -> str:
    """Return the format at whose rate a device multiplies ``dtype``: itself, or what PyTorch or we take instead."""
    if dtype == "tf32":
        return dtype if gpu.tf32_by_default else "fp32"
    if dtype not in ("fp16", "bf16", "fp8") or has_units(gpu, dtype) or (dtype == "fp16" and gpu.fp16_vector_tflops):
        return dtype
    return counts_as(gpu, "fp16") if dtype == "fp8" else "fp32"
