"""Two recordings made comparable: by the same step clock, and both with or both without the profiler."""

from __future__ import annotations

from functools import cached_property

from msgspec import Struct

from whatif.graph.recorded import Simulated
from whatif.graph.task_graph import TaskGraph
from whatif.prediction.baseline import Baseline
from whatif.prediction.untraced import untraced_step
from whatif.questions.comparison.change_candidates import batch_factor
from whatif.questions.comparison.differences import BATCH, Difference, differences
from whatif.questions.comparison.measured_step import MeasuredStep, noise_ms
from whatif.questions.comparison.pace import SameWork
from whatif.simulation.steps import default_clock


class TwoRecordings(Struct, frozen=True, dict=True):
    """Recording A (``before``) and recording B (``after``), by one clock, each with what it measured."""

    before: Baseline
    after: Baseline
    measured: tuple[MeasuredStep, MeasuredStep]
    remarks: tuple[str, ...]  # how the two were made comparable

    @staticmethod
    def of(before: TaskGraph, after: TaskGraph, clock: str | None = None, *, calibrated: bool = True) -> TwoRecordings:
        """Simulate both. Without the profiler if both recorded that step, else both as recorded.

        An export without the profiler's cost has no step as recorded: the other's step without it is estimated if
        possible. Raises WhatifError if a recording lacks the clock, or a step that takes time.
        """
        chosen = clock or common_clock(before, after)
        graphs = (before, after)
        bare = [(graph.info.recorded.simulated or Simulated()).without_profiler for graph in graphs]
        known = [
            is_bare or untraced_step(graph, chosen)[0] is not None or (any(bare) and graph.info.profiler is not None)
            for graph, is_bare in zip(graphs, bare, strict=True)
        ]
        remarks = []
        if any(bare) and not (calibrated and all(known)):
            without, recorded = ("A", "B") if bare[0] else ("B", "A")
            if not all(bare):
                remarks.append(
                    f"{without} is without the profiler's cost, which is in {recorded}: their difference contains it"
                )
        elif calibrated and any(known) and not all(known):
            remarks.append(
                f"only {'A' if known[0] else 'B'} has a step time without the profiler: both are compared as recorded"
            )
        baselines = [Baseline.of(graph, chosen, calibrated=calibrated and all(known)) for graph in graphs]
        batches = [graph.info.batch_size for graph in graphs]
        if batches.count(None) == 1:
            holder = "A" if batches[1] is None else "B"
            remarks.append(
                f"only {holder} has its batch size ({batches[0] or batches[1]}): whether it is the same is not known"
            )
        measured = MeasuredStep.of(baselines[0]), MeasuredStep.of(baselines[1])
        clocks = [f"the {step.clock} clock" for step in measured]
        if clocks[0] != clocks[1] and all(graph.info.is_recorded for graph in graphs):
            remarks.append(f"the step without the profiler is timed by {clocks[0]} in A and by {clocks[1]} in B")
        return TwoRecordings(baselines[0], baselines[1], measured, tuple(remarks))

    @property
    def clock(self) -> str:
        """The step clock of both."""
        return self.before.clock

    @property
    def on_gpu(self) -> bool:
        """Whether either recording has a GPU's work."""
        return self.before.graph.has_gpu or self.after.graph.has_gpu

    @property
    def not_recorded(self) -> tuple[str, ...]:
        """Which of the two are no recordings, one sentence each."""
        made = {"A": self.before.graph.info, "B": self.after.graph.info}
        return tuple(f"{name} is {info.made}, not recorded" for name, info in made.items() if not info.is_recorded)

    @property
    def change_ms(self) -> float:
        """B's measured step minus A's, ms."""
        return self.measured[1].ms - self.measured[0].ms

    @property
    def change_pct(self) -> float:
        """The same, percent of A's step."""
        return 100.0 * self.change_ms / self.measured[0].ms

    @property
    def noise_ms(self) -> float | None:
        """The change up to which the quartiles of the two still overlap, ms; None if one lacks its spread."""
        return noise_ms(*self.measured)

    @property
    def noise_pct(self) -> float | None:
        """The same, percent of A's step."""
        return None if self.noise_ms is None else 100.0 * self.noise_ms / self.measured[0].ms

    @property
    def within_noise(self) -> bool:
        """Whether the noise is known and the change is within it."""
        return self.noise_ms is not None and abs(self.change_ms) <= self.noise_ms

    @cached_property
    def same_work(self) -> SameWork:
        """The calls that do the same work in both."""
        # Batches differ by the recorded sizes or by FLOPs.
        same_batch = batch_factor(self.before, self.after) is None
        return SameWork.of(self.before, self.after, same_batch=same_batch)

    @property
    def pace(self) -> float | None:
        """Time of the same call in B over that in A, the median weighted by time; None if too few are known."""
        return self.same_work.pace()

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """The recorded facts that differ, and the batch if FLOPs show that it does."""
        found = differences(self.before.graph, self.after.graph, self.clock)
        factor = batch_factor(self.before, self.after)
        if factor is None or any(item.what == BATCH for item in found):
            return found
        by_flops = Difference(BATCH, "not recorded", f"{factor:g} times as large, by its FLOPs", blocks=True)
        return (by_flops, *found)


def common_clock(before: TaskGraph, after: TaskGraph) -> str:
    """Name the clock by which two recordings are compared: that of their reports, if it is the same.

    Short recordings are reported as a whole span. But the measured step without the profiler is a single one, and spans
    are comparable only if both hold the same steps: then a clock of single steps is used, if both have one.
    """
    graphs = (before, after)
    chosen = default_clock(before)
    if chosen == default_clock(after) != "span":
        return chosen
    several = all(graph.info.n_steps > 1 for graph in graphs)
    for clock in ("gpu", "mark"):
        if all(graph.info.measured_step_ns.get(clock) for graph in graphs):
            untraced = all(untraced_step(graph, clock)[0] is not None for graph in graphs)
            if several or untraced:
                return clock
    return "span"
