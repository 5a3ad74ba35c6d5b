"""The CPU cost of exchanges over gloo: its threads send, receive and add up on the core of the step.

On a GPU NCCL does this in kernels. On a CPU the operating system copies every byte into and out of sockets, and gloo's
threads, woken for it, take time from the core of the step. Constants were measured with bare all-reduces between two
network namespaces and with DistributedDataParallel of one worker, never with the multi-worker steps that predictions
are scored on (docs/data_parallel.md).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whatif.graph.task_graph import TaskGraph
from whatif.hardware.cluster.collectives import Cost
from whatif.hardware.cluster.links import GLOO_MESSAGE_NS
from whatif.hardware.cluster.network import Network
from whatif.models.durations.memory_rate import memory_gbyte_s
from whatif.simulation.transfers import Parts

# Copies of each byte that passes a worker, at the recording's copy rate: without a rate limit 1.0 to 1.3 ns per byte at
# a copy rate of 7.6 GB/s; over a slow link half as much again (WOKEN).
COPIES = 8.0
# DDP's work around a step: 0.5 ms, and 5 us for the hook of each gradient, besides its copy.
STEP_NS, HOOK_NS = 500_000, 5_000
# Each buffer that rank 0 broadcasts before the forward pass is flattened and copied back: 12 us, as medians of a
# ResNet's 60 buffers with and without.
BUFFER_NS = 12_000
# Other machines and versions: our estimate.
SPREAD = 2.0


# gloo's reduce_scatter is an all-reduce of which each worker keeps its part (ProcessGroupGloo of torch 2.13: a profile
# of fully_shard on two CPUs shows gloo:all_reduce inside c10d::_reduce_scatter_base_).
RUN_AS = {"reduce_scatter": "all_reduce"}


class Sent(NamedTuple):
    """The cost of collectives, ns, shape (n,) each.

    ``work_ns``: the CPU time of gloo's threads on a worker within that. ``parts``: the network's time, and the CPU time
    with a fast network.
    """

    cost: Cost
    work_ns: npt.NDArray[np.float64]
    parts: Parts


def sent(graph: TaskGraph, network: Network, operation: str, size_bytes: npt.ArrayLike) -> Sent:
    """Return the cost of collectives of ``size_bytes`` among the workers of ``network``.

    On a GPU that is the network's cost. On a CPU none is shorter than the work of gloo's threads.
    """
    if graph.has_gpu:
        cost = network.cost(operation, size_bytes)
        nothing = np.zeros(len(cost.latency_ns))
        return Sent(cost, nothing, Parts(cost.latency_ns, cost.total_ns, nothing, nothing))
    run = RUN_AS.get(operation, operation)
    cost, workers = network.cost(run, size_bytes), network.workers
    rounds = 2 if run == "all_reduce" else 1  # rounds of the ring; in each a part passes every other worker
    passing_bytes = rounds * (workers - 1) / workers * np.atleast_1d(np.asarray(size_bytes, dtype=np.float64))
    copy_ns = passing_bytes / memory_gbyte_s(graph, None)  # 1 GB/s is 1 byte/ns
    messages_ns = rounds * (workers - 1) * GLOO_MESSAGE_NS
    at_once_ns = messages_ns + COPIES * copy_ns
    parts = Parts(cost.latency_ns, cost.total_ns, at_once_ns, np.full(len(at_once_ns), float(messages_ns)))
    work = np.minimum(parts.duration_ns, parts.woken_ns)  # gloo waits while the network is slower
    return Sent(bounded_by_cpu(cost, work), work, parts)


def passing_ns(graph: TaskGraph, size_bytes: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the CPU time of a worker that sends ``size_bytes`` and receives as much, ns, shape (n,)."""
    return np.atleast_1d(np.asarray(size_bytes, dtype=np.float64)) * COPIES / memory_gbyte_s(graph, None)


def one_way_ns(graph: TaskGraph, size_bytes: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the CPU time of a worker that sends or receives a message of ``size_bytes``, ns, shape (n,)."""
    return np.asarray((GLOO_MESSAGE_NS + passing_ns(graph, size_bytes)) / 2, dtype=np.float64)


def bounded_by_cpu(cost: Cost, work: npt.NDArray[np.float64]) -> Cost:
    """Return the cost of exchanges with the CPU time ``work``, ns, as lower bound: no bandwidth shortens it."""
    excess_ns = np.maximum(work - cost.total_ns, 0)
    return Cost(cost.latency_ns + excess_ns, cost.transfer_ns)


def buffers(graph: TaskGraph) -> tuple[int, int]:
    """Return the number of buffers that DDP broadcasts before each forward pass (batch normalization), and their bytes.

    Running mean, running variance and the batch counter; none if the recording lacks its layers.
    """
    count = size = 0
    for layer in graph.info.recorded.layers:
        if "BatchNorm" in layer.type:
            channels = next(iter(layer.shapes.get("weight", ())), 0)
            count, size = count + 3, size + 8 * channels + 8
    return count, size
