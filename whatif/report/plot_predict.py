"""A plot of ``whatif predict``: the parts of a step that nobody recorded, without and with the what-ifs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from whatif.composition import spelled
from whatif.operator_graph.predict_step import PredictedStep
from whatif.report.plot_breakdown import Bar, bars_figure
from whatif.report.plots import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_predicted(predicted: PredictedStep, path: str | Path) -> None:
    """Draw a predicted step into a file: see ``predicted_figure``."""
    save(predicted_figure(predicted), path)


def predicted_figure(predicted: PredictedStep) -> Figure:
    """Give the parts of the step as a bar with its nominal 90 % range, below the one without the what-ifs."""
    prediction = predicted.prediction
    names = " + ".join(spelled(transform) for transform in prediction.transforms)
    last = Bar(names or "as it is", prediction.breakdown, prediction.predicted_ms, *predicted.range_ms)
    first = [Bar("as it is", prediction.baseline.breakdown, prediction.baseline_ms)] if names else []
    return bars_figure([*first, last], "a step, ms", predicted.source, f"on {predicted.device}, nothing measured")
