"""Reads a page of ``whatif report`` back: its tables, its data, its policy, with nothing but the standard library."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Cell:
    """What a cell shows, and the number behind it."""

    text: str = ""
    value: float | None = None


@dataclass
class Table:
    """A table: the texts of its headers, and its rows."""

    headers: list[str] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)

    def column(self, place: int) -> dict[str, Cell]:
        """The cells of a column by the first cell of their row."""
        return {row[0].text: row[place] for row in self.rows}


class Page(HTMLParser):
    """A page taken apart."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = Path(path).read_text(encoding="utf-8")
        self.tables: dict[str, Table] = {}
        self.numbers: dict[str, float] = {}  # of the cards
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self._table: Table | None = None
        self._cell: Cell | None = None
        self._in_head = False
        self._inner: list[str] = []
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.tags.append((tag, known))
        if tag == "table":
            self._table = self.tables[str(known["id"])] = Table()
        elif tag == "tr" and self._table is not None:
            self._table.rows.append([])
        elif tag in ("th", "td") and self._table is not None:
            value = known.get("data-value")
            self._cell = Cell(value=None if value is None else float(value))
            self._table.rows[-1].append(self._cell)
        elif tag in ("script", "style"):
            self._inner = []
        if known.get("data-key"):
            self.numbers[str(known["data-key"])] = float(str(known["data-value"]))

    def handle_endtag(self, tag: str) -> None:
        if tag == "thead" and self._table is not None:
            self._table.headers = [cell.text for cell in self._table.rows.pop()]
        elif tag == "table":
            self._table = None
        elif tag in ("th", "td"):
            self._cell = None
        elif tag == "script":
            attributes = next(known for name, known in reversed(self.tags) if name == "script")
            self.scripts.append((attributes, "".join(self._inner)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            self._inner.append(data)
            return
        self.text += data
        if self._cell is not None:
            self._cell.text += data

    def data(self, ident: str) -> Any:
        """What an element with JSON holds."""
        return json.loads(next(text for known, text in self.scripts if known.get("id") == ident))

    @property
    def policy(self) -> str:
        """The page's content security policy."""
        return next(
            str(known["content"]) for name, known in self.tags if known.get("http-equiv") == "Content-Security-Policy"
        )

    @property
    def obeyed(self) -> set[str]:
        """The hashes of the scripts that are no data, as a policy spells them."""
        return {
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for known, text in self.scripts
            if known.get("type") != "application/json"
        }


def unpacked(side: dict[str, Any], unit_ns: int) -> dict[str, Any]:
    """The columns of one side of a timeline: starts and durations in ns, codes of names, layers and what tasks are."""
    rows = np.frombuffer(zlib.decompress(base64.b64decode(side["columns"])), "<u4").reshape(5, side["n"])
    starts, first = [], 0
    for thread in side["threads"]:
        starts.append(np.cumsum(rows[0][first : first + thread["n"]].astype(np.int64)) * unit_ns)
        first += thread["n"]
    assert first == side["n"]
    return {
        "start_ns": np.concatenate(starts) if starts else np.empty(0, dtype=np.int64),
        "duration_ns": rows[1].astype(np.int64) * unit_ns,
        "name": rows[2],
        "layer": rows[3],
        "what": rows[4],
    }


def resources(page: Page) -> list[str]:
    """Every address that a browser would fetch or follow by itself."""
    found = [
        str(known[key])
        for name, known in page.tags
        for key in ("src", "href", "data", "action", "poster", "srcset")
        if known.get(key) and not (name == "a" and str(known[key]).startswith("#"))
    ]
    style = re.search(r"<style>(.*?)</style>", page.source, re.DOTALL)
    return found + re.findall(r"url\([^)]*\)|@import[^;]*", style[1] if style else "")
