"""Decode a recording into event columns, whichever profiler wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from whatif.ingest.events import Events
from whatif.ingest.file_bytes import cut_first
from whatif.ingest.kineto import read_kineto
from whatif.runtime.errors import WhatifError

SQLITE_MAGIC = b"SQLite format 3\0"
# Suffixes of Nsight Systems' own format, which only its exporter reads.
NSYS_SUFFIXES = (".nsys-rep", ".qdrep", ".qdstrm")


def read_events(
    path: Path, progress: Callable[[int, int], None] | None = None, *, process: int | None = None
) -> Events:
    """Return the events of a Kineto / Chrome trace, or of one ``process`` of an nsys report (SQLite).

    Raises WhatifError, one sentence, if the file cannot be read.
    """
    if is_sqlite(path):
        from whatif.ingest.nsys import read_nsys  # loads sqlite3
        from whatif.ingest.nsys_database import cut_at

        size_bytes = cut_at(path)
        try:
            return replace(read_nsys(path, process=process, progress=progress), ends_early_at=size_bytes)
        except WhatifError as error:
            if size_bytes is None:
                raise
            raise cut_first(path, size_bytes, error) from error
    try:
        return read_kineto(path, progress=progress)
    except WhatifError as error:
        if path.suffix in NSYS_SUFFIXES and path.is_file():
            raise WhatifError(
                f"{path}: expected a trace or a SQLite export, got an Nsight Systems report that is not exported; "
                "export it first with `nsys export --type sqlite report.nsys-rep`."
            ) from error
        raise


def is_sqlite(path: Path) -> bool:
    """Whether a file begins like a SQLite database; False if it cannot be read twice (a pipe) or at all."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            start = file.read(len(SQLITE_MAGIC))
            return bool(start) and SQLITE_MAGIC.startswith(start)
    except (OSError, ValueError):  # the reader of traces reports the error
        return False
