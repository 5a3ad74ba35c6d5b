"""A roofline plot of ``whatif explain --efficiency``: families of kernels under the roof of their GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from whatif.questions.efficiency import Efficiency
from whatif.report.plots import COLORS, MARKERS, new_figure, title, unboxed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def roofline_figure(found: Efficiency) -> Figure:
    """Return FLOP/s over FLOPs per byte, both logarithmic, with the peaks of the device's formats."""
    figure = new_figure(9, 5)
    axes = figure.subplots()
    points = found.points
    low = min([0.5, *(intensity / 2 for _, intensity, _ in points)])
    high = max([1000.0, *(intensity * 2 for _, intensity, _ in points)])
    across = np.geomspace(low, high, 200)
    if found.gpu is not None:
        for name, peak in found.roofs:
            axes.plot(across, np.minimum(across * found.memory_tbyte_s, peak), color="0.6", linewidth=1)
            axes.annotate(name, (high, peak), fontsize=7, ha="right", va="bottom", parse_math=False)
    for place, (use, intensity, tflops) in enumerate(points):
        color, label = COLORS[place % len(COLORS)], f"{use.name}, {use.ms:,.2f} ms"
        axes.plot([intensity], [tflops], MARKERS[place % len(MARKERS)], color=color, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs a byte", fontsize=8)
    axes.set_ylabel("TFLOP/s", fontsize=8)
    axes.tick_params(labelsize=8)
    if points:
        axes.legend(fontsize=7, frameon=False, loc="lower right")
    unboxed(axes, "both")
    mfu = "" if found.mfu_pct is None else f", MFU {found.mfu_pct:.1f} %"
    title(figure, found.baseline.graph.info.path, f"{found.gpu.name if found.gpu else 'device not known'}{mfu}")
    return figure
