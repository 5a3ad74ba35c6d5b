"""The wait for the slowest worker: by order statistics of many workers, and in one worker's recorded collectives."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from whatif.graph.kernels import collective_of
from whatif.graph.order import each_once, numbered, quartiles
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Float64, Int64, TaskKind
from whatif.hardware.cluster.cluster_file import usual_cluster
from whatif.hardware.cluster.collectives import OPERATIONS
from whatif.hardware.cluster.links import LATENCY_US, Link
from whatif.hardware.cluster.nccl import COLLECTIVES, knows, start_us
from whatif.hardware.cluster.network import Network
from whatif.hardware.gpu import Gpu
from whatif.models.durations.estimator import device
from whatif.models.exchange.collective_tasks import OVERLAPPED
from whatif.models.exchange.exchanges import tensor_workers
from whatif.runtime.errors import WhatifError
from whatif.simulation.transfers import workers_of

# Points of the slowest's distribution: with this many the mean of 100,000 workers has an error of 0.01 %.
_POINTS = 2_000
# Ends of the nominal 90 % range.
_LOW, _HIGH = 0.05, 0.95


class Slowest(NamedTuple):
    """The time of the slowest of n workers over one's mean time: its mean, and the ends of a 90 % range."""

    mean: float
    low: float
    high: float

    def times(self, factor: float) -> Slowest:
        """The same for workers that all take ``factor`` times as long."""
        return Slowest(self.mean * factor, self.low * factor, self.high * factor)


@cache
def slowest_of(workers: int, jitter_pct: float) -> Slowest:
    """Return the time of the slowest of ``workers`` with lognormal, independent times of mean 1.

    ``jitter_pct`` is the standard deviation of one worker's time, percent of its mean. With s² = ln(1 + cv²) and the
    normal quantile z, the q-quantile of the slowest of n is exp(s z(q^(1/n)) - s²/2), because all n lie below it with
    the n-th power of the probability of one (David and Nagaraja, "Order Statistics", 2003, §2.1). Its mean is that of
    all quantiles, and has no closed form.
    """
    if workers < 1 or jitter_pct == 0:
        return Slowest(1.0, 1.0, 1.0)
    variance = math.log1p((jitter_pct / 100) ** 2)
    normal = NormalDist()

    def quantile(q: float) -> float:
        # 1 - q^(1/n) keeps its digits if q^(1/n) is close to 1.
        return math.exp(-math.sqrt(variance) * normal.inv_cdf(-math.expm1(math.log(q) / workers)) - variance / 2)

    middle = (np.arange(_POINTS) + 0.5) / _POINTS
    mean = float(np.mean([quantile(q) for q in middle.tolist()])) if workers > 1 else 1.0
    return Slowest(mean, quantile(_LOW), quantile(_HIGH))


def worker_classes(workers: int, count: int, slowdown: float, jitter_pct: float) -> list[Slowest]:
    """Return the classes that one of ``workers`` waits for: itself, the slowest of its equals, and that of the others.

    ``count`` of the workers take ``slowdown`` times as long. Only the slowest of a class is waited for.
    """
    found = [Slowest(1.0, 1.0, 1.0)]
    if jitter_pct and workers - count > 1:
        found.append(slowest_of(workers - count, jitter_pct))
    if count:
        found.append(slowest_of(count, jitter_pct).times(slowdown))
    return found


# Spread of a step among equal GPUs, standard deviation in percent: fitted to NVIDIA's weak-scaling tables, leaving out
# each model in turn (benchmarks/published/weak_scaling.py).
GPU_SPREAD_PCT = 1.5
# The attached column of the factors by which ``with_slowest`` scaled each task's time; 0: not scaled.
SLOWED = "as long as on the slowest"
# Recordings whose steps differ more are no measurement of the spread of workers.
_MOST = 1.25
# The fewest steps with usable quartiles.
_STEPS = 5
# The quartile range of a normal distribution in standard deviations.
_QUARTILES = 2 * NormalDist().inv_cdf(0.75)


def recorded_spread_pct(graph: TaskGraph) -> float | None:
    """Return the spread of a recording's steps, standard deviation in percent of the median, by their quartiles.

    By steps timed without the profiler, else by GPU work in five recorded steps or more with equally many kernels; None
    if neither is known.
    """
    recorded = graph.info.recorded
    step = recorded.simulated.untraced_step if recorded.simulated else recorded.untraced_step
    if step is not None and step.median_ms and step.q25_ms is not None and step.q75_ms is not None:
        return 100 * max(step.q75_ms - step.q25_ms, 0.0) / _QUARTILES / step.median_ms
    first, last = graph.info.steady
    work = np.flatnonzero(graph.gpu_work & (graph.start_ns >= 0))
    work = work[(graph.step[work] >= first) & (graph.step[work] < last)]
    steps, inverse, count = np.unique(graph.step[work], return_inverse=True, return_counts=True)
    if len(steps) < _STEPS or count.max() > 1.01 * count.min():
        return None
    low, median, high = quartiles(np.bincount(inverse, weights=graph.duration_ns[work]))
    return 100 * (high - low) / _QUARTILES / median if median else None


def with_slowest(graph: TaskGraph, network: Network) -> TaskGraph:
    """Scale the work of a step to the slowest of all workers, for which the others wait.

    Workers of ``network`` are data parallel: each is a whole pipeline, or a group across which the model is split, if
    there is one. Their steps differ by the network's ``spread_pct``, else like the recorded steps, on a GPU by at least
    ``GPU_SPREAD_PCT``. At the lower end all are equally fast.
    """
    together = network.workers * tensor_workers(graph) * len({thread.rank for thread in graph.threads})
    factor = slowest_factor(graph, together, network.spread_pct)
    if factor <= 1:
        return graph
    on_gpu = graph.has_gpu
    # On a CPU tasks inserted by other what-ifs stay: messages, and the work of gloo's threads.
    work = graph.kind != TaskKind.COMMUNICATION if on_gpu else graph.on_cpu & (graph.start_ns >= 0)
    slowed = graph.scale(work, factor, low=1.0, high=2 * factor - 1 if on_gpu else factor)
    return slowed.attach(**{SLOWED: np.where(work, factor, 0.0)})


def without_slowest(graph: TaskGraph) -> TaskGraph:
    """Return the graph with the work of this worker instead of the slowest's: undo ``with_slowest``."""
    factor = graph.attached.get(SLOWED)
    if factor is None:
        return graph
    undone = 1 / np.where(factor > 0, factor, 1.0)
    return graph.scale(factor > 0, undone[factor > 0], low=1.0).attach(**{SLOWED: np.zeros(len(graph))})


def slowest_factor(graph: TaskGraph, workers: int, given_pct: float | None = None) -> float:
    """Return the time of the slowest of ``workers``, with a spread of ``given_pct``, over the recorded one's.

    By default they differ like the recorded steps, on a GPU by at least ``GPU_SPREAD_PCT``.
    """
    least_pct = GPU_SPREAD_PCT if graph.has_gpu else 0.0
    spread_pct = max(recorded_spread_pct(graph) or 0.0, least_pct) if given_pct is None else given_pct
    return min(slowest_of(workers, spread_pct).mean, _MOST if given_pct is None else math.inf)


# AMD, "Understanding RCCL Bandwidth and xGMI Performance on AMD Instinct MI300X", March 2025: of the 64 GB/s of a link
# about 48 are usable.
FABRIC_SHARE = 48 / 64
# The number of GPUs that a machine's internal fabric connects.
FABRIC_WORKERS = 8
# Operations of networks by the names of their kernels.
_OPERATIONS = {"send_recv": "all_to_all"}


def waiting_for_peers(graph: TaskGraph) -> Int64:
    """Return the time that each recorded collective of one rank waited for the other ranks, ns, shape (n_tasks,).

    The transfer itself takes as long as the shortest of equal collectives (operation, size, process group): the last
    rank to arrive waits for no other. If even that exceeds the expected time on the GPU's usual links, all of them
    waited. The expected time is that of NCCL's tuner (``expected_transfers_ns``) plus a third, as measured beside other
    kernels (Daydream, §6.5). 0 for transfers of what-ifs, and in graphs of several ranks, where waiting is known.
    """
    waits = np.zeros(len(graph), dtype=np.int64)
    tasks = np.flatnonzero(graph.on_gpu & (graph.kind == TaskKind.COMMUNICATION) & (workers_of(graph) == 0))
    if graph.info.ranks or not len(tasks):
        return waits
    spent_ns, size = graph.duration_ns[tasks], graph.size_bytes[tasks]
    equal = numbered(graph.name[tasks], size, graph.group[tasks])
    shortest_ns = np.full(int(equal.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(shortest_ns, equal, spent_ns)
    # Unknown sizes are not equal.
    transfer_ns = np.where(size >= 0, shortest_ns[equal], spent_ns)
    expected_ns = np.rint(OVERLAPPED * expected_transfers_ns(graph, tasks)).astype(np.int64)
    transfer_ns = np.where(expected_ns > 0, np.minimum(transfer_ns, expected_ns), transfer_ns)
    waits[tasks] = np.maximum(spent_ns - transfer_ns, 0)
    return waits


def workers_of_groups(graph: TaskGraph, tasks: Int64) -> Int64:
    """Return the number of ranks in each collective of ``tasks`` (ids): its group's, else all; 0: unknown."""
    sizes = sizes_of_groups(graph, tasks)
    return np.where(sizes > 0, sizes, graph.info.workers or 0)


def sizes_of_groups(graph: TaskGraph, tasks: Int64) -> Int64:
    """Return the number of ranks in the recorded process group of each of ``tasks`` (ids); -1: not recorded."""
    return np.array([*(group.size for group in graph.info.groups), -1])[graph.group[tasks]]


def expected_transfers_ns(graph: TaskGraph, tasks: Int64) -> Float64:
    """Return the time of each collective of ``tasks`` (ids) on the GPU's usual links, ns; 0 if unknown.

    From NCCL's tuner plus the start of its Simple protocol if it covers the GPU, else from the links alone.
    """
    expected_ns = np.zeros(len(tasks))
    gpu = device(graph)
    if gpu is None:
        return expected_ns
    called = {code: collective_of(graph.names[code], "") for code in each_once(graph.name[tasks]).tolist()}
    operations = np.array([_OPERATIONS.get(called[code], called[code]) for code in graph.name[tasks].tolist()])
    workers = workers_of_groups(graph, tasks)
    for count in np.unique(workers[workers > 1]).tolist():
        network = _usual_network(gpu, count)
        if network is None:
            continue
        for operation in np.unique(operations).tolist():
            chosen = (operations == operation) & (workers == count) & (graph.size_bytes[tasks] >= 0)
            if operation in OPERATIONS and chosen.any():
                size = graph.size_bytes[tasks][chosen] * (count if operation == "all_gather" else 1)
                tuned = knows(gpu) and operation in COLLECTIVES
                expected_ns[chosen] = network.cost(operation, size, "nccl" if tuned else None).total_ns
                if knows(gpu) and not tuned:
                    expected_ns[chosen] += 1e3 * start_us()
    return expected_ns


def _usual_network(gpu: Gpu, workers: int) -> Network | None:
    """The usual network of ``workers`` of the GPU; None if there is none."""
    if not gpu.cluster and gpu.nvlink_gbyte_s and not gpu.nvlink_bridged and workers <= FABRIC_WORKERS:
        return Network.of(workers, Link(FABRIC_SHARE * gpu.nvlink_gbyte_s * 1e9, LATENCY_US * 1e3))
    try:
        return replace(usual_cluster(gpu).network(workers), gpu=gpu.name)
    except WhatifError:  # more than its machines hold
        return None
