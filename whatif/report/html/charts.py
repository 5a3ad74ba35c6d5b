"""Charts as plain numbers, which the page's script draws, each beside a table with the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs

from whatif.report.html.markup import Html, tag
from whatif.report.printable import drawn

# Colors of the page's palette.
N_COLORS = 8
# Longer labels on an axis, on up to two lines, would leave too little room for the chart.
LONGEST_LABEL = 84


class Series(Struct, frozen=True):
    """One line or one kind of bar; ``low`` and ``high`` are the ends of its range, if it has one."""

    name: str
    values: tuple[float | None, ...]
    color: int  # of the page's palette
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    dashed: bool = False


class Chart(Struct, frozen=True):
    """A chart: ``bars`` are horizontal, one a label; ``stacked`` ones add up; ``lines`` are over ``x`` or labels."""

    kind: str  # bars, stacked, lines, area
    labels: tuple[str, ...]
    series: tuple[Series, ...]
    x_title: str
    y_title: str = ""
    x: tuple[float, ...] = ()
    ticks: tuple[float, ...] = ()  # of the x axis; some of ``x`` if none are given
    logarithmic: bool = False
    both_logarithmic: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the chart as JSON, its texts made harmless and short."""
        return {
            **structs.asdict(self),
            "labels": [drawn(label, LONGEST_LABEL) for label in self.labels],
            "series": [{**structs.asdict(each), "name": drawn(each.name, LONGEST_LABEL)} for each in self.series],
        }


# The charts of a page by the id of their container.
Charts = dict[str, Chart]


def figure(ident: str, title: str, alternative: str, *, height: int = 260) -> Html:
    """Return the container of a chart: its caption, and a one-sentence text alternative."""
    canvas = tag("canvas", alternative, id=ident, role="img", aria_label=alternative)
    # A style attribute would need a content policy with inline styles: the script sets the height instead.
    place = tag("div", canvas, class_="chart", data_height=str(height))
    caption = tag("figcaption", title, id=f"{ident}-caption")
    return tag("figure", caption, place, class_="plot", aria_labelledby=f"{ident}-caption")


def bars_height(labels: Sequence[str]) -> int:
    """Return the height of a legible bar chart, pixels."""
    return 60 + 34 * len(labels)
