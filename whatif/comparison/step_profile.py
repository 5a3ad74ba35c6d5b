"""What a step is made of, in numbers that two steps can be held against each other by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from whatif.baseline import Baseline
from whatif.explain import family_codes
from whatif.graph import TaskGraph
from whatif.kernels import DTYPES, KernelFamily
from whatif.steps import step_ns
from whatif.timeline import Timeline
from whatif.types import Bool, Phase, TaskKind

Floats = npt.NDArray[np.floating[Any]]

# Our choice: what-ifs model the time of a step closely and its number of tasks roughly, so tasks count a quarter.
TASKS_WEIGHT = 0.25


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The time of a step, its work by kind and phase, and how many kernels or operators do it, by kind and phase.

    ``work_ms`` has a cell for each kernel family (of what is told by family), else task kind, and phase; ``tasks``
    one for each family, number format and phase: what a machine's pace cannot change.
    """

    step_ms: float
    work_ms: Floats
    tasks: Floats

    @staticmethod
    def of(graph: TaskGraph, timeline: Timeline, clock: str) -> StepProfile:
        """Sum up the steady steps, or all that was recorded where the clock is the span."""
        families = family_codes(graph)
        counted, n_steps = _steady_tasks(graph, clock)
        works = counted & (graph.kind != TaskKind.WAIT)
        rows = np.where(families >= 0, families, len(KernelFamily) + graph.kind).astype(np.int64)
        work_ns = np.bincount(
            rows[works] * len(Phase) + graph.phase[works],
            weights=graph.duration_ns[works],
            minlength=(len(KernelFamily) + len(TaskKind)) * len(Phase),
        )
        told = counted & (families >= 0)
        dtype = np.clip(graph.dtype, 0, len(DTYPES) - 1).astype(np.int64)
        cells = (families.astype(np.int64)[told] * len(DTYPES) + dtype[told]) * len(Phase) + graph.phase[told]
        tasks = np.bincount(cells, minlength=len(KernelFamily) * len(DTYPES) * len(Phase))
        step_ms = step_ns(timeline.step_times_ns(clock), graph, clock) / 1e6
        return StepProfile(step_ms, work_ns / n_steps / 1e6, tasks / n_steps)

    def distance(self, target: StepProfile) -> float:
        """Give how far this step is from ``target``: 0 is the same.

        The share of the target's time that is elsewhere, and by ``TASKS_WEIGHT`` the share of its tasks.
        """
        time_ms = abs(self.step_ms - target.step_ms) + float(np.abs(self.work_ms - target.work_ms).sum())
        tasks = float(np.abs(self.tasks - target.tasks).sum())
        whole_ms = target.step_ms + float(target.work_ms.sum())
        return time_ms / max(whole_ms, 1e-9) + TASKS_WEIGHT * tasks / max(float(target.tasks.sum()), 1.0)


def profile(baseline: Baseline) -> StepProfile:
    """Give the profile of a baseline's step."""
    return StepProfile.of(baseline.graph, baseline.timeline, baseline.clock)


def tasks_in_phase(graph: TaskGraph, clock: str, phase: Phase) -> float:
    """Give how many kernels, or operators where there is no GPU, a step has in a phase."""
    counted, n_steps = _steady_tasks(graph, clock)
    return float((counted & (family_codes(graph) >= 0) & (graph.phase == phase)).sum()) / n_steps


def flops_of_step(graph: TaskGraph, clock: str) -> float:
    """Give the floating-point operations of a step, as far as the recording tells them."""
    counted, n_steps = _steady_tasks(graph, clock)
    return float(np.maximum(graph.flops[counted], 0).sum(dtype=np.float64)) / n_steps


def _steady_tasks(graph: TaskGraph, clock: str) -> tuple[Bool, int]:
    """The tasks of the steady steps, and how many steps these are; of the span all, as if it were one step."""
    first, last = graph.info.steady
    if clock == "span" or last <= first:
        return np.ones(len(graph), dtype=np.bool_), 1
    return (graph.step >= first) & (graph.step < last), last - first
