"""A plot of ``whatif plan``: throughput over the memory of the fullest device, and the Pareto front."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whatif.questions.plan.search import Planned, Row
from whatif.report.plots import COLORS, new_figure, title, unboxed
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def front(rows: list[Row]) -> list[Row]:
    """Return the Pareto-optimal plans in throughput and memory, by ascending memory."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda candidate: (candidate.peak_bytes or 0, -candidate.samples_per_s)):
        if not found or row.samples_per_s > found[-1].samples_per_s:
            found.append(row)
    return found


def plan_figure(found: Planned) -> Figure:
    """Return the figure. Raises WhatifError if the recording lacks memory data."""
    rows = [row for row in found.rows if row.peak_bytes is not None]
    if not rows:
        raise WhatifError("plan: expected a recording with its memory for a plot over it, got one without.")
    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    axes.scatter(
        [(row.peak_bytes or 0) / 2**30 for row in rows], [row.samples_per_s for row in rows], s=14, color=COLORS[0],
        alpha=0.5, label="plans",
    )  # fmt: skip
    edge = front(rows)
    axes.plot(
        [(row.peak_bytes or 0) / 2**30 for row in edge], [row.samples_per_s for row in edge], color=COLORS[1],
        marker="o", markersize=4, label="no other plan is as fast with less memory",
    )  # fmt: skip
    axes.set_xlabel("peak memory of the fullest device, GiB")
    axes.set_ylabel(f"{found.unit} a second")
    axes.legend(frameon=False)
    unboxed(axes, "both")
    title(figure, found.baseline.graph.info.path)
    return figure
