"""A plot of ``whatif advise``: the gain of each what-if, alone and combined with others, with ranges."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from whatif.questions.advice.advise import Advice, Ranked
from whatif.report.layout import CLOCK_SUBJECTS
from whatif.report.plots import (
    COLORS,
    draw_range,
    draw_rows,
    legend,
    name_rows,
    new_figure,
    title,
    unboxed,
    write_beside,
)
from whatif.report.printable import printable
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Letters of a line of a name, and its lines: combinations have several what-ifs.
LINE_LENGTH, MOST_LINES = 46, 2
ROW_INCHES = 0.3


def advice_figure(advice: Advice, top: int = 10) -> Figure:
    """Return the gains of the best ``top`` what-ifs and combinations as bars with their nominal 90 % ranges.

    If nothing gains, those that come closest; if the step does not fit, those that make it fit. Raises WhatifError if
    nothing could be tried, or if nothing fits.
    """
    from matplotlib.patches import Patch

    groups: list[tuple[str, tuple[Ranked, ...], str]] = [
        ("alone", (advice.alone or advice.not_gaining)[:top], COLORS[0]),
        ("together", advice.together[:top], COLORS[2]),
    ]
    rows = [(name, entry, color) for name, entries, color in groups for entry in entries]
    if not rows:
        path = advice.baseline.graph.info.path
        raise WhatifError(f"{path}: expected a what-if that applies and fits, got none to draw.")
    figure = new_figure(9.5, 1.6 + ROW_INCHES * len(rows))
    axes = figure.subplots()
    gains, striped = [entry.trial.gain_pct for _, entry, _ in rows], [name == "together" for name, _, _ in rows]
    draw_rows(axes, gains, [color for _, _, color in rows], striped, zorder=2)
    for place, (gain, (_, entry, _)) in enumerate(zip(gains, rows, strict=True)):
        ends = entry.gain_range_pct
        if ends is not None:
            draw_range(axes, gain, place, *ends, zorder=3)
        far = max(gain, ends[1] if ends else 0.0, 0.0)
        write_beside(axes, f"{gain:.1f}", far, place)
    name_rows(axes, [_lines(entry) for _, entry, _ in rows])
    axes.margins(x=0.1)
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set_xlabel(f"gain, % of {CLOCK_SUBJECTS[advice.baseline.clock]}; lines: nominal 90 % range")
    unboxed(axes, "x")
    if advice.together:
        handles = [
            Patch(facecolor=color, hatch="//" if name == "together" else "", edgecolor="white", label=name)
            for name, entries, color in groups
            if entries
        ]
        legend(axes, handles=handles, loc="lower right")
    title(figure, advice.baseline.graph.info.path, f"{advice.baseline.step_ms:,.4g} ms as it is")
    return figure


def _lines(entry: Ranked) -> str:
    """The label of a combination, with line breaks between its what-ifs."""
    words = printable(entry.trial.label)
    return "\n".join(wrap(words, LINE_LENGTH, max_lines=MOST_LINES, placeholder=" …"))
