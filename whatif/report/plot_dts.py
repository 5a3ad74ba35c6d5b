"""A plot of ``whatif dts``: the epochs of the architectures, and the roles of the fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whatif.models.dts.ranking import Ranking
from whatif.report.plot_network import draw, network_graph
from whatif.report.plots import COLORS, name_rows, new_figure, reach, unboxed
from whatif.report.printable import drawn
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def ranking_figure(ranking: Ranking) -> Figure:
    """Return the epochs as bars with their 5 to 95 % range, beside the network graph of the fastest architecture.

    Raises WhatifError if no architecture is possible.
    """
    rows = ranking.possible
    if not rows or rows[0].found is None:
        raise WhatifError("dts: expected an architecture that the cluster can train with, got none to draw.")
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    middle, low, high = (
        [getattr(row.epoch, key) / 1e9 for row in rows if row.epoch] for key in ("median_ns", "low_ns", "high_ns")
    )
    left.barh(
        range(len(rows)), middle, xerr=reach(middle, low, high), color=COLORS[0], alpha=0.6, ecolor="black", capsize=3
    )
    name_rows(left, [drawn(row.name, 24) for row in rows], fontsize=None)
    left.set_xlabel(f"epoch of {ranking.epoch_batches:,} batches, s (median, 5 to 95 %)")
    unboxed(left, "x")
    draw(right, network_graph(rows[0].found))
    return figure
