"""Read measured times of collectives: a CSV, or the output of nccl-tests."""

from __future__ import annotations

import csv
from functools import lru_cache
from pathlib import Path

import numpy as np

from whatif.hardware.cluster.calibration import Curve, Table
from whatif.hardware.cluster.collectives import OPERATIONS
from whatif.hardware.cluster.network import MOST_WORKERS
from whatif.runtime.errors import WhatifError

_SIZE_UNITS = {"bytes": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_TIME_UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_LARGEST_FILE_BYTES = 50_000_000
# Names that nccl-tests uses.
_ALIASES = {"send_recv": "send"}
# Larger messages have not been measured.
_MOST_BYTES, _MOST_NS = 1e15, 1e15


def read_table(path: Path) -> Table:
    """Read a CSV with the columns ``size_bytes`` and ``time_us``, or the output of nccl-tests.

    Other units are size_kb, _mb, _gb, _kib, _mib, _gib and time_ns, _ms, _s; a header without them is refused. The
    columns ``operation`` and ``workers`` may distinguish several collectives, and lines that begin with # are skipped.
    Raises WhatifError, with the line, for anything else.
    """
    try:
        state = path.stat()
        return _read(path, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise WhatifError(f"{path}: expected a table of measured times, got {error.strerror or error}.") from error
    except ValueError as error:
        raise WhatifError(f"table: expected the path of a file, got {str(path)!r}: {error}.") from error


@lru_cache(maxsize=16)
def _read(path: Path, _changed_ns: int, size_bytes: int) -> Table:
    if size_bytes > _LARGEST_FILE_BYTES:
        raise WhatifError(
            f"{path}: expected a table of at most {_LARGEST_FILE_BYTES / 1e6:.0f} MB, got {size_bytes / 1e6:,.0f} MB."
        )
    try:
        with path.open("rb") as file:  # a device reports size 0, and never ends
            text = file.read(_LARGEST_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise WhatifError(f"{path}: expected a table of measured times, got a file that is not UTF-8.") from error
    lines = text.splitlines()
    if any(line.split()[:2] == ["#", "size"] for line in lines):
        rows = _nccl_rows(text, path)
    else:
        rows = _csv_rows(lines, path)
    curves: dict[tuple[str, int | None], dict[float, list[float]]] = {}
    for operation, workers, size, time in rows:
        curves.setdefault((operation, workers), {}).setdefault(size, []).append(time)
    return Table(tuple(_curve(*key, times) for key, times in sorted(curves.items(), key=str)), str(path))


Row = tuple[str, int | None, float, float]


def _curve(operation: str, workers: int | None, times: dict[float, list[float]]) -> Curve:
    """Build a curve; a size that was measured several times gets the median."""
    sizes = sorted(times)
    return Curve(operation, workers, tuple(sizes), tuple(float(np.median(times[size])) for size in sizes))


def _nccl_rows(text: str, path: Path) -> list[Row]:
    """Rows of nccl-tests output; in place and out of place count as two measurements of one size."""
    # Here: the database's readers load pandas.
    from whatif.opdb.importers.found import Found
    from whatif.opdb.importers.nccl_tests import parse_run

    run = parse_run(text, path, Found())
    name = _ALIASES.get(run.name, run.name)
    if name not in OPERATIONS:
        raise WhatifError(f"{path}: expected a table of {', '.join(OPERATIONS)}, got {name}.")
    return [
        (name, run.ranks if run.ranks > 1 else None, float(dict(timed.operator.integers)["bytes"]), timed.t_s * 1e9)
        for timed in run.timed
    ]


def _csv_rows(lines: list[str], path: Path) -> list[Row]:
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#"]
    if not numbered:
        raise WhatifError(f"{path}: expected a table of measured times, got an empty file.")
    try:
        table = list(csv.reader(line for _, line in numbered))
    except csv.Error as error:
        raise WhatifError(f"{path}: expected a table of measured times, got {str(error)!r}.") from error
    header = [word.strip().lower() for word in table[0]]
    if len(set(header)) < len(header):
        raise WhatifError(f"{path}: expected distinct column names, got {', '.join(header)[:200]!r}.")
    size_at, byte = _column(header, "size", _SIZE_UNITS, path)
    time_at, ns = _column(header, "time", _TIME_UNITS, path)
    rows: list[Row] = []
    for (number, _), words in zip(numbered[1:], table[1:], strict=False):
        where = f"{path}: line {number}"
        if len(words) != len(header):
            raise WhatifError(f"{where}: expected {len(header)} columns, got {len(words)}.")
        cells = dict(zip(header, (word.strip() for word in words), strict=True))
        operation = cells.get("operation") or "all_reduce"
        operation = _ALIASES.get(operation, operation)
        if operation not in OPERATIONS:
            raise WhatifError(f"{where}: expected one of {', '.join(OPERATIONS)}, got {operation!r}.")
        size = _number(words[size_at], byte, _MOST_BYTES, f"{where}: expected a size above 0")
        time = _number(words[time_at], ns, _MOST_NS, f"{where}: expected a time above 0")
        rows.append((operation, _workers(cells.get("workers") or "", where), size, time))
    return rows


def _column(header: list[str], kind: str, units: dict[str, float], path: Path) -> tuple[int, float]:
    """Return the position of the column, and its unit."""
    found = [(place, units[unit]) for place, name in enumerate(header) for unit in units if name == f"{kind}_{unit}"]
    if len(found) != 1:
        raise WhatifError(
            f"{path}: expected one column of {kind}s, its unit in its name "
            f"({', '.join(f'{kind}_{unit}' for unit in units)}), got the columns {', '.join(header)[:200]!r}."
        )
    return found[0]


def _number(text: str, unit: float, most: float, expected: str) -> float:
    try:
        number = float(text) * unit
    except ValueError:
        number = 0.0
    if not 0 < number <= most:
        raise WhatifError(f"{expected}, got {text.strip()!r}.")
    return number


def _workers(text: str, where: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or not 2 <= int(text[:9]) <= MOST_WORKERS:
        raise WhatifError(f"{where}: expected from 2 to {MOST_WORKERS:,} workers, got {text!r}.")
    return int(text)
