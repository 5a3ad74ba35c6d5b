"""Plots of what the library computed. matplotlib is imported only where one is drawn."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from whatif.errors import WhatifError
from whatif.output_file import file_beside, replacing
from whatif.report.layout import CLOCK_LABELS, CLOCK_SUBJECTS, ms_format
from whatif.report.printable import printable
from whatif.report.text_explain import short_name
from whatif.report.text_sensitivity import kind_titles
from whatif.sensitivity import KINDS, Sensitivity, at_speedups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
# Okabe and Ito, "Color Universal Design" (2008): told apart by people with any colour vision; the yellow is left out,
# which paper does not show. Dashes and markers tell the lines apart where there is no colour.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES_PER_PANEL = len(COLORS)
NAME_LENGTH, TITLE_LENGTH = 34, 100
# What gains next to nothing has to look like it: no panel's scale ends below this.
LEAST_SCALE_PCT = 5.0
CURVE_PCT = tuple(float(pct) for pct in range(0, 101, 5))


def check_plot(path: str | Path, trace: str | Path) -> None:
    """Raise WhatifError where no plot can be written to ``path``: its ending, its folder, the trace, no matplotlib."""
    if Path(path).suffix.lower() not in ENDINGS:
        raise WhatifError(f"{path}: expected a plot's name that ends in {', '.join(ENDINGS)}, got another ending.")
    file_beside(path, trace)
    try:
        import matplotlib  # noqa: F401 - is it there?
    except ImportError:
        raise WhatifError(
            "a plot needs matplotlib, which is not installed; run `pip install 'whatif-profiler[plot]'`."
        ) from None


def plot_sensitivity(found: Sensitivity, path: str | Path) -> None:
    """Draw what the step gains against how much faster each part is into a file: see ``sensitivity_figure``."""
    save(sensitivity_figure(found), path)


def sensitivity_figure(found: Sensitivity) -> Figure:
    """Give the gain against the speed-up, at every 5 %: a panel for each kind of part, a line for each of its best."""
    from matplotlib.figure import Figure

    curves = at_speedups(found, CURVE_PCT)
    titles = kind_titles(bool(found.baseline.graph.on_gpu.any()))
    kinds = [kind for kind in KINDS if curves.of_kind(kind)]
    n_rows = max((len(kinds) + 1) // 2, 1)
    figure = Figure(figsize=(10, 0.8 + 3.3 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, 2, squeeze=False).ravel()
    for kind, axes in zip(kinds, panels, strict=False):
        _panel(axes, curves, kind, titles[kind])
    for axes in panels[len(kinds) :]:
        axes.set_axis_off()
    baseline, ms = found.baseline, ms_format(found.step_ms)
    what = f"{CLOCK_SUBJECTS[baseline.clock]}: {ms(found.step_ms)} ms, {CLOCK_LABELS[baseline.clock]}"
    title(figure, baseline.graph.info.path, what)
    figure.supxlabel("each panel has a scale of its own", fontsize=8)
    return figure


def _panel(axes: Axes, curves: Sensitivity, kind: str, title: str) -> None:
    parts = curves.of_kind(kind)[:LINES_PER_PANEL]
    handles = [
        axes.plot(
            curves.speedups_pct, [curves.pct(gain_ms) for gain_ms in part.gain_ms],
            color=COLORS[n], linestyle=DASHES[n], marker=MARKERS[n], markevery=4, markersize=4, linewidth=1.4,
            clip_on=False,  # the last mark lies on the edge
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
    legend = axes.legend(handles, [str(n) for n in range(len(parts))], fontsize=7, loc="upper left", frameon=False)
    for text, part in zip(legend.get_texts(), parts, strict=True):
        text.set_parse_math(False)
        text.set_text(drawn(short_name(part.name), NAME_LENGTH))


def drawn(name: str, longest: int) -> str:
    """A name of a trace as it is drawn: on one line, not too long."""
    shown = printable(name)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def title(figure: Figure, path: str, what: str = "") -> None:
    """Head a figure with the name of its recording and, behind it, a few words."""
    name = drawn(Path(path).name, TITLE_LENGTH - len(what) - 3)
    figure.suptitle(f"{name} ({what})" if what else name, fontsize=11).set_parse_math(False)


def unboxed(axes: Axes, grid: Literal["x", "y", "both"]) -> None:
    """Give axes no box, and a thin grid behind what is drawn."""
    axes.grid(visible=True, axis=grid, linewidth=0.4, color="#bbbbbb")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure: whole or not at all, and the same bytes for the same figure."""
    import matplotlib

    ending = Path(path).suffix.lower()
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(ending, {})
    with replacing(path) as part, warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "whatif"}):
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box stands for it
        figure.savefig(part, format=ending[1:], dpi=150, metadata=undated)
