"""A plot of ``whatif recommend``: the step on each device with its range and, where there are prices, what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from whatif.errors import WhatifError
from whatif.recommend.ranking import Ranking
from whatif.report.layout import CLOCK_LABELS, CLOCK_SUBJECTS, ms_format
from whatif.report.plots import COLORS, NAME_LENGTH, drawn, save, title, unboxed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_INCHES = 0.3


def plot_recommendation(found: Ranking, path: str | Path, top: int = 10) -> None:
    """Draw a ranking into a file: see ``recommendation_figure``. Raises WhatifError where no device is left."""
    save(recommendation_figure(found, top), path)


def recommendation_figure(found: Ranking, top: int = 10) -> Figure:
    """Give the steps of the first ``top`` devices as bars with their ranges, the recorded device in another colour.

    Raises WhatifError where no device is left.
    """
    from matplotlib.figure import Figure

    rows = found.candidates[:top]
    if not rows:
        raise WhatifError("recommend: expected a device that the step fits, got none to draw.")
    costs = [row.cost for row in rows]
    priced = any(cost is not None for cost in costs)
    figure = Figure(figsize=(10.5 if priced else 8, 1.6 + ROW_INCHES * len(rows)), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, 2 if priced else 1, sharey=True, squeeze=False).ravel())
    step = panels[0]
    ms = ms_format(min(row.step_ms for row in rows))
    step.barh(
        range(len(rows)),
        [row.step_ms for row in rows],
        color=[COLORS[2] if row.recorded else COLORS[0] for row in rows],
        hatch=["//" if row.fits is False else "" for row in rows],
        edgecolor="white",
        height=0.66,
    )
    for place, row in enumerate(rows):
        reach = [[max(row.step_ms - row.low_ms, 0.0)], [max(row.high_ms - row.step_ms, 0.0)]]
        step.errorbar([row.step_ms], [place], xerr=reach, fmt="none", ecolor="black", elinewidth=1, capsize=3)
        step.annotate(
            ms(row.step_ms), (max(row.high_ms, row.step_ms), place), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    names = [drawn(row.device + (" (recorded)" if row.recorded else ""), NAME_LENGTH) for row in rows]
    step.set_yticks(range(len(rows)), names, fontsize=8, parse_math=False)
    step.set_ylim(len(rows) - 0.4, -0.6)
    step.margins(x=0.12)
    clock = found.baseline.clock
    unfit = "; striped: does not fit" if any(row.fits is False for row in rows) else ""
    step.set_xlabel(f"{CLOCK_SUBJECTS[clock]}, ms ({CLOCK_LABELS[clock]}; lines: nominal 90 % range{unfit})")
    unboxed(step, "x")
    if priced:
        panels[1].barh(range(len(rows)), [1e3 * (cost or 0.0) for cost in costs], color=COLORS[1], height=0.66)
        panels[1].set_xlabel(f"cost of a thousand steps, {drawn(found.currency, 12) or 'in the units of the prices'}")
        unboxed(panels[1], "x")
    title(figure, found.baseline.graph.info.path)
    return figure
