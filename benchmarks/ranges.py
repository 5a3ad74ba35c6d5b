"""The width of predicted ranges, calibrated on recorded pairs and scored on the held-out pair.

Fits the two constants of `whatif.prediction.ranges` for the difference between runs of one program, each time
without the scored pair, and reports the coverage of measured steps and the width of the range.
benchmarks/accuracy.py writes the table into docs/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whatif.prediction.ranges import RUN_TO_RUN, RUN_TO_RUN_WORKERS
from whatif.questions.validate.validate import Outcome
from whatif.report.layout import markdown_table

# The candidates of both constants.
FLOORS = np.round(np.arange(0.01, 0.1201, 0.005), 3)
# A step outside a nominal 90 % range costs as much as 2 / (1 - 0.9) times its distance in width: the interval score
# (Gneiting and Raftery 2007, equation 43), which is minimal for the right width.
MISS = 20.0
# Limit on the median width: wider ranges are not informative. Our choice.
WIDEST = 0.15


@dataclass(frozen=True)
class Scored:
    """Pairs as arrays: ``[f, i]`` is pair i with floor ``FLOORS[f]``; widths and scores are shares of the step."""

    outcomes: tuple[Outcome, ...]
    width: np.ndarray
    score: np.ndarray
    inside: np.ndarray
    workers: np.ndarray  # (n_pairs,): with several workers


def scored(outcomes: Sequence[Outcome]) -> Scored:
    """Return the scores of CPU pairs for each floor; the other parts of their ranges stay."""
    chosen = tuple(outcome for outcome in outcomes if outcome.scored and not outcome.on_gpu)
    workers = np.array([outcome.several_workers for outcome in chosen], dtype=bool)
    predicted, low, high, measured = (
        np.array([getattr(outcome, f"{name}_ms") for outcome in chosen])
        for name in ("predicted", "low", "high", "measured")
    )
    missed = measured / predicted - 1
    now = np.where(workers, RUN_TO_RUN_WORKERS, RUN_TO_RUN)
    below, above = (
        np.sqrt(np.maximum(end**2 - now**2, 0) + FLOORS[:, None] ** 2)
        for end in (1 - low / predicted, high / predicted - 1)
    )
    outside = np.maximum(-below - missed, 0) + np.maximum(missed - above, 0)
    return Scored(chosen, below + above, below + above + MISS * outside, outside == 0, workers)


def fitted(pairs: Scored, used: np.ndarray) -> tuple[int, int]:
    """Return the indices of the best floors, for one worker and for several, on the pairs of a mask."""
    best, least = (0, 0), np.inf
    single, several = used & ~pairs.workers, used & pairs.workers
    for first in range(len(FLOORS)):
        for second in range(len(FLOORS)):
            widths = np.concatenate([pairs.width[first, single], pairs.width[second, several]])
            if np.median(widths) > WIDEST:
                break
            score = pairs.score[first, single].sum() + pairs.score[second, several].sum()
            if score < least:
                best, least = (first, second), score
    return best


def left_out(pairs: Scored) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each pair is inside the range calibrated on the other pairs, and the width of that range."""
    inside, width = np.zeros(len(pairs.outcomes), dtype=bool), np.zeros(len(pairs.outcomes))
    for place in range(len(pairs.outcomes)):
        used = np.arange(len(pairs.outcomes)) != place
        floor = fitted(pairs, used)[int(pairs.workers[place])]
        inside[place], width[place] = pairs.inside[floor, place], pairs.width[floor, place]
    return inside, width


def coverage_table(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """Return the coverage of each kind of what-if with constants fitted without the pair, and a sentence on the fit."""
    pairs = scored(outcomes)
    inside, width = left_out(pairs)
    kinds = np.array([outcome.kind for outcome in pairs.outcomes])
    rows = []
    for name, chosen in [
        *((kind, kinds == kind) for kind in dict.fromkeys(kinds.tolist())),
        ("one worker", ~pairs.workers),
        ("several workers", pairs.workers),
        ("all", np.ones(len(kinds), dtype=bool)),
    ]:
        if chosen.any():
            share = f"{100 * inside[chosen].mean():.0f} %"
            rows.append(
                (name, f"{inside[chosen].sum()} of {chosen.sum()}", share, f"{100 * np.median(width[chosen]):.1f} %")
            )
    single, several = fitted(pairs, np.ones(len(pairs.outcomes), dtype=bool))
    sentence = (
        f"Fitted on all of them, two runs of one worker differ by ±{100 * FLOORS[single]:.1f} % and of several by\n"
        f"±{100 * FLOORS[several]:.1f} %; the program uses ±{100 * RUN_TO_RUN:.1f} and "
        f"±{100 * RUN_TO_RUN_WORKERS:.1f} %"
    )
    return markdown_table(("what-if", "inside", "share", "median width"), rows), sentence
