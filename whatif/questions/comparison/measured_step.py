"""The step that a recording measured, with its noise: without the profiler if the recording has that time."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from whatif.prediction.baseline import Baseline
from whatif.prediction.untraced import untraced_step
from whatif.runtime.errors import WhatifError
from whatif.simulation.steps import steady

# Of fewer steps the extremes are taken instead of the quartiles.
QUARTILE_STEPS = 8


class MeasuredStep(Struct, frozen=True):
    """The median of a recording's steps, ms, and the quartiles around it: of few steps the extremes.

    ``clock`` is ``wall`` or ``cpu`` for steps without the profiler, ``estimate`` where that is estimated (with its
    range), else the step clock of the recorded ones. A spread of zero that no second step confirms is not known:
    ``low_ms`` and ``high_ms`` are None.
    """

    ms: float
    low_ms: float | None
    high_ms: float | None
    clock: str

    @staticmethod
    def of(baseline: Baseline) -> MeasuredStep:
        """Return what was measured: without the profiler if the baseline is corrected to that, else as recorded.

        Raises WhatifError if the recording has no step that takes time.
        """
        graph, clock = baseline.graph, baseline.clock
        if baseline.meets_untraced:
            untraced, _ = untraced_step(graph, clock)
            if untraced is not None:
                known = untraced.q25_ns < untraced.q75_ns
                low_ms, high_ms = (untraced.q25_ns / 1e6, untraced.q75_ns / 1e6) if known else (None, None)
                return MeasuredStep(untraced.median_ns / 1e6, low_ms, high_ms, untraced.clock)
        if estimated := baseline.estimated_ms:
            return MeasuredStep(estimated["estimate"], estimated["low"], estimated["high"], "estimate")
        times_ns = steady(graph.info.measured_step_ns[clock], graph, clock)
        ms = float(np.median(times_ns)) / 1e6 if times_ns else 0.0
        if not ms > 0:
            raise WhatifError(f"{graph.info.path}: expected steps that take time, got none; record some whole steps.")
        if len(times_ns) < 2:
            return MeasuredStep(ms, None, None, clock)
        ends = (25, 75) if len(times_ns) >= QUARTILE_STEPS else (0, 100)
        low_ns, high_ns = np.percentile(times_ns, ends).tolist()
        return MeasuredStep(ms, low_ns / 1e6, high_ns / 1e6, clock)

    def to_dict(self) -> dict[str, Any]:
        """Return the step as a JSON object."""
        return {"step_ms": self.ms, "low_ms": self.low_ms, "high_ms": self.high_ms, "measured_by": self.clock}


def noise_ms(before: MeasuredStep, after: MeasuredStep) -> float | None:
    """Return the change of the step up to which the quartiles of the two still overlap, ms; None if one has none."""
    if before.low_ms is None or before.high_ms is None or after.low_ms is None or after.high_ms is None:
        return None
    if after.ms >= before.ms:
        return (before.high_ms - before.ms) + (after.ms - after.low_ms)
    return (before.ms - before.low_ms) + (after.high_ms - after.ms)
