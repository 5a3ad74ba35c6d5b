"""Validate predictions: apply the what-ifs of recorded pairs to the baselines, and compare with what was measured."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from whatif.graph.recorded import StepTimes
from whatif.graph.task_graph import TaskGraph
from whatif.ingest.read import read
from whatif.prediction.predict import Baseline, apply
from whatif.prediction.ranges import several_workers
from whatif.prediction.transform import parse_spec
from whatif.prediction.trust import BOUND_PCT, trust_of
from whatif.prediction.untraced import untraced_step
from whatif.questions.comparison.differences import differences
from whatif.questions.validate.validate_pairs import Pair, Unpaired, find_pairs
from whatif.questions.validate.validate_records import StepTime
from whatif.runtime.errors import WhatifError
from whatif.runtime.progress import Progress, reported

# The bound on the median error of all predictions, percent.
MEDIAN_BOUND_PCT = 5.0


class Outcome(Struct, frozen=True):
    """One prediction and its measured step; times in ms, all by one clock."""

    pair: Pair
    baseline_ms: float
    predicted_ms: float
    low_ms: float
    high_ms: float
    measured_ms: float
    replay_error_pct: float
    step_clock: str
    on_gpu: bool
    several_workers: bool = False
    doubts: tuple[str, ...] = ()  # findings in its recordings

    @property
    def error_pct(self) -> float:
        """Predicted against measured step, percent, signed."""
        return 100.0 * (self.predicted_ms / self.measured_ms - 1)

    @property
    def bound_pct(self) -> float:
        """The bound on the error of a single prediction, percent."""
        return BOUND_PCT["gpu" if self.on_gpu else "cpu"]

    @property
    def within_bound(self) -> bool:
        """Whether the error is within its bound."""
        return abs(self.error_pct) <= self.bound_pct

    @property
    def truth_spread_pct(self) -> float | None:
        """The uncertainty of the measured step itself, ± percent (nominal 90 %); None if the record lacks it."""
        return self.pair.truth.spread_pct if self.pair.truth else None

    @property
    def raw_ms(self) -> float | None:
        """The median of the changed run's own rounds, ms; None if a recording was compared."""
        return self.pair.truth.raw_ms if self.pair.truth else None

    @property
    def raw_error_pct(self) -> float | None:
        """The error against ``raw_ms``, percent, signed."""
        return 100.0 * (self.predicted_ms / self.raw_ms - 1) if self.raw_ms else None

    @property
    def uncertain(self) -> bool:
        """Whether the measured step is more uncertain than the bound of its prediction, so that it cannot judge it."""
        return (self.truth_spread_pct or 0.0) > self.bound_pct

    @property
    def scored(self) -> bool:
        """Whether the pair counts: not if a constant was chosen on it, nor if its measured step is uncertain."""
        return self.pair.scored and not self.uncertain

    @property
    def inside(self) -> bool:
        """Whether the measured step is inside the predicted range."""
        return self.low_ms <= self.measured_ms <= self.high_ms

    @property
    def half_width_pct(self) -> float:
        """Half the width of the predicted range, percent of the measured step."""
        return 50.0 * (self.high_ms - self.low_ms) / self.measured_ms

    @property
    def width_pct(self) -> float:
        """The width of the predicted range, percent of the predicted step."""
        return 100.0 * (self.high_ms - self.low_ms) / self.predicted_ms if self.predicted_ms else 0.0

    @property
    def kind(self) -> str:
        """The names of the what-ifs, with the architecture if there is one, without other options."""
        parsed = [parse_spec(spec) for spec in self.pair.what_ifs]
        return " + ".join(" ".join([name, *filter(None, [options.get("architecture")])]) for name, options in parsed)

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as a JSON object."""
        pair = self.pair
        return {
            "question": pair.question,
            "hardware": pair.hardware,
            "what_ifs": list(pair.what_ifs),
            "baseline": str(pair.baseline),
            "changed": str(pair.changed),
            "measured_by": pair.clock,
            "step_clock": self.step_clock,
            "baseline_ms": self.baseline_ms,
            "predicted_ms": self.predicted_ms,
            "low_ms": self.low_ms,
            "high_ms": self.high_ms,
            "measured_ms": self.measured_ms,
            "error_pct": self.error_pct,
            "bound_pct": self.bound_pct,
            "within_bound": self.within_bound,
            "inside_range": self.inside,
            "half_width_pct": self.half_width_pct,
            "replay_error_pct": self.replay_error_pct,
            "scored": self.scored,
            "measured_raw_ms": self.raw_ms,
            "measured_spread_pct": self.truth_spread_pct,
            "width_pct": self.width_pct,
            "remark": pair.remark,
            "doubts": list(self.doubts),
        }


class Score(Struct, frozen=True):
    """The accuracy of the scored ones among some predictions; errors in percent of the measured step, without sign."""

    pairs: int
    scored: int
    median_error_pct: float | None
    largest_error_pct: float | None
    inside: int
    within_bound: int
    median_half_width_pct: float | None
    median_width_pct: float | None  # of the whole range, percent of the predicted step
    uncertain: int  # pairs that are not scored only because the measured step is uncertain

    @staticmethod
    def of(outcomes: list[Outcome]) -> Score:
        """Score some outcomes; values are None if none of them is scored."""
        scored = [outcome for outcome in outcomes if outcome.scored]
        errors_pct = [abs(outcome.error_pct) for outcome in scored]
        return Score(
            pairs=len(outcomes),
            scored=len(scored),
            median_error_pct=statistics.median(errors_pct) if scored else None,
            largest_error_pct=max(errors_pct, default=None),
            inside=sum(outcome.inside for outcome in scored),
            within_bound=sum(outcome.within_bound for outcome in scored),
            median_half_width_pct=statistics.median(o.half_width_pct for o in scored) if scored else None,
            median_width_pct=statistics.median(o.width_pct for o in scored) if scored else None,
            uncertain=sum(outcome.pair.scored and outcome.uncertain for outcome in outcomes),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the score as a JSON object."""
        return structs.asdict(self)


class Validation(Struct, frozen=True, dict=True):
    """The pairs that were compared, and the runs that could not be."""

    outcomes: tuple[Outcome, ...]
    unpaired: tuple[Unpaired, ...]
    calibrated: bool

    @cached_property
    def score(self) -> Score:
        """The score of all pairs."""
        return Score.of(list(self.outcomes))

    @cached_property
    def by_kind(self) -> dict[str, Score]:
        """The score of each kind of what-if, in the order of the pairs."""
        kinds: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in self.outcomes:
            kinds[outcome.kind].append(outcome)
        return {kind: Score.of(outcomes) for kind, outcomes in kinds.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the validation as a JSON object."""
        return {
            "calibrated": self.calibrated,
            "pairs": [outcome.to_dict() for outcome in self.outcomes],
            "score": {**self.score.to_dict(), "median_bound_pct": MEDIAN_BOUND_PCT},
            "by_what_if": {kind: score.to_dict() for kind, score in self.by_kind.items()},
            "not_compared": [structs.asdict(unpaired) for unpaired in self.unpaired],
        }


def validate(
    paths: list[Path], *, calibrated: bool = True, force: bool = False, progress: Progress | None = None
) -> Validation:
    """Compare the prediction of every pair among files and folders with what was measured.

    Only the baseline's recording goes into a prediction; ``calibrated`` starts it from the step without the profiler.
    ``progress(done, total)`` counts pairs. A pair that cannot be predicted is listed with its reason, and so is one
    with a recording that voids answers, unless ``force``. Raises WhatifError where there is nothing to validate.
    """
    pairs, unpaired = find_pairs(paths)
    outcomes: dict[int, Outcome] = {}
    failed: list[Unpaired] = []
    # Pairs are sorted by baseline, so that each recording is read once and one is in memory at a time.
    order = sorted(range(len(pairs)), key=lambda place: (str(pairs[place].baseline), pairs[place].clock))
    cached: tuple[tuple[Any, ...], Baseline | WhatifError] | None = None
    for place in reported(order, progress):
        pair = pairs[place]
        try:
            changed = read(pair.changed) if pair.changed_untraced is None else None
            correct = calibrated and (changed is None or changed.info.untraced_step_ns is not None)
            key = (pair.baseline, pair.clock, correct, pair.baseline_untraced)
            if cached is None or cached[0] != key:
                cached = key, baseline_of(pair, correct)
            if isinstance(cached[1], WhatifError):
                raise cached[1]
            outcomes[place] = predict(pair, cached[1], changed, force=force)
        except WhatifError as error:
            failed.append(Unpaired(pair.question, str(error)))
    return Validation(tuple(outcomes[place] for place in sorted(outcomes)), (*failed, *unpaired), calibrated)


def predict(pair: Pair, baseline: Baseline, changed: TaskGraph | None = None, *, force: bool = False) -> Outcome:
    """Predict one pair from its baseline; ``changed`` is the other recording of a pair that a file names.

    Raises WhatifError if a what-if does not apply, or if a recording voids answers and ``force`` is not given.
    """
    doubts = _doubts(baseline, pair.baseline, force=force)
    prediction = apply(baseline, *pair.what_ifs)
    on_gpu = baseline.graph.has_gpu
    if pair.changed_untraced is not None:
        measured_ms = pair.changed_untraced.median_ms
    else:
        changed = read(pair.changed) if changed is None else changed
        _check_two_runs(pair, changed)
        recorded = Baseline.of(changed, baseline.clock, calibrated=False)
        doubts += (*_doubts(recorded, pair.changed, force=force), *_other_work(baseline.graph, recorded, pair))
        measured_ms, pair = _measured(pair, baseline, recorded)
        if not pair.hardware:
            pair = replace(pair, hardware=baseline.graph.info.gpu or ("GPU" if on_gpu else "CPU"))
    if not measured_ms > 0:
        raise WhatifError(f"{pair.changed}: expected a measured step above 0 ms, got {measured_ms}; record it again.")
    return Outcome(
        pair=pair,
        baseline_ms=prediction.baseline_ms,
        predicted_ms=prediction.predicted_ms,
        low_ms=prediction.low_ms,
        high_ms=prediction.high_ms,
        measured_ms=measured_ms,
        replay_error_pct=baseline.replay_error_pct,
        step_clock=baseline.clock,
        on_gpu=on_gpu,
        several_workers=several_workers(prediction.graph),
        doubts=(*doubts, *prediction.graph.declined),
    )


def _check_two_runs(pair: Pair, changed: TaskGraph) -> None:
    """Raise WhatifError if the changed run of a named pair has no measurement of its own."""
    if not changed.info.is_recorded:
        raise WhatifError(
            f"{pair.changed}: expected the recording of the changed run, got a step that is {changed.info.made}: "
            "nothing was measured."
        )
    if os.path.samefile(pair.baseline, pair.changed):
        raise WhatifError(f"{pair.changed}: expected the recording of the changed run, got the baseline's once more.")


def _other_work(baseline: TaskGraph, changed: Baseline, pair: Pair) -> tuple[str, ...]:
    """Differences of device or model between the runs of a named pair that its what-ifs do not name, as sentences."""
    names = {parse_spec(spec)[0] for spec in pair.what_ifs}
    found = differences(baseline, changed.graph, changed.clock)
    return tuple(
        f"the two runs differ in {one}" for one in found if one.what in ("device", "model") and one.what not in names
    )


def _doubts(baseline: Baseline, path: Path, *, force: bool) -> tuple[str, ...]:
    """Doubts about a recording of a pair; raises WhatifError if it voids answers."""
    trust = trust_of(baseline)
    refusal = trust.refusal(str(path))
    if refusal and not force:
        raise WhatifError(refusal)
    return tuple(f"{path.name}: {sentence}" for sentence in trust.doubts)


def _measured(pair: Pair, baseline: Baseline, changed: Baseline) -> tuple[float, Pair]:
    """The step of a named pair's changed recording, ms: without the profiler if the baseline is, too."""
    if baseline.meets_untraced:
        untraced, _ = untraced_step(changed.graph, baseline.clock)
        if untraced is not None:
            return untraced.median_ns / 1e6, replace(pair, clock="untraced")
    return changed.measured_ns / 1e6, pair


def baseline_of(pair: Pair, calibrated: bool) -> Baseline | WhatifError:
    """Return the simulated baseline of a pair, or the error that all pairs with it share."""
    try:
        graph = read(pair.baseline)
        if pair.baseline_untraced is None:
            return Baseline.of(graph, calibrated=calibrated)
        # A recording of few steps is reported as a whole span; what was measured is one step.
        clock = next((c for c in ("gpu", "mark") if c in graph.info.measured_step_ns), None)
        return Baseline.of(_measured_again(graph, pair.baseline_untraced), clock, calibrated=calibrated)
    except WhatifError as error:
        return error


def _measured_again(graph: TaskGraph, untraced: StepTime) -> TaskGraph:
    """The graph with the step time of the campaign's record, which has more rounds than the recording's own.

    It is set for both of the recording's clocks, so that calibration uses the one by which the pair is judged.
    """
    times = StepTimes(untraced.median_ms, untraced.q25_ms, untraced.q75_ms)
    recorded = structs.replace(graph.info.recorded, untraced_step=times, untraced_cpu=times)
    return graph.replace(info=replace(graph.info, untraced_step_ns=round(untraced.median_ms * 1e6), recorded=recorded))
