"""The cost of many bandwidths and many workers: process CPU time on the largest public recording, minimum of five.

    python benchmarks/workers.py

Prints the rows of the table in docs/scaling.md. The recording is data parallel already, so its gradients are given and
its collectives are removed first.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from inputs import trace

from whatif import TaskGraph, TaskKind, load_transform, read
from whatif.prediction.baseline import Baseline
from whatif.questions.sweep import parse_vary, sweep
from whatif.questions.sweep.scaling import scaling

ROUNDS = 5


def main() -> None:
    """Print a line for each what-if."""
    graph = read(trace("v100-50"))
    single = alone(graph)
    baseline, of_one = Baseline.of(graph), Baseline.of(single)
    bandwidth = [load_transform("bandwidth")]
    distributed = [load_transform("distributed:gradient_mb=100")]
    slowed = [*distributed, load_transform("straggler:slowdown=1.5")]
    per_step = len(graph) // graph.info.n_steps
    print(f"{len(graph):,} tasks, {per_step:,} a step")
    calls: dict[str, Callable[[], Any]] = {
        "1,000 bandwidths, recorded collectives": lambda: sweep(
            baseline, bandwidth, [parse_vary("factor=0.1..10:1000", bandwidth)]
        ),
        "1,000 bandwidths, distributed": lambda: sweep(
            of_one, distributed, [parse_vary("bandwidth=1Gbps..400Gbps:1000", distributed)]
        ),
        "1,024 workers": lambda: scaling(of_one, distributed, [1024]),
        "1,024 workers, one of them slower": lambda: scaling(of_one, slowed, [1024]),
        "2 workers, one of them slower": lambda: scaling(of_one, slowed, [2]),
    }
    for title, call in calls.items():
        call()  # load compiled loops and fill caches
        print(f"| {title} | {least_cpu_s(call):.2f} s |")
    print(f"peak memory of all that: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB")


def alone(graph: TaskGraph) -> TaskGraph:
    """Return the graph without its collectives, as of one worker."""
    return graph.remove(np.flatnonzero(graph.kind == TaskKind.COMMUNICATION))


def least_cpu_s(call: Callable[[], Any]) -> float:
    """The minimum process CPU time of several runs, s."""
    times = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)


if __name__ == "__main__":
    main()
