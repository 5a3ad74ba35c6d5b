"""Which what-ifs may explain the change between two recordings, with their options from recorded facts."""

from __future__ import annotations

import statistics

from whatif.graph.types import Phase
from whatif.prediction.baseline import Baseline
from whatif.prediction.transform import Transform, load_transform
from whatif.questions.advice.candidates import installed
from whatif.questions.comparison.step_profile import calls_in_phase, flops_of_step
from whatif.questions.comparison.told_changes import ToldChanges

# How near a ratio of FLOPs or tasks must be to one that people choose: our choice.
NEAR = 0.02

# What-ifs whose options are recorded, so that no default is tried instead.
FROM_FACTS = ("batch_size", "gradient_accumulation", "data_loading")


def candidates_between(before: Baseline, after: Baseline, told: ToldChanges) -> list[Transform]:
    """Return the what-ifs worth trying on ``before`` towards ``after``, as far as the facts of both allow them.

    All that are installed and can be switched on, with their options from the two recordings.
    """
    found = [transform for transform in installed().transforms if transform.name not in FROM_FACTS]
    specs = ["data_loading"]
    loading = after.graph.info.recorded.data_loading
    if loading is not None and loading.workers:
        specs.insert(0, f"data_loading:workers={loading.workers}")
    factor = batch_factor(before, after)
    if factor is not None:
        specs.append(f"batch_size:factor={factor:g}")
    passes = accumulated_passes(before, after)
    if passes is not None:
        specs.append(f"gradient_accumulation:passes={passes}")
    found += [load_transform(spec) for spec in specs]
    return [transform for transform in found if told.allows(transform.name)]


def batch_factor(before: Baseline, after: Baseline) -> float | None:
    """Return how many times the batch grew: as recorded, or by the FLOPs of equally many operators; None if not.

    FLOPs give it where they grew by a ratio that batches have: a multiple of a half, or one over it.
    """
    told = before.graph.info.batch_size, after.graph.info.batch_size
    if told[0] and told[1]:
        return told[1] / told[0] if told[0] != told[1] else None
    if not _of_as_many_ranks(before, after):
        return None
    flops = [flops_of_step(side.graph, side.clock) for side in (before, after)]
    if min(flops) <= 0:
        return None
    ratio = flops[1] / flops[0]
    grown = max(ratio, 1 / ratio)
    nice = round(2 * grown) / 2
    if nice == 1 or abs(grown / nice - 1) > NEAR or accumulated_passes(before, after) is not None:
        return None
    return nice if ratio > 1 else 1 / nice


def _of_as_many_ranks(before: Baseline, after: Baseline) -> bool:
    """Whether the work of a step, which adds up over ranks, describes the step and not the number of ranks."""
    return len(before.graph.info.ranks) == len(after.graph.info.ranks)


def accumulated_passes(before: Baseline, after: Baseline) -> int | None:
    """Return how many passes a step has in ``after``, where what runs in its forward pass runs so many times as often.

    Most of what both have does: a step that cuts its batch into pieces runs some operations more than that.
    """
    if not _of_as_many_ranks(before, after):
        return None
    counts = [calls_in_phase(side.graph, side.clock, Phase.FORWARD) for side in (before, after)]
    ratios = [counts[1][call] / count for call, count in counts[0].items() if call in counts[1]]
    if not ratios or 2 * len(ratios) < len(counts[0]):
        return None
    ratio = statistics.median(ratios)
    passes = round(ratio)
    return passes if passes >= 2 and abs(ratio / passes - 1) <= NEAR else None
