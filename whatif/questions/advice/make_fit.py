"""What-ifs that make a step fit that needs more memory than its device has, beside those that advice tries anyway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from whatif.graph.memory import peak
from whatif.models.layers.memory_effects import accumulated, with_batch
from whatif.prediction.peak_fit import fits
from whatif.prediction.transform import Transform, load_transform
from whatif.questions.advice.combine import MOST_PARTNERS, WORTH_PCT
from whatif.questions.advice.effort import EffortSize
from whatif.questions.advice.trial import Trial, Trier
from whatif.questions.what_fits import MOST_WORKERS, fewest_workers, largest_batch
from whatif.runtime.errors import WhatifError

# What-ifs that share the parameters, the gradients or the optimizer's state among more GPUs.
SHARING = ("fsdp", "zero")
# Passes that train the samples of a step are searched up to this number, our choice.
MOST_PASSES = 256


def smaller_batches(trier: Trier) -> list[tuple[Transform, ...]]:
    """Return the largest batch that fits, alone and in as many passes as train the samples of a recorded step."""
    info = trier.baseline.graph.info
    if info.memory is None or info.gpu_memory_bytes is None:
        return []
    try:
        factor = largest_batch(trier, info.memory, info.batch_size, (), info.gpu_memory_bytes).factor
    except WhatifError:  # this recording's batch cannot change
        return []
    if not factor:
        return []
    samples = info.batch_size
    alone = f"batch_size:size={round(factor * samples)}" if samples else f"batch_size:factor={factor:g}"
    found: list[tuple[Transform, ...]] = [(load_transform(alone),)]
    # Their gradients stay until the update, so each pass may have fewer samples than the largest batch.
    for passes in range(2, MOST_PASSES + 1):
        if samples and samples % passes:
            continue
        if fits(peak(accumulated(with_batch(info.memory, 1 / passes))).total, None, info.gpu_memory_bytes):
            part = f"size={samples // passes}" if samples else f"factor={1 / passes!r}"
            accumulation = load_transform(f"gradient_accumulation:passes={passes}")
            return [*found, (load_transform(f"batch_size:{part}"), accumulation)]
    return found


def on_more_devices(trier: Trier, savers: Iterable[Trial]) -> list[Trial]:
    """Return the step with the fewest workers of each of ``SHARING`` that make it fit, each beside one what-if or none.

    That is, if none fits alone, the one of ``savers`` that leaves least to keep on each of many workers. ``trier`` may
    move the step to other machines.
    """
    alone = [step for name in SHARING if (step := _on_fewest(trier, (), name))]
    if alone:
        return alone
    same = [t for t in savers if t.same_training and t.effort.size != EffortSize.LARGE]
    beside = [(_least_kept(trier, same, name), name) for name in SHARING]
    return [step for saver, name in beside if saver and (step := _on_fewest(trier, saver, name))]


def _on_fewest(trier: Trier, beside: Sequence[Transform], name: str) -> Trial | None:
    capacity_bytes = trier.baseline.graph.info.gpu_memory_bytes
    if capacity_bytes is None:
        return None
    try:
        fewest = fewest_workers(trier, [*beside, load_transform(name)], capacity_bytes)
    except WhatifError:  # it does not apply here
        return None
    return fewest.step if (fewest.workers or 1) > 1 and isinstance(fewest.step, Trial) else None


def _least_kept(trier: Trier, savers: Sequence[Trial], name: str) -> tuple[Transform, ...]:
    """The what-ifs of the trial with the lowest peak beside ``name``: alone, parameters may hide what it saves."""
    shared = load_transform(f"{name}:workers={MOST_WORKERS}")
    peaks: list[tuple[int, tuple[Transform, ...]]] = []
    for trial in savers:
        with suppress(WhatifError):  # they do not apply together
            peaks.append((trier.peak_bytes_of((*trial.transforms, shared)), trial.transforms))
    return min(peaks, key=lambda each: each[0], default=(0, ()))[1]


def faster_beside(trier: Trier, start: Trial, trials: Sequence[Trial]) -> list[Trial]:
    """Return ``start`` with each of the ``trials`` that gain most alone, if it fits and gains more than ``start``."""
    same = [t for t in trials if t.same_training and t.gain_pct >= WORTH_PCT and t.effort.size != EffortSize.LARGE]
    best = sorted(same, key=lambda t: -t.gain_pct)[:MOST_PARTNERS]
    found = [trier.attempt((*start.transforms, *t.transforms)) for t in best]
    least_pct = start.gain_pct + WORTH_PCT
    return [t for t in found if isinstance(t, Trial) and trier.fits(t) and t.gain_pct >= least_pct]
