"""Which what-if describes the change between two recordings: its prediction from one comes closest to the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import TaskKind
from whatif.prediction.baseline import Baseline
from whatif.prediction.composition import (
    compose,
    is_unchanged,
    single_schedule,
    spelled,
    spelled_together,
)
from whatif.prediction.transform import Transform
from whatif.prediction.trust import BOUND_PCT
from whatif.questions.comparison.change_candidates import batch_factor, candidates_between
from whatif.questions.comparison.constraints import constraints_between
from whatif.questions.comparison.differences import BATCH, OPTIMIZER, Difference
from whatif.questions.comparison.pace import SameWork
from whatif.questions.comparison.same_program import CallDifference
from whatif.questions.comparison.step_profile import StepProfile, profile
from whatif.questions.comparison.two_recordings import TwoRecordings
from whatif.runtime.errors import WhatifError
from whatif.runtime.progress import Progress, reported
from whatif.simulation.simulator import simulate

# Our choices, made on the pairs of docs/compare.md: a what-if describes a change if it leaves at most this share of it
# unexplained and its error is within the bound of `whatif validate`; it does so clearly if the next best leaves a tenth
# of the change more.
MOST_LEFT = 0.6
CLEARLY = 0.1
# If no single what-if describes the change, pairs are tried that begin with this many of the closest ones in each
# direction, if they explain anything.
FIRSTS = 2
HELPS = 0.95
# A pair explains more than one what-if by chance: it has to leave at most this share of what the closest one leaves.
PAIR_LEFT = 0.5
# Two steps within this distance whose times differ by no more than their noise are alike.
ALIKE = 0.03
# A what-if that adds more than this share of differing tasks is not what was changed, whatever its step time: neither
# the machine nor noise changes the number of tasks.
OTHER_TASKS = 0.02
# A smaller change of the machine's pace is not mentioned.
NOTABLE_PACE = 0.05
# The spread assumed if a recording lacks it, percent of the step.
UNKNOWN_NOISE_PCT = 2.0


class Fit(Struct, frozen=True):
    """What-ifs, applied left to right, that lead from one recording towards the other.

    ``undone`` ones were applied to B and lead back to A. ``left`` is the share of the change that remains.
    ``pace`` is the time of a call that they leave unchanged in the recording they lead to, over that in the one they
    start from; the predicted step is at that pace.
    """

    transforms: tuple[Transform, ...]
    undone: bool
    predicted_ms: float
    measured_ms: float
    left: float
    pace: float

    @property
    def spelled(self) -> str:
        """The what-ifs as on a command line, joined by plus signs."""
        return spelled_together(self.transforms)

    @property
    def names(self) -> frozenset[str]:
        """Their names, without options."""
        return frozenset(transform.name for transform in self.transforms)

    @property
    def error_pct(self) -> float:
        """Predicted against measured step, percent, signed."""
        return 100.0 * (self.predicted_ms / self.measured_ms - 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the fit as a JSON object."""
        return {
            "what_ifs": [spelled(transform) for transform in self.transforms],
            "applied_to": "b" if self.undone else "a",
            "predicted_ms": self.predicted_ms,
            "measured_ms": self.measured_ms,
            "error_pct": self.error_pct,
            "pace": self.pace,
            "unexplained_pct": 100.0 * self.left,
        }


class Description(Struct, frozen=True):
    """The fit that describes a change, None if none does clearly; all that were tried, best first; and a sentence."""

    found: Fit | None
    fits: tuple[Fit, ...]
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """Return the description as a JSON object."""
        return {
            "found": self.found.to_dict() if self.found else None,
            "closest": [fit.to_dict() for fit in self.fits[:3]],
            "sentence": self.sentence,
        }


class _Route(Struct, frozen=True):
    """One of the two directions: from a recording to the other.

    Without a GPU the machine may have run at another pace when the end was recorded: ``same`` measures it. ``calls``:
    where the calls of the two differ; None if one is a prediction or their batches differ.
    """

    start: Baseline
    end: Baseline
    source: StepProfile
    target: StepProfile
    measured_ms: float
    undone: bool
    same: SameWork | None
    calls: CallDifference | None

    def fit(self, transforms: tuple[Transform, ...]) -> Fit | None:
        """Return the fit of what-ifs; None if they do not apply, change nothing, or lead elsewhere.

        Elsewhere: to other tasks, or into parts of the step where both recordings make the same calls.
        """
        communicates = bool((self.end.graph.kind == TaskKind.COMMUNICATION).any())
        changed = _changed(self.start, transforms, communicates=communicates)
        if changed is None:
            return None
        graph, reached = changed
        if self.calls is not None and not self.calls.asked_for_by(self.source, reached):
            return None
        counted = self.source.counted_phases(reached)
        own_elsewhere, elsewhere = (step.tasks_elsewhere(self.target, counted) for step in (self.source, reached))
        if elsewhere > own_elsewhere + OTHER_TASKS:
            return None
        pace, own_pace = ((self.same.pace(g) or 1.0) if self.same else 1.0 for g in (graph, None))
        own_distance = self.source.at_pace(own_pace).distance(self.target, counted)
        left = reached.at_pace(pace).distance(self.target, counted) / max(own_distance, 1e-9)
        return Fit(transforms, self.undone, reached.step_ms * pace, self.measured_ms, left, pace)


def describe_change(two: TwoRecordings, progress: Progress | None = None) -> Description:
    """Try every what-if that can be switched on, from A to B and from B to A; one of each name is kept.

    If none describes the change, the closest are also tried with each other one. Nothing is tried if the recordings
    differ in device, model, input or optimizer. ``progress(done, total)`` counts what was tried.
    """
    beyond = [item.what for item in two.differences if _no_what_if(item)]
    if beyond:
        return Description(None, (), f"no what-if was tried: the recordings differ in {' and '.join(beyond)}")
    before, after = profile(two.before), profile(two.after)
    noise_pct = UNKNOWN_NOISE_PCT if two.noise_pct is None else two.noise_pct
    if abs(two.change_pct) <= noise_pct and before.distance(after) <= ALIKE:
        return Description(None, (), "the two are alike: there is no change to describe")
    allowed = constraints_between(two.before.graph.info, two.after.graph.info)
    same = None if two.on_gpu else two.same_work
    calls = None
    # A prediction has the calls of its recording, and another batch changes calls everywhere.
    if allowed.only is None and batch_factor(two.before, two.after) is None:
        calls = CallDifference.of(two.before, two.after)
        if calls.same and not allowed.required:
            return Description(None, (), _same_program(two.pace))
    routes = (
        _Route(two.before, two.after, before, after, two.measured[1].ms, False, same, calls),
        _Route(two.after, two.before, after, before, two.measured[0].ms, True, same and same.reversed(), calls),
    )
    bound_pct = BOUND_PCT["gpu" if two.on_gpu else "cpu"]
    candidates = [(route, candidates_between(route.start, route.end, allowed)) for route in routes]
    # A change of batch is tried in one direction only.
    singles = [
        (route, (transform,))
        for route, found in candidates
        for transform in found
        if not (route.undone and transform.name == "batch_size")
    ]
    alone = _closest(singles, progress)
    fitting = [fit for fit in alone if allowed.satisfied_by(fit.names)]
    if _near(fitting, bound_pct):
        return _judged(fitting, alone, bound_pct)
    together = []
    for route, found in candidates:
        firsts = [fit.transforms for fit in alone if fit.undone == route.undone and fit.left <= HELPS][:FIRSTS]
        # The what-if of a recorded change may hide in the other half of the difference.
        firsts += [(transform,) for transform in found if transform.name == "batch_size" and allowed.required]
        for (first,) in firsts:
            pairs = [(first, second) for second in found if second.name != first.name]
            together += [(route, pair) for pair in pairs if allowed.satisfied_by(frozenset((first.name, pair[1].name)))]
    least = alone[0].left if alone else 1.0
    fitting += [fit for fit in _closest(together, progress) if fit.left <= least * PAIR_LEFT]
    return _judged(fitting, alone, bound_pct)


def _same_program(pace: float | None) -> str:
    ratio = "" if pace is None else f", and a call takes {pace:.2f} times as long in B (median)"
    pace_note = "" if pace is None or abs(pace - 1) < NOTABLE_PACE else "; the machine's pace changed"
    return f"the same program{pace_note}: both make the same calls{ratio}"


def _closest(tries: Sequence[tuple[_Route, tuple[Transform, ...]]], progress: Progress | None) -> list[Fit]:
    """The fits of all of these, closest first; of what-ifs with the same names the closest form."""
    best: dict[tuple[frozenset[str], bool], Fit] = {}
    for route, transforms in reported(tries, progress):
        fit = route.fit(transforms)
        if fit is not None:
            key = fit.names, route.undone
            if key not in best or fit.left < best[key].left:
                best[key] = fit
    return sorted(best.values(), key=lambda fit: (fit.left, fit.undone, fit.spelled))


def _no_what_if(difference: Difference) -> bool:
    """Whether no what-if accounts for a difference, so that one that comes close does so by chance."""
    return (difference.blocks and difference.what != BATCH) or difference.what == OPTIMIZER


def _changed(
    baseline: Baseline, transforms: tuple[Transform, ...], *, communicates: bool
) -> tuple[TaskGraph, StepProfile] | None:
    """The graph under what-ifs and its step profile; None if one does not apply, or none changes anything.

    Also None if they add communication and the run that they lead to has none (``communicates``).
    """
    try:
        changed = compose(baseline.graph, transforms)
        schedule = single_schedule(transforms)
        if schedule is None and is_unchanged(baseline.graph, changed):
            return None
        if not communicates and (changed.kind == TaskKind.COMMUNICATION).any():
            return None
        return changed, StepProfile.of(changed, simulate(changed, schedule), baseline.clock)
    except WhatifError:
        return None


def _near(fits: Sequence[Fit], bound_pct: float) -> list[Fit]:
    return [fit for fit in fits if fit.left <= MOST_LEFT and abs(fit.error_pct) <= bound_pct]


def _judged(fitting: Sequence[Fit], alone: Sequence[Fit], bound_pct: float) -> Description:
    """The description by the fits that account for all recorded differences; if none is near, the closest."""
    found = tuple(sorted({id(fit): fit for fit in (*fitting, *alone)}.values(), key=lambda fit: fit.left))
    near = _near(sorted(fitting, key=lambda fit: fit.left), bound_pct)
    if not found or (not near and found[0].left > HELPS):
        return Description(None, found, "no what-if describes the change: none that applies comes closer")
    if not near:
        closest = found[0]
        verb, leaves = ("is", "leaves") if len(closest.transforms) == 1 else ("are", "leave")
        return Description(
            None,
            found,
            f"no what-if describes the change: the closest {verb} {_labelled(closest)}, "
            f"which {leaves} {100 * closest.left:.0f} % of it unexplained; its error in the step is "
            f"{closest.error_pct:+z.1f} %",
        )
    best = near[0]
    rivals = [fit for fit in near[1:] if fit.left < best.left + CLEARLY]
    if rivals:
        names = " or ".join(_labelled(fit) for fit in (best, *rivals[:2]))
        return Description(None, found, f"{names} would describe the change about equally well")
    verb = "describes" if len(best.transforms) == 1 else "describe"
    return Description(
        best,
        found,
        f"{_labelled(best)} {verb} the change: {'A' if best.undone else 'B'}'s step time is predicted within "
        f"{abs(best.error_pct):.1f} %{_at_pace(best)}; part by part, {100 * best.left:.0f} % of the difference "
        "between A and B is unexplained",
    )


def _at_pace(fit: Fit) -> str:
    """The assumed pace of the machine, if it matters."""
    if abs(fit.pace - 1) < NOTABLE_PACE:
        return ""
    end, start = ("A", "B") if fit.undone else ("B", "A")
    return f" at {end}'s pace (an unchanged call takes {fit.pace:.2f} times as long as in {start})"


def _labelled(fit: Fit) -> str:
    return f"{fit.spelled} undone" if fit.undone else fit.spelled
