"""A plot of ``whatif validate``: predictions beside measurements, with their ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whatif.questions.validate.validate import Outcome, Validation
from whatif.report.plots import COLORS, MARKERS, NAME_LENGTH, legend, name_rows, new_figure, reach, unboxed
from whatif.report.printable import drawn
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The most rows of the right panel that are legible.
MOST_KINDS = 40
# An error beyond this is drawn at the edge, so that the others stay distinct.
EDGE_PCT = 60.0


def validation_figure(found: Validation) -> Figure:
    """Return predicted over measured steps, each with its range, beside the errors of each kind of what-if.

    Raises WhatifError if nothing was compared.
    """
    if not found.outcomes:
        raise WhatifError("validate: expected a pair that could be compared, got none to draw.")
    kinds = list(found.by_kind)[:MOST_KINDS]
    figure = new_figure(11.5, max(4.4, 1.2 + 0.24 * len(kinds)))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _steps(left, found.outcomes)
    _errors(right, found, kinds)
    score = found.score
    if score.median_error_pct is not None:
        inside = f"{score.inside} of {score.scored} inside their range"
        figure.suptitle(
            f"{score.scored} predictions: median error {score.median_error_pct:.1f} %, {inside}", fontsize=11
        )
    return figure


def _steps(axes: Axes, outcomes: tuple[Outcome, ...]) -> None:
    """Draw predicted over measured, on logarithmic scales if the steps span a wide range."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    for on_gpu, name, place in ((False, "on a CPU", 0), (True, "on a GPU", 1)):
        chosen = [outcome for outcome in outcomes if outcome.on_gpu == on_gpu]
        if not chosen:
            continue
        measured, predicted, low_ms, high_ms = (
            [getattr(outcome, f"{name}_ms") for outcome in chosen] for name in ("measured", "predicted", "low", "high")
        )
        axes.errorbar(
            measured, predicted, yerr=reach(predicted, low_ms, high_ms), fmt=MARKERS[place],
            color=COLORS[place], markersize=4, elinewidth=0.8, capsize=2, label=name, zorder=3,
        )  # fmt: skip
    times = [time for outcome in outcomes for time in (outcome.measured_ms, outcome.predicted_ms) if time > 0]
    low, high = min(times) / 1.3, max(times) * 1.3
    if high > 20 * low:
        axes.set_xscale("log")
        axes.set_yscale("log")
        # Few enough ticks to fit: 1, 2 and 5 of each decade, or only 1 over many decades.
        steps = (1.0, 2.0, 5.0) if high < 3e3 * low else (1.0,)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=steps, numticks=12))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.minorticks_off()
    bound = max(outcome.bound_pct for outcome in outcomes) / 100
    axes.plot([low, high], [low, high], color="0.3", linewidth=0.9, label="as measured")
    axes.fill_between(
        [low, high], [low * (1 - bound), high * (1 - bound)], [low * (1 + bound), high * (1 + bound)], color="0.85",
        linewidth=0, label=f"within {100 * bound:.0f} %", zorder=0,
    )  # fmt: skip
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("measured step, ms")
    axes.set_ylabel("predicted step, ms (nominal 90 % range)")
    unboxed(axes, "both")
    legend(axes, loc="upper left")


def _errors(axes: Axes, found: Validation, kinds: list[str]) -> None:
    """Draw the error of every prediction in the row of its kind, filled if the measured step is inside the range."""
    drawn_kinds = set()
    for outcome in found.outcomes:
        if outcome.kind not in kinds:
            continue
        error = min(max(outcome.error_pct, -EDGE_PCT), EDGE_PCT)
        label = "inside its range" if outcome.inside else "outside"
        axes.plot(
            [error], [kinds.index(outcome.kind)], MARKERS[0 if outcome.inside else 2], markersize=5, color=COLORS[0 if
            outcome.inside else 1], fillstyle="full" if outcome.inside else "none",
            label=label if label not in drawn_kinds else None,
        )  # fmt: skip
        drawn_kinds.add(label)
    bound = max(outcome.bound_pct for outcome in found.outcomes)
    axes.axvspan(-bound, bound, color="0.85", linewidth=0, zorder=0)
    axes.axvline(0, color="0.3", linewidth=0.8)
    names = [drawn(f"{kind} ({found.by_kind[kind].pairs})", NAME_LENGTH) for kind in kinds]
    name_rows(axes, names, tight=True)
    axes.set_xlabel(f"error of the prediction, % (beyond ±{EDGE_PCT:.0f} at the edge)")
    unboxed(axes, "x")
    legend(axes, loc="upper center", bbox_to_anchor=(0.5, 1.08), ncols=2)
