"""A composition of what-ifs predicted at many values of their options."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct, structs

from whatif.graph.task_graph import TaskGraph
from whatif.prediction.baseline import Baseline, range_ns
from whatif.prediction.composition import (
    compose,
    new_notes,
    single_schedule,
    spelled,
    spelled_together,
)
from whatif.prediction.predict import Prediction
from whatif.prediction.ranges import simulated_at
from whatif.prediction.totals import Totals, samples_factor, totals
from whatif.prediction.transform import Transform
from whatif.questions.sweep.batch import pieces
from whatif.questions.sweep.spread import predicted, spread
from whatif.questions.sweep.values import MOST_VALUES, Varied
from whatif.runtime.errors import WhatifError
from whatif.runtime.notebook_view import notebook_view, plot
from whatif.runtime.progress import Progress


class Point(Struct, frozen=True):
    """The prediction at one value of each varied option; times in ms, None if the what-ifs do not apply there."""

    values: tuple[str, ...]
    step_ms: float | None
    low_ms: float | None = None
    high_ms: float | None = None
    samples_per_s: float | None = None  # of all workers; None if the batch is not recorded
    devices: int = 1  # that train together
    energy_j: float | None = None  # of all devices at their power limit; None if it is unknown
    peak_bytes: int | None = None  # the fullest device's; None if the recording does not show what a step keeps
    reason: str = ""  # why the what-ifs do not apply
    share: float = 1.0  # the samples of its step over those of the recorded one

    def to_dict(self, options: Sequence[str], baseline_ms: float) -> dict[str, Any]:
        """Return the point as a JSON object."""
        return {
            **dict(zip(options, self.values, strict=True)),
            "predicted_ms": self.step_ms,
            "low_ms": self.low_ms,
            "high_ms": self.high_ms,
            "speedup": baseline_ms / self.step_ms if self.step_ms else None,
            "samples_factor": self.share,
            "samples_per_s": self.samples_per_s,
            "devices": self.devices,
            "energy_j": self.energy_j,
            "peak_memory_bytes": self.peak_bytes,
            **({"reason": self.reason} if self.reason else {}),
        }


class Sweep(Struct, frozen=True):
    """All points of a sweep, in the order of the values, those of the last option changing fastest."""

    baseline: Baseline
    transforms: tuple[Transform, ...]
    varied: tuple[Varied, ...]
    points: tuple[Point, ...]
    notes: tuple[str, ...]  # of the what-ifs at the first point that has any, each with that point's values

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the varied options, prefixed with the what-if's name if two are the same."""
        names = [varied.option for varied in self.varied]
        return tuple(
            f"{self.transforms[varied.of[0]].name}.{name}" if names.count(name) > 1 else name
            for varied, name in zip(self.varied, names, strict=True)
        )

    @property
    def by_throughput(self) -> bool:
        """Whether the points train on different numbers of samples: then samples a second compare them."""
        return len({point.share for point in self.points if point.step_ms}) > 1

    @property
    def by_sample(self) -> bool:
        """Whether they train on other numbers of samples than the recorded step."""
        return any(point.share != 1 for point in self.points if point.step_ms)

    @property
    def best(self) -> Point | None:
        """The point with the shortest step, or the most samples a second; None if the what-ifs apply nowhere."""
        found = [point for point in self.points if point.step_ms is not None]
        if self.by_throughput:
            return max(found, key=lambda point: self.times_as_fast(point) or 0.0)
        return min(found, key=lambda point: point.step_ms or 0.0, default=None)

    def times_as_fast(self, point: Point) -> float | None:
        """Return how many times as fast as the recorded step a point is, per sample if their numbers differ."""
        return point.share * self.baseline.step_ms / point.step_ms if point.step_ms else None

    def to_dict(self) -> dict[str, Any]:
        """Return the sweep as a JSON object with the keys that scripts rely on."""
        baseline_ms = self.baseline.step_ms
        return {
            "trace": self.baseline.graph.info.path,
            "transforms": [spelled(transform) for transform in self.transforms],
            "step_clock": self.baseline.clock,
            "baseline_ms": baseline_ms,
            "replay_error_pct": self.baseline.known_error_pct,
            "varied": list(self.options),
            "best": self.best.to_dict(self.options, baseline_ms) if self.best else None,
            "best_by": "samples_per_s" if self.by_throughput else "predicted_ms",
            "points": [point.to_dict(self.options, baseline_ms) for point in self.points],
            "warnings": list(self.notes),
        }

    def __repr__(self) -> str:
        names = spelled_together(self.transforms)
        return f"Sweep({names} at {len(self.points):,} points, {self.baseline.graph!r})"

    _repr_html_ = notebook_view
    plot = plot


def sweep(
    baseline: Baseline,
    transforms: Sequence[Transform],
    varied: Sequence[Varied],
    *,
    jobs: str | int = 1,
    progress: Progress | None = None,
) -> Sweep:
    """Predict the composition at every combination of the values.

    Values that change durations only, and linearly, are simulated all at once; the others one by one, on the processes
    that ``jobs`` names (``whatif.runtime.jobs``). A combination that does not apply keeps its reason. Raises
    WhatifError if none applies, or if there are too many.
    """
    combinations = list(itertools.product(*(part.values for part in varied)))
    if not combinations or len(combinations) > MOST_VALUES:
        raise WhatifError(
            f"sweep: expected from 1 to {MOST_VALUES:,} combinations of values, got {len(combinations):,}."
        )
    chosen = [_put(transforms, varied, combination) for combination in combinations]
    found: dict[int, Point] = {}
    notes: dict[int, tuple[str, ...]] = {}
    length = len(varied[-1].values)
    for first in range(0, len(combinations), length):
        row = range(first, first + length)  # differs in the last option only
        notes |= _at_once(baseline, transforms, varied[-1], chosen, row, found, combinations)
        if progress is not None:
            progress(len(found), len(combinations))
    left = [place for place in range(len(combinations)) if place not in found]
    done = len(found)
    for place, (point, point_notes) in zip(
        left,
        spread(partial(predicted, _facts), baseline, [chosen[place] for place in left], jobs=jobs),
        strict=True,
    ):
        found[place] = Point(combinations[place], **point)
        notes[place] = point_notes
        done += 1
        if progress is not None:
            progress(done, len(combinations))
    points = tuple(found[place] for place in range(len(combinations)))
    if all(point.step_ms is None for point in points):
        raise WhatifError(points[0].reason)
    result = Sweep(baseline, tuple(transforms), tuple(varied), points, ())
    first_noted = min((place for place, point_notes in notes.items() if point_notes), default=None)
    if first_noted is None:
        return result
    values = [f"{option}={value}" for option, value in zip(result.options, points[first_noted].values, strict=True)]
    at = f"at {', '.join(values)}: " if len(points) > 1 else ""
    return structs.replace(result, notes=tuple(f"{at}{note}" for note in notes[first_noted]))


def _put(transforms: Sequence[Transform], varied: Sequence[Varied], values: Sequence[str]) -> tuple[Transform, ...]:
    chosen = tuple(transforms)
    for part, value in zip(varied, values, strict=True):
        chosen = part.put(chosen, value)
    return chosen


def _at_once(
    baseline: Baseline,
    transforms: Sequence[Transform],
    varied: Varied,
    chosen: Sequence[tuple[Transform, ...]],
    row: Sequence[int],
    found: dict[int, Point],
    combinations: Sequence[tuple[str, ...]],
) -> dict[int, tuple[str, ...]]:
    """Add the points of a row that can be simulated together to ``found``; return the what-ifs' notes by position."""
    if isinstance(chosen[row[0]][varied.of[0]].options[varied.option], int):
        return {}  # one count may apply and the next not, as with workers that fill equal nodes
    numbers = [varied.number(transforms, combinations[place][-1]) for place in row]
    if any(number is None or number <= 0 for number in numbers) or single_schedule(chosen[row[0]]) is not None:
        return {}
    order = np.argsort(np.array(numbers, dtype=np.float64), kind="stable")
    graphs: dict[int, TaskGraph] = {}

    def graph_at(place: int) -> TaskGraph:
        if place not in graphs:
            graphs[place] = simulated_at(compose(baseline.graph, chosen[row[int(order[place])]]))
        return graphs[place]

    notes: dict[int, tuple[str, ...]] = {}
    try:
        for piece in pieces(np.array(numbers, dtype=np.float64)[order], graph_at, baseline.clock):
            notes[row[int(order[piece.places[0]])]] = new_notes(baseline.graph, piece.first)
            step_ns = piece.steps.predicted_ns
            low_ns, high_ns = range_ns(baseline, piece.first, *piece.steps, piece.sums)
            columns = (step_ns, np.minimum(low_ns, step_ns), np.maximum(high_ns, step_ns))
            rows = np.stack(columns, axis=1) / 1e6
            for place, (step_ms, low_ms, high_ms) in zip(piece.places.tolist(), rows.tolist(), strict=True):
                at = row[int(order[place])]
                facts = _point_facts(baseline, piece.first, totals(piece.first, step_ms, baseline.clock))
                found[at] = Point(combinations[at], step_ms, low_ms, high_ms, **facts)
    except WhatifError:
        return notes  # each of the others reports its own reason
    return notes


def _facts(prediction: Prediction) -> dict[str, Any]:
    return _point_facts(prediction.baseline, prediction.graph, prediction.totals)


def _point_facts(baseline: Baseline, graph: TaskGraph, total: Totals) -> dict[str, Any]:
    share = samples_factor(baseline.graph, graph)
    return {**total.to_dict(), "peak_bytes": graph.info.peak_bytes, "share": share}
