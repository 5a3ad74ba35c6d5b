"""Layers whose pipelines are known by hand.

A layer of ``equal_layers`` takes 2,000 ns and 2,000,000 more for the whole batch forward, twice the latter backward, so
with m micro-batches 2,000 + 2,000,000 / m. Its launches take 1,000, a call to send or receive 55,000.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.transforms.layer_graphs import Call, network
from whatif import TaskGraph, load_transform, simulate

# A byte a nanosecond and no latency; activations of 200,000 bytes a batch.
LINK = "bandwidth=1GB/s,latency_us=1,activation_mb=0.2"
# Nothing to send.
FREE = "latency_us=0,activation_mb=0"


def equal_layers(count: int, *, launch_ns: int = 1_000, steps: int = 1, on_cpu: bool = False, work_ns: int = 2_000_000,
                 **info: Any) -> TaskGraph:  # fmt: skip
    calls = [Call(f"Linear_{i}", 2_000 + work_ns, 2_000 + 2 * work_ns, 1_000) for i in range(count)]
    return network(calls, launch_ns=launch_ns, steps=steps, on_cpu=on_cpu, **info)


def changed(graph: TaskGraph, spec: str) -> TaskGraph:
    return load_transform(f"pipeline:{spec}")(graph).check()


def tasks_of(graph: TaskGraph, thread: str) -> list[tuple[str, int, int]]:
    """Name, start and end of each task of a thread, in order."""
    timeline = simulate(graph)
    (code,) = [number for number, found in enumerate(graph.threads) if found.name == thread]
    ids = np.flatnonzero(graph.thread == code).tolist()
    return [(graph.names[graph.name[i]], int(timeline.start_ns[i]), int(timeline.end_ns[i])) for i in ids]
