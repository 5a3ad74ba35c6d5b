"""The baseline of every what-if: a graph, its simulated timeline, and its replay error."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import BEFORE_NAME, BEGIN_NAME, Array, Float64, TaskKind
from whatif.prediction.calibrate import Calibration, calibrate
from whatif.prediction.ranges import (
    PREDICTED_REST,
    combined_shares,
    error_sums,
    run_to_run,
    simulated_at,
    spread_of_steps,
)
from whatif.runtime.errors import WhatifError
from whatif.simulation.breakdown import Breakdown, breakdown
from whatif.simulation.simulator import Schedule, simulate, simulate_bounds
from whatif.simulation.steps import default_clock, steady, step_ns
from whatif.simulation.timeline import Timeline


class Baseline(Struct, frozen=True, dict=True):
    """A graph, its simulated timeline and its replay error.

    The graph is the recorded one, or with ``calibration`` the one without the profiler.
    """

    graph: TaskGraph
    timeline: Timeline
    clock: str
    calibration: Calibration | None = None  # None if the recording lacks the step without the profiler

    @staticmethod
    def of(graph: TaskGraph, clock: str | None = None, *, calibrated: bool = True) -> Baseline:
        """Simulate ``graph``, corrected to the step without the profiler if the recording has it.

        ``calibrated=False`` keeps the graph as recorded. Raises WhatifError on a clock that the recording lacks.
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
        return Baseline(
            found.graph, found.timeline, chosen, found if found.is_without_profiler or found.reason else None
        )

    @cached_property
    def step_ns(self) -> float:
        """The simulated step, ns."""
        return self.timeline.step_ns_by(self.clock)

    @property
    def step_ms(self) -> float:
        """The simulated step, ms."""
        return self.step_ns / 1e6

    @property
    def is_without_profiler(self) -> bool:
        """Whether the profiler's cost was removed, as measured or as estimated."""
        return self.calibration is not None and self.calibration.is_without_profiler

    @property
    def meets_untraced(self) -> bool:
        """Whether the step is corrected to the one that was measured without the profiler."""
        return self.calibration is not None and self.calibration.untraced is not None

    @property
    def as_recorded(self) -> Baseline | None:
        """The baseline including the profiler's cost, if that was estimated and removed; else None."""
        recorded = self.calibration.recorded if self.calibration else None
        return Baseline(recorded.graph, recorded, self.clock) if recorded else None

    @cached_property
    def estimated_ms(self) -> dict[str, float] | None:
        """The step without the profiler and its range, ms, if estimated from the trace; else None."""
        if self.calibration is None or self.calibration.estimate is None:
            return None
        low_ns, high_ns = bounds_ns(self, self.graph, self.step_ns)
        return {"estimate": self.step_ms, "low": low_ns / 1e6, "high": high_ns / 1e6}

    @property
    def profiler_facts(self) -> dict[str, Any]:
        """The profiler's cost in answers, as part of a JSON object; empty if none was removed."""
        return {
            **({"without_profiler_ms": self.estimated_ms} if self.estimated_ms else {}),
            **({"calibration": self.calibration.to_dict()} if self.calibration else {}),
        }

    @property
    def measured_ns(self) -> float:
        """The measured step, ns."""
        return step_ns(self.graph.info.measured_step_ns[self.clock], self.graph, self.clock)

    @property
    def measured_ms(self) -> float | None:
        """The measured step, ms; None if nothing was measured."""
        return self.measured_ns / 1e6 or None if self.graph.info.is_recorded else None

    @property
    def replayed_ns(self) -> float:
        """The simulated step of the graph as recorded, before any calibration, ns."""
        return self.calibration.replayed_ns if self.calibration else self.step_ns

    @property
    def replay_error_pct(self) -> float:
        """Simulated against measured step of the recording, percent, signed: both including the profiler."""
        return 100.0 * (self.replayed_ns - self.measured_ns) / self.measured_ns if self.measured_ns else 0.0

    @property
    def known_error_pct(self) -> float | None:
        """The replay error; None if no step was measured to compare with."""
        return self.replay_error_pct if self.graph.info.is_recorded else None

    @cached_property
    def unexplained_wait_pct(self) -> float:
        """Waiting that no dependency explains, percent of the makespan."""
        graph = self.graph
        lead_in = np.array([name in (BEFORE_NAME, BEGIN_NAME) for name in graph.names], dtype=np.bool_)
        # Before the main thread's first task, GPU work without a recorded call ran.
        unexplained = graph.of_clock & (graph.kind == TaskKind.WAIT) & (~lead_in.take(graph.name) | (graph.thread == 0))
        return 100.0 * float(graph.duration_ns[unexplained].sum()) / max(self.timeline.makespan_ns, 1)

    @cached_property
    def spread(self) -> tuple[float, float]:
        """Shares by which another run's step may be shorter and longer, from untraced steps, else the recorded ones."""
        if self.calibration is not None and self.calibration.untraced is not None:
            return self.calibration.spread
        return spread_of_steps(steady(self.graph.info.measured_step_ns.get(self.clock, ()), self.graph, self.clock))

    def mean_over_median(self, times_ns: tuple[int, ...]) -> float:
        """Return the mean of the steady steps in ``times_ns`` over their median: above 1 if some take longer."""
        chosen = steady(times_ns, self.graph, self.clock)
        return float(np.mean(chosen) / np.median(chosen)) if chosen and np.median(chosen) > 0 else 1.0

    @cached_property
    def breakdown(self) -> Breakdown:
        """The breakdown of the simulated step."""
        return breakdown(self.timeline, self.clock)


def bounds_ns(
    baseline: Baseline, changed: TaskGraph, predicted_ns: float, schedule: Schedule | None = None
) -> tuple[float, float]:
    """Return the ends of the nominal 90 % range of the step of a changed graph, ns; it takes two simulations."""
    times_ns = times_at_bounds_ns(baseline, changed, schedule)
    return ends_ns(baseline, changed, [predicted_ns, *(step_ns(times, changed, baseline.clock) for times in times_ns)])


def times_at_bounds_ns(
    baseline: Baseline, changed: TaskGraph, schedule: Schedule | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the times of a changed graph's steps with all durations at their low bounds, and at their high ones, ns.

    It takes two simulations.
    """
    low, high = simulate_bounds(simulated_at(changed), schedule)
    return low.step_times_ns(baseline.clock), high.step_times_ns(baseline.clock)


def ends_ns(
    baseline: Baseline, changed: TaskGraph, steps_ns: Sequence[float], sums: Float64 | None = None
) -> tuple[float, float]:
    """Return the ends of that range from the step as predicted and at both bounds, ns; ``sums`` as in ``range_ns``."""
    if not steps_ns[0] > 0:
        return 0.0, 0.0
    sums = error_sums(simulated_at(changed)) if sums is None else sums
    predicted_ns, at_low_ns, at_high_ns = (np.array([time_ns]) for time_ns in steps_ns)
    low_ns, high_ns = range_ns(baseline, changed, predicted_ns, at_low_ns, at_high_ns, sums)
    return float(low_ns[0]), float(high_ns[0])


def range_ns(
    baseline: Baseline, changed: TaskGraph, predicted_ns: Array, low_ns: Array, high_ns: Array, sums: Float64
) -> tuple[Array, Array]:
    """Return the ends of that range for n steps of one structure, shape (n,), each above 0 ns.

    ``low_ns`` and ``high_ns`` are the steps with all durations at their bounds, which adds up independent errors;
    ``sums`` (``error_sums``) give the share of that width to keep. The replay error, the spread of steps and the
    difference between two runs are independent of it and of each other: they add as squares.
    """
    replay_error, spread = abs(baseline.replay_error_pct) / 100, baseline.spread
    shares, between_runs = combined_shares(sums), np.full(1, PREDICTED_REST)
    if not changed.info.is_predicted:  # predicted steps have no runs
        n_steps = 1 if baseline.clock == "span" else changed.info.n_steps
        between_runs = run_to_run(changed, sums, predicted_ns, max(n_steps, 1))
    below, above = (
        np.sqrt((share * (bound_ns / predicted_ns - 1)) ** 2 + replay_error**2 + step_spread**2 + between_runs**2)
        for bound_ns, share, step_spread in zip((low_ns, high_ns), shares, spread, strict=True)
    )
    return np.maximum(predicted_ns * (1 - below), 0.0), predicted_ns * (1 + above)
