"""The index of a database: its rows sorted by operator, as arrays that are mapped into memory, and SQLite for the rest.

It is built from the shards, kept in the user's cache, and built again when a shard comes or goes. No server, no lock:
an index is written under another name and renamed when it is whole.
"""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from whatif.errors import WhatifError
from whatif.opdb import devices
from whatif.opdb.keys import UInt64
from whatif.opdb.location import cache_folder
from whatif.opdb.provenance import Basis, Provenance
from whatif.opdb.quarantine import log_sizes, set_aside
from whatif.opdb.rows import Operators, Rows, Texts, sound_part
from whatif.opdb.schema import FAMILIES, TEXTS, TIMES
from whatif.opdb.shard import parquet
from whatif.opdb.store import Store
from whatif.opdb.work import work
from whatif.types import Array, Int8, Int32, Int64

Float64 = npt.NDArray[np.float64]
Progress = Callable[[int, int], None] | None

# Raised when what an index holds changes; another one is then built.
INDEX_VERSION = 2
_COLUMNS = ("keys", *TIMES, "contribution", "aside", "group", "log_sizes", "flops", "moved_bytes", "by_group", "starts")
DATABASE = "provenance.sqlite"


@dataclass(frozen=True)
class GroupInfo:
    """What the operators of a group have in common."""

    number: int
    family: str
    key: int
    device: str
    basis: Basis
    rows: int
    name: str
    dtype: str


@dataclass(frozen=True)
class FamilyIndex:
    """The rows of a family, sorted by key: all columns have shape (n,), ``log_sizes`` (n, p).

    ``by_group`` lists the rows of each group, those of group g from ``starts[g]`` to ``starts[g + 1]``.
    """

    keys: UInt64
    t_s: Float64
    t_low_s: Float64
    t_high_s: Float64
    contribution: Int32
    aside: Int8
    group: Int32
    log_sizes: Float64
    flops: Float64
    moved_bytes: Float64
    by_group: Int64
    starts: Int64

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: UInt64) -> tuple[Int64, Int64]:
        """Give the first row of each key and the one behind its last, shape (q,) both; equal where there is none."""
        order = np.argsort(keys)  # in order the search walks through memory instead of jumping
        wanted = keys[order]
        first, last = np.empty(len(keys), dtype=np.int64), np.empty(len(keys), dtype=np.int64)
        first[order] = np.searchsorted(self.keys, wanted, side="left")
        last[order] = np.searchsorted(self.keys, wanted, side="right")
        return first, last

    def rows_of(self, group: int) -> Int64:
        """The rows of a group, sorted by key."""
        return np.asarray(self.by_group[self.starts[group] : self.starts[group + 1]], dtype=np.int64)


@dataclass(frozen=True)
class Index:
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


def open_index(store: Store, *, progress: Progress = None) -> Index:
    """Open the index of a database; builds it where it is missing.

    Contributions that are damaged are left out, with a warning for each.
    """
    name = str(store.folder.resolve()).encode("utf-8", "surrogateescape")
    place = cache_folder() / hashlib.sha256(name).hexdigest()[:16]
    folder = place / _fingerprint(store)
    if not folder.is_dir():
        _build(store, place, folder, progress)
    try:
        return _load(folder)
    except (OSError, ValueError, KeyError, sqlite3.Error, msgspec.DecodeError):
        # Cut short by a full disk, or touched: it can be built again.
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
            told, groups[family] = _family_index(family, parts, [c for c, _ in contributions], wrong)
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


def read_contributions(store: Store, progress: Progress = None) -> tuple[list[tuple[Provenance, Rows]], list[str]]:
    """Read every contribution once, by id; gives their rows, and a sentence for each that is damaged."""
    contributions, wrong = store.contributions()
    found, seen = [], set()
    for place, contribution in enumerate(contributions):
        if progress:
            progress(place, len(contributions))
        said = contribution.provenance
        # The same measurements, told of twice with different words, count once.
        if (said.origin.device.name, said.times_sha256) in seen:
            continue
        try:
            rows, lost = sound_part(contribution.read())
        except WhatifError as error:
            wrong.append(str(error))
            continue
        seen.add((said.origin.device.name, said.times_sha256))
        if lost:
            wrong.append(f"{contribution.shard}: {lost:,} rows left out: times or sizes that no device can have.")
        if len(rows):
            found.append((said, rows))
    return found, wrong


def _family_index(
    family: str, parts: list[tuple[int, Rows]], contributions: list[Provenance], wrong: list[str]
) -> tuple[FamilyIndex, list[GroupInfo]]:
    rows = _joined(family, [rows for _, rows in parts])
    contribution = np.repeat(np.array([n for n, _ in parts], dtype=np.int32), [len(r) for _, r in parts])
    order = np.lexsort((rows.t_s, contribution, rows.ops.keys))
    rows, contribution = rows.take(order), contribution[order]
    clash = _clashes(rows.ops)
    if clash.any():  # two operators with one key: with 10^7 operators one chance in 10^5
        wrong.append(f"{int(clash.sum()):,} rows of the family {family!r} left out: their key is another operator's.")
        rows, contribution = rows.take(~clash), contribution[~clash]
    group, groups = _groups(family, rows.ops, contribution, contributions)
    aside = set_aside(
        rows.ops, rows.t_s, group, [devices.facts(g.device) for g in groups], [g.basis.cache == "cold" for g in groups]
    )
    flops, moved = work(rows.ops)
    by_group = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[by_group], np.arange(len(groups) + 1))
    return FamilyIndex(
        rows.ops.keys, rows.t_s, rows.t_low_s, rows.t_high_s, contribution, aside, group.astype(np.int32),
        log_sizes(rows.ops), flops, moved, by_group, starts,
    ), groups  # fmt: skip


def _groups(
    family: str, ops: Operators, contribution: Int32, contributions: list[Provenance]
) -> tuple[Int64, list[GroupInfo]]:
    """Number what is comparable: the same operators but for their sizes, on one device, measured in one way."""
    kinds = [(c.origin.device.name, c.origin.basis) for c in contributions]
    table = sorted(set(kinds))
    kind = np.array([table.index(k) for k in kinds], dtype=np.int64)[contribution]
    pairs = np.stack([ops.group_keys.view(np.int64), kind], axis=1)
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    new = np.append(True, (np.diff(pairs[order], axis=0) != 0).any(axis=1)) if len(order) else np.zeros(0, np.bool_)
    group = np.empty(len(ops), dtype=np.int64)
    group[order] = np.cumsum(new) - 1
    infos, sizes = [], np.bincount(group)
    for number, row in enumerate(order[new].tolist()):
        device, basis = table[kind[row]]
        said = ops.described(row)
        key, name, dtype = int(ops.group_keys[row]), str(said["name"]), str(said["dtype"])
        infos.append(GroupInfo(number, family, key, device, basis, int(sizes[number]), name, dtype))
    return group, infos


def _joined(family: str, parts: list[Rows]) -> Rows:
    def texts(columns: list[Texts]) -> Texts:
        table = {text: code for code, text in enumerate(dict.fromkeys(t for c in columns for t in c.table))}
        codes = [np.array([table[t] for t in c.table] or [0], dtype=np.int32)[c.codes] for c in columns]
        return Texts(np.concatenate(codes), tuple(table))

    def numbers(columns: list[Array]) -> Array:
        return np.concatenate(columns)

    ops = Operators(
        family,
        {name: texts([part.ops.texts[name] for part in parts]) for name in TEXTS},
        {name: numbers([part.ops.integers[name] for part in parts]) for name in FAMILIES[family].attributes},
    )
    t, low, high, repeats = (numbers([getattr(part, name) for part in parts]) for name in (*TIMES, "repeats"))
    return Rows(ops, t, low, high, repeats, Texts.same("", len(ops)))


def _clashes(ops: Operators) -> npt.NDArray[np.bool_]:
    """Mask of the rows that share their key with a row above them and are another operator; sorted by key."""
    same = np.append(False, ops.keys[1:] == ops.keys[:-1])
    differs = np.zeros(len(ops), dtype=np.bool_)
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(ops))))
    columns: list[Array] = [*ops.integers.values(), *(texts.codes for texts in ops.texts.values())]
    for column in columns:
        differs |= column != column[first]
    return np.asarray(same & differs, dtype=np.bool_)


def _build(store: Store, place: Path, folder: Path, progress: Progress) -> None:
    parquet()  # without the package every shard would seem damaged, and an empty index would be kept
    index = index_of(*read_contributions(store, progress))
    try:
        place.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=place))
    except OSError as error:
        raise WhatifError(
            f"{place}: expected a folder to keep the database's index in, got '{error.strerror or error}'; name "
            "another with the environment variable XDG_CACHE_HOME."
        ) from error
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
    for family, told in index.families.items():
        for name in _COLUMNS:
            np.save(folder / f"{family}.{name}.npy", getattr(told, name), allow_pickle=False)
    with closing(sqlite3.connect(folder / DATABASE)) as database, database:
        database.execute(
            "CREATE TABLE contribution (number INTEGER PRIMARY KEY, id TEXT, device TEXT, family TEXT, rows INTEGER, "
            "method TEXT, environment TEXT, author TEXT, licence TEXT, sidecar BLOB)"
        )
        database.executemany(
            "INSERT INTO contribution VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    n, c.contribution, c.origin.device.name, c.family, c.rows, c.origin.method.name,
                    c.origin.environment_id, c.origin.source.author, c.origin.source.licence, msgspec.json.encode(c),
                )
                for n, c in enumerate(index.contributions)
            ],
        )  # fmt: skip
        database.execute("CREATE TABLE family (name TEXT PRIMARY KEY, groups BLOB)")
        database.executemany(
            "INSERT INTO family VALUES (?, ?)", [(f, msgspec.json.encode(g)) for f, g in index.groups.items()]
        )
        database.execute("CREATE TABLE warning (sentence TEXT)")
        database.executemany("INSERT INTO warning VALUES (?)", [(sentence,) for sentence in index.warnings])


def _load(folder: Path) -> Index:
    with closing(sqlite3.connect(f"{(folder / DATABASE).as_uri()}?mode=ro", uri=True)) as database:
        contributions = [
            msgspec.json.decode(row[0], type=Provenance)
            for row in database.execute("SELECT sidecar FROM contribution ORDER BY number")
        ]
        groups = {
            name: msgspec.json.decode(blob, type=list[GroupInfo])
            for name, blob in database.execute("SELECT name, groups FROM family")
        }
        warnings = [row[0] for row in database.execute("SELECT sentence FROM warning")]

    def column(family: str, name: str) -> Any:
        return np.load(folder / f"{family}.{name}.npy", mmap_mode="r", allow_pickle=False)

    families = {name: FamilyIndex(*(column(name, c) for c in _COLUMNS)) for name in groups}
    return Index(families, groups, tuple(contributions), tuple(warnings))
