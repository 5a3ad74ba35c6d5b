"""The profile of a step: the numbers by which two steps are compared."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Float64, Int64, Phase, TaskKind
from whatif.prediction.baseline import Baseline
from whatif.prediction.utilization import steady_tasks
from whatif.questions.comparison.differences import without_wrappers
from whatif.questions.explain import family_codes
from whatif.simulation.timeline import Timeline

# Our choice: what-ifs model the time of a step closely and its number of tasks roughly, so tasks count a quarter.
TASKS_WEIGHT = 0.25
# Work that differs by a smaller share of the step is equal: times are rounded to nanoseconds.
SAME = 1e-6


class StepProfile(Struct, frozen=True):
    """The time of a step, its work by kind and phase, and how many kernels or operators do it, by kind and phase.

    ``work_ms`` has a cell for each kernel family (of tasks grouped by family), else task kind, and phase; ``tasks``
    one for each family, number format and phase: what a machine's pace cannot change.
    """

    step_ms: float
    work_ms: Float64
    tasks: Float64

    @staticmethod
    def of(graph: TaskGraph, timeline: Timeline, clock: str) -> StepProfile:
        """Sum up the steady steps, or all that was recorded if the clock is the span."""
        families = family_codes(graph)
        counted, n_steps = steady_tasks(graph, clock)
        works = counted & (graph.kind != TaskKind.WAIT)
        work_ns = np.bincount(
            work_rows(graph)[works] * len(Phase) + graph.phase[works],
            weights=graph.duration_ns[works],
            minlength=(len(KernelFamily) + len(TaskKind)) * len(Phase),
        )
        grouped = counted & (families >= 0)
        dtype = np.clip(graph.dtype, 0, len(DTYPES) - 1).astype(np.int64)
        cells = (families.astype(np.int64)[grouped] * len(DTYPES) + dtype[grouped]) * len(Phase) + graph.phase[grouped]
        tasks = np.bincount(cells, minlength=len(KernelFamily) * len(DTYPES) * len(Phase))
        return StepProfile(timeline.step_ns_by(clock) / 1e6, work_ns / n_steps / 1e6, tasks / n_steps)

    def at_pace(self, pace: float) -> StepProfile:
        """Return the same step on a machine where everything takes ``pace`` times as long."""
        return replace(self, step_ms=self.step_ms * pace, work_ms=self.work_ms * pace)

    def counted_phases(self, changed: StepProfile) -> Bool:
        """Return the phases, shape (n_phases,), whose number of tasks is known in a ``changed`` step.

        What-ifs that make the work of a phase longer or shorter and leave its tasks alone model time only.
        """
        works, tasks = (
            np.abs(one - other).reshape(-1, len(Phase)).sum(axis=0)
            for one, other in ((self.work_ms, changed.work_ms), (self.tasks, changed.tasks))
        )
        return np.asarray((works <= SAME * self.work_ms.sum()) | (tasks > 0))

    def distance(self, target: StepProfile, counted: Bool | None = None) -> float:
        """Return the distance of this step from ``target``; 0 is the same step.

        The share of the target's time that differs, plus ``TASKS_WEIGHT`` times the share of its tasks that differ, in
        the ``counted`` phases only, if given.
        """
        time_ms = abs(self.step_ms - target.step_ms) + float(np.abs(self.work_ms - target.work_ms).sum())
        total_ms = target.step_ms + float(target.work_ms.sum())
        return time_ms / max(total_ms, 1e-9) + TASKS_WEIGHT * self.tasks_elsewhere(target, counted)

    def tasks_elsewhere(self, target: StepProfile, counted: Bool | None = None) -> float:
        """Return the share of the target's tasks that this step lacks or has in excess, in the ``counted`` phases."""
        missed = np.abs(self.tasks - target.tasks).reshape(-1, len(Phase)).sum(axis=0)
        return float(missed.sum(where=True if counted is None else counted)) / max(float(target.tasks.sum()), 1.0)


def work_rows(graph: TaskGraph) -> Int64:
    """Return the row of ``StepProfile.work_ms`` of each task, shape (n_tasks,): its family, else its kind."""
    families = family_codes(graph)
    return np.where(families >= 0, families, len(KernelFamily) + graph.kind).astype(np.int64)


def profile(baseline: Baseline) -> StepProfile:
    """Return the profile of a baseline's step."""
    return StepProfile.of(baseline.graph, baseline.timeline, baseline.clock)


def calls_in_phase(graph: TaskGraph, clock: str, phase: Phase) -> dict[tuple[str, str], float]:
    """Return how often each kernel, or operator if there is no GPU, runs for a layer in a phase of a step."""
    counted, n_steps = steady_tasks(graph, clock)
    counted = counted & (family_codes(graph) >= 0) & (graph.phase == phase)
    kinds, times = np.unique(np.stack([graph.name[counted], graph.layer[counted]]), axis=1, return_counts=True)
    found: dict[tuple[str, str], float] = {}
    for (name, layer), count in zip(kinds.T.tolist(), times.tolist(), strict=True):
        call = graph.names[name], without_wrappers(graph.layers[layer])
        found[call] = found.get(call, 0.0) + count / n_steps
    return found


def flops_of_step(graph: TaskGraph, clock: str) -> float:
    """Return the floating-point operations of a step, if recorded."""
    counted, n_steps = steady_tasks(graph, clock)
    return float(np.maximum(graph.flops[counted], 0).sum(dtype=np.float64)) / n_steps
