"""Which what-ifs may explain the change between two recordings, with their options from recorded facts."""

from __future__ import annotations

import statistics

from whatif.graph.types import Phase
from whatif.prediction.baseline import Baseline
from whatif.prediction.transform import Transform, load_transform
from whatif.questions.advice.candidates import installed
from whatif.questions.comparison.constraints import WhatIfConstraints
from whatif.questions.comparison.step_profile import calls_in_phase, flops_of_step

# The tolerance between a ratio of FLOPs or tasks and a round one: our choice.
NEAR = 0.02

# What-ifs whose options come from the recordings, never from defaults.
FROM_FACTS = ("batch_size", "gradient_accumulation", "data_loading")


def candidates_between(before: Baseline, after: Baseline, constraints: WhatIfConstraints) -> list[Transform]:
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
    return [transform for transform in found if constraints.allows(transform.name)]


def batch_factor(before: Baseline, after: Baseline) -> float | None:
    """Return the factor by which the batch grew: as recorded, or by the FLOPs of equally many operators; else None.

    FLOPs determine it if their ratio is a multiple of a half, or the inverse of one.
    """
    batches = before.graph.info.batch_size, after.graph.info.batch_size
    if batches[0] and batches[1]:
        return batches[1] / batches[0] if batches[0] != batches[1] else None
    if not _of_as_many_ranks(before, after):
        return None
    flops = [flops_of_step(side.graph, side.clock) for side in (before, after)]
    if min(flops) <= 0:
        return None
    ratio = flops[1] / flops[0]
    grown = max(ratio, 1 / ratio)
    round_ratio = round(2 * grown) / 2
    if round_ratio == 1 or abs(grown / round_ratio - 1) > NEAR or accumulated_passes(before, after) is not None:
        return None
    return round_ratio if ratio > 1 else 1 / round_ratio


def _of_as_many_ranks(before: Baseline, after: Baseline) -> bool:
    """Whether the work of a step, which adds up over ranks, describes the step and not the number of ranks."""
    return len(before.graph.info.ranks) == len(after.graph.info.ranks)


def accumulated_passes(before: Baseline, after: Baseline) -> int | None:
    """Return the passes of a step in ``after`` if its forward calls run that many times as often; else None.

    The median over common calls decides: a step that splits its batch runs some operations even more often.
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
