"""Bring measurements into a database: read by the importer of their kind, checked, written as contributions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from whatif.errors import WhatifError
from whatif.opdb.importers.found import Found
from whatif.opdb.merging import Merged
from whatif.opdb.provenance import Method
from whatif.opdb.store import Store, in_shards

# What `whatif opdb import` reads.
KINDS = ("neusight", "nccl-tests", "recording", "csv", "aiconfigurator", "deepbench")


def read_foreign(
    kind: str,
    path: Path,
    *,
    device: str | None = None,
    operator: str | None = None,
    method: Method | None = None,
    author: str | None = None,
    licence: str | None = None,
) -> Found:
    """Read measurements of a ``kind`` (one of ``KINDS``). Raises WhatifError where ``path`` holds none to keep."""
    if not path.exists():
        raise WhatifError(f"{path}: expected measurements to import, got no such file or folder.")
    if not path.is_file() and not path.is_dir():  # a pipe or a device may never end
        raise WhatifError(f"{path}: expected a file or folder of measurements, got something else; copy it to a file.")
    for text in (device, operator, author, licence):
        _check_text(text)
    readers: dict[str, Callable[[], Found]] = {
        "neusight": lambda: _neusight(path, author),
        "nccl-tests": lambda: _nccl_tests(path, operator, device, author),
        "recording": lambda: _recording(path, device, author),
        "csv": lambda: _csv(path, device, method, author, licence),
        "aiconfigurator": lambda: _aiconfigurator(path, author),
        "deepbench": lambda: _deepbench(path, device, author),
    }
    found = readers[kind]()
    if not found.contributions:
        said = "; ".join(found.warnings()) or "it is empty"
        raise WhatifError(f"{path}: expected measurements that can be kept, got none: {said}.")
    return found


def add_found(found: Found, store: Store, progress: Callable[[int, int], None] | None = None) -> Merged:
    """Write what a reader found. Raises WhatifError where nothing of it can be kept, or a file cannot be written."""
    done = Merged()
    known = store.devices_by_times()
    for place, (rows, origin) in enumerate(found.contributions):
        if progress:
            progress(place, len(found.contributions))
        for part in in_shards(rows):
            with done.refusing():
                outcome, name = store.add(part, origin, known=known)
                done.keep(name, outcome, len(part))
    done.check()
    return done


def _check_text(text: str | None) -> None:
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise WhatifError(f"opdb: expected a text in UTF-8, got {text!r}; spell it otherwise.") from error


def _neusight(path: Path, author: str | None) -> Found:
    from whatif.opdb.importers.neusight import read_neusight

    return read_neusight(path, author=author)


def _nccl_tests(path: Path, operator: str | None, device: str | None, author: str | None) -> Found:
    from whatif.opdb.importers.nccl_tests import read_nccl_tests

    return read_nccl_tests(path, operator=operator, device=device, author=author)


def _recording(path: Path, device: str | None, author: str | None) -> Found:
    from whatif.opdb.importers.recording import read_recording

    return read_recording(path, device=device, author=author)


def _csv(path: Path, device: str | None, method: Method | None, author: str | None, licence: str | None) -> Found:
    from whatif.opdb.importers.generic_csv import read_csv

    return read_csv(path, device=device, method=method, author=author, licence=licence)


def _aiconfigurator(path: Path, author: str | None) -> Found:
    from whatif.opdb.importers.aiconfigurator import read_aiconfigurator

    return read_aiconfigurator(path, author=author)


def _deepbench(path: Path, device: str | None, author: str | None) -> Found:
    from whatif.opdb.importers.deepbench import read_deepbench

    return read_deepbench(path, device=device, author=author)
