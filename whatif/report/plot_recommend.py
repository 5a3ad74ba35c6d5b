"""A plot of ``whatif recommend``: the step on each device with its range and, if there are prices, its cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whatif.questions.recommend.ranking import Ranking
from whatif.report.layout import CLOCK_LABELS, CLOCK_SUBJECTS, ms_format
from whatif.report.plots import (
    COLORS,
    NAME_LENGTH,
    draw_range,
    draw_rows,
    name_rows,
    new_figure,
    title,
    unboxed,
    write_beside,
)
from whatif.report.printable import drawn
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_INCHES = 0.3


def recommendation_figure(found: Ranking, top: int = 10) -> Figure:
    """Return the steps of the first ``top`` devices as bars with their ranges, the recorded device in another colour.

    Raises WhatifError if no device is left.
    """
    rows = found.candidates[:top]
    if not rows:
        raise WhatifError("recommend: expected a device that the step fits, got none to draw.")
    costs = [row.cost for row in rows]
    priced = any(cost is not None for cost in costs)
    figure = new_figure(10.5 if priced else 8, 1.6 + ROW_INCHES * len(rows))
    panels: list[Axes] = list(figure.subplots(1, 2 if priced else 1, sharey=True, squeeze=False).ravel())
    step = panels[0]
    ms = ms_format(min(row.step_ms for row in rows))
    colors = [COLORS[2] if row.recorded else COLORS[0] for row in rows]
    draw_rows(step, [row.step_ms for row in rows], colors, [row.fits is False for row in rows])
    for place, row in enumerate(rows):
        draw_range(step, row.step_ms, place, row.low_ms, row.high_ms)
        write_beside(step, ms(row.step_ms), max(row.high_ms, row.step_ms), place)
    names = [drawn(row.device + (" (recorded)" if row.recorded else ""), NAME_LENGTH) for row in rows]
    name_rows(step, names, tight=True)
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
