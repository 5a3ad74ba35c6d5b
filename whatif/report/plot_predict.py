"""A plot of ``whatif predict``: the parts of a step that was not recorded, without and with the what-ifs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whatif.from_module.predict_step import PredictedStep
from whatif.prediction.composition import spelled_together
from whatif.report.plot_breakdown import Bar, bars_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def predicted_figure(predicted: PredictedStep) -> Figure:
    """Return the parts of the step as a bar with its nominal 90 % range, below the one without the what-ifs."""
    prediction = predicted.prediction
    names = spelled_together(prediction.transforms)
    last = Bar(names or "as it is", prediction.breakdown, prediction.predicted_ms, *predicted.range_ms)
    first = [Bar("as it is", prediction.baseline.breakdown, prediction.baseline_ms)] if names else []
    return bars_figure([*first, last], "a step, ms", predicted.source, f"on {predicted.device}, nothing measured")
