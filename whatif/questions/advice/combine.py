"""Promising combinations of what-ifs: pairs that relieve different parts of the machine, and extensions of the best.

Thirty what-ifs have hundreds of pairs; those that gain alone, or save work that the step does not yet wait for, leave
a few dozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from whatif.prediction.composition import spelled
from whatif.prediction.transform import Transform
from whatif.questions.advice.effort import Effort, EffortSize
from whatif.questions.advice.trial import (
    Refusal,
    Refused,
    Trial,
    Trier,
)

# A gain below this is within replay errors, percent.
WORTH_PCT = 1.0
# Limits of the search, our choice: what-ifs in a combination, and candidates of each kind for pairs.
MOST_TOGETHER, MOST_PARTNERS = 4, 4
# Saving less than this share of the CPU's or the GPU's work, or of the memory, makes no combination promising.
SAVES = 0.05
# Equivalent what-ifs: torch.compile puts its regions into CUDA graphs by itself.
EQUIVALENT = (frozenset({"compile:mode=reduce-overhead", "cuda_graph"}),)

_EQUIVALENT_NAMES = tuple(frozenset(spec.partition(":")[0] for spec in same) for same in EQUIVALENT)

# What-ifs that gain together even if neither does alone: tensor cores convolve images whose channels are innermost.
TOGETHER = (("amp", "channels_last"),)


class Search:
    """Tries combinations of what-ifs that were tried alone."""

    def __init__(
        self,
        trier: Trier,
        trials: Sequence[Trial],
        refused: Sequence[Refused],
        pairs: Sequence[tuple[Transform, ...]] = (),
    ) -> None:
        self._trier, self._given = trier, pairs
        # Only the best variant of each what-if: two variants of one are no combination. No combination starts with
        # other software or machines.
        best: dict[str, Trial] = {}
        for trial in sorted(trials, key=lambda t: (not (trier.fits() or trier.fits(t)), -t.gain_pct)):
            if _can_begin(trial):
                best.setdefault(trial.transforms[0].name, trial)
        self._single = list(best.values())
        refusals = [r.transforms[0] for r in refused if r.why == Refusal.NOT_APPLICABLE]
        self._refused = [t for t in refusals if Effort.of(t.doc).size != EffortSize.LARGE]
        self._found: dict[frozenset[str], Trial] = {frozenset(t.spelled): t for t in trials}

    def combinations(self) -> list[Trial]:
        """Return the combinations that gain more than every smaller one in them, in no order."""
        for pair in (*self._given, *self._pairs()):
            self._attempt(pair)
        self._grow()
        return [t for t in self._found.values() if len(t.transforms) > 1 and self._is_better_than_its_parts(t)]

    def fitting_pairs(self) -> list[Trial]:
        """Return the pairs tried that fit where neither of the two fits alone with the same samples, in no order."""
        fit = {key: t for key, t in self._found.items() if self._trier.fits(t)}
        parts = [key for key, t in fit.items() if t.same_training]
        return [t for key, t in fit.items() if len(key) == 2 and not any(part < key for part in parts)]

    def _savers(self) -> list[Trial]:
        """Return the what-ifs that free most memory and train the same samples, the largest saving first."""
        held, able = self._trier.peak_bytes or 0, [t for t in self._single if t.same_training]
        return _largest(able, lambda t: float(held - (t.peak_bytes or held)), SAVES * held)

    def _pairs(self) -> Iterable[tuple[Transform, ...]]:
        work = self._trier.work
        fitting = [t for t in self._single if self._trier.fits(t) and t.same_training]
        gaining = [t for t in fitting if t.gain_pct >= WORTH_PCT]
        by_name = {t.transforms[0].name: t.transforms[0] for t in fitting}
        yield from (tuple(by_name[name] for name in names) for names in TOGETHER if set(names) <= by_name.keys())
        hosts = _largest(fitting, lambda t: work.host_ms - t.work.host_ms / t.samples, SAVES * work.host_ms)
        devices = _largest(fitting, lambda t: work.device_ms - t.work.device_ms / t.samples, SAVES * work.device_ms)
        yield from ((*a.transforms, *b.transforms) for a in hosts for b in devices)
        # What-ifs that free memory, with those that do not fit alone.
        large = [t for t in self._single if not self._trier.fits(t)]
        yield from ((*a.transforms, *b.transforms) for a in self._savers() for b in large)
        # A what-if that does not apply to the recorded run may apply after another.
        yield from ((*a.transforms, b) for b in self._refused for a in gaining[:MOST_PARTNERS])

    def _grow(self) -> None:
        """Add the what-if that gains most to the best combination as long as one gains; at the end another batch."""
        pool = [t for t in self._single if self._trier.fits(t) or not self._trier.fits()]
        same = [t.transforms[0] for t in pool if t.same_training][: 2 * MOST_PARTNERS]
        able = [t for t in self._found.values() if t.same_training and _can_begin(t)]
        first = self._best(able)
        if first is None:
            return
        # Also grow the best trial that shares no what-if with it: two that gain little alone may relieve in turn what
        # the step waits for.
        second = self._best(t for t in able if not t.names & first.names)
        for start in (first, second, self._relieving_all(able)):
            if start is not None:
                self._grow_from(start, pool, same)

    def _relieving_all(self, able: Sequence[Trial]) -> Trial | None:
        """The trial of the best savers of CPU, GPU and loading work together: alone, each may only move a wait."""
        chosen: dict[str, Transform] = {}
        for name in ("device_ms", "cpu_ms", "loading_ms"):
            recorded = getattr(self._trier.work, name)
            savers = [t for t in able if not any(frozenset((*chosen, *t.names)) >= same for same in _EQUIVALENT_NAMES)]
            best = min(savers, key=lambda t: getattr(t.work, name) / t.samples, default=None)
            if best is not None and getattr(best.work, name) / best.samples < (1 - SAVES) * recorded:
                chosen |= {t.name: t for t in best.transforms}
        return self._attempt(tuple(chosen.values())) if len(chosen) > 1 else None

    def _grow_from(self, chosen: Trial, pool: Sequence[Trial], same: Sequence[Transform]) -> None:
        while len(chosen.transforms) < MOST_TOGETHER:
            grown = self._best(self._attempt((*chosen.transforms, t)) for t in same)
            if grown is None or grown.gain_pct < chosen.gain_pct + WORTH_PCT:
                break
            chosen = grown
        for trial in pool:
            if not trial.same_training:
                self._attempt((*chosen.transforms, *trial.transforms))

    def _best(self, trials: Iterable[Trial | None]) -> Trial | None:
        """The trial that gains most among those that fit into the device."""
        fitting = (t for t in trials if t is not None and self._trier.fits(t))
        return max(fitting, key=lambda t: t.gain_pct, default=None)

    def _attempt(self, transforms: Sequence[Transform]) -> Trial | None:
        """The trial of some transforms; None if two are equivalent, or if they do not apply together."""
        key = frozenset(spelled(t) for t in transforms)
        if len({t.name for t in transforms}) < len(transforms) or any(same <= key for same in EQUIVALENT):
            return None
        if key not in self._found:
            found = self._trier.attempt(sorted(transforms, key=spelled))
            if isinstance(found, Refused):
                return None
            self._found[key] = found
        return self._found[key]

    def _is_better_than_its_parts(self, trial: Trial) -> bool:
        key = frozenset(trial.spelled)
        parts = [part.gain_pct for other, part in self._found.items() if other < key and self._trier.fits(part)]
        return self._trier.fits(trial) and trial.gain_pct >= max([0.0, *parts]) + WORTH_PCT


def _can_begin(trial: Trial) -> bool:
    return trial.effort.size != EffortSize.LARGE


def _largest(trials: Sequence[Trial], saved: Callable[[Trial], float], least: float) -> list[Trial]:
    """The trials that save most, ``least`` at least."""
    return sorted((t for t in trials if saved(t) > least), key=lambda t: -saved(t))[:MOST_PARTNERS]
