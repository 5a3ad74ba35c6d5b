"""A plot of the memory of a step, layer by layer. matplotlib is imported only for drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whatif.graph.types import Phase
from whatif.questions.memory_summary import MemorySummary
from whatif.report.perfetto_counters import MEMORY_PARTS
from whatif.report.plots import COLORS, legend, new_figure, title, unboxed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def memory_figure(summary: MemorySummary) -> Figure:
    """Return the parts of the memory over the moments of a step, stacked, with the capacity as a line."""
    figure = new_figure(9.5, 4.5)
    axes = figure.subplots()
    found = summary.moments
    unit, scale = ("GiB", 2**30) if summary.peak.total >= 2**29 else ("MiB", 2**20)
    stacks = [[getattr(moment, field) / scale for moment in found] for field in MEMORY_PARTS]
    axes.stackplot(range(len(found)), stacks, labels=list(MEMORY_PARTS.values()), colors=COLORS, step="mid")
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):
        first = next((place for place, moment in enumerate(found) if moment.phase == phase), None)
        if first is not None:
            axes.axvline(first - 0.5, color="0.4", linewidth=0.8)
            axes.annotate(
                phase.name.lower(), (first, 1), xycoords=("data", "axes fraction"), xytext=(3, 3),
                textcoords="offset points", fontsize="small",
            )  # fmt: skip
    if summary.capacity_bytes and summary.capacity_bytes < 4 * summary.peak.total:
        axes.axhline(summary.capacity_bytes / scale, color="black", linestyle="--", label="capacity")
    axes.set_xlim(-0.5, len(found) - 0.5)
    axes.set_xlabel("layers, in the order in which they work")
    axes.set_ylabel(f"memory, {unit}")
    axes.set_ylim(bottom=0)
    unboxed(axes, "y")
    handles, labels = axes.get_legend_handles_labels()
    # In stacking order: the last one is on top.
    legend(axes, handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    title(figure, summary.baseline.graph.info.path, f"peak {summary.peak.total / scale:,.4g} {unit}")
    return figure
