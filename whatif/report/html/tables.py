"""Tables for people, screen readers, and the page's sorting and searching."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from whatif.report.html.made import Made, badge
from whatif.report.html.markup import Content, Html, name, prose, tag, text

# The least rows for a search field: fewer are read faster than a search is typed.
SEARCHED_FROM = 8
# A cell with more characters is a sentence, which needs room.
PROSE_FROM = 60
# On paper longer names are cut to two lines: hundreds of kernel names would fill pages.
LONG_NAME_FROM = 120


class Cell(Struct, frozen=True):
    """The content of a cell, the number behind it for sorting, and a share (0 to 1) to draw as a bar."""

    shown: Content
    value: float | None = None
    share: float | None = None


Row = list[Cell | str]


class Column(Struct, frozen=True):
    """A column: its header, whether it holds numbers, and their provenance if it differs from the table's."""

    header: str
    numbers: bool = True
    made: Made | None = None


# A plain string is the header of a column of numbers.
Header = Column | str


def table(
    ident: str,
    caption: str,
    headers: Sequence[Header],
    rows: Sequence[Row],
    *,
    made: Made | None = None,
    sortable: bool = True,
    note: Content = "",
) -> Html:
    """Return a table with its caption; the first column names the rows. A long one can be searched."""
    columns = [header if isinstance(header, Column) else Column(header) for header in headers]
    head = [
        tag(
            "th",
            column.header,
            [" ", badge(column.made)] if column.made else "",
            scope="col",
            class_="number" if column.numbers and place else None,
            data_sort=("number" if column.numbers else "text") if sortable and column.header else None,
        )
        for place, column in enumerate(columns)
    ]
    body = [tag("tr", [_cell(cell, columns[place], place) for place, cell in enumerate(row)]) for row in rows]
    title = tag("caption", tag("span", caption, id=f"{ident}-caption"), [" ", badge(made)] if made else "")
    inner = tag("table", title, tag("thead", tag("tr", head)), tag("tbody", body), id=ident)
    scrolled = tag("div", inner, class_="scroll", tabindex=0, role="region", aria_labelledby=f"{ident}-caption")
    under = tag("p", note, class_="note") if note else ""
    search = len(rows) >= SEARCHED_FROM and sortable
    return tag("div", scrolled, under, class_="table", data_search=search)


def joined(rows: Sequence[Row]) -> list[Row]:
    """Merge rows that differ only in their first cell: for reasons, not for parts of a whole."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(_shown(cell) for cell in row[1:]), []).append(row)
    return [[", ".join(_shown(row[0]) for row in same), *same[0][1:]] for same in found.values()]


def _shown(cell: Cell | str) -> str:
    return str(cell.shown) if isinstance(cell, Cell) else cell


def _cell(cell: Cell | str, column: Column, place: int) -> Html:
    found = cell if isinstance(cell, Cell) else Cell(cell)
    if not isinstance(found.shown, str) or isinstance(found.shown, Html):
        shown = text(found.shown)
    else:
        shown = name(found.shown) if place == 0 else prose(found.shown)
        if place == 0 and len(found.shown) > LONG_NAME_FROM:
            shown = tag("span", shown, class_="long")
    if found.share is not None:
        shown = Html(shown + _bar(found.share))
    if place == 0:
        return tag("th", shown, scope="row", data_value=_number(found.value))
    kind = "number" if column.numbers else "prose" if len(shown) > PROSE_FROM else None
    return tag("td", shown, class_=kind, data_value=_number(found.value))


def _number(value: float | None) -> str | None:
    """A number at full precision; the displayed one is rounded."""
    return None if value is None else repr(float(value))


def _bar(share: float) -> Html:
    width = f"{100 * min(max(share, 0.0), 1.0):.1f}%"
    return tag("svg", tag("rect", width=width, height="100%"), class_="bar", aria_hidden="true", focusable="false")
