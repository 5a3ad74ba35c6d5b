"""Where a step goes, as stacked bars: before and after a what-if, or of two recordings (Daydream, figure 6)."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from msgspec import Struct

from whatif.prediction.composition import spelled_together
from whatif.prediction.predict import Prediction
from whatif.report.layout import BREAKDOWN_LABELS, CLOCK_LABELS, CLOCK_SUBJECTS, ms_format
from whatif.report.plots import (
    COLORS,
    NAME_LENGTH,
    draw_range,
    legend_on_top,
    name_rows,
    new_figure,
    title,
    unboxed,
    write_beside,
)
from whatif.report.printable import drawn
from whatif.simulation.breakdown import Breakdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Idle time is grey. Hatches distinguish the parts without colour.
PART_COLORS = (COLORS[0], COLORS[2], COLORS[4], COLORS[1], "#d0d0d0")
PART_HATCHES = ("", "//", "..", "xx", "")
# A part narrower than this share of the longest bar has no room for its number.
LEAST_LABELLED = 0.07
BAR_INCHES = 0.55
# Letters of a line of a bar's name.
MOST_LINES = 3


class Bar(Struct, frozen=True):
    """One bar: the parts of a step, ms, and, if known, the ends of its range and the measured step."""

    name: str
    parts: Breakdown
    step_ms: float
    low_ms: float | None = None
    high_ms: float | None = None
    measured_ms: float | None = None


def prediction_figure(prediction: Prediction) -> Figure:
    """Return the parts of the step before and after the what-ifs as two bars, the second one with its 90 % range."""
    baseline = prediction.baseline
    names = spelled_together(prediction.transforms) or "as it is"
    bars = [
        Bar("baseline", baseline.breakdown, prediction.baseline_ms, measured_ms=baseline.measured_ms),
        Bar(names, prediction.breakdown, prediction.predicted_ms, prediction.low_ms, prediction.high_ms),
    ]
    label = f"{CLOCK_SUBJECTS[baseline.clock]}, ms ({CLOCK_LABELS[baseline.clock]})"
    # The bars exclude the profiler's overhead, if any; the recorded step includes it.
    legend_label = "recorded, with the profiler's cost" if baseline.is_without_profiler else "recorded"
    samples = f", {prediction.samples_factor:.4g}× the samples" if prediction.samples_factor != 1 else ""
    what = f"{_times(prediction.speedup)} as fast{samples}"
    return bars_figure(bars, label, baseline.graph.info.path, what, legend_label)


def bars_figure(bars: Sequence[Bar], label: str, path: str, what: str = "", measured: str = "measured") -> Figure:
    """Return some steps as bars under the name of a recording and a few words.

    ``label`` is that of their axis, and ``measured`` the legend's name of the diamonds.
    """
    figure = new_figure(9, 1.5 + BAR_INCHES * len(bars))
    draw_bars(figure.subplots(), bars, label, measured)
    title(figure, path, what)
    return figure


def _times(speedup: float) -> str:
    return f"{speedup:.2f}×" if speedup < 1e4 else "far more than 10,000×"


def draw_bars(axes: Axes, bars: Sequence[Bar], label: str, measured: str = "measured") -> None:
    """Draw bars into ``axes``, the first one on top; parts that no bar has are left out of the legend."""
    longest = max([1e-9, *(bar.high_ms or 0.0 for bar in bars), *(bar.step_ms for bar in bars)])
    ms = ms_format(longest)
    left = [0.0] * len(bars)
    for (key, part), color, hatch in zip(BREAKDOWN_LABELS, PART_COLORS, PART_HATCHES, strict=True):
        widths = [getattr(bar.parts, key) for bar in bars]
        if not any(width > 0 for width in widths):
            continue
        axes.barh(
            range(len(bars)), widths, left=left, color=color, hatch=hatch, edgecolor="white", linewidth=0.5,
            height=0.62, label=part,
        )  # fmt: skip
        for place, (width, begin) in enumerate(zip(widths, left, strict=True)):
            if width >= LEAST_LABELLED * longest:
                axes.text(
                    begin + width / 2, place, ms(width), ha="center", va="center", fontsize=8, color="black",
                    bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
                )  # fmt: skip
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for place, bar in enumerate(bars):
        if bar.low_ms is not None and bar.high_ms is not None:
            draw_range(axes, bar.step_ms, place, bar.low_ms, bar.high_ms, elinewidth=1.2, capsize=4)
        end = max(bar.step_ms, bar.high_ms or 0.0, bar.measured_ms or 0.0)
        # The number is the bar's, even beside a diamond.
        also = f" (◆ {ms(bar.measured_ms)})" if bar.measured_ms and ms(bar.measured_ms) != ms(bar.step_ms) else ""
        write_beside(axes, f"{ms(bar.step_ms)} ms{also}", end, place, distance=6, fontsize=9)
    diamonds = [(bar.measured_ms, place) for place, bar in enumerate(bars) if bar.measured_ms]
    if diamonds:
        axes.plot(*zip(*diamonds, strict=True), "D", color="black", markersize=5, label=measured)
    name_rows(axes, [_lines(bar.name) for bar in bars], fontsize=9)
    longest = max([longest, *(value for value, _ in diamonds)])
    axes.set_xlim(0, (1.3 if diamonds else 1.16) * longest)  # room for the number after the bar
    axes.set_xlabel(label)
    axes.tick_params(axis="y", length=0)
    unboxed(axes, "x")
    if axes.get_legend_handles_labels()[0]:
        legend_on_top(axes, 6, columnspacing=1.2)


def _lines(name: str) -> str:
    """Wrap a name into as few lines as possible, with a few what-ifs on each."""
    words = drawn(name, MOST_LINES * NAME_LENGTH).replace(",", ", ")
    return "\n".join(wrap(words, NAME_LENGTH, max_lines=MOST_LINES, placeholder=" …"))
