"""The peak rates of a device, and the share of it that a recorded kernel occupies.

Sources: Williams et al., "Roofline", CACM 2009; NVIDIA, "CUDA C++ Programming Guide", technical specifications per
compute capability (resident warps of a multiprocessor).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from whatif.graph.kernels import DTYPES, MATRIX_FAMILIES
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Float64, TaskKind, among
from whatif.hardware.gpu import MATRIX_DTYPES, Gpu
from whatif.hardware.roofline import kernel_floor_ns, memory_gbyte_s, sustained_tflops
from whatif.ingest.kineto_fields import THREADS_PER_WARP

# A kernel that fills less of the device than this is latency-bound: our estimate. A quarter of such kernels are shorter
# than `latency_ns`.
IDLE_SHARE, IDLE_PERCENTILE, IDLE_KERNELS = 1 / 32, 25, 5
# Registers of a multiprocessor since Kepler, and their allocation unit per thread (CUDA C++ Programming Guide).
REGISTERS_PER_SM, REGISTER_STEP = 65536, 8
# Resident warps of a matrix kernel without recorded registers: accumulators take most registers, so that a
# multiprocessor holds only one or two blocks of four to eight warps (NVIDIA, CUTLASS, "Efficient GEMM in CUDA").
MATRIX_WARPS_PER_SM = 8
# The format whose rate applies to each of `kernels.DTYPES`; unknown formats count as fp32.
RATE_DTYPES = tuple(name if name in MATRIX_DTYPES else "fp32" for name in DTYPES)


def rates_tflops(gpu: Gpu) -> Float64:
    """Return the sustained rate of matrix products in each format, by position in `kernels.DTYPES`, TFLOP/s."""
    return np.array([sustained_tflops(gpu, name) for name in RATE_DTYPES])


def matrix_flops_per_ns(dtype: npt.NDArray[np.integer[Any]], gpu: Gpu) -> Float64:
    """Return sustained matrix-product rates, FLOP/ns, in the shape of ``dtype`` (positions in `kernels.DTYPES`)."""
    return np.asarray(rates_tflops(gpu)[dtype] * 1e3, dtype=np.float64)


def roofline_ns(graph: TaskGraph, gpu: Gpu | None, tasks: Array) -> Float64:
    """Return the minimum time of the known operations and bytes of ``tasks`` (ids), ns, same shape; 0 if none is known.

    Uses the device's sustained rates.
    """
    if gpu is None:
        return np.zeros(len(tasks))
    flops = np.where(among(graph.family[tasks], MATRIX_FAMILIES), np.maximum(graph.flops[tasks], 0), 0)
    compute_ns = flops / matrix_flops_per_ns(graph.dtype[tasks], gpu)
    memory_ns = np.maximum(graph.size_bytes[tasks], 0) / memory_gbyte_s(gpu)  # 1 GB/s is 1 byte/ns
    return np.asarray(np.maximum(compute_ns, memory_ns), dtype=np.float64)


def filled(graph: TaskGraph, gpu: Gpu | None, tasks: Array) -> Float64:
    """Return the share of the device's warp slots that each of ``tasks`` (ids) fills; NaN if unknown.

    Above 1 its blocks run in several waves. Registers limit the slots; shared memory may limit them further.
    """
    if gpu is None:
        return np.full(len(tasks), np.nan)
    warps, registers = graph.warps[tasks], graph.registers[tasks]
    known = (graph.kind[tasks] == TaskKind.KERNEL) & (warps > 0)
    recorded = registers > 0
    per_warp = -(-np.where(recorded, registers, REGISTER_STEP) // REGISTER_STEP) * REGISTER_STEP * THREADS_PER_WARP
    usual = np.where(among(graph.family[tasks], MATRIX_FAMILIES), MATRIX_WARPS_PER_SM, gpu.warps_per_sm)
    places = np.where(recorded, np.clip(REGISTERS_PER_SM // per_warp, 1, gpu.warps_per_sm), usual)
    return np.where(known, warps / (gpu.sm_count * places), np.nan)


def latency_ns(graph: TaskGraph, gpu: Gpu | None) -> float:
    """Return the time of a recorded kernel that leaves the device nearly idle, ns: start, one wave, and end.

    A GPU that idles between kernels, as a host-bound one does, takes two or three times as long as a busy one. With
    fewer than ``IDLE_KERNELS`` such kernels it is the floor of all kernels.
    """
    kernels = np.flatnonzero(graph.kind == TaskKind.KERNEL)
    floor_ns = kernel_floor_ns(gpu)
    idle = graph.duration_ns[kernels[np.nan_to_num(filled(graph, gpu, kernels), nan=1.0) < IDLE_SHARE]]
    if len(idle) < IDLE_KERNELS:
        return float(floor_ns)
    return max(float(np.percentile(idle, IDLE_PERCENTILE)), float(floor_ns))
