"""Which what-ifs may lie between two recordings, with their options by what the two tell."""

from __future__ import annotations

import statistics

from whatif.advice.candidates import installed
from whatif.baseline import Baseline
from whatif.comparison.step_profile import calls_in_phase, flops_of_step
from whatif.comparison.told_changes import ToldChanges
from whatif.transform import Transform, load_transform
from whatif.types import Phase

# How near a ratio of FLOPs or tasks must be to one that people choose: our choice.
NEAR = 0.02

# Whose options the two recordings tell, so that no default is tried in their place.
FROM_FACTS = ("batch_size", "gradient_accumulation", "data_loading")


def candidates_between(before: Baseline, after: Baseline, told: ToldChanges) -> list[Transform]:
    """Give the what-ifs worth trying on ``before`` towards ``after``, as far as what both tell allows them.

    All that are installed and can be switched on, with their options by what the two recordings tell.
    """
    found = [transform for transform in installed().transforms if transform.name not in FROM_FACTS]
    specs = ["data_loading"]
    loading = after.graph.info.metadata.get("data_loading")
    workers = loading.get("workers") if isinstance(loading, dict) else None
    if isinstance(workers, int) and 0 < workers < 1000:
        specs.insert(0, f"data_loading:workers={workers}")
    factor = batch_factor(before, after)
    if factor is not None:
        specs.append(f"batch_size:factor={factor:g}")
    passes = accumulated_passes(before, after)
    if passes is not None:
        specs.append(f"gradient_accumulation:passes={passes}")
    found += [load_transform(spec) for spec in specs]
    return [transform for transform in found if told.allows(transform.name)]


def batch_factor(before: Baseline, after: Baseline) -> float | None:
    """Give how many times the batch grew: told, or seen in the FLOPs of equally many operators; None where it did not.

    FLOPs tell it where they grew by a ratio that batches have: a multiple of a half, or one over it.
    """
    told = before.graph.info.batch_size, after.graph.info.batch_size
    if told[0] and told[1]:
        return told[1] / told[0] if told[0] != told[1] else None
    flops = [flops_of_step(side.graph, side.clock) for side in (before, after)]
    if min(flops) <= 0:
        return None
    ratio = flops[1] / flops[0]
    grown = max(ratio, 1 / ratio)
    nice = round(2 * grown) / 2
    if nice == 1 or abs(grown / nice - 1) > NEAR or accumulated_passes(before, after) is not None:
        return None
    return nice if ratio > 1 else 1 / nice


def accumulated_passes(before: Baseline, after: Baseline) -> int | None:
    """Give how many passes a step has in ``after``, where what runs in its forward pass runs so many times as often.

    Most of what both have does: a step that cuts its batch into pieces runs some operations more than that.
    """
    counts = [calls_in_phase(side.graph, side.clock, Phase.FORWARD) for side in (before, after)]
    ratios = [counts[1][call] / count for call, count in counts[0].items() if call in counts[1]]
    if not ratios or 2 * len(ratios) < len(counts[0]):
        return None
    ratio = statistics.median(ratios)
    passes = round(ratio)
    return passes if passes >= 2 and abs(ratio / passes - 1) <= NEAR else None
