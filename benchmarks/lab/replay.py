"""A recorded step as a plan of times: when each gradient is finished, and how long the rest of the step takes.

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
    """One step of one worker, ms since its begin."""

    step_ms: float
    backward_ms: float  # the end of the backward pass; the update follows
    gradients: tuple[tuple[float, int], ...]  # when each is finished, and its bytes, in order


def plan_of(trace: Path) -> Plan:
    """Read a recording and give its usual step: the simulated baseline, which is without the profiler's cost."""
    baseline = Baseline.of(read(trace), "mark")
    graph, timeline = baseline.graph, baseline.timeline
    gradients = step_gradients(graph, None, "lab")
    steps = np.unique(gradients.step)
    step = int(steps[len(steps) // 2])
    own = graph.step == step
    begin_ns = int(timeline.start_ns[own].min())
    backward = own & (graph.phase == Phase.BACKWARD)
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
    """Fill buckets by DDP's rule: when each can be sent, and its bytes."""
    found: list[tuple[float, int]] = []
    filled = 0
    for at, size in gradients:
        filled += size
        if filled >= cap_bytes:
            found.append((at, filled))
            filled = 0
    return [*found, (gradients[-1][0], filled)] if filled else found


def sleep_until(end_s: float) -> None:
    """Sleep until the performance counter shows so many seconds."""
    left_s = end_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
