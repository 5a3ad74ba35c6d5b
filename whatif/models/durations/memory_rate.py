"""The rate at which a device moves bytes, by its data sheet or as the recorder measured it."""

from __future__ import annotations

from whatif.graph.task_graph import TaskGraph
from whatif.hardware import roofline
from whatif.hardware.gpu import Gpu

# What a core copies where the recording does not say, GB/s: one channel of DDR4-3200 carries 25.6 at its peak, and a
# copy moves every byte twice.
CPU_COPY_GBYTE_S = 10.0
# An unknown device: the bandwidth of a V100, and a range from a T4's third to an H100's fourfold.
UNKNOWN_MEMORY_GBYTE_S, UNKNOWN_MEMORY_SPREAD = 900.0, 3.0


def cast_gbyte_s(graph: TaskGraph, gpu: Gpu | None) -> float:
    """Return the rate of memory where a kernel changes the number format, counted as ``memory_gbyte_s`` does."""
    if gpu is not None and graph.has_gpu:
        return roofline.cast_gbyte_s(gpu)
    return memory_gbyte_s(graph, gpu)


def memory_gbyte_s(graph: TaskGraph, gpu: Gpu | None) -> float:
    """Return the rate of memory, GB/s: on a GPU of all bytes moved, on a CPU of those that a copy writes."""
    if graph.has_gpu:
        return roofline.memory_gbyte_s(gpu) if gpu else UNKNOWN_MEMORY_GBYTE_S * roofline.memory_share(None).centre
    rates = graph.info.recorded.rates
    measured = rates.copy_gbyte_s if rates is not None else None
    return CPU_COPY_GBYTE_S if measured is None else float(measured)
