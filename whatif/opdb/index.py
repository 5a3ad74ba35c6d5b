"""The index of a database: rows sorted by operator, as memory-mapped arrays, and one JSON file for the rest.

It is built from the shards, kept in the user's cache, and rebuilt when a shard is added or removed. No server, no lock:
an index is written under a temporary name and renamed when complete.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from whatif.graph.described import FAMILIES
from whatif.opdb.family_index import FamilyIndex, GroupInfo, family_index
from whatif.opdb.location import cache_folder
from whatif.opdb.provenance import Provenance
from whatif.opdb.rows import Rows, sound_part
from whatif.opdb.schema import TIMES
from whatif.opdb.shard import parquet
from whatif.opdb.store import Store
from whatif.runtime.errors import WhatifError, expecting
from whatif.runtime.progress import Progress
from whatif.units import counted

# Increased when the content of an index changes; a new one is then built.
INDEX_VERSION = 4
_COLUMNS = ("keys", *TIMES, "contribution", "aside", "group", "log_sizes", "flops", "moved_bytes", "by_group", "starts")
CATALOGUE = "catalogue.json"


class _Catalogue(msgspec.Struct, frozen=True):
    """The content of an index except its arrays."""

    groups: dict[str, list[GroupInfo]]
    contributions: tuple[Provenance, ...]
    warnings: tuple[str, ...]


class Index(Struct, frozen=True):
    """An opened index: rows by family, groups by family, contributions, and warnings about the database."""

    families: dict[str, FamilyIndex]
    groups: dict[str, list[GroupInfo]]
    contributions: tuple[Provenance, ...]
    warnings: tuple[str, ...]

    def __len__(self) -> int:
        return sum(map(len, self.families.values()))

    def devices(self) -> list[str]:
        """The measured devices, sorted."""
        return sorted({c.origin.device.name for c in self.contributions})


def open_index(store: Store, *, progress: Progress | None = None) -> Index:
    """Open the index of a database, building it if it is missing.

    Damaged contributions are left out, with a warning for each.
    """
    name = str(store.folder.resolve()).encode("utf-8", "surrogateescape")
    place = cache_folder() / hashlib.sha256(name).hexdigest()[:16]
    folder = place / _fingerprint(store)
    with suppress(OSError, ValueError, KeyError, msgspec.DecodeError):
        return _load(folder)
    # It is missing, or was truncated by a full disk, or modified.
    shutil.rmtree(folder, ignore_errors=True)
    _build(store, place, folder, progress)
    return _load(folder)


def index_of(contributions: list[tuple[Provenance, Rows]], warnings: list[str] | None = None) -> Index:
    """Index rows in memory; nothing is written."""
    messages = list(warnings or [])
    families, groups = {}, {}
    for family in FAMILIES:
        parts = [(number, rows) for number, (_, rows) in enumerate(contributions) if rows.family == family]
        if parts:
            indexed, groups[family] = family_index(family, parts, [c for c, _ in contributions], messages)
            families[family] = indexed
    return Index(families, groups, tuple(c for c, _ in contributions), tuple(messages))


def _fingerprint(store: Store) -> str:
    digest = hashlib.sha256(f"index {INDEX_VERSION}".encode())
    for path in store.sidecars():
        for file in (path, path.with_suffix(".parquet")):
            with suppress(OSError):
                stat = file.stat()
                line = f"{file.relative_to(store.folder)}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
                digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def read_contributions(
    store: Store, progress: Progress | None = None
) -> tuple[list[tuple[Provenance, Rows]], list[str]]:
    """Read every contribution once, by id; returns their rows, and a message for each that is damaged."""
    contributions, damaged = store.contributions()
    # Of the same measurements described twice, the description that states their method comes first, and counts.
    contributions.sort(key=lambda entry: entry.provenance.origin.method.name == "unknown")
    found, known = [], set()
    for place, contribution in enumerate(contributions):
        if progress:
            progress(place, len(contributions))
        provenance = contribution.provenance
        if (provenance.origin.device.name, provenance.times_sha256) in known:
            continue
        try:
            rows, dropped = sound_part(contribution.read())
        except WhatifError as error:
            damaged.append(str(error))
            continue
        known.add((provenance.origin.device.name, provenance.times_sha256))
        if dropped:
            damaged.append(
                f"{contribution.shard}: {counted(dropped, 'row')} left out: times or sizes that no device can have."
            )
        if len(rows):
            found.append((provenance, rows))
    return found, damaged


def _build(store: Store, place: Path, folder: Path, progress: Progress | None) -> None:
    parquet()  # without the package every shard would seem damaged, and an empty index would be cached
    index = index_of(*read_contributions(store, progress))
    another = "; set another in the environment variable XDG_CACHE_HOME"
    with expecting(f"{place}: expected a folder to keep the database's index in", OSError, hint=another):
        place.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=place))
    try:
        _write(index, part)
        with suppress(OSError):  # another process was faster; its index is the same
            part.rename(folder)
        for leftover in place.iterdir():
            if leftover != folder and not _is_being_written(leftover):
                shutil.rmtree(leftover, ignore_errors=True)
    except OSError as error:
        text = error.strerror or error
        raise WhatifError(f"{place}: expected to write the database's index, got '{text}'; free some space.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _is_being_written(folder: Path) -> bool:
    """Whether another process may still be writing it; remains of killed ones are kept for a day."""
    try:
        return folder.name.startswith(".part-") and time.time() - folder.stat().st_mtime < 86_400
    except OSError:
        return False


def _write(index: Index, folder: Path) -> None:
    for family, rows in index.families.items():
        for name in _COLUMNS:
            np.save(folder / f"{family}.{name}.npy", getattr(rows, name), allow_pickle=False)
    catalogue = _Catalogue(index.groups, index.contributions, index.warnings)
    (folder / CATALOGUE).write_bytes(msgspec.json.encode(catalogue))


def _load(folder: Path) -> Index:
    found = msgspec.json.decode((folder / CATALOGUE).read_bytes(), type=_Catalogue)

    def column(family: str, name: str) -> Any:
        return np.load(folder / f"{family}.{name}.npy", mmap_mode="r", allow_pickle=False)

    families = {name: FamilyIndex(*(column(name, c) for c in _COLUMNS)) for name in found.groups}
    return Index(families, found.groups, found.contributions, found.warnings)
