"""Charts as plain numbers, which the page's script draws; beside each stands a table with the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs

from whatif.report.html.markup import Html, tag
from whatif.report.printable import drawn

# Colors of the page's palette.
N_COLORS = 8
# A longer label on an axis takes the room of what it labels, on up to two lines.
LONGEST_LABEL = 84


class Series(Struct, frozen=True):
    """One line or one kind of bar; ``low`` and ``high`` are the ends of its range where it has one."""

    name: str
    values: tuple[float | None, ...]
    color: int  # of the page's palette
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    dashed: bool = False


class Chart(Struct, frozen=True):
    """A chart: ``bars`` lie, one a label; ``stacked`` ones add up; ``lines`` run over numbers ``x`` or the labels."""

    kind: str  # bars, stacked, lines, area
    labels: tuple[str, ...]
    series: tuple[Series, ...]
    x_title: str
    y_title: str = ""
    x: tuple[float, ...] = ()
    ticks: tuple[float, ...] = ()  # of the x axis; some of ``x`` where none are given
    logarithmic: bool = False
    both_logarithmic: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the chart as JSON, its texts made harmless and short."""
        return {
            **structs.asdict(self),
            "labels": [drawn(label, LONGEST_LABEL) for label in self.labels],
            "series": [{**structs.asdict(one), "name": drawn(one.name, LONGEST_LABEL)} for one in self.series],
        }


# The charts of a page by the id of their place.
Charts = dict[str, Chart]


def figure(ident: str, title: str, says: str, *, height: int = 260) -> Html:
    """Return the place of a chart: its caption, and in one sentence what it shows to those who cannot see it."""
    canvas = tag("canvas", says, id=ident, role="img", aria_label=says)
    # A style attribute would need a policy that lets styles be injected: the script sets the height.
    place = tag("div", canvas, class_="chart", data_height=str(height))
    caption = tag("figcaption", title, id=f"{ident}-caption")
    return tag("figure", caption, place, class_="plot", aria_labelledby=f"{ident}-caption")


def bars_height(labels: Sequence[str]) -> int:
    """Return how high a chart of bars is that can be read, pixels."""
    return 60 + 34 * len(labels)
