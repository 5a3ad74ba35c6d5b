"""A recorded step as a plan: the time at which each gradient is ready, and the duration of the rest of the step.

For more workers than this machine has cores the computation is replayed: a worker sleeps until the recorded one would
have finished a gradient. Only the network is real.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whatif import read
from whatif.graph.types import Phase
from whatif.models.exchange.buckets import step_gradients
from whatif.prediction.predict import Baseline


@dataclass(frozen=True)
class Plan:
    """One step of one worker, ms since its start."""

    step_ms: float
    backward_ms: float  # the end of the backward pass; the update follows
    gradients: tuple[tuple[float, int], ...]  # ready time and bytes of each, in order


def plan_of(trace: Path) -> Plan:
    """Read a recording and return its steady step: the simulated baseline, without the profiler's overhead."""
    baseline = Baseline.of(read(trace), "mark")
    graph, timeline = baseline.graph, baseline.timeline
    gradients = step_gradients(graph, None, "lab")
    steps = np.unique(gradients.step)
    step = int(steps[len(steps) // 2])
    in_step = graph.step == step
    begin_ns = int(timeline.start_ns[in_step].min())
    backward = in_step & (graph.phase == Phase.BACKWARD)
    rows = gradients.step == step
    ready = (timeline.end_ns[gradients.task[rows]] - begin_ns) / 1e6
    return Plan(
        step_ms=round(baseline.step_ns / 1e6, 4),
        backward_ms=round(float(timeline.end_ns[backward].max() - begin_ns) / 1e6, 4),
        gradients=tuple(
            (round(float(at), 4), int(size)) for at, size in zip(ready, gradients.size_bytes[rows], strict=True)
        ),
    )


def buckets_of(gradients: list[tuple[float, int]], cap_bytes: int) -> list[tuple[float, int]]:
    """Fill buckets by DDP's rule; returns the ready time and bytes of each."""
    found: list[tuple[float, int]] = []
    filled = 0
    for at, size in gradients:
        filled += size
        if filled >= cap_bytes:
            found.append((at, filled))
            filled = 0
    return [*found, (gradients[-1][0], filled)] if filled else found


def sleep_until(end_s: float) -> None:
    """Sleep until the performance counter reaches ``end_s``."""
    left_s = end_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
