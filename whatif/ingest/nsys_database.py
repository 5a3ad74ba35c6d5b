"""A report of Nsight Systems as a SQLite database: opened for reading only, and never trusted.

The schema is that of NVIDIA's documentation ("SQLite Schema Reference", Nsight Systems user guide), which grew over
the years: tables are written only where there is something to say, and older reports lack columns.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from whatif.graph.order import each_once
from whatif.graph.types import Int64
from whatif.ingest.file_bytes import ends_early
from whatif.runtime.errors import WhatifError, expecting

# The value for NULL, for a column that the report's version lacks and for what is no integer.
ABSENT = int(np.iinfo(np.int64).min)

# The module decodes SQLite's messages, which may quote a damaged schema.
_DAMAGE = (sqlite3.Error, UnicodeError)

STRINGS = "StringIds"
_EXPORT = "`nsys export --type sqlite report.nsys-rep`"


class Database:
    """The tables of one report, a context manager; ``dropped`` counts what damage costs.

    Names of tables and columns in the queries are this package's own constants, never data. Only ordinary tables are
    read: a view or a virtual table that bears a known name could make the query compute anything.
    """

    def __init__(self, path: Path, dropped: Counter[str]) -> None:
        """Open the database. Raises WhatifError if it is damaged or another tool's."""
        self._dropped = dropped
        hint = f"; export it again with {_EXPORT}"
        with expecting(f"{path}: expected a readable SQLite export of Nsight Systems", *_DAMAGE, OSError, hint=hint):
            # Immutable: no lock, no journal, nothing is written beside the file.
            self._connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
            self._columns = self._readable_tables()
        if cut_at(path) is not None:
            dropped[ends_early(path.stat().st_size)] += 1
        if STRINGS not in self._columns or not any(name.startswith(_FAMILIES) for name in self._columns):
            self._connection.close()
            raise WhatifError(
                f"{path}: expected a report of Nsight Systems (tables {STRINGS} and CUPTI_ACTIVITY_KIND_...), got a "
                f"SQLite database of another tool; export a report with {_EXPORT}."
            )

    def _readable_tables(self) -> dict[str, frozenset[str]]:
        """Return the columns of every ordinary table; closes the connection if the schema is damaged."""
        try:
            # SQLite stores any bytes as text; a name that is not UTF-8 is still a name.
            self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            self._connection.execute("PRAGMA trusted_schema = OFF")
            tables = self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0")
            return {str(name): self._column_names(str(name)) for (name,) in tables.fetchall()}
        except _DAMAGE:
            self._connection.close()
            raise

    def __enter__(self) -> Database:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._connection.close()

    def __contains__(self, table: str) -> bool:
        return table in self._columns

    def _column_names(self, table: str) -> frozenset[str]:
        columns = self._connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
        return frozenset(str(name) for (name,) in columns)

    def integers(self, table: str, columns: tuple[str, ...]) -> dict[str, Int64]:
        """Return integer columns of a table in the order of its rows, each of shape (n_rows,); see ``ABSENT``.

        A table that the report lacks has no rows.
        """
        known = [name for name in columns if name in self._columns.get(table, ())]
        values = np.empty(0, dtype=np.int64)
        if known:
            selected = ", ".join(f'CASE typeof("{c}") WHEN \'integer\' THEN "{c}" ELSE {ABSENT} END' for c in known)
            # An index holds the rows in another order than the next query of this table would find.
            rows = self._rows(table, f'SELECT {selected} FROM "{table}" NOT INDEXED')
            values = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
        by_column = values.reshape(-1, max(len(known), 1)).T
        found = {name: np.ascontiguousarray(by_column[i]) for i, name in enumerate(known)}
        n_rows = by_column.shape[1] if known else 0
        return {name: found[name] if name in found else np.full(n_rows, ABSENT) for name in columns}

    def texts(self, table: str, column: str) -> list[str | None]:
        """Return a text column of a table, in the order of ``integers``; None if it holds anything else."""
        if column not in self._columns.get(table, ()):
            return []
        selected = f'CASE typeof("{column}") WHEN \'text\' THEN "{column}" END'
        return list(chain.from_iterable(self._rows(table, f'SELECT {selected} FROM "{table}" NOT INDEXED')))

    def strings(self, wanted: Int64) -> dict[int, str]:
        """Return the ``wanted`` strings of the table of all names, by id."""
        ids = set(each_once(wanted).tolist())
        query = f"SELECT id, value FROM {STRINGS} WHERE typeof(id) = 'integer' AND typeof(value) = 'text'"
        return {key: value for key, value in self._rows(STRINGS, query) if key in ids}

    def labels(self, table: str) -> dict[int, str]:
        """Return the labels of an enumeration of the report, by value."""
        names = self.texts(table, "label")
        return {
            key: name for key, name in zip(self.integers(table, ("id",))["id"].tolist(), names, strict=False) if name
        }

    def _rows(self, table: str, query: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query up to the first damage, which costs the rest of that table."""
        try:
            cursor = self._connection.execute(query)
            while rows := cursor.fetchmany(65_536):
                yield from rows
        except _DAMAGE as error:
            message = " ".join(str(error).split())  # it may quote pieces of a damaged schema
            self._dropped[f"the rest of table {table} is damaged ({message})"] += 1


def cut_at(path: Path) -> int | None:
    """Return the size of a file that is shorter than its header states, bytes; None if it is complete.

    SQLite reads the missing end of a page as zeros.

    The header has the size of a page at byte 16 and the number of pages at 28, which is valid if the change counters at
    24 and 92 agree (SQLite, "Database File Format").
    """
    with path.open("rb") as file:
        header = file.read(100)
    page_bytes, n_pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
    page_bytes = 65_536 if page_bytes == 1 else page_bytes
    size_bytes = path.stat().st_size
    is_cut = len(header) < 100 or (header[24:28] == header[92:96] and size_bytes < page_bytes * n_pages)
    return size_bytes if is_cut else None


# Prefixes of the tables that only Nsight Systems writes.
_FAMILIES = ("CUPTI_ACTIVITY_KIND_", "NVTX_EVENTS", "TARGET_INFO_", "ANALYSIS_DETAILS", "META_DATA_", "OSRT_API")
