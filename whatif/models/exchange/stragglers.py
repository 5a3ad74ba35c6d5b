"""How much slower than the mean the slowest of many workers is, by order statistics, and the classes that follow."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import TaskKind
from whatif.hardware.cluster.network import Network
from whatif.models.exchange.exchanges import tensor_workers

# Points at which the distribution of the slowest is read: with so many the mean of 100,000 workers is off by 0.01 %.
_POINTS = 2_000
# Ends of the range, as everywhere a nominal 90 % one.
_LOW, _HIGH = 0.05, 0.95


class Slowest(NamedTuple):
    """The time of the slowest of n workers over the mean time of one: its mean, and the ends of a 90 % range."""

    mean: float
    low: float
    high: float

    def times(self, factor: float) -> Slowest:
        """The same of workers that all take ``factor`` times as long."""
        return Slowest(self.mean * factor, self.low * factor, self.high * factor)


def slowest_of(workers: int, jitter_pct: float) -> Slowest:
    """Return how long the slowest of ``workers`` takes whose times are lognormal and independent, mean 1.

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
        # 1 - q^(1/n) keeps its digits where q^(1/n) is next to 1.
        return math.exp(-math.sqrt(variance) * normal.inv_cdf(-math.expm1(math.log(q) / workers)) - variance / 2)

    middle = (np.arange(_POINTS) + 0.5) / _POINTS
    mean = float(np.mean([quantile(q) for q in middle.tolist()])) if workers > 1 else 1.0
    return Slowest(mean, quantile(_LOW), quantile(_HIGH))


def worker_classes(workers: int, count: int, slowdown: float, jitter_pct: float) -> list[Slowest]:
    """Return the classes of workers that one of ``workers`` meets: itself, the slowest of its like, and of the others.

    ``count`` of the workers take ``slowdown`` times as long. Only the slowest of a class is waited for.
    """
    found = [Slowest(1.0, 1.0, 1.0)]
    if jitter_pct and workers - count > 1:
        found.append(slowest_of(workers - count, jitter_pct))
    if count:
        found.append(slowest_of(count, jitter_pct).times(slowdown))
    return found


# How GPUs of one kind differ in a step, standard deviation in percent of it: fitted to NVIDIA's weak-scaling tables by
# leaving out each model in turn (benchmarks/published/weak_scaling.py).
GPU_SPREAD_PCT = 1.5
# A recording whose steps differ more than that is no measurement of how workers differ.
_MOST = 1.25
# So many steps have quartiles.
_STEPS = 5
# Quartiles of a normal distribution lie so many standard deviations apart.
_QUARTILES = 2 * NormalDist().inv_cdf(0.75)


def recorded_spread_pct(graph: TaskGraph) -> float | None:
    """Return how much the steps of a recording differ, standard deviation in percent of the median, by their quartiles.

    The steps without the profiler, else the work of a GPU in five recorded steps or more with equally many kernels;
    None where neither tells.
    """
    told = graph.info.recorded.untraced_step
    if told is not None and told.median_ms and told.q25_ms is not None and told.q75_ms is not None:
        return 100 * max(told.q75_ms - told.q25_ms, 0.0) / _QUARTILES / told.median_ms
    first, last = graph.info.steady
    work = np.flatnonzero(graph.on_gpu & (graph.kind != TaskKind.COMMUNICATION) & (graph.start_ns >= 0))
    work = work[(graph.step[work] >= first) & (graph.step[work] < last)]
    steps, which, count = np.unique(graph.step[work], return_inverse=True, return_counts=True)
    if len(steps) < _STEPS or count.max() > 1.01 * count.min():
        return None
    low, median, high = np.percentile(np.bincount(which, weights=graph.duration_ns[work]), (25, 50, 75)).tolist()
    return 100 * (high - low) / _QUARTILES / median if median else None


def with_slowest(graph: TaskGraph, network: Network) -> TaskGraph:
    """Let the work of a step take as long as on the slowest of all workers, for whom all others wait.

    Those of ``network`` are data parallel: each is a whole pipeline, or a group across which the model is cut, where it
    is. Their steps differ by the network's ``spread_pct``, else as those of the recording, which on a GPU is
    ``GPU_SPREAD_PCT`` or more. At the lower end all are equally fast.
    """
    on_gpu, told = bool(graph.on_gpu.any()), network.spread_pct
    spread_pct = max(recorded_spread_pct(graph) or 0.0, GPU_SPREAD_PCT if on_gpu else 0.0) if told is None else told
    together = network.workers * tensor_workers(graph) * len({thread.rank for thread in graph.threads})
    factor = min(slowest_of(together, spread_pct).mean, _MOST if told is None else math.inf)
    if factor <= 1:
        return graph
    # On a CPU what other what-ifs put in stays: messages, and the work of gloo's threads.
    work = graph.kind != TaskKind.COMMUNICATION if on_gpu else graph.on_cpu & (graph.start_ns >= 0)
    return graph.scale(work, factor, low=1.0, high=2 * factor - 1 if on_gpu else factor)
