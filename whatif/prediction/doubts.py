"""Sentences on the doubts of an answer, and on why a change has no effect."""

from __future__ import annotations

import numpy as np

from whatif.prediction.baseline import Baseline
from whatif.prediction.trust import trust_of
from whatif.prediction.unfinished import unfinished_work
from whatif.simulation.breakdown import Breakdown
from whatif.simulation.steps import CLOCK_NOUNS
from whatif.simulation.timeline import Timeline

# If the mean of the steps exceeds their median by more than this factor, the steps differ in kind. Predicted steps: in
# either direction, and also relative to the recorded ones.
UNEVEN_STEPS = 1.1
# A GPU busy for a smaller share of the step waits for the CPU, with any transform.
HOST_BOUND_PCT = 50.0
# A change below this is within the replay error.
NOTHING_PCT = 1.0


def warnings_of(baseline: Baseline) -> tuple[str, ...]:
    """Return the warnings of every answer from a recording, without further simulations."""
    unchanged = why_nothing_changes(baseline, baseline.step_ms, baseline.breakdown)
    return tuple(filter(None, (*doubts_of(baseline, baseline.timeline), unchanged)))


def doubts_of(baseline: Baseline, timeline: Timeline) -> tuple[str, ...]:
    """Return findings, the recording's quirks, the calibration, uneven steps and work that ``timeline`` leaves out."""
    found = [*trust_of(baseline).doubts, *baseline.graph.info.quirks]
    if baseline.calibration and baseline.calibration.reason:
        found.append(baseline.calibration.reason)
    uneven = baseline.mean_over_median(baseline.graph.info.measured_step_ns[baseline.clock])
    if uneven > UNEVEN_STEPS:
        found.append(f"the steps differ (their mean is {uneven:.2f} times the median); the median step is reported")
    before, after = (
        baseline.mean_over_median(steps.step_times_ns(baseline.clock)) for steps in (baseline.timeline, timeline)
    )
    if min(abs(np.log(after)), abs(np.log(after / before))) > np.log(UNEVEN_STEPS):
        found.append(
            f"some steps change more than others (the mean of the predicted ones is {after:.2f} times the median); "
            "the median step is predicted"
        )
    found.append(unfinished_work(timeline, baseline.clock))
    return tuple(filter(None, found))


def why_nothing_changes(baseline: Baseline, predicted_ms: float, after: Breakdown) -> str:
    """Return why a step with the parts ``after`` is hardly shorter than the baseline's, if known; else ""."""
    before, baseline_ms = baseline.breakdown, baseline.step_ms
    gain_pct = 100.0 * (1 - predicted_ms / baseline_ms) if baseline_ms else 0.0
    if not baseline.graph.has_gpu or gain_pct >= NOTHING_PCT or not baseline_ms:
        return ""
    longer = gain_pct <= -NOTHING_PCT
    if longer and after.gpu_busy_ms - before.gpu_busy_ms >= (predicted_ms - baseline_ms) / 2:
        return ""  # slower kernels, or communication
    busy_pct = 100.0 * before.gpu_busy_ms / baseline_ms
    shrank = after.gpu_busy_ms < 0.99 * before.gpu_busy_ms
    if (not shrank or busy_pct >= 90) and busy_pct >= HOST_BOUND_PCT:
        return ""
    busy = (
        f"the GPU is busy {busy_pct:.0f} % of the {CLOCK_NOUNS[baseline.clock]} ({before.gpu_busy_ms:.2f} of "
        f"{baseline_ms:.2f} ms)"
    )
    so = "so faster kernels change nothing" + (", and the added CPU work costs time" if longer else "")
    if 2 * baseline.unexplained_wait_pct > 100 - busy_pct:
        return f"waiting: {busy}, and most of the rest is waiting that the recording does not explain, {so}"
    return f"host-bound: {busy} and waits for the CPU in the rest, {so}"
