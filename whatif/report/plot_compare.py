"""A plot of ``whatif compare``: two recordings as bars, and the parts whose work changed most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whatif.questions.comparison.compare import Comparison
from whatif.report.layout import CLOCK_LABELS, CLOCK_SUBJECTS, distinct_names
from whatif.report.plot_breakdown import Bar, draw_bars
from whatif.report.plots import COLORS, NAME_LENGTH, draw_rows, name_rows, new_figure, unboxed
from whatif.report.printable import drawn
from whatif.report.text_explain import short_name
from whatif.report.text_sensitivity import kind_titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from whatif.questions.comparison.part_changes import PartChange


def comparison_figure(found: Comparison, top: int = 10) -> Figure:
    """Return the breakdown of both recordings above the ``top`` layers and families whose work changed most.

    If neither recording has layers, it shows phases instead.
    """
    two = found.two
    families = kind_titles(two.before.graph.has_gpu)["family"].lower()
    first = ("layers", found.layers) if found.layers else ("phases", found.phases)  # many recordings have no layers
    panels = [
        (name, [part for part in parts if abs(part.work_change_ms) > 0][:top])
        for name, parts in (first, (families, found.kernels))
    ]
    n_rows = max([3, *(len(parts) for _, parts in panels)])
    figure = new_figure(11, 3.4 + 0.24 * n_rows)
    grid = figure.add_gridspec(2, 2, height_ratios=(2.2, 0.8 + 0.24 * n_rows))
    bars = [
        Bar(f"{side}: {file}", explained.breakdown, baseline.step_ms, measured_ms=measured.ms or None)
        for side, file, baseline, explained, measured in zip(
            "AB", distinct_names([side.graph.info.path for side in (two.before, two.after)]), (two.before, two.after),
            found.explained, two.measured, strict=True,
        )
    ]  # fmt: skip
    draw_bars(figure.add_subplot(grid[0, :]), bars, f"{CLOCK_SUBJECTS[two.clock]}, ms ({CLOCK_LABELS[two.clock]})")
    for place, (name, parts) in enumerate(panels):
        _changes(figure.add_subplot(grid[1, place]), name, parts)
    figure.suptitle(found.headline.split(";")[0], fontsize=11)
    return figure


def _changes(axes: Axes, name: str, parts: list[PartChange]) -> None:
    longer = [part.work_change_ms > 0 for part in parts]
    draw_rows(axes, [part.work_change_ms for part in parts], [COLORS[is_longer] for is_longer in longer], longer)
    name_rows(axes, [drawn(short_name(part.name), NAME_LENGTH) for part in parts])
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set_title(f"{name}: where the work changed", fontsize=10, loc="left")
    axes.set_xlabel("change of work a step, ms (B − A; striped: longer)", fontsize=8)
    axes.tick_params(labelsize=8)
    unboxed(axes, "x")
    if not parts:
        axes.text(0.5, 0.5, "nothing changed", transform=axes.transAxes, ha="center", fontsize=9)
