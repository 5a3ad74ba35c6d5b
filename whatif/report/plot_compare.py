"""A plot of ``whatif compare``: two recordings as bars, and the parts whose work changed most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from whatif.comparison.compare import Comparison
from whatif.report.layout import CLOCK_LABELS, CLOCK_SUBJECTS, told_apart
from whatif.report.plot_breakdown import Bar, draw_bars
from whatif.report.plots import COLORS, NAME_LENGTH, drawn, save, unboxed
from whatif.report.text_explain import short_name
from whatif.report.text_sensitivity import kind_titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from whatif.comparison.part_changes import PartChange


def plot_comparison(found: Comparison, path: str | Path, top: int = 10) -> None:
    """Draw a comparison into a file: see ``comparison_figure``."""
    save(comparison_figure(found, top), path)


def comparison_figure(found: Comparison, top: int = 10) -> Figure:
    """Give the breakdown of both recordings above the ``top`` layers and families whose work changed most.

    Where neither recording tells layers, phases stand in their place.
    """
    from matplotlib.figure import Figure

    two = found.two
    families = kind_titles(bool(two.before.graph.on_gpu.any()))["family"].lower()
    first = ("layers", found.layers) if found.layers else ("phases", found.phases)  # many recordings tell no layers
    panels = [
        (name, [part for part in parts if abs(part.work_change_ms) > 0][:top])
        for name, parts in (first, (families, found.kernels))
    ]
    n_rows = max([3, *(len(parts) for _, parts in panels)])
    figure = Figure(figsize=(11, 3.4 + 0.24 * n_rows), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(2.2, 0.8 + 0.24 * n_rows))
    bars = [
        Bar(f"{side}: {file}", explained.breakdown, baseline.step_ns / 1e6, measured_ms=measured.ms or None)
        for side, file, baseline, explained, measured in zip(
            "AB", told_apart([side.graph.info.path for side in (two.before, two.after)]), (two.before, two.after),
            found.explained, two.measured, strict=True,
        )
    ]  # fmt: skip
    draw_bars(figure.add_subplot(grid[0, :]), bars, f"{CLOCK_SUBJECTS[two.clock]}, ms ({CLOCK_LABELS[two.clock]})")
    for place, (name, parts) in enumerate(panels):
        _changes(figure.add_subplot(grid[1, place]), name, parts)
    figure.suptitle(found.headline.split(";")[0], fontsize=11)
    return figure


def _changes(axes: Axes, name: str, parts: list[PartChange]) -> None:
    axes.barh(
        range(len(parts)),
        [part.work_change_ms for part in parts],
        color=[COLORS[1] if part.work_change_ms > 0 else COLORS[0] for part in parts],
        hatch=["//" if part.work_change_ms > 0 else "" for part in parts],
        edgecolor="white",
        height=0.66,
    )
    axes.set_yticks(
        range(len(parts)), [drawn(short_name(part.name), NAME_LENGTH) for part in parts], fontsize=8, parse_math=False
    )
    axes.invert_yaxis()
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set_title(f"{name}: where the work changed", fontsize=10, loc="left")
    axes.set_xlabel("change of work a step, ms (B − A; striped: longer)", fontsize=8)
    axes.tick_params(labelsize=8)
    unboxed(axes, "x")
    if not parts:
        axes.text(0.5, 0.5, "nothing changed", transform=axes.transAxes, ha="center", fontsize=9)
