"""Apply transforms to a graph and report what they would do: the pipeline of every what-if."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from whatif.breakdown import Breakdown, breakdown
from whatif.calibrate import Calibration, calibrate
from whatif.errors import WhatifError
from whatif.graph import TaskGraph
from whatif.simulator import Schedule, simulate, simulate_bounds
from whatif.steps import default_clock, steady, step_ns
from whatif.timeline import Timeline
from whatif.transform import Transform, load_transform
from whatif.types import BEFORE_NAME, TaskKind

# Above this share of the span, time that no dependency explains makes every prediction doubtful.
DOUBTFUL_WAIT_PCT = 2.0
# Steps whose mean exceeds their median by more than this are not one kind of step.
UNEVEN_STEPS = 1.1
# A GPU that is busy for less of the step than this waits for the CPU, whatever a transform changed.
HOST_BOUND_PCT = 50.0
# A change below this is within what replays miss.
NOTHING_PCT = 1.0

AnyTransform = Transform | str | Callable[[TaskGraph], TaskGraph]


@dataclass(frozen=True)
class Baseline:
    """A graph, its simulated timeline and how well that meets the recording.

    The graph is the recorded one, or where ``calibration`` is given that one without the profiler.
    """

    graph: TaskGraph
    timeline: Timeline
    clock: str
    calibration: Calibration | None = None  # None where the recording tells no step without the profiler

    @staticmethod
    def of(graph: TaskGraph, clock: str | None = None, *, calibrated: bool = True) -> Baseline:
        """Simulate ``graph``, corrected to the step without the profiler where the recording tells it.

        With ``calibrated=False`` as it was recorded. Raises WhatifError on a clock that the recording does not have.
        """
        chosen = clock or default_clock(graph)
        if chosen not in ("gpu", "mark", "span"):
            raise WhatifError(f"expected the step clock gpu, mark or span, got {chosen!r}.")
        if chosen not in graph.info.measured_step_ns:
            raise WhatifError(
                f"{graph.info.path}: this recording has no steps by the clock {chosen!r}; "
                f"it has: {', '.join(graph.info.measured_step_ns) or 'none'}."
            )
        if not calibrated:
            return Baseline(graph, simulate(graph), chosen)
        found = calibrate(graph, chosen)
        return Baseline(found.graph, found.timeline, chosen, found if found.untraced or found.reason else None)

    @property
    def step_ns(self) -> float:
        """The simulated step, ns."""
        return step_ns(self.timeline.step_times_ns(self.clock), self.graph, self.clock)

    @property
    def measured_ns(self) -> float:
        """The measured step, ns."""
        return step_ns(self.graph.info.measured_step_ns[self.clock], self.graph, self.clock)

    @property
    def replayed_ns(self) -> float:
        """The simulated step of the graph as it was recorded, before any calibration, ns."""
        return self.calibration.replayed_ns if self.calibration else self.step_ns

    @property
    def replay_error_pct(self) -> float:
        """Simulated against measured step of the recording, percent, signed: both with the profiler in them."""
        return 100.0 * (self.replayed_ns - self.measured_ns) / self.measured_ns if self.measured_ns else 0.0

    @cached_property
    def unexplained_wait_pct(self) -> float:
        """Waiting that no dependency explains, percent of the makespan."""
        graph = self.graph
        lead_in = np.array([name == BEFORE_NAME for name in graph.names])
        # Before the main thread's first task GPU work ran that the recording does not lead back to any call.
        unexplained = (graph.kind == TaskKind.WAIT) & (~lead_in[graph.name] | (graph.thread == 0))
        return 100.0 * float(graph.duration_ns[unexplained].sum()) / max(self.timeline.makespan_ns, 1)

    @property
    def mean_over_median(self) -> float:
        """The mean of the measured steady steps over their median: above 1 where some take much longer."""
        times_ns = steady(self.graph.info.measured_step_ns[self.clock], self.graph, self.clock)
        return float(np.mean(times_ns) / np.median(times_ns)) if times_ns and np.median(times_ns) > 0 else 1.0

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where the simulated step goes."""
        return breakdown(self.timeline, self.clock)


@dataclass(frozen=True)
class Prediction:
    """What transforms would do to the step; times in ms by one clock, the median of the steady steps."""

    baseline: Baseline
    transforms: tuple[Transform, ...]
    timeline: Timeline
    low_ns: float
    high_ns: float

    @property
    def graph(self) -> TaskGraph:
        """The transformed graph."""
        return self.timeline.graph

    @property
    def predicted_ms(self) -> float:
        """The predicted step, ms."""
        clock = self.baseline.clock
        return step_ns(self.timeline.step_times_ns(clock), self.graph, clock) / 1e6

    @property
    def baseline_ms(self) -> float:
        """The simulated step of the recording itself, ms."""
        return self.baseline.step_ns / 1e6

    @property
    def low_ms(self) -> float:
        """The lower end of a nominal 90 % range, ms."""
        return min(self.low_ns / 1e6, self.predicted_ms)

    @property
    def high_ms(self) -> float:
        """The upper end of a nominal 90 % range, ms."""
        return max(self.high_ns / 1e6, self.predicted_ms)

    @property
    def speedup(self) -> float:
        """Baseline over predicted step; infinite where nothing is left."""
        return self.baseline_ms / self.predicted_ms if self.predicted_ms else float("inf")

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where the predicted step goes."""
        return breakdown(self.timeline, self.baseline.clock)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What to know before trusting the numbers: the recording's quirks, the model's doubts, the verdict."""
        graph = self.baseline.graph
        found = list(graph.info.quirks)
        if self.baseline.calibration and self.baseline.calibration.reason:
            found.append(self.baseline.calibration.reason)
        wait_pct = self.baseline.unexplained_wait_pct
        if wait_pct > DOUBTFUL_WAIT_PCT:
            found.append(
                f"{wait_pct:.0f} % of the span is waiting that nothing in the recording explains (other ranks, other "
                "processes); the range counts it as free to vanish"
            )
        uneven = self.baseline.mean_over_median
        if uneven > UNEVEN_STEPS:
            found.append(
                f"the steps differ (their mean is {uneven:.2f} times the median); all is told of the median one"
            )
        found += [note for note in self.graph.notes if note not in graph.notes]
        verdict = self.verdict
        if verdict:
            found.append(verdict)
        return tuple(found)

    @property
    def verdict(self) -> str:
        """Say why little or nothing changes, where that is so; else ""."""
        before, after = self.baseline.breakdown, self.breakdown
        gain_pct = 100.0 * (1 - self.predicted_ms / self.baseline_ms) if self.baseline_ms else 0.0
        if not self.baseline.graph.on_gpu.any() or gain_pct >= NOTHING_PCT or not self.baseline_ms:
            return ""
        busy_pct = 100.0 * before.gpu_busy_ms / self.baseline_ms
        shrank = after.gpu_busy_ms < 0.99 * before.gpu_busy_ms
        if (shrank and busy_pct < 90) or busy_pct < HOST_BOUND_PCT:
            return (
                f"host-bound: the GPU is busy {busy_pct:.0f} % of the step ({before.gpu_busy_ms:.2f} of "
                f"{self.baseline_ms:.2f} ms) and waits for the CPU in the rest, so faster kernels change nothing"
                + (", and what is added on the CPU costs time" if gain_pct <= -NOTHING_PCT else "")
            )
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Give the prediction as a JSON object with the keys that scripts rely on."""
        info = self.baseline.graph.info
        result: dict[str, Any] = {
            "trace": info.path,
            "transforms": [{"name": t.name, "options": _plain(t.options)} for t in self.transforms],
            "steps": info.n_steps,
            "measured_ms": self.baseline.measured_ns / 1e6 or None,
            "untraced_ms": info.untraced_step_ns / 1e6 if info.untraced_step_ns else None,
            "baseline_ms": self.baseline_ms,
            "replay_error_pct": self.baseline.replay_error_pct,
            "predicted_ms": self.predicted_ms,
            "low_ms": self.low_ms,
            "high_ms": self.high_ms,
            "speedup": self.speedup if np.isfinite(self.speedup) else None,
            "step_clock": self.baseline.clock,
            "gpu_busy_ms": {"baseline": self.baseline.breakdown.gpu_busy_ms, "predicted": self.breakdown.gpu_busy_ms},
            "unexplained_wait_pct": self.baseline.unexplained_wait_pct,
            "breakdown": {"baseline": self.baseline.breakdown.to_dict(), "predicted": self.breakdown.to_dict()},
            "warnings": list(self.warnings),
        }
        if self.baseline.calibration:
            result["calibration"] = self.baseline.calibration.to_dict()
        changed_batch = self.graph.info.batch_size
        if info.batch_size and changed_batch and self.baseline_ms and self.predicted_ms:
            result["samples_per_s"] = {
                "baseline": 1e3 * info.batch_size / self.baseline_ms,
                "predicted": 1e3 * changed_batch / self.predicted_ms,
            }
        return result


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, str | int | float | bool | None) else str(v) for k, v in options.items()}


def apply(
    graph: TaskGraph | Baseline, *transforms: AnyTransform, clock: str | None = None, calibrated: bool = True
) -> Prediction:
    """Give the prediction for a graph under transforms, applied left to right.

    A transform is a name with options as text, a loaded ``Transform`` or a function from graph to graph. ``clock`` and
    ``calibrated`` are those of ``Baseline.of``, for a graph that is no baseline yet. Raises WhatifError where a script
    fails its checks, breaks the graph, or where two of them override the schedule.
    """
    baseline = graph if isinstance(graph, Baseline) else Baseline.of(graph, clock, calibrated=calibrated)
    loaded = tuple(_as_transform(t) for t in transforms)
    schedule = single_schedule(loaded)
    changed = baseline.graph
    for transform in loaded:
        changed = transform(changed).check()
    if changed is baseline.graph and schedule is None:
        return Prediction(baseline, loaded, baseline.timeline, baseline.step_ns, baseline.step_ns)
    timeline = simulate(changed, schedule)
    # What the model misses on the recording itself it may miss here as well.
    missed = abs(baseline.replay_error_pct) / 100
    lower, higher = baseline.calibration.spread if baseline.calibration else (0.0, 0.0)
    low, high = (
        step_ns(bound.step_times_ns(baseline.clock), changed, baseline.clock)
        for bound in simulate_bounds(changed, schedule)
    )
    return Prediction(baseline, loaded, timeline, max(low * (1 - missed - lower), 0.0), high * (1 + missed + higher))


def single_schedule(transforms: tuple[Transform, ...]) -> Schedule | None:
    """Give the one schedule override of a composition, if any. Raises WhatifError where two transforms have one."""
    overriding = [t for t in transforms if t.schedule is not None]
    if len(overriding) > 1:
        names = " and ".join(repr(t.name) for t in overriding)
        raise WhatifError(f"{names} both override the schedule; apply one of them at a time.")
    return overriding[0].schedule if overriding else None


def _as_transform(transform: AnyTransform) -> Transform:
    if isinstance(transform, Transform):
        return transform
    if isinstance(transform, str):
        return load_transform(transform)
    if callable(transform):
        name = getattr(transform, "__name__", "function")
        return Transform(name, (transform.__doc__ or name).strip().splitlines()[0], "", transform)
    raise WhatifError(f"expected a transform's name, a Transform or a function, got {type(transform).__name__}.")
