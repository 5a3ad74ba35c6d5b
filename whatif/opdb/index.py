"""The index of a database: rows sorted by operator, as arrays mapped into memory, and one JSON file for the rest.

It is built from the shards, kept in the user's cache, and built again when a shard comes or goes. No server, no lock:
an index is written under another name and renamed when it is whole.
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

# Raised when what an index holds changes; another one is then built.
INDEX_VERSION = 4
_COLUMNS = ("keys", *TIMES, "contribution", "aside", "group", "log_sizes", "flops", "moved_bytes", "by_group", "starts")
CATALOGUE = "catalogue.json"


class _Catalogue(msgspec.Struct, frozen=True):
    """What an index holds beside its arrays."""

    groups: dict[str, list[GroupInfo]]
    contributions: tuple[Provenance, ...]
    warnings: tuple[str, ...]


class Index(Struct, frozen=True):
    """An opened index: rows by family, groups by family, contributions, and what was wrong with the database."""

    families: dict[str, FamilyIndex]
    groups: dict[str, list[GroupInfo]]
    contributions: tuple[Provenance, ...]
    warnings: tuple[str, ...]

    def __len__(self) -> int:
        return sum(map(len, self.families.values()))

    def devices(self) -> list[str]:
        """The devices that were measured, sorted."""
        return sorted({c.origin.device.name for c in self.contributions})


def open_index(store: Store, *, progress: Progress | None = None) -> Index:
    """Open the index of a database; builds it where it is missing.

    Contributions that are damaged are left out, with a warning for each.
    """
    name = str(store.folder.resolve()).encode("utf-8", "surrogateescape")
    place = cache_folder() / hashlib.sha256(name).hexdigest()[:16]
    folder = place / _fingerprint(store)
    with suppress(OSError, ValueError, KeyError, msgspec.DecodeError):
        return _load(folder)
    # There is none, or it was cut short by a full disk, or touched.
    shutil.rmtree(folder, ignore_errors=True)
    _build(store, place, folder, progress)
    return _load(folder)


def index_of(contributions: list[tuple[Provenance, Rows]], warnings: list[str] | None = None) -> Index:
    """Index rows that are in memory; nothing is written."""
    wrong = list(warnings or [])
    families, groups = {}, {}
    for family in FAMILIES:
        parts = [(number, rows) for number, (_, rows) in enumerate(contributions) if rows.family == family]
        if parts:
            told, groups[family] = family_index(family, parts, [c for c, _ in contributions], wrong)
            families[family] = told
    return Index(families, groups, tuple(c for c, _ in contributions), tuple(wrong))


def _fingerprint(store: Store) -> str:
    digest = hashlib.sha256(f"index {INDEX_VERSION}".encode())
    for path in store.sidecars():
        for file in (path, path.with_suffix(".parquet")):
            with suppress(OSError):
                said = file.stat()
                line = f"{file.relative_to(store.folder)}\0{said.st_size}\0{said.st_mtime_ns}\n"
                digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def read_contributions(
    store: Store, progress: Progress | None = None
) -> tuple[list[tuple[Provenance, Rows]], list[str]]:
    """Read every contribution once, by id; gives their rows, and a sentence for each that is damaged."""
    contributions, wrong = store.contributions()
    # Of the same measurements described twice, the one that says how they were taken comes first, and counts.
    contributions.sort(key=lambda one: one.provenance.origin.method.name == "unknown")
    found, seen = [], set()
    for place, contribution in enumerate(contributions):
        if progress:
            progress(place, len(contributions))
        said = contribution.provenance
        if (said.origin.device.name, said.times_sha256) in seen:
            continue
        try:
            rows, lost = sound_part(contribution.read())
        except WhatifError as error:
            wrong.append(str(error))
            continue
        seen.add((said.origin.device.name, said.times_sha256))
        if lost:
            wrong.append(
                f"{contribution.shard}: {counted(lost, 'row')} left out: times or sizes that no device can have."
            )
        if len(rows):
            found.append((said, rows))
    return found, wrong


def _build(store: Store, place: Path, folder: Path, progress: Progress | None) -> None:
    parquet()  # without the package every shard would seem damaged, and an empty index would be kept
    index = index_of(*read_contributions(store, progress))
    another = "; name another with the environment variable XDG_CACHE_HOME"
    with expecting(f"{place}: expected a folder to keep the database's index in", OSError, hint=another):
        place.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=place))
    try:
        _write(index, part)
        with suppress(OSError):  # another process was faster; its index is the same
            part.rename(folder)
        for other in place.iterdir():
            if other != folder and not _is_being_written(other):
                shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        said = error.strerror or error
        raise WhatifError(f"{place}: expected to write the database's index, got '{said}'; free some space.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _is_being_written(folder: Path) -> bool:
    """Whether another process may still write it; what was killed on the way is left behind for a day."""
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
