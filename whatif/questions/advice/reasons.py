"""The reason for a what-if's gain or loss, in one sentence with its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from whatif.questions.advice.combine import WORTH_PCT
from whatif.questions.advice.trial import COMMUNICATION, COPIES, CPU, GPU, LOADING, Trial, Trier
from whatif.simulation.steps import RECORDED

_GIB = 2**30


def reason(trial: Trial, trier: Trier, alone_pct: Sequence[float | None] = ()) -> str:
    """Return the sentence: gains of the parts alone, changes of work, whether they are critical, and memory."""
    parts = []
    if alone_pct:
        gains = [f"{name} {_pct(gain)}" for name, gain in zip(trial.spelled, alone_pct, strict=True)]
        parts.append(f"alone {', '.join(gains)}; together {_pct(trial.gain_pct)}")
    parts += _work(trial, trier)
    if trial.gain_pct < WORTH_PCT or not trier.fits(trial):  # else memory is no reason; it has a separate column
        parts += _memory(trial, trier)
    if not trial.same_training and trial.waiting_ms >= trial.baseline_ms * WORTH_PCT / 100:
        parts.append(f"the unexplained wait of {trial.waiting_ms:,.1f} ms counts once per recorded batch")
    if not parts:
        parts.append(_without_change_of_work(trial.gain_pct))
    if _not_modelled(trial) and trial.peak_bytes != trier.peak_bytes:
        parts.append(f"the peak leaves out what {' and '.join(_not_modelled(trial))} changes")
    return "; ".join(parts)


def _without_change_of_work(gain_pct: float) -> str:
    if abs(gain_pct) < WORTH_PCT:
        return "the step stays nearly the same"
    return f"the work stays nearly the same, but {'less' if gain_pct > 0 else 'more'} of it waits for something"


def memory_change(before_bytes: int, after_bytes: int) -> str:
    """Return two sizes of memory in the unit of the larger one; one if they are the same."""
    unit, name = (_GIB, "GiB") if max(before_bytes, after_bytes) >= _GIB else (2**20, "MiB")
    before, after = (f"{size / unit:,.2f}" for size in (before_bytes, after_bytes))
    return f"{after} {name}" if before == after else f"{before} → {after} {name}"


def peak_cell(trial: Trial, before_bytes: int | None) -> str:
    """Return the peak memory of a trial next to the recorded one as a table cell, or how far it is not modelled."""
    if trial.peak_bytes is None or before_bytes is None:
        return "–"
    change = memory_change(before_bytes, trial.peak_bytes)
    if not _not_modelled(trial):
        return change
    return "not modelled" if trial.peak_bytes == before_bytes else f"{change}, partial"


def _not_modelled(trial: Trial) -> tuple[str, ...]:
    return trial.memory.not_modelled if trial.memory is not None else ()


def _pct(gain_pct: float | None) -> str:
    return "does not apply" if gain_pct is None else f"{round(gain_pct) + 0:.0f} %"


def _work(trial: Trial, trier: Trier) -> list[str]:
    """The work that changes by more than a percent of the step, and whether the step waits for it."""
    before, after = trier.work, trial.work
    least_ms = trial.baseline_ms * WORTH_PCT / 100
    digits = 1 if trial.baseline_ms >= 100 else 2 if trial.baseline_ms >= 1 else 4
    changes, saved_ms, critical = [], 0.0, False
    for resource, kinds, old_ms, new_ms in (
        ("GPU work", GPU, before.gpu_ms, after.gpu_ms),
        ("copies", COPIES, before.copies_ms, after.copies_ms),
        ("communication", COMMUNICATION, before.communication_ms, after.communication_ms),
        ("CPU work", CPU, before.cpu_ms, after.cpu_ms),
        ("data loading", LOADING, before.loading_ms, after.loading_ms),
    ):
        if abs(new_ms / trial.samples - old_ms) >= least_ms:
            changes.append(f"{resource} {old_ms:,.{digits}f} → {new_ms / trial.samples:,.{digits}f} ms")
            if old_ms - new_ms / trial.samples > saved_ms:
                saved_ms = old_ms - new_ms / trial.samples
                path_ms = trier.explanation.critical_path_ms
                critical = sum(path_ms.get(kind.name.lower(), 0.0) for kind in kinds) >= trial.baseline_ms / 2
    if not changes:
        return []
    sentence = ", ".join(changes)
    if trier.baseline.graph.info.ranks:
        sentence = f"of all ranks together: {sentence}"
    if not trial.same_training:
        sentence = f"for the samples of {RECORDED[trier.baseline.clock]}: {sentence}"
    if trial.gain_pct < WORTH_PCT and saved_ms >= least_ms:
        if critical:  # most of the step waits for such work, but then for other work in its place
            sentence += ", but then other work is on the critical path"
        elif trial.gain_pct <= -WORTH_PCT:
            sentence += ", but the added work is on the critical path and the saved work is not"
        else:
            sentence += ", but the saved work is not on the critical path"
    return [sentence]


def _memory(trial: Trial, trier: Trier) -> list[str]:
    """The peak of the memory if it changes, and whether it still fits."""
    if trial.peak_bytes is None or trier.peak_bytes is None or trial.peak_bytes == trier.peak_bytes:
        return []
    of_rank = " of the rank that needs most" if trier.baseline.graph.info.ranks else ""
    sentence = f"peak memory{of_rank} {memory_change(trier.peak_bytes, trial.peak_bytes)}"
    capacity = trier.baseline.graph.info.gpu_memory_bytes
    if capacity is not None and not trier.fits(trial):
        sentence += f", more than the device's {capacity / _GIB:.1f} GiB"
    return [sentence]
