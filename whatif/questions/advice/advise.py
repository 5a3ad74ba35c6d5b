"""Rank the what-ifs that would help a run: each applicable one alone, and promising combinations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from whatif.ingest.lines import lines_if_any
from whatif.prediction.baseline import Baseline
from whatif.prediction.composition import spelled
from whatif.prediction.transform import Transform
from whatif.questions.advice.candidates import IN_PART, Candidates, installed
from whatif.questions.advice.combine import WORTH_PCT, Search
from whatif.questions.advice.effort import EffortSize
from whatif.questions.advice.make_fit import faster_beside, on_more_devices, smaller_batches
from whatif.questions.advice.reasons import memory_change, reason
from whatif.questions.advice.trial import (
    Refusal,
    Refused,
    Trial,
    Trier,
    Work,
)
from whatif.questions.advice.warm_up import warm_up
from whatif.questions.efficiency import Use, efficiency
from whatif.questions.explain import step_facts
from whatif.questions.lines import OUTSIDE, CostlyLine, WaitingLine, costly_lines, waiting_lines
from whatif.questions.verdict import NAMED_FROM
from whatif.runtime.progress import Progress, reported
from whatif.simulation.steps import CLOCK_NOUNS, RECORDED

# Our choice: more effort is worth it if it gains twice as much as little effort.
WORTH_MORE_EFFORT = 2.0


class Ranked(Struct, frozen=True):
    """A trial in the advice, with its range and the reason for its gain."""

    trial: Trial
    reason: str
    range_ms: tuple[float, float] | None = None  # None after the first ``top`` rows
    alone_pct: tuple[float | None, ...] = ()  # of a combination: the gain of each what-if alone, if it applies
    doubt: str = ""  # if its peak fits but the end of the peak's range does not; else ""

    @property
    def gain_range_pct(self) -> tuple[float, float] | None:
        """The ends of the nominal 90 % range of the gain, percent, the lower one first."""
        if self.range_ms is None:
            return None
        return self.trial.gain_at_pct(self.range_ms[1]), self.trial.gain_at_pct(self.range_ms[0], waiting=False)

    def to_dict(self, baseline_bytes: int | None) -> dict[str, Any]:
        """Return the entry as a JSON object."""
        trial, gains = self.trial, self.gain_range_pct
        low_ms, high_ms = self.range_ms or (None, None)
        found: dict[str, Any] = {
            "what_ifs": list(trial.spelled),
            "gain_pct": trial.gain_pct,
            "gain_low_pct": gains[0] if gains else None,
            "gain_high_pct": gains[1] if gains else None,
            "predicted_ms": trial.predicted_ms,
            "low_ms": low_ms,
            "high_ms": high_ms,
            "batch_factor": trial.samples,
            "recorded_samples_ms": trial.recorded_samples_ms,
            "peak_memory_bytes": {"baseline": baseline_bytes, "predicted": trial.peak_bytes},
            "memory_not_modelled": list(trial.memory.not_modelled) if trial.memory is not None else [],
            "effort": trial.effort.size.name.lower(),
            "how": trial.effort.how,
            "reason": self.reason,
            "memory_doubt": self.doubt or None,
            "estimates": trial.estimates,
            "notes": list(trial.notes),
        }
        return {**found, "alone_pct": list(self.alone_pct)} if self.alone_pct else found


class Advice(Struct, frozen=True):
    """The what-ifs tried on a run, and what to do first; every list is sorted by gain or by name."""

    baseline: Baseline
    bound: str  # the sentence that says what limits the step
    before: Work
    critical_path_ms: dict[str, float]  # by task kind
    peak_bytes: int | None
    gaining: tuple[Ranked, ...]
    together: tuple[Ranked, ...]
    not_gaining: tuple[Ranked, ...]
    too_large: tuple[Ranked, ...]  # more than the device's memory
    refused: tuple[Refused, ...]
    hypothetical: tuple[str, ...]  # names of the transforms that are questions, and were not tried
    fits: bool = True  # whether the step as it is fits into the device; True if unknown
    making_fit: tuple[Ranked, ...] = ()  # if it does not: all that fit, with the same samples and devices first
    warm_up: str = ""  # the part of the step that later steps seem not to have; else ""
    waiting: tuple[WaitingLine, ...] = ()  # lines that wait for the GPU, if the trace has lines
    costly: tuple[CostlyLine, ...] = ()  # those ``OUTSIDE``, if the trace has lines

    @property
    def alone(self) -> tuple[Ranked, ...]:
        """The what-ifs to show first: those that gain alone; if the step does not fit, all that make it fit."""
        return self.gaining if self.fits else self.making_fit

    @property
    def first(self) -> Ranked | None:
        """What to do first: the best of small effort, unless more effort gains twice as much; None if none gains.

        If the step waits for data or communication, what-ifs that remove the wait are preferred. Another batch comes
        first only if nothing else gains: it may need another learning rate. If the step does not fit, only what makes
        it fit counts, whatever it costs, on as few devices as possible.
        """
        fewest = min((entry.trial.workers for entry in self.alone), default=1.0)
        able = [entry for entry in self.alone if entry.trial.workers == fewest]
        same = [entry for entry in able if entry.trial.same_training] or able
        same = [entry for entry in same if self._relieves(entry.trial)] or same
        if not same:
            return None
        small = next((entry for entry in same if entry.trial.effort.size == EffortSize.SMALL), same[0])
        gain_pct = small.trial.gain_pct
        worth = gain_pct * WORTH_MORE_EFFORT if gain_pct > 0 else gain_pct / WORTH_MORE_EFFORT
        return small if worth >= same[0].trial.gain_pct else same[0]

    @property
    def first_line(self) -> CostlyLine | None:
        """The costliest line of code, if it gains more than the what-if to do first, and the steps are warm."""
        if self.warm_up or not self.costly or not self.fits:
            return None
        line = self.costly[0]
        return line if self.first is None or line.gain_pct > self.first.trial.gain_pct else None

    @property
    def savings(self) -> tuple[Use, ...]:
        """Kernel families below the rates that are usual on this GPU, the largest saving first."""
        return efficiency(self.baseline).savings

    @property
    def _waited_for(self) -> str:
        """What the step waits for, for a quarter of its time: loading, communication or an unknown cause; else ""."""
        least_ms = NAMED_FROM * self.baseline.step_ns / 1e6
        kinds = {"data_loading": "loading", "communication": "communication", "wait": "unexplained waiting"}
        return next((name for kind, name in kinds.items() if self.critical_path_ms.get(kind, 0.0) >= least_ms), "")

    def _relieves(self, trial: Trial) -> bool:
        """Whether a trial removes most of the loading or the communication that the step waits for."""
        if self._waited_for == "loading":
            return trial.work.loading_ms / trial.samples <= self.before.loading_ms / 2
        if self._waited_for == "communication":
            return trial.work.communication_ms / trial.samples <= self.before.communication_ms / 2
        return False

    @property
    def verdict(self) -> tuple[str, str, str]:
        """Three sentences: what bounds the step, what to do first, and its gain alone and with more what-ifs.

        If the step looks like the first one of a program, the second sentence advises to record a later one.
        """
        first, line = self.first, self.first_line
        line_gain, do_line = "", ""
        if line is not None:
            mean = f"the mean {CLOCK_NOUNS[self.baseline.clock]} of {line.step_ms:,.2f} ms"
            line_gain = f"Removing its CPU part shortens {mean} by {line.gain_ms:,.2f} ms ({line.gain_pct:.0f} %). "
            # It may still be part of the training, as a moving average of the weights is.
            do_line = f"Do first: make {line.line} cheaper, {OUTSIDE}."
        if first is None and not self.fits:
            least = min(self.too_large, key=lambda entry: entry.trial.peak_bytes or 0, default=None)
            most = f"; {least.trial.label} needs least, {_size(least.trial.peak_bytes)}." if least else "."
            return (
                f"{self.bound} {self._unfit}",
                "Nothing that was tried makes it fit; see whatif memory and whatif plan.",
                f"None of {len(self.too_large)} what-ifs that apply frees enough memory{most}",
            )
        if first is None:
            tried = len(self.not_gaining) + len(self.too_large)
            best = max(self.not_gaining, key=lambda entry: entry.trial.gain_pct, default=None)
            most = f"; the most is {best.trial.label} with {best.trial.gain_pct:+z.1f} %." if best else "."
            none = (
                f"None of {tried} what-ifs that apply gains {WORTH_PCT:g} %{most}" if tried else "No what-if applies."
            )
            return (
                self.bound,
                self._record_again or do_line or "No optimization helps this run as it is.",
                f"{line_gain}{none}",
            )
        trial, gains = first.trial, first.gain_range_pct
        instructions = trial.effort.how.rstrip(".")
        unit = "for the whole span" if self.baseline.clock == "span" else "a step"
        if not trial.same_training:
            unit = f"for the samples of {RECORDED[self.baseline.clock]}"
        if trial.workers > 1:
            unit += f" on {trial.workers:g} times as many devices"
        sign, verb = (1, "gains") if trial.gain_pct > -0.5 else (-1, "costs")
        ends = sorted(round(sign * end) for end in gains) if gains else []  # no "-0"
        spread = f" (nominal 90 % range {ends[0]} to {ends[1]} %)" if ends else ""
        before_ms, after_ms = trial.baseline_ms, trial.recorded_samples_ms
        digits = 2 if before_ms >= 10 else 3 if before_ms >= 1 else 4
        subject = f"As it was recorded, {first.trial.label}" if self._record_again else "It"
        if line is not None:
            subject = f"{line_gain}Of the what-ifs, {first.trial.label}"
        gain = f"{subject} {verb} {abs(trial.gain_pct):.0f} %{spread}"
        gain += f", {before_ms:,.{digits}f} → {after_ms:,.{digits}f} ms {unit}"
        best = next((entry for entry in self.together if entry.trial.same_training), None)
        if best is not None and best.trial.gain_pct > trial.gain_pct + WORTH_PCT:
            gain += f"; {best.trial.label} together gain {best.trial.gain_pct:.0f} %"
        if self._waited_for and not self._relieves(trial):
            gain += f"; no what-if that was tried removes the {self._waited_for}"
        do_first = f"Do first: {first.trial.label}" + (f" ({instructions})" if instructions else "")
        if not self.fits:
            verb = "may fit" if first.doubt else "fits"
            return f"{self.bound} {self._unfit}", f"{do_first}, with which it {verb}.", gain + "."
        return self.bound, self._record_again or do_line or f"{do_first}.", gain + "."

    @property
    def _unfit(self) -> str:
        needs, held = _size(self.peak_bytes), _size(self.baseline.graph.info.gpu_memory_bytes)
        return f"It needs {needs} at its peak, more than the device's {held}."

    @property
    def _record_again(self) -> str:
        return f"Record again, after some steps of warm-up: {self.warm_up}." if self.warm_up else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as a JSON object with the keys that scripts rely on."""

        def entries(ranked: Iterable[Ranked]) -> list[dict[str, Any]]:
            return [entry.to_dict(self.peak_bytes) for entry in ranked]

        def reasons(why: Refusal) -> list[dict[str, Any]]:
            return [
                {"what_if": refused.label, "reason": refused.reason} for refused in self.refused if refused.why == why
            ]

        return {
            **step_facts(self.baseline),
            "peak_memory_bytes": self.peak_bytes,
            "memory_capacity_bytes": self.baseline.graph.info.gpu_memory_bytes,
            "verdict": list(self.verdict),
            "warm_up": self.warm_up or None,
            "makes_fit": entries(self.making_fit),
            "advice": entries(self.gaining),
            "combinations": entries(self.together),
            "no_gain": entries(self.not_gaining),
            "too_large": entries(self.too_large),
            "not_applicable": reasons(Refusal.NOT_APPLICABLE),
            "elsewhere": reasons(Refusal.ELSEWHERE),
            "done_in_part": reasons(Refusal.IN_PART),
            "failed": reasons(Refusal.FAILED),
            "not_tried": list(self.hypothetical),
            "waiting_lines": [line.to_dict() for line in self.waiting],
            "costly_lines": [line.to_dict() for line in self.costly],
            "usual_rates": [use.to_dict("family") for use in self.savings],
        }


def advise(
    baseline: Baseline,
    candidates: Candidates | None = None,
    *,
    top: int = 10,
    path: Path | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Try every candidate on ``baseline``, then promising combinations; by default all installed transforms.

    Ranges are computed for the ``top`` entries of each list, and for what-ifs that the user named. ``progress(done,
    total)`` counts trials of single transforms. A transform that does not apply or fails is listed with its reason, and
    the others still run. ``path`` is the trace, for the lines of code, if the graph no longer records it.
    """
    candidates = installed() if candidates is None else candidates
    refused = list(candidates.broken)
    trier = Trier(baseline)
    trials: list[Trial] = []
    smaller = [] if trier.fits() else smaller_batches(trier)
    also = [transforms[0] for transforms in smaller if len(transforms) == 1]
    for transform in reported((*candidates.transforms, *also), progress):
        in_part = IN_PART[transform.name](baseline.graph) if transform.name in IN_PART else ""
        if in_part:
            found: Trial | Refused = Refused((spelled(transform),), (transform,), Refusal.IN_PART, in_part)
        else:
            found = trier.attempt([transform])
        if isinstance(found, Trial):
            if not any(found.is_like(trial) for trial in trials):
                trials.append(found)
        else:
            refused.append(found)
    search = Search(trier, trials, refused, [transforms for transforms in smaller if len(transforms) > 1])
    together = search.combinations()
    alone_pct: dict[str, float | None] = {trial.spelled[0]: trial.gain_pct for trial in trials}
    alone_pct |= {name: None for found in refused for name in found.spelled if len(found.spelled) == 1}
    moving = Trier(baseline, may_move=True)

    def gain_alone_pct(transform: Transform) -> float | None:
        name = spelled(transform)
        if name not in alone_pct:
            found = moving.attempt([transform])
            alone_pct[name] = found.gain_pct if isinstance(found, Trial) else None
        return alone_pct[name]

    bound = trier.explanation.verdict

    def ranked(
        found: Iterable[Trial], with_range: bool = True, by: Callable[[Trial], tuple[float, ...]] = lambda _: ()
    ) -> tuple[Ranked, ...]:
        best_first = sorted(found, key=lambda t: (*by(t), -t.gain_pct, t.effort.size, t.spelled))
        entries = []
        for place, trial in enumerate(best_first):
            parts_pct = [gain_alone_pct(t) for t in trial.transforms] if len(trial.transforms) > 1 else []
            shown = place < top or candidates.asked.issuperset(trial.spelled)
            range_ms = trier.range_ms(trial) if with_range and shown else None
            why, doubt = reason(trial, trier, parts_pct), trier.doubt(trial)
            entries.append(Ranked(trial, why, range_ms, tuple(parts_pct), doubt))
        return tuple(entries)

    fitting = [t for t in trials if trier.fits(t)]
    making_fit: list[Trial] = []
    if not trier.fits():
        here = [*fitting, *search.fitting_pairs()]
        shared = on_more_devices(moving, () if here else trials)
        making_fit = [*here, *shared]
        if shared and not here:
            together += faster_beside(moving, min(shared, key=lambda t: t.workers), trials)
    lines = lines_if_any(baseline.graph, path=path)
    result = Advice(
        baseline=baseline,
        bound=bound[:1].upper() + bound[1:],
        before=trier.work,
        critical_path_ms=trier.explanation.critical_path_ms,
        peak_bytes=trier.peak_bytes,
        gaining=ranked(t for t in fitting if t.gain_pct >= WORTH_PCT),
        together=ranked(t for t in together if t not in making_fit),
        not_gaining=ranked((t for t in fitting if trier.fits() and t.gain_pct < WORTH_PCT), with_range=False),
        too_large=ranked((t for t in trials if not trier.fits(t)), with_range=False),
        refused=tuple(refused),
        hypothetical=candidates.hypothetical,
        fits=trier.fits(),
        making_fit=ranked(making_fit, by=lambda t: (t.workers, not t.same_training)),
        warm_up=warm_up(baseline),
        waiting=waiting_lines(baseline, lines) if lines else (),
        costly=costly_lines(baseline, lines) if lines else (),
    )
    first = result.first
    if first is None or first.range_ms is not None:
        return result
    # The verdict shows the range, whatever the rank of the entry.
    completed = replace(first, range_ms=trier.range_ms(first.trial))
    return replace(
        result,
        gaining=tuple(completed if entry is first else entry for entry in result.gaining),
        making_fit=tuple(completed if entry is first else entry for entry in result.making_fit),
    )


def _size(size_bytes: int | None) -> str:
    return "an unknown size" if size_bytes is None else memory_change(size_bytes, size_bytes)
