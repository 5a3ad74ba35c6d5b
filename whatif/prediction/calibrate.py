"""Remove the profiler from a recording: correct CPU times until the simulated step matches the untraced one.

First the cost of recording each profiler event is subtracted from the task that contains it. The remaining difference
(colder caches, hooks, another speed of the machine while recording) is one factor on all CPU work, found by simulation.
GPU tasks and waits keep their times. If the recorder timed the parts of a step, each part has a separate cost and
factor (``step_parts.py``).

If the untraced step was not measured, as in a trace of torch's profiler, the profiler's cost is estimated from the
trace (``whatif.ingest.profiler_cost``) and removed task by task, with its range.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import Struct, structs

from whatif.graph.order import loops
from whatif.graph.recorded import ProfilerEstimate
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Float64, Int64
from whatif.prediction.step_parts import part_times
from whatif.prediction.untraced import Untraced, event_cost_ns, untraced_step
from whatif.simulation.simulator import simulate
from whatif.simulation.timeline import Timeline

# Cost of an event if the recording does not contain it: 0.34 us by default to 0.98 us with shapes (torch 2.13, measured
# with thread CPU time on two models); used only as far as the untraced step requires.
DEFAULT_EVENT_COST_NS = 500.0
# Our choice: a machine slower or faster than this while recording is another machine. Other programs' share comes on
# top.
PACE_LOW, PACE_HIGH = 0.4, 1.5
# Nothing is left to correct if the simulated step is this close to the untraced one.
MET = 1e-3
# A larger difference is reported to the user: the acceptance limit of the calibration.
MISSED = 0.01
# Our choice: if a step follows the CPU's pace by less than this share, other work bounds it and the CPU explains
# nothing.
FOLLOWS = 0.2
PACE_SIMULATIONS = 3


class Calibration(Struct, frozen=True):
    """A corrected graph, its simulation, and the corrections; times of steps in ns."""

    graph: TaskGraph
    timeline: Timeline
    replayed_ns: float  # the simulated step before any correction, by the requested clock
    untraced: Untraced | None = None  # the target step; None: nothing was corrected
    corrected_ns: float = 0.0  # the simulated step, if ``untraced`` or ``estimate`` is given
    event_cost_ns: float = 0.0  # removed for each event of the profiler
    cost_measured: bool = False  # by the recorder, on the machine of the recording
    removed_ns: float = 0.0  # CPU time of events removed per step, or in total without steps; all threads
    pace: float = 1.0  # factor on the remaining CPU work, the mean if parts of a step have separate ones
    by_parts: bool = False  # whether each part of a step was corrected separately
    recorded: Timeline | None = None  # including the profiler, if ``estimate`` is given
    estimate: ProfilerEstimate | None = None  # the removed cost, if no step without the profiler was measured
    reason: str = ""  # why nothing was corrected, or why the untraced step is not matched; "" if it is

    @property
    def is_without_profiler(self) -> bool:
        """Whether the profiler's cost was removed, as measured or as estimated."""
        return self.untraced is not None or self.estimate is not None

    @property
    def own_pace(self) -> float:
        """``pace`` without the share of other programs on the machine during the recording."""
        return self.pace / self.untraced.running if self.untraced else 1.0

    @property
    def missed(self) -> float:
        """The error of the simulated step against the untraced one, a signed share."""
        return self.corrected_ns / self.untraced.median_ns - 1 if self.untraced else 0.0

    @property
    def spread(self) -> tuple[float, float]:
        """Shares by which predictions may be lower and higher: the untraced step's quartiles, and the remaining error.

        The difference of two medians of 20 steps stays within one quartile distance in 90 % of the cases (normal
        steps), and a prediction is compared with such a median of another run. The errors are independent, so they add
        as squares. If the simulated step is too short, the upper end reaches the untraced one.
        """
        if self.untraced is None:
            return 0.0, 0.0
        median_ns = self.untraced.median_ns
        lower, higher = 1 - self.untraced.q25_ns / median_ns, self.untraced.q75_ns / median_ns - 1
        too_short = median_ns / self.corrected_ns - 1 if self.corrected_ns > 0 else 0.0
        return math.hypot(lower, self.missed), math.hypot(higher, max(abs(self.missed), too_short))

    @property
    def met(self) -> bool:
        """Whether the corrected graph's step is the one without the profiler, within one percent."""
        return self.untraced is not None and abs(self.missed) <= MISSED

    @property
    def sentence(self) -> str:
        """Explain the correction in one sentence."""
        if self.estimate is not None:
            return self._estimated
        if self.untraced is None:
            return f"nothing is corrected: {self.reason}."
        parts = []
        if self.removed_ns:
            source = "measured with the recording" if self.cost_measured else "our default"
            parts.append(
                f"{self.removed_ns / 1e6:.2f} ms of CPU time {self._scope} are the profiler's overhead "
                f"({self.event_cost_ns / 1e3:.2f} µs an event, {source}) and are removed"
            )
        if self.pace != 1:
            rest = "what is left of the CPU's work" if parts else "the CPU's work"
            others_pct = 100 * (1 - self.untraced.running)
            others = f" (other programs took {others_pct:.0f} % of that)" if others_pct >= 0.5 else ""
            each = ", each part of a step by itself" if self.by_parts else ""
            parts.append(f"{rest} is scaled to {self.pace:.3f} of its recorded time{each}{others}")
        corrections = ", and ".join(parts) or "nothing had to be corrected"
        return f"{corrections}; {self.reason}." if self.reason else f"{corrections}."

    @property
    def missed_pct(self) -> float:
        """The corrected step's error against the measured one, percent, for display: never less than 0.01."""
        return max(abs(100 * self.missed), 0.01)

    @property
    def _scope(self) -> str:
        """The scope of the removed time, which is summed over threads and ranks."""
        info = self.graph.info
        return ("a step" if info.n_steps else "in all") + (" on all ranks together" if info.ranks else "")

    @property
    def _estimated(self) -> str:
        estimate, ms = self.estimate, self.removed_ns / 1e6
        assert estimate is not None
        source = "read from the trace" if estimate.read_from_trace else "a constant: the trace does not show it"
        return (
            f"the time without the profiler was not measured; about {ms:.2f} ms of CPU time {self._scope} "
            f"({ms * estimate.low:.2f} to {ms * estimate.high:.2f}) are estimated to be the profiler's "
            f"({estimate.operator_us:,.2f} µs an operator, {source}) and are removed."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the corrections as a JSON object."""
        low, high = self.spread
        return {
            "untraced_ms": self.untraced.median_ns / 1e6 if self.untraced else None,
            "untraced_clock": self.untraced.clock if self.untraced else None,
            "replayed_ms": self.replayed_ns / 1e6,
            "calibrated_ms": self.corrected_ns / 1e6 if self.untraced or self.estimate else None,
            "estimated": self.estimate is not None,
            "missed_pct": 100 * self.missed if self.untraced else None,
            "spread_pct": [100 * low, 100 * high],
            "event_cost_us": self.event_cost_ns / 1e3,
            "event_cost_measured": self.cost_measured,
            "removed_cpu_ms": self.removed_ns / 1e6,
            "pace": self.pace,
            "own_pace": self.own_pace,
            "reason": self.reason,
        }


def calibrate(graph: TaskGraph, clock: str) -> Calibration:
    """Return ``graph`` with CPU times as without the profiler, and the corrections.

    The simulated step by ``clock`` is matched to the recording's untraced one; if steps are not marked (``span``), by
    the recording's steps. Without an untraced step the profiler's estimated cost is removed, after one simulation;
    without an estimate the graph stays as it is. Else it takes at most six simulations.
    """
    timeline = simulate(graph)
    replayed_ns = timeline.step_ns_by(clock)
    clock = _clock_of_steps(graph, clock)
    untraced, reason = untraced_step(graph, clock)
    if untraced is None and graph.info.profiler is not None:
        return _estimated(timeline, clock, graph.info.profiler, replayed_ns)
    if untraced is None:
        return Calibration(graph, timeline, replayed_ns, reason=reason)
    search = _Search(graph, clock, untraced.median_ns, untraced.running)
    given_ns, reason = event_cost_ns(graph.info.recorded)
    most_ns = DEFAULT_EVENT_COST_NS if given_ns is None else given_ns
    parts = part_times(graph, untraced, most_ns, search.bounded(0), search.bounded(math.inf))
    if parts is None:
        cost_ns, first = search.event_cost(search.trial(timeline), given_ns)
        removed_ns, part_pace = _removed_ns(graph, cost_ns), 1.0
    else:
        removed_ns = _removed_ns(graph, parts.event_cost_ns)
        adjusted = corrected(graph, parts.event_cost_ns, parts.pace)
        search = structs.replace(search, graph=adjusted, applied_pace=parts.mean_pace)
        first = search.trial(simulate(search.graph))
        cost_ns, part_pace = parts.mean_event_cost_ns, parts.mean_pace
    pace, last, missed = search.pace(cost_ns, first)
    return Calibration(
        graph=last.timeline.graph,
        timeline=last.timeline,
        replayed_ns=replayed_ns,
        untraced=untraced,
        corrected_ns=last.step_ns,
        event_cost_ns=cost_ns,
        cost_measured=given_ns is not None,
        removed_ns=removed_ns,
        pace=pace * part_pace,
        by_parts=parts is not None,
        reason="; ".join(sentence for sentence in (reason, missed) if sentence),
    )


def _estimated(recorded: Timeline, clock: str, estimate: ProfilerEstimate, replayed_ns: float) -> Calibration:
    """The graph without the estimated cost of the profiler; its range widens the bounds of CPU tasks."""
    graph = recorded.graph
    mid_ns, least_ns, most_ns = (_left_ns(graph, factor) for factor in (1.0, estimate.high, estimate.low))
    without = graph.replace(
        duration_ns=mid_ns,
        low_ns=np.minimum(graph.low_ns, least_ns),
        high_ns=np.maximum(graph.high_ns - graph.duration_ns, 0) + np.maximum(most_ns, mid_ns),
        profiler_ns=np.zeros_like(graph.profiler_ns),
        profiler_events=np.where(graph.on_cpu, 0, graph.profiler_events),
        info=replace(graph.info, profiler=None),
    )
    timeline = simulate(without)
    in_step = graph.step >= 0 if graph.info.n_steps else np.ones(len(graph), dtype=np.bool_)
    removed_ns = float((graph.duration_ns - mid_ns)[in_step].sum()) / max(graph.info.n_steps, 1)
    return Calibration(
        without, timeline, replayed_ns, corrected_ns=timeline.step_ns_by(clock), removed_ns=removed_ns,
        recorded=recorded, estimate=estimate,
    )  # fmt: skip


def _left_ns(graph: TaskGraph, factor: float) -> Int64:
    """Return the time of each task without ``factor`` times its estimated cost, ns, shape (n_tasks,).

    Cost beyond a CPU task's time is subtracted from the tasks after it on its thread: if stamps are close, a part of an
    event's cost is in its neighbours.
    """
    cost_ns, left_ns = np.ascontiguousarray(graph.profiler_ns, dtype=np.int32), np.empty(len(graph))
    works = graph.on_cpu.mask.view(np.uint8)
    loops.without_cost(graph.thread, works, graph.duration_ns, cost_ns, factor, len(graph.threads), left_ns)
    return np.where(graph.on_cpu, np.rint(left_ns).astype(np.int64), graph.duration_ns)


def _clock_of_steps(graph: TaskGraph, clock: str) -> str:
    """The clock for comparing one step: the span of a recording covers several steps."""
    if clock != "span":
        return clock
    return next((c for c in ("gpu", "mark") if c in graph.info.measured_step_ns), clock)


class _Trial(Struct, frozen=True):
    """A simulation, and its step by the clock of the search."""

    timeline: Timeline
    step_ns: float


class _Search(Struct, frozen=True):
    """Finds the correction that matches the simulated step to ``target_ns`` in few simulations."""

    graph: TaskGraph
    clock: str
    target_ns: float
    running: float
    applied_pace: float = 1.0  # factor already applied to the CPU work of ``graph``

    def trial(self, timeline: Timeline) -> _Trial:
        return _Trial(timeline, timeline.step_ns_by(self.clock))

    def run(self, cost_ns: float, pace: float) -> _Trial:
        return self.trial(simulate(corrected(self.graph, cost_ns, pace)))

    def meets(self, trial: _Trial) -> bool:
        return abs(trial.step_ns - self.target_ns) <= MET * self.target_ns

    def event_cost(self, recorded: _Trial, given_ns: float | None) -> tuple[float, _Trial]:
        """Return the cost of an event and the graph without it; an unmeasured cost only as far as needed."""
        if not self.graph.profiler_events.any():
            return 0.0, recorded
        if given_ns is not None:
            return given_ns, self.run(given_ns, 1.0)
        if recorded.step_ns <= self.target_ns:
            return 0.0, recorded
        cost_ns = DEFAULT_EVENT_COST_NS
        without = self.run(cost_ns, 1.0)
        if without.step_ns < self.target_ns:
            # Nearly linear: only the shortest tasks reach 0.
            cost_ns *= (recorded.step_ns - self.target_ns) / (recorded.step_ns - without.step_ns)
            without = self.run(cost_ns, 1.0)
        return cost_ns, without

    def pace(self, cost_ns: float, first: _Trial) -> tuple[float, _Trial, str]:
        """Return the factor on CPU work, the graph with it, and why the target is not met, or ""."""
        if self.meets(first) or not first.step_ns:
            return 1.0, first, ""
        before, at = (1.0, first), self.bounded(self.target_ns / first.step_ns)
        best = before
        for _ in range(PACE_SIMULATIONS):
            # Already tried: 1, which may be a bound if others shared the machine, or the bound of the previous round.
            if at in (1.0, before[0]):
                break
            trial = self.run(cost_ns, at)
            if abs(trial.step_ns - self.target_ns) < abs(best[1].step_ns - self.target_ns):
                best = at, trial
            follows = (trial.step_ns / first.step_ns - 1) / (at - 1)
            if follows < FOLLOWS and self.graph.has_gpu:
                return 1.0, first, self._unexplained(first)
            slope = (trial.step_ns - before[1].step_ns) / (at - before[0])
            if self.meets(trial) or slope <= 0:
                break
            before, at = (at, trial), self.bounded(at + (self.target_ns - trial.step_ns) / slope)
        pace, trial = best
        if abs(trial.step_ns / self.target_ns - 1) <= MISSED:
            return pace, trial, ""
        if self.graph.has_gpu:
            return 1.0, first, self._unexplained(first)
        return pace, trial, self._at_bound(pace, trial)

    def bounded(self, pace: float) -> float:
        scale = self.running / self.applied_pace
        return min(max(pace, PACE_LOW * scale), PACE_HIGH * scale)

    def _unexplained(self, first: _Trial) -> str:
        return (
            f"the CPU's pace does not explain why the simulated step {self._differs(first)}, because the GPU's work "
            "bounds it"
        )

    def _at_bound(self, pace: float, trial: _Trial) -> str:
        return (
            f"with the CPU's work at {pace * self.applied_pace:.2f} of its recorded time, the limit, the simulated "
            f"step still {self._differs(trial)}"
        )

    def _differs(self, trial: _Trial) -> str:
        return f"differs by {100 * (trial.step_ns / self.target_ns - 1):+z.1f} % from the one without the profiler"


def corrected(graph: TaskGraph, cost_ns: float | Float64, pace: float | Float64) -> TaskGraph:
    """Return the graph without ``cost_ns`` per event of the profiler, and the remaining CPU work times ``pace``.

    Each is one number, or one per task, shape (n_tasks,).
    """
    work = graph.on_cpu
    # At most the task's time: if stamps are close, part of the cost is in its neighbour.
    cost = np.where(work, np.rint(cost_ns * graph.profiler_events), 0).astype(np.int64)

    def without_cost(time_ns: Int64) -> Int64:
        left_ns = np.maximum(time_ns - cost, 0)
        return np.where(work, np.rint(left_ns * pace), time_ns).astype(np.int64)

    return graph.replace(
        duration_ns=without_cost(graph.duration_ns),
        low_ns=without_cost(graph.low_ns),
        high_ns=without_cost(graph.high_ns),
        profiler_ns=np.zeros_like(graph.profiler_ns),
        profiler_events=np.where(work, 0, graph.profiler_events).astype(np.int32),
    )


def _removed_ns(graph: TaskGraph, cost_ns: float | Float64) -> float:
    """The CPU time removed per step with the events' cost, ns: the mean of all steps."""
    in_step = graph.on_cpu & (graph.step >= 0)
    taken_ns = np.minimum(cost_ns * graph.profiler_events, graph.duration_ns)[in_step]
    return float(taken_ns.sum()) / max(graph.info.n_steps, 1)
