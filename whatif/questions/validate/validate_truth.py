"""The measured step of a changed run and its uncertainty, by the rounds in which it and its baseline were timed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from whatif.opdb.exact import SIGMAS_OF_90
from whatif.questions.validate.validate_records import StepTime

# Draws of the bootstrap: with other draws the spread of a pair in traces/ changes by at most a tenth.
DRAWS = 4_000


class Truth(Struct, frozen=True):
    """The step of a changed run, and the median of its own rounds, ms.

    ``spread_pct`` is the uncertainty of the step by its rounds (nominal 90 %), ± percent of it; None if the record has
    no rounds, or one.
    """

    step: StepTime
    raw_ms: float
    spread_pct: float | None = None
    paced: bool = False  # whether ``step`` is by the ratios of rounds, and differs from ``raw_ms``


def paced(changed: StepTime, baseline: StepTime) -> Truth:
    """Return a step as it would be if the machine had always run at the pace of the baseline's median.

    A machine that others use as well changes its pace between rounds, not between two runs of one round: the median of
    the rounds' ratios is more precise than the ratio of two medians. Without rounds of both it is unchanged.
    """
    if min(len(changed.rounds_ms), len(baseline.rounds_ms)) < 2:
        return Truth(changed, changed.median_ms)
    ratios = [own / base for own, base in zip(changed.rounds_ms, baseline.rounds_ms, strict=False)]
    pace = baseline.median_ms * statistics.median(ratios) / changed.median_ms
    step = StepTime(changed.median_ms * pace, changed.q25_ms * pace, changed.q75_ms * pace, changed.rounds_ms)
    return Truth(step, changed.median_ms, spread_pct(ratios), paced=True)


def unpaced(changed: StepTime, baseline: StepTime) -> Truth:
    """Return a step by its own rounds: those of a network, whose pace does not change with the machine's."""
    if min(len(changed.rounds_ms), len(baseline.rounds_ms)) < 2:
        return Truth(changed, changed.median_ms)
    return Truth(changed, changed.median_ms, spread_pct(changed.rounds_ms, baseline.rounds_ms))


def spread_pct(times: Sequence[float], over: Sequence[float] = (1.0,)) -> float:
    """Return the uncertainty of the median of ``times`` over that of ``over``, ± percent of it (nominal 90 %).

    By the bootstrap: each list is resampled ``DRAWS`` times, always with the same seed.
    """
    generator = np.random.default_rng(0)
    above, below = (
        np.median(np.asarray(rounds)[generator.integers(0, len(rounds), (DRAWS, len(rounds)))], axis=1)
        for rounds in (times, over)
    )
    # Percentiles of the draws are unstable: with four rounds, the 5th is sometimes the lowest round and sometimes the
    # next one.
    return float(100 * SIGMAS_OF_90 * np.std(above / below) / (statistics.median(times) / statistics.median(over)))
