"""Results of the readers of foreign measurements, and their file access, with limits and clear errors."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct, field

from whatif.graph.described import LARGEST_ATTRIBUTE
from whatif.graph.types import Int64
from whatif.ingest.file_bytes import PIECE_BYTES, FileBytes
from whatif.opdb.provenance import Origin
from whatif.opdb.rows import Rows, sound_part
from whatif.runtime.errors import WhatifError, expecting
from whatif.runtime.files import read_at_most
from whatif.units import counted

# The largest table of measurements that is read as text, bytes.
LARGEST_TEXT_BYTES = 2_000_000_000
# The most columns of a table. pandas takes quadratic time in their number, and a JSON trace is one long line.
_MOST_COLUMNS = 10_000


class Found(Struct):
    """Rows with their origin, one pair for each contribution, and the number of dropped rows by reason."""

    contributions: list[tuple[Rows, Origin]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def keep(self, rows: Rows, origin: Origin) -> None:
        """Keep the plausible rows; count the others."""
        rows, dropped = sound_part(rows)
        self.drop(dropped, "times or sizes that no device can have")
        if len(rows):
            self.contributions.append((rows, origin))

    def drop(self, rows: int, reason: str) -> None:
        """Count dropped rows, if any."""
        if rows:
            self.dropped[reason] += int(rows)

    def warnings(self) -> list[str]:
        """One sentence for each reason for dropping rows."""
        return [f"{counted(count, 'row')} left out: {reason}" for reason, count in sorted(self.dropped.items())]


def read_table(file: IO[bytes] | Path, where: str, needed: Sequence[str]) -> pd.DataFrame:
    """Read a CSV table. Raises WhatifError if it is not one, or lacks one of the columns ``needed``."""
    head = (next(iter(FileBytes(file)), b"") if isinstance(file, Path) else _begin(file)).partition(b"\n")[0]
    if head.count(b",") > _MOST_COLUMNS:
        raise WhatifError(f"{where}: expected a table of comma-separated values, got over {_MOST_COLUMNS:,} columns.")
    damage = (OSError, ValueError, OverflowError, UnicodeDecodeError, pd.errors.ParserError)
    with expecting(f"{where}: expected a table of comma-separated values", *damage):
        table = pd.read_csv(file, encoding="utf-8", on_bad_lines="error", low_memory=False)
    missing = [name for name in needed if name not in table.columns]
    if missing:
        raise WhatifError(f"{where}: expected the columns {', '.join(needed)}, got none called {', '.join(missing)}.")
    return table


def _begin(file: IO[bytes]) -> bytes:
    piece = file.read(PIECE_BYTES)
    file.seek(0)
    return piece


def numbers(table: pd.DataFrame, column: str) -> npt.NDArray[np.float64]:
    """Return a column as numbers, shape (n,); NaN for invalid ones: such rows are counted and dropped."""
    if column not in table:
        return np.full(len(table), np.nan)
    return np.asarray(pd.to_numeric(table[column], errors="coerce"), dtype=np.float64)


def integers(table: pd.DataFrame, column: str) -> Int64:
    """Return a column as integers, shape (n,); -1 for invalid ones: no operator has such a size."""
    values = numbers(table, column)
    sane = np.isfinite(values) & (np.abs(values) <= LARGEST_ATTRIBUTE) & (values == np.rint(values))
    return np.where(sane, values, -1).astype(np.int64)


def read_text(path: Path) -> str:
    """Read a text file, replacing undecodable bytes. Raises WhatifError if it cannot be read."""
    with expecting(f"{path}: expected a readable file", OSError):
        return read_at_most(path, LARGEST_TEXT_BYTES).decode("utf-8", "replace")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
