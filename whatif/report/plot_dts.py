"""A plot of ``whatif dts``: the epochs of the architectures, and who does what in the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from whatif.dts.network_graph import draw, network_graph
from whatif.dts.ranking import Ranking
from whatif.errors import WhatifError
from whatif.report.plots import COLORS, drawn, save, unboxed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_ranking(ranking: Ranking, path: str | Path) -> None:
    """Draw a ranking into a file: see ``ranking_figure``. Raises WhatifError where no architecture is possible."""
    save(ranking_figure(ranking), path)


def ranking_figure(ranking: Ranking) -> Figure:
    """Give the epochs as bars with their 5 to 95 % range, beside the network graph of the fastest architecture.

    Raises WhatifError where no architecture is possible.
    """
    from matplotlib.figure import Figure

    rows = ranking.possible
    if not rows or rows[0].found is None:
        raise WhatifError("dts: expected an architecture that the cluster can train with, got none to draw.")
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    times = [row.epoch for row in rows if row.epoch]
    middle = [time.median_ns / 1e9 for time in times]
    reach = [
        [(time.median_ns - time.low_ns) / 1e9 for time in times],
        [(time.high_ns - time.median_ns) / 1e9 for time in times],
    ]
    left.barh(range(len(rows)), middle, xerr=reach, color=COLORS[0], alpha=0.6, ecolor="black", capsize=3)
    left.set_yticks(range(len(rows)), [drawn(row.name, 24) for row in rows], parse_math=False)
    left.invert_yaxis()
    left.set_xlabel(f"epoch of {ranking.epoch_batches:,} batches, s (median, 5 to 95 %)")
    unboxed(left, "x")
    draw(right, network_graph(rows[0].found))
    return figure
