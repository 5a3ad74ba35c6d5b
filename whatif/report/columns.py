"""Column widths of text tables: numbers are never cut, names and sentences wrap, bars shrink.

Columns that do not fit beside the names of the rows go into a table below, which repeats these names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct
from rich.cells import cell_len, chop_cells
from rich.text import Text

BAR_CELLS, LEAST_BAR_CELLS = 20, 8
COLUMN_GAP = 3
# A shorter cut of a name is meaningless, and a sentence in a narrower column is hard to read.
MIN_NAME, MIN_SENTENCE = 12, 24
# A name may be broken after these characters.
_BREAKS = re.compile(r"(?<=[:=,./_+-])")


class Bar(Struct, frozen=True):
    """A small bar for a share, 0 to 1, as wide as its column."""

    share: float

    def drawn(self, cells: int) -> Text:
        """Draw the bar in ``cells`` cells."""
        return Text("█" * min(round(cells * max(self.share, 0.0)), cells), style="blue")


Cell = str | Text | Bar


class Column(Struct, frozen=True):
    """A column: its header, its natural width ``wide``, and its minimum width ``least``, in cells."""

    place: int
    header: str
    is_text: bool
    is_bar: bool
    wide: int
    least: int

    @staticmethod
    def of(place: int, header: str, cells: Sequence[Cell], *, is_text: bool, at_least: int = 0) -> Column:
        """Measure a column: numbers keep their width and their header wraps, text shrinks down to ``MIN_NAME``.

        If there is room it takes at least ``at_least`` cells.
        """
        if any(isinstance(cell, Bar) for cell in cells):
            return Column(place, header, is_text=True, is_bar=True, wide=BAR_CELLS, least=LEAST_BAR_CELLS)
        longest = max((_width(cell) for cell in cells), default=0)
        wide = max(longest, cell_len(header))
        if is_text:
            return Column(place, header, is_text, is_bar=False, wide=max(wide, at_least), least=min(wide, MIN_NAME))
        word = max(map(cell_len, header.split()), default=0)
        return Column(place, header, is_text, is_bar=False, wide=wide, least=max(longest, word))


def fitted(columns: Sequence[Column], page: int, *, keys: int, gives_way: int) -> list[list[tuple[Column, int]]]:
    """Return the columns of one table, or of several below each other, each column with its width.

    If a page of ``page`` cells is too narrow, first headers wrap, then bars shrink, then the column at ``gives_way``
    does, then other text. If that is not enough, bars are dropped, and the rest goes into further tables, each with the
    first ``keys`` columns.
    """
    without_bars = [column for column in columns if not column.is_bar]
    for chosen in (columns, without_bars):
        widths = _widths(chosen, page, gives_way)
        if widths is not None:
            return [list(zip(chosen, widths, strict=True))]
    names, rest = without_bars[:keys], without_bars[keys:]
    tables = []
    while rest:
        taken = next((n for n in range(len(rest), 1, -1) if _widths([*names, *rest[:n]], page, gives_way)), 1)
        chosen = [*names, *rest[:taken]]
        # A single column that is still too wide is left to the terminal's wrapping.
        widths = _widths(chosen, page, gives_way) or [column.least for column in chosen]
        tables.append(list(zip(chosen, widths, strict=True)))
        rest = rest[taken:]
    return tables


def wrapped(text: str, width: int) -> str:
    """Break a line at spaces; wider words after separators of a name (``:``, ``=`` ...), else anywhere."""
    lines, line = [], ""
    for word in text.split(" "):
        if not line or cell_len(f"{line} {word}") <= width:
            line = f"{line} {word}" if line else word
        else:
            lines.append(line)
            line = word
        if cell_len(line) > width:
            *whole, line = _broken(line, width)
            lines += whole
    return "\n".join([*lines, line])


def _broken(word: str, width: int) -> list[str]:
    """Split a word into pieces that fit."""
    pieces = [""]
    for part in _BREAKS.split(word):
        if cell_len(pieces[-1] + part) > width and pieces[-1]:
            pieces.append("")
        first, *more = chop_cells(part, width) or [""]
        pieces[-1:] = [pieces[-1] + first, *more]
    return pieces


def _widths(columns: Sequence[Column], page: int, gives_way: int) -> list[int] | None:
    """Widths at which the columns fit; None if they do not."""
    widths = [column.wide for column in columns]
    over = sum(widths) + COLUMN_GAP * (len(columns) - 1) - page

    def shrink(which: Sequence[int], least: Sequence[int]) -> None:
        nonlocal over
        for place in which:
            taken = max(min(over, widths[place] - least[place]), 0)
            widths[place] -= taken
            over -= taken

    places = range(len(columns))
    text = [p for p in places if columns[p].is_text and not columns[p].is_bar]
    numbers = [p for p in places if not columns[p].is_text]
    leasts = [column.least for column in columns]
    giving = [p for p in text if columns[p].place == gives_way]
    others = [p for p in text if p not in giving]
    # Sentences keep a readable width as long as a long name beside them can still be broken.
    readable = [min(wide, max(MIN_SENTENCE, page // 2)) for wide in widths]
    shrink(sorted(numbers, key=lambda p: leasts[p] - widths[p]), leasts)
    shrink([p for p in places if columns[p].is_bar], leasts)
    shrink(giving, readable)
    shrink(others, [max(least, page // 3) for least in leasts])
    shrink(giving, leasts)
    shrink(others, leasts)
    return widths if over <= 0 else None


def _width(cell: Cell) -> int:
    return cell.cell_len if isinstance(cell, Text) else BAR_CELLS if isinstance(cell, Bar) else cell_len(cell)
