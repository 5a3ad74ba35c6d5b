"""Baseline, ground truth and prediction beside one another, as Daydream's figures 5, 7 and 10 show them."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from whatif.questions.validate.validate import Outcome
from whatif.report.plots import COLORS, NAME_LENGTH, draw_range, legend_on_top, new_figure, unboxed
from whatif.report.printable import drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKS = (("baseline", "#b0b0b0", ""), ("measured", COLORS[0], ""), ("predicted", COLORS[1], "//"))
WIDTH = 0.26
# Letters per line of a name below its bars.
LINE_LENGTH = 17


def truth_figure(outcomes: Sequence[Outcome], names: Sequence[str], heading: str = "") -> Figure:
    """Return three bars for each outcome, under its name: the baseline, the measurement, and the prediction.

    The prediction has its nominal 90 % range, and its error above. The steps are relative to the baseline's, so that
    models of all sizes are legible.
    """
    figure = new_figure(max(6.0, 2.2 + 1.35 * len(outcomes)), 4.2)
    axes = figure.subplots()
    for n, (name, color, hatch) in enumerate(LOOKS):
        heights = [getattr(outcome, f"{name}_ms") / outcome.baseline_ms for outcome in outcomes]
        at = [place + (n - 1) * WIDTH for place in range(len(outcomes))]
        axes.bar(at, heights, WIDTH, color=color, hatch=hatch, edgecolor="white", label=name)
        for x, height, outcome in zip(at, heights, outcomes, strict=True):
            if name == "predicted":
                low, high = (getattr(outcome, end) / outcome.baseline_ms for end in ("low_ms", "high_ms"))
                draw_range(axes, x, height, low, high, along="y")
                axes.annotate(
                    f"{outcome.error_pct:+z.1f} %", (x, max(high, height)), xytext=(0, 3), textcoords="offset points",
                    ha="center", fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
                )  # fmt: skip
    lines = [wrap(drawn(name, NAME_LENGTH), LINE_LENGTH, max_lines=3, placeholder="…") for name in names]
    axes.set_xticks(range(len(outcomes)), ["\n".join(line) for line in lines], fontsize=8, parse_math=False)
    axes.set_ylabel("step, share of the baseline's")
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    unboxed(axes, "y")
    legend_on_top(axes, 3)
    if heading:
        figure.suptitle(drawn(heading, 100), fontsize=11).set_parse_math(False)
    return figure
