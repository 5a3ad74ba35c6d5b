"""Common parts of all plots: colours, figures, axes, ranges, titles, files. matplotlib is imported only for drawing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from whatif.report.printable import drawn
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import file_beside, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
# Okabe and Ito, "Color Universal Design" (2008): distinguishable with any colour vision; without the yellow,
# which is invisible on paper. Dashes and markers distinguish the lines without colour.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
NAME_LENGTH, TITLE_LENGTH = 34, 100


def check_plot(path: str | Path, trace: str | Path) -> None:
    """Raise WhatifError if no plot can be written to ``path``: its suffix, its folder, the trace, no matplotlib."""
    if Path(path).suffix.lower() not in ENDINGS:
        raise WhatifError(f"{path}: expected a plot's name that ends in {', '.join(ENDINGS)}, got another ending.")
    file_beside(path, trace)
    _figure_class()


def _figure_class() -> type[Figure]:
    try:
        import matplotlib  # noqa: F401 - is it there?
        from matplotlib.figure import Figure
    except ImportError:
        raise WhatifError(
            "a plot needs matplotlib, which is not installed; run `pip install 'whatif-profiler[plot]'`."
        ) from None
    return Figure


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches, in a layout without overlaps. Raises WhatifError without matplotlib."""
    return _figure_class()(figsize=(width, height), layout="constrained")


def title(figure: Figure, path: str, what: str = "") -> None:
    """Head a figure with the name of its recording and, after it, a few words."""
    name = drawn(Path(path).name, TITLE_LENGTH - len(what) - 3)
    figure.suptitle(f"{name} ({what})" if what else name, fontsize=11).set_parse_math(False)


def unboxed(axes: Axes, grid: Literal["x", "y", "both"]) -> None:
    """Draw axes without a box, and a thin grid in the background."""
    axes.grid(visible=True, axis=grid, linewidth=0.4, color="#bbbbbb")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def name_rows(axes: Axes, names: Sequence[str], *, tight: bool = False, **look: Any) -> None:
    """Label the rows of a bar chart verbatim, the first one on top; ``tight`` leaves no margins around them."""
    axes.set_yticks(range(len(names)), names, parse_math=False, **{"fontsize": 8, **look})
    if tight:
        axes.set_ylim(max(len(names), 1) - 0.4, -0.6)
    else:
        axes.invert_yaxis()


def draw_rows(axes: Axes, values: Sequence[float], colors: Sequence[str], striped: Sequence[bool], **look: Any) -> None:
    """Draw a bar in each row; stripes distinguish some of them without colour."""
    hatches = ["//" if is_striped else "" for is_striped in striped]
    axes.barh(range(len(values)), values, color=colors, hatch=hatches, edgecolor="white", height=0.66, **look)


def reach(values: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[list[float]]:
    """Return the distances of range ends below and above their values, in matplotlib's format."""
    below = [max(value - end, 0.0) for value, end in zip(values, low, strict=True)]
    return [below, [max(end - value, 0.0) for value, end in zip(values, high, strict=True)]]


def draw_range(
    axes: Axes, x: float, y: float, low: float, high: float, *, along: Literal["x", "y"] = "x", **look: Any
) -> None:
    """Draw a line from ``low`` to ``high`` through the value at (``x``, ``y``)."""
    value = x if along == "x" else y
    ends: Any = {f"{along}err": reach([value], [low], [high])}
    axes.errorbar([x], [y], **ends, **{"fmt": "none", "ecolor": "black", "elinewidth": 1, "capsize": 3, **look})


def write_beside(axes: Axes, text: str, x: float, y: float, *, distance: float = 5, fontsize: float = 8) -> None:
    """Write text to the right of a point."""
    axes.annotate(text, (x, y), xytext=(distance, 0), textcoords="offset points", va="center", fontsize=fontsize)


def legend(axes: Axes, *what: Any, **place: Any) -> None:
    """Draw a legend without a box; names of a trace are shown verbatim."""
    for text in axes.legend(*what, **{"fontsize": 8, "frameon": False, **place}).get_texts():
        text.set_parse_math(False)


def legend_on_top(axes: Axes, columns: int, **look: Any) -> None:
    """Draw a legend in a line above the axes."""
    legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, **look)


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure atomically; equal figures give equal bytes."""
    import matplotlib

    ending = Path(path).suffix.lower()
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(ending, {})
    with replacing(path) as part, warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "whatif"}):
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box replaces it
        figure.savefig(part, format=ending[1:], dpi=150, metadata=undated)
