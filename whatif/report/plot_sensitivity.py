"""A plot of ``whatif explain --sensitivity``: the gain of the step over the speed-up of one of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whatif.questions.sensitivity import KINDS, Sensitivity, at_speedups
from whatif.report.layout import CLOCK_LABELS, CLOCK_SUBJECTS, ms_format
from whatif.report.plots import COLORS, DASHES, MARKERS, NAME_LENGTH, new_figure, title, unboxed
from whatif.report.printable import drawn
from whatif.report.text_explain import short_name
from whatif.report.text_sensitivity import kind_titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES_PER_PANEL = len(COLORS)
# The least end of a panel's scale, so that negligible gains look negligible.
LEAST_SCALE_PCT = 5.0
CURVE_PCT = tuple(float(pct) for pct in range(0, 101, 5))


def sensitivity_figure(found: Sensitivity) -> Figure:
    """Return the gain over the speed-up, in steps of 5 %: a panel per kind of part, a line per best part."""
    curves = at_speedups(found, CURVE_PCT)
    titles = kind_titles(found.baseline.graph.has_gpu)
    kinds = [kind for kind in KINDS if curves.of_kind(kind)]
    n_rows = max((len(kinds) + 1) // 2, 1)
    figure = new_figure(10, 0.8 + 3.3 * n_rows)
    panels = figure.subplots(n_rows, 2, squeeze=False).ravel()
    for kind, axes in zip(kinds, panels, strict=False):
        _panel(axes, curves, kind, titles[kind])
    for axes in panels[len(kinds) :]:
        axes.set_axis_off()
    baseline, ms = found.baseline, ms_format(found.step_ms)
    subtitle = f"{CLOCK_SUBJECTS[baseline.clock]}: {ms(found.step_ms)} ms, {CLOCK_LABELS[baseline.clock]}"
    title(figure, baseline.graph.info.path, subtitle)
    figure.supxlabel("each panel has a scale of its own", fontsize=8)
    return figure


def _panel(axes: Axes, curves: Sensitivity, kind: str, title: str) -> None:
    parts = curves.of_kind(kind)[:LINES_PER_PANEL]
    handles = [
        axes.plot(
            curves.speedups_pct, [curves.pct(gain_ms) for gain_ms in part.gain_ms],
            color=COLORS[n], linestyle=DASHES[n], marker=MARKERS[n], markevery=4, markersize=4, linewidth=1.4,
            clip_on=False,  # the last mark is on the edge
        )[0]
        for n, part in enumerate(parts)
    ]  # fmt: skip
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("how much faster the part is (% of its time)", fontsize=8)
    axes.set_ylabel(f"gain (% of {CLOCK_SUBJECTS[curves.baseline.clock]})", fontsize=8)
    axes.set_xlim(0, 100)
    axes.set_ylim(top=max(axes.get_ylim()[1], LEAST_SCALE_PCT))
    axes.tick_params(labelsize=8)
    unboxed(axes, "both")
    # Names are set afterwards: matplotlib leaves out labels that begin with "_".
    # Lines may pass behind the names.
    look: dict[str, Any] = {"fontsize": 7, "loc": "best", "framealpha": 0.6, "edgecolor": "none"}
    legend = axes.legend(handles, [str(n) for n in range(len(parts))], **look)
    for text, part in zip(legend.get_texts(), parts, strict=True):
        text.set_parse_math(False)
        text.set_text(drawn(short_name(part.name), NAME_LENGTH))
