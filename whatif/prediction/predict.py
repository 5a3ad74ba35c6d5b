"""Apply transforms to a graph and predict the step: the pipeline of every what-if."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.ingest.read import read
from whatif.models.durations.estimator import described
from whatif.prediction.baseline import Baseline, ends_ns, times_at_bounds_ns
from whatif.prediction.composition import (
    Applied,
    Composition,
    Kept,
    applied_in_turn,
    contributions,
    is_without_effect,
    new_notes,
    single_schedule,
    spelled_together,
)
from whatif.prediction.doubts import doubts_of, why_nothing_changes
from whatif.prediction.totals import Totals, samples_factor, totals
from whatif.prediction.transform import Transform, load_transform
from whatif.prediction.trust import Trust, trust_of
from whatif.runtime.errors import WhatifError
from whatif.runtime.notebook_view import notebook_view, plot
from whatif.simulation.breakdown import Breakdown, breakdown
from whatif.simulation.simulator import simulate
from whatif.simulation.steps import step_ns
from whatif.simulation.timeline import Timeline

if TYPE_CHECKING:
    from whatif.ingest.ranks.read import Ranks

__all__ = ["Baseline", "Prediction", "apply"]

AnyTransform = Transform | str | Path | Callable[[TaskGraph], TaskGraph]


@dataclass(frozen=True)
class Prediction:
    """The predicted effect of transforms on the step; times in ms by one clock, the median of the steady steps."""

    baseline: Baseline
    applied: tuple[Applied, ...]
    timeline: Timeline
    # The steps with all durations at their low bounds, and at their high ones.
    times_at_bounds_ns: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms in the order of application."""
        return tuple(part.transform for part in self.applied)

    @property
    def graph(self) -> TaskGraph:
        """The transformed graph."""
        return self.timeline.graph

    @property
    def times_ns(self) -> tuple[tuple[int, ...], ...]:
        """The times of the steps as predicted, and with all durations at their low and at their high bounds, ns."""
        return self.timeline.step_times_ns(self.baseline.clock), *self.times_at_bounds_ns

    @property
    def predicted_ns(self) -> float:
        """The predicted step, ns."""
        return step_ns(self.times_ns[0], self.graph, self.baseline.clock)

    @property
    def predicted_ms(self) -> float:
        """The predicted step, ms."""
        return self.predicted_ns / 1e6

    @property
    def baseline_ms(self) -> float:
        """The simulated step of the baseline, ms."""
        return self.baseline.step_ms

    @cached_property
    def ends_ns(self) -> tuple[float, float]:
        """The ends of a nominal 90 % range of the step, ns."""
        return ends_ns(
            self.baseline, self.graph, [step_ns(times, self.graph, self.baseline.clock) for times in self.times_ns]
        )

    @property
    def low_ms(self) -> float:
        """The lower end of a nominal 90 % range, ms."""
        return self.ends_ns[0] / 1e6

    @property
    def high_ms(self) -> float:
        """The upper end of a nominal 90 % range, ms."""
        return self.ends_ns[1] / 1e6

    @property
    def speedup(self) -> float:
        """Baseline over predicted step; infinite if the predicted step is 0."""
        return self.baseline_ms / self.predicted_ms if self.predicted_ms else float("inf")

    @property
    def samples_factor(self) -> float:
        """The samples of a predicted step, of all workers together, over those of a recorded one."""
        return samples_factor(self.baseline.graph, self.graph)

    @cached_property
    def breakdown(self) -> Breakdown:
        """The parts of the predicted step."""
        return breakdown(self.timeline, self.baseline.clock)

    @cached_property
    def composition(self) -> Composition:
        """The contribution of each of several transforms; takes two simulations for each beyond the first."""
        return contributions(self.baseline, self.transforms, self.predicted_ms * 1e6)

    @property
    def totals(self) -> Totals:
        """The totals of all devices that train together in the predicted step."""
        return totals(self.graph, self.predicted_ms, self.baseline.clock)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the transforms, and one for each that changes nothing and does not say why."""
        silent = (part.transform.name for part in self.applied if not part.changed and not part.notes)
        return (*new_notes(self.baseline.graph, self.graph), *(f"{name}: it changes nothing here" for name in silent))

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings: quirks of the recording, doubts of the model, notes of the transforms, the verdict."""
        return tuple(filter(None, (*self.doubts, *self.notes, self.verdict)))

    @cached_property
    def trust(self) -> Trust:
        """How far answers from the recording can be trusted."""
        return trust_of(self.baseline)

    @cached_property
    def doubts(self) -> tuple[str, ...]:
        """Doubts about the numbers: findings, the recording's quirks, the calibration and uneven steps."""
        return doubts_of(self.baseline, self.timeline)

    @property
    def verdict(self) -> str:
        """The reason why the step hardly gets shorter, if known; else ""."""
        return why_nothing_changes(self.baseline, self.predicted_ms, self.breakdown)

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as a JSON object with the keys that scripts rely on."""
        info = self.baseline.graph.info
        result: dict[str, Any] = {
            "trace": info.path,
            "transforms": [{**_named(part.transform), "changed": part.changed} for part in self.applied],
            "steps": info.n_steps,
            "measured_ms": self.baseline.measured_ms,
            "untraced_ms": info.untraced_step_ns / 1e6 if info.untraced_step_ns else None,
            "baseline_ms": self.baseline_ms,
            "replay_error_pct": self.baseline.known_error_pct,
            "predicted_ms": self.predicted_ms,
            "low_ms": self.low_ms,
            "high_ms": self.high_ms,
            "speedup": self.speedup if np.isfinite(self.speedup) else None,
            "samples_factor": self.samples_factor,
            "step_clock": self.baseline.clock,
            "gpu_busy_ms": {"baseline": self.baseline.breakdown.gpu_busy_ms, "predicted": self.breakdown.gpu_busy_ms},
            "unexplained_wait_pct": self.baseline.unexplained_wait_pct,
            "breakdown": {"baseline": self.baseline.breakdown.to_dict(), "predicted": self.breakdown.to_dict()},
            "estimates": described(self.graph),
            "trust": self.trust.to_dict(),
            "warnings": list(self.warnings),
        }
        if len(self.transforms) > 1:
            parts = zip(self.transforms, self.composition.contributions, strict=True)
            result["contributions"] = [{**_named(transform), **part.to_dict()} for transform, part in parts]
            result["interaction_ms"] = self.composition.interaction_ms
        result |= self.baseline.profiler_facts
        before = totals(self.baseline.graph, self.baseline_ms, self.baseline.clock)
        result["devices"] = {"baseline": before.devices, "predicted": self.totals.devices}
        result["energy_j"] = {"baseline": before.energy_j, "predicted": self.totals.energy_j}
        if info.samples and self.baseline.clock == "span":
            result["samples_per_s"] = None
        elif before.samples_per_s and self.totals.samples_per_s:
            result["samples_per_s"] = {"baseline": before.samples_per_s, "predicted": self.totals.samples_per_s}
        return result

    def __repr__(self) -> str:
        names = spelled_together(self.transforms)
        return f"Prediction({names}: {self.baseline_ms:.4f} to {self.predicted_ms:.4f} ms, {self.baseline.graph!r})"

    _repr_html_ = notebook_view
    plot = plot


def _named(transform: Transform) -> dict[str, Any]:
    options = transform.options.items()
    plain = {k: v if isinstance(v, str | int | float | bool | None) else str(v) for k, v in options}
    return {"name": transform.name, "options": plain}


def apply(
    graph: TaskGraph | Baseline | Ranks | str | Path,
    *transforms: AnyTransform,
    clock: str | None = None,
    calibrated: bool = True,
) -> Prediction:
    """Return the prediction for a graph, or for the trace in a file, under transforms, in ``in_order``.

    ``graph`` may also be the result of ``read_ranks``. A transform is a name with options as text, a script's path, a
    ``Transform`` or a function from graph to graph. ``clock`` and ``calibrated``, as in ``Baseline.of``, do not apply
    to a baseline. Raises WhatifError if a script fails its checks or breaks the graph, or if two override the schedule.
    """
    baseline = graph if isinstance(graph, Baseline) else Baseline.of(_as_graph(graph), clock, calibrated=calibrated)
    return predicted(baseline, tuple(_as_transform(t) for t in transforms))


def predicted(baseline: Baseline, transforms: Sequence[Transform], kept: Kept | None = None) -> Prediction:
    """Return the prediction under loaded ``transforms``; ``kept`` as in ``applied_in_turn``."""
    schedule = single_schedule(transforms)
    changed, applied = applied_in_turn(baseline.graph, transforms, kept)
    if changed is baseline.graph and schedule is None:
        return Prediction(baseline, applied, baseline.timeline, times_at_bounds_ns(baseline, changed))
    if is_without_effect(baseline.graph, changed, applied):
        schedule = None  # it has nothing to decide, and is slow
    timeline = simulate(changed, schedule)
    return Prediction(baseline, applied, timeline, times_at_bounds_ns(baseline, changed, schedule))


def _as_graph(given: TaskGraph | Ranks | str | Path) -> TaskGraph:
    graph: Any = getattr(given, "graph", given)
    return graph if isinstance(graph, TaskGraph) else read(graph)


def _as_transform(transform: AnyTransform) -> Transform:
    if isinstance(transform, Transform):
        return transform
    if isinstance(transform, str | Path):
        return load_transform(transform)
    if callable(transform):
        name = getattr(transform, "__name__", "function")
        return Transform(name, (transform.__doc__ or name).strip().splitlines()[0], "", transform)
    raise WhatifError(f"expected a transform's name, a Transform or a function, got {type(transform).__name__}.")
