"""The memory rate of a device, by its data sheet or as the recorder measured it."""

from __future__ import annotations

from whatif.graph.task_graph import TaskGraph
from whatif.hardware import roofline
from whatif.hardware.gpu import Gpu

# The copy rate of a core if not recorded, GB/s: one channel of DDR4-3200 peaks at 25.6, and a copy moves every byte
# twice.
CPU_COPY_GBYTE_S = 10.0
# An unknown device: the bandwidth of a V100, and a range from a third (T4) to four times that (H100).
UNKNOWN_MEMORY_GBYTE_S, UNKNOWN_MEMORY_SPREAD = 900.0, 3.0


def cast_gbyte_s(graph: TaskGraph, gpu: Gpu | None) -> float:
    """Return the memory rate of kernels that change the number format, counted as in ``memory_gbyte_s``."""
    if gpu is not None and graph.has_gpu:
        return roofline.cast_gbyte_s(gpu)
    return memory_gbyte_s(graph, gpu)


def memory_gbyte_s(graph: TaskGraph, gpu: Gpu | None) -> float:
    """Return the memory rate, GB/s: on a GPU of all bytes moved, on a CPU of those that a copy writes."""
    if graph.has_gpu:
        return roofline.memory_gbyte_s(gpu) if gpu else UNKNOWN_MEMORY_GBYTE_S * roofline.memory_share(None).centre
    rates = graph.info.recorded.rates
    measured = rates.copy_gbyte_s if rates is not None else None
    return CPU_COPY_GBYTE_S if measured is None else float(measured)
