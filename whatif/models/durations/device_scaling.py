"""The time of a kernel on another device, from data sheets and the recording alone.

A kernel's time has a fixed part (start, first wave, tail) and a part that follows the roofline: max(FLOPs / rate,
bytes / bandwidth). Scaling the recorded time by the ratio of two rooflines cancels the errors on both devices.

Sources: Williams et al., "Roofline", CACM 2009; Yu et al., "Habitat", USENIX ATC 2021 (wave scaling: a kernel that
does not fill the device gains nothing from more multiprocessors).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from whatif.graph.kernels import DTYPES, MATRIX_FAMILIES, KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Float64, Int8, Int64, among
from whatif.hardware.gpu import Gpu
from whatif.hardware.roofline import kernel_floor_ns, memory_gbyte_s, on_tensor_cores
from whatif.ingest.kineto_fields import THREADS_PER_WARP
from whatif.models.durations.database import grouped_operators
from whatif.models.durations.occupancy import filled, rates_tflops
from whatif.opdb.data_sheet import executed_over_asked

# The share of warp slots that attention's blocks must fill to keep memory busy: our estimate.
_BUSY_MEMORY_FILL = 0.5
# The memory traffic per thread in flight (Little's law), GB/s: elementwise kernels that leave thread slots empty move
# 10 to 13 MB/s per thread on V100, A100-SXM, H100 and MI300X; on an A100-PCIE-40 2 to 5.
_THREAD_GBYTE_S = 0.012
# A nominal 90 % range of a ratio of two rooflines: between boards of one architecture, architectures of one vendor, and
# vendors, with different libraries; and the factor by which unknown work widens it. Our estimate;
# docs/device.md has its coverage.
SPREADS, UNKNOWN_SPREAD = (1.2, 1.35, 1.5), 1.4
# Products of unknown sizes wait for memory and latency as well: speedup = (ratio of rates) ** exponent. Fitted to the
# known sizes of products in ten recordings on six other devices: 0.63 for those within eight floors, 0.77 for longer
# ones. The error of the log, leaving one recording out, falls from 0.55 to 0.40.
_UNKNOWN_EXPONENT = 0.67
# The time of the shortest kernels also depends on clocks and drivers: 1 to 3 us on NVIDIA's devices alone.
FLOOR_SPREADS = (1.2, 1.4, 1.6)
# Multiprocessors and clocks of an unknown device: from a T4's to an H100's; a ratio may be anything between.
NO_FACTS_SPREAD = 4.0


class Ratio(Struct, frozen=True):
    """New over recorded time of n kernels, and a nominal 90 % range of it, shape (n,) each."""

    centre: Float64
    low: Float64
    high: Float64

    def put(self, at: Int64, other: Ratio) -> None:
        """Overwrite the places ``at`` with the ratios of ``other``."""
        self.centre[at], self.low[at], self.high[at] = other.centre, other.low, other.high


def roofline_ratio(graph: TaskGraph, tasks: Int64, old: Gpu, new: Gpu, dtype: Int8, new_dtype: Int8) -> Ratio:
    """Return new over recorded time of kernels ``tasks`` (ids) that go from ``dtype`` to ``new_dtype``.

    Formats are positions in ``kernels.DTYPES``, the shape of ``tasks``. A kernel's recorded FLOPs and bytes are used if
    known; else its family decides what bounds it. A product's time beyond its floor and ``FAR_ABOVE`` rooflines is
    latency, which another device does not shorten.
    """
    family, recorded = graph.family[tasks], graph.duration_ns[tasks].astype(np.float64)
    flops, moved = graph.flops[tasks].astype(np.float64), graph.size_bytes[tasks].astype(np.float64)
    matrix = among(family, MATRIX_FAMILIES)
    tiled = among(family, (KernelFamily.GEMM, KernelFamily.CONVOLUTION))
    known = np.where(matrix, flops > 0, moved > 0)
    roofline_ns = []
    for gpu, form in ((old, dtype), (new, new_dtype)):
        share = filled(graph, gpu, tasks)
        # Libraries choose tiles of products by device; other kernels start the same threads on any.
        share = np.where(tiled, np.nan, share)
        threads = np.minimum(graph.warps[tasks], gpu.sm_count * gpu.warps_per_sm) * THREADS_PER_WARP
        # Kernels too small to keep the memory busy wait for its latency, which more bandwidth does not shorten; blocks
        # of attention prefetch, as fast as their multiprocessor can.
        in_blocks = memory_gbyte_s(gpu) * share / _BUSY_MEMORY_FILL
        demand_gbyte_s = np.where(np.isfinite(share), np.where(matrix, in_blocks, threads * _THREAD_GBYTE_S), np.inf)
        rates = rates_tflops(gpu) * 1e3
        rate, bandwidth = rates[form] * _waves(share), np.minimum(memory_gbyte_s(gpu), demand_gbyte_s)
        # Unknown work cancels in the ratio: any amount will do.
        compute = np.where(matrix, np.where(flops > 0, flops, 1.0), 0.0) * _in_tiles(graph, gpu, tasks) / rate
        memory = np.where(moved > 0, moved, ~matrix) / bandwidth
        roofline_ns.append(np.where(matrix & (flops <= 0), compute, np.maximum(compute, memory)))
    ratio = roofline_ns[1] / roofline_ns[0]
    units = [np.array([on_tensor_cores(gpu, name) for name in DTYPES]) for gpu in (old, new)]
    of_any_size = (family == KernelFamily.GEMM) & ~known & (units[0][dtype] == units[1][new_dtype])
    ratio = np.where(of_any_size, ratio**_UNKNOWN_EXPONENT, ratio)
    # If memory alone bounds a kernel, bytes cancel: unknown ones do not widen the range.
    spread = spread_between(old, new) * np.where(matrix & ~known, UNKNOWN_SPREAD, 1.0)
    far_above = np.where(known, np.maximum(recorded - kernel_floor_ns(old) - FAR_ABOVE * roofline_ns[0], 0.0), 0.0)
    found = with_range(recorded, ratio, spread, old, new, latency_ns=np.where(tiled, far_above, 0.0))
    # Latency falls at most with clocks and multiprocessors.
    clock_ratio = old.sm_count * old.boost_mhz / (new.sm_count * new.boost_mhz)
    by_clocks = above_floor(recorded, np.full(len(tasks), clock_ratio), old, new)
    low, high = np.minimum(found.low, by_clocks), np.maximum(found.high, by_clocks)
    # If the blocks are known, the roofline includes the waits of a half-empty device.
    slow = ~tiled & (far_above > 0) & ~np.isfinite(filled(graph, old, tasks))
    return Ratio(found.centre, np.where(slow, low, found.low), np.where(slow, high, found.high))


# The multiple of a kernel's roofline time beyond which something else bounds it: our estimate.
FAR_ABOVE = 3.0


def _in_tiles(graph: TaskGraph, gpu: Gpu, tasks: Int64) -> Float64:
    """Executed over useful work of products of known sizes, in whole tiles and waves of a device; else 1."""
    by_operator = np.ones(len(graph.info.operators) + 1)  # -1 is the last entry
    for place, ops in grouped_operators(graph.info.operators):
        if ops.family == "matmul":
            by_operator[place] = executed_over_asked(gpu, ops)
    return np.where(graph.family[tasks] == KernelFamily.GEMM, by_operator[graph.called[tasks]], 1.0)


def _tier(old: Gpu, new: Gpu) -> int:
    return 0 if old.arch == new.arch else 1 if old.vendor == new.vendor else 2


def spread_between(old: Gpu, new: Gpu) -> float:
    """Return the factor, up and down, of the nominal 90 % range of a ratio of two rooflines."""
    return SPREADS[_tier(old, new)]


def with_range(
    recorded_ns: Float64, ratio: npt.ArrayLike, spread: npt.ArrayLike, old: Gpu, new: Gpu,
    *, latency_ns: npt.ArrayLike = 0.0,
) -> Ratio:  # fmt: skip
    """Return new over recorded time; ``ratio``, uncertain by a factor ``spread``, applies above floor and latency."""
    floor = FLOOR_SPREADS[_tier(old, new)]
    by = np.asarray(ratio)
    ways = ((by, 1.0), (by / np.asarray(spread), 1 / floor), (by * np.asarray(spread), floor))
    found = Ratio(*(above_floor(recorded_ns, r, old, new, floor_by=f, latency_ns=latency_ns) for r, f in ways))
    # Latency is as uncertain as the rest, half of it from each of the two devices.
    share, by_half = np.asarray(latency_ns) / np.maximum(recorded_ns, 1.0), np.sqrt(np.asarray(spread))
    return Ratio(found.centre, found.low - share * (1 - 1 / by_half), found.high + share * (by_half - 1))


def above_floor(
    recorded_ns: Float64, ratio: npt.ArrayLike, old: Gpu, new: Gpu,
    *, floor_by: float = 1.0, latency_ns: npt.ArrayLike = 0.0,
) -> Float64:  # fmt: skip
    """Return new over recorded time if only the time above the floor follows ``ratio``; shape of ``recorded_ns``.

    A kernel at half of the floor stays at half of the new floor, which is ``floor_by`` times the device's.
    ``latency_ns`` of the time above the floor stays; the longer it is, the more of the floor's change it hides.
    """
    floors, stays = (kernel_floor_ns(old), kernel_floor_ns(new)), np.asarray(latency_ns)
    exposed = 1 / (1 + stays / np.sqrt(floors[0] * floors[1]))
    fixed = np.minimum(recorded_ns, floors[0])
    new_ns = fixed * (floors[1] / floors[0] * floor_by) ** exposed + stays
    new_ns = new_ns + (recorded_ns - fixed - stays) * np.asarray(ratio)
    return np.asarray(np.where(recorded_ns > 0, new_ns / np.maximum(recorded_ns, 1.0), 1.0))


def _waves(share: Float64) -> Float64:
    """The useful share of the multiprocessors' time in whole waves; 1 if the fill is unknown."""
    known = np.isfinite(share) & (share > 0)
    safe = np.where(known, share, 1.0)
    return np.where(known, safe / np.ceil(safe), 1.0)


def no_facts(n: int) -> Ratio:
    """Return the ratio of ``n`` kernels of an unknown recorded device, with a range from a T4 to an H100."""
    return Ratio(np.ones(n), np.full(n, 1 / NO_FACTS_SPREAD), np.full(n, NO_FACTS_SPREAD))


def has_units(gpu: Gpu, dtype: str) -> bool:
    """Return whether a device has units for ``dtype``, without falling back to another format."""
    return dtype in ("fp32", "fp64") or on_tensor_cores(gpu, dtype)


def counts_as(gpu: Gpu, dtype: str) -> str:
    """Return the format at whose rate a device multiplies ``dtype``: itself, or PyTorch's or our substitute."""
    if dtype == "tf32":
        return dtype if gpu.tf32_by_default else "fp32"
    if dtype not in ("fp16", "bf16", "fp8") or has_units(gpu, dtype) or (dtype == "fp16" and gpu.fp16_vector_tflops):
        return dtype
    return counts_as(gpu, "fp16") if dtype == "fp8" else "fp32"
