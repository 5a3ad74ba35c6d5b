"""The rate at which a device moves bytes, by its data sheet or as the recorder measured it."""

from __future__ import annotations

from whatif.graph.task_graph import TaskGraph
from whatif.hardware.gpu import Gpu
from whatif.models.durations.half_precision import BANDWIDTH_SHARE

# What a core copies where the recording does not say, GB/s: one channel of DDR4-3200 carries 25.6 at its peak, and a
# copy moves every byte twice.
CPU_COPY_GBYTE_S = 10.0


def memory_gbyte_s(graph: TaskGraph, gpu: Gpu | None) -> float:
    """Return the rate of memory, GB/s: on a GPU of all bytes moved, on a CPU of those that a copy writes."""
    if graph.on_gpu.any():
        return (gpu.memory_gbyte_s if gpu else 900.0) * BANDWIDTH_SHARE
    rates = graph.info.recorded.rates
    measured = rates.copy_gbyte_s if rates is not None else None
    return CPU_COPY_GBYTE_S if measured is None else float(measured)
