"""Measurements so far, written to disk after every visit: a killed run loses nothing and can be resumed.

One JSON object per line; the first one identifies device, environment and method. A damaged line is skipped.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import IO, Any

import msgspec

from whatif.graph.described import FAMILIES, Described
from whatif.opdb.provenance import Device, Environment, Method, Origin
from whatif.runtime.errors import WhatifError

from .pace import sensitivity
from .visits import Visit, Visited

FOLDER = "journals"
# Above these it is no journal of this tool: a visit takes less than a kilobyte, except with many inputs.
LARGEST_BYTES = 1_000_000_000
LONGEST_LINE = 100_000


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    whatif_opdb_journal: int
    device: Device
    environment: Environment
    method: Method


class _Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    op: tuple[str, str, str, str, str, dict[str, int]]
    ns: list[float] = []
    pace_ns: list[float] = []
    skipped: str | None = None


class Journal:
    """The journal of one device, environment and method beside a database; a context manager that locks it."""

    def __init__(self, folder: Path, origin: Origin) -> None:
        head = _Head(1, origin.device, origin.environment, origin.method)
        self._head = msgspec.json.encode(head, order="sorted")
        self.path = folder / FOLDER / f"{hashlib.sha256(self._head).hexdigest()[:16]}.jsonl"
        self.found: dict[Described, Visited] = {}
        self.damaged_lines = 0

    def __enter__(self) -> Journal:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self.path.open("a+b")
        except OSError as error:
            raise WhatifError(
                f"{self.path}: expected to write a journal, got '{error.strerror or error}'; free some space or name "
                "another database with --db."
            ) from error
        try:
            _lock(self._file, self.path)
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keep(self, operator: Described, answer: dict[str, Any]) -> None:
        """Write one visit."""
        op = (operator.family, operator.name, operator.dtype, operator.phase, operator.layout, dict(operator.integers))
        line = _Line(op, answer.get("ns", []), answer.get("pace_ns", []), answer.get("skipped"))
        self._write(msgspec.json.encode(line))

    def remove(self) -> None:
        """Remove the journal once its contents are in the database."""
        self.path.unlink(missing_ok=True)
        if not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()

    def _write(self, line: bytes) -> None:
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            raise WhatifError(
                f"{self.path}: expected to write a journal, got '{error.strerror or error}'; free some space, then "
                "run the same command to continue."
            ) from error

    def _read(self) -> None:
        if self.path.stat().st_size > LARGEST_BYTES:
            raise WhatifError(f"{self.path}: expected a journal, got a file of over a gigabyte; remove it.")
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        if not lines[0]:
            self._write(self._head)
            return
        if lines[0] != self._head:
            raise WhatifError(
                f"{self.path}: expected the journal of this device and method, got a different one; remove it."
            )
        if lines[-1]:  # Killed while writing: end the incomplete line.
            self._write(b"")
        for line in filter(None, lines[1:]):
            self._read_line(line)

    def _read_line(self, text: bytes) -> None:
        try:
            if len(text) > LONGEST_LINE:
                raise ValueError("too long")
            line = msgspec.json.decode(text, type=_Line)
            family, name, dtype, phase, layout, integers = line.op
            if family not in FAMILIES or set(integers) != set(FAMILIES[family].attributes):
                raise ValueError("no operator")
            if not (line.skipped or line.ns) or not all(map(math.isfinite, line.ns)):
                raise ValueError("no times")
            if line.pace_ns and (len(line.pace_ns) != len(line.ns) or not min(line.pace_ns) > 0):
                raise ValueError("no paces")
        except (msgspec.DecodeError, ValueError, UnicodeDecodeError, RecursionError):
            self.damaged_lines += 1
            return
        sizes = tuple((attribute, integers[attribute]) for attribute in FAMILIES[family].attributes)
        operator = Described(family, name, dtype, sizes, phase, layout)
        visited = self.found.setdefault(operator, Visited(exponent=sensitivity(operator)))
        if line.skipped:
            visited.skipped = line.skipped
        else:
            visited.visits.append(Visit(line.ns, line.pace_ns))


def _lock(file: IO[bytes], path: Path) -> None:
    """Lock the journal: two simultaneous runs would disturb each other's measurements, and the file."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise WhatifError(
            f"{path}: expected no other run measuring into this database, got one; wait until it ends."
        ) from error
