"""A database on disk: a folder of contributions, each an immutable Parquet shard and its sidecar.

    FOLDER/opdb.json                                    marks the database; holds its schema version
    FOLDER/DEVICE/FAMILY/ENVIRONMENT/CONTRIBUTION.parquet
    FOLDER/DEVICE/FAMILY/ENVIRONMENT/CONTRIBUTION.json  the sidecar; written last: a shard without one does not exist

A contribution's name is a hash of its content, so that two databases merge by the union of their files, in any order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

import numpy as np
from msgspec import Struct

from whatif.opdb import devices
from whatif.opdb.provenance import Origin, Provenance, contribution_id, encode, read_sidecar
from whatif.opdb.rows import Rows
from whatif.opdb.schema import MOST_ROWS, SCHEMA_VERSION
from whatif.opdb.shard import read_shard, write_shard
from whatif.runtime.errors import WhatifError, expecting
from whatif.runtime.files import replacing

MARKER = "opdb.json"
# Fewer times may be equal on two devices by chance.
FEWEST_DISTINCT_ROWS = 8


class CannotWriteError(WhatifError):
    """A file of the database could not be written, for lack of space or permission."""


@contextmanager
def _writing(sentence: str, hint: str) -> Iterator[None]:
    try:
        with expecting(sentence, OSError, hint=hint):
            yield
    except WhatifError as error:
        raise CannotWriteError(str(error)) from error


class Outcome(Enum):
    """The result of adding rows."""

    ADDED = "added"
    PRESENT = "present"


class Contribution(Struct, frozen=True):
    """A contribution of a database: its provenance, and the paths of its two files."""

    provenance: Provenance
    sidecar: Path

    @property
    def shard(self) -> Path:
        """The Parquet file."""
        return self.sidecar.with_suffix(".parquet")

    def read(self) -> Rows:
        """Read the rows. Raises WhatifError if they are not those that the sidecar describes."""
        if not self.shard.is_file():
            raise WhatifError(f"{self.shard}: expected the shard of a sidecar, got no such file; fetch it again.")
        rows = read_shard(self.shard, self.provenance.family)
        if len(rows) != self.provenance.rows or rows.sha256() != self.provenance.sha256:
            raise WhatifError(
                f"{self.shard}: expected the rows that its sidecar describes, got others: one was changed or "
                "damaged; fetch both again."
            )
        return rows


class Store:
    """The folder of a database. Contributions are added and read, never changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def open(folder: str | Path, *, create: bool = False) -> Store:
        """Open the database in ``folder``. Raises WhatifError if there is none of this version.

        With ``create`` the folder may be missing or empty: it becomes a database with the first addition, so that a
        command that fails leaves nothing behind.
        """
        folder = Path(folder)
        marker = folder / MARKER
        if not marker.is_file():
            if not create:
                raise WhatifError(
                    f"{folder}: expected an op database, got no folder, or one without {MARKER}; "
                    "`whatif opdb import` creates one."
                )
            if folder.exists() and (not folder.is_dir() or any(map(_is_foreign, folder.iterdir()))):
                raise WhatifError(
                    f"{folder}: expected an op database or a new folder, got other files; name another folder."
                )
            return Store(folder)
        check_marker(marker)
        return Store(folder)

    def begin(self) -> None:
        """Initialize the folder as a database if it is not one. Raises CannotWriteError if it cannot be written."""
        marker = self.folder / MARKER
        if marker.is_file():
            return
        with _writing(f"{self.folder}: expected to create a folder", "; name another"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(marker) as part:
                part.write_bytes(marker_content())

    def sidecars(self) -> Iterator[Path]:
        """The paths of the sidecars, sorted by name. Links to folders are not followed."""
        for folder, subfolders, files in os.walk(self.folder):
            depth = len(Path(folder).relative_to(self.folder).parts)
            subfolders[:] = sorted(subfolders) if depth < 3 else []
            if depth == 3:
                sidecars = (Path(folder, name) for name in sorted(files) if name.endswith(".json"))
                yield from (path for path in sidecars if path.is_file())  # a pipe would never end

    def contributions(self) -> tuple[list[Contribution], list[str]]:
        """Return the contributions, by id, and an error message for each invalid sidecar."""
        found: dict[str, Contribution] = {}
        damaged = []
        for path in self.sidecars():
            try:
                provenance = read_sidecar(path)
                if provenance.contribution != path.stem:
                    raise WhatifError(f"{path}: expected the name computed from its content; fetch it again.")
            except WhatifError as error:
                damaged.append(str(error))
                continue
            found[provenance.contribution] = Contribution(provenance, path)
        return [found[name] for name in sorted(found)], damaged

    def add(self, rows: Rows, origin: Origin, *, known: dict[str, str] | None = None) -> tuple[Outcome, str]:
        """Write rows as a new contribution; returns the outcome, and its id.

        ``known`` maps the times' hash of each contribution to its device; it is updated. Raises WhatifError
        if the same times are stored under another device's name, or if rows are not sound. An existing damaged
        contribution is written anew.
        """
        rows = rows.canonical()
        if not len(rows) or len(rows) > MOST_ROWS or not rows.sound().all():
            raise WhatifError(f"{self.folder}: expected 1 to {MOST_ROWS:,} valid measurements to add, got others.")
        known = self.devices_by_times() if known is None else known
        times, device = rows.times_sha256(), origin.device.name
        check_device_of_times(self.folder, device, times, len(rows), known)
        sha256 = rows.sha256()
        name = contribution_id(origin, rows.family, sha256)
        target = self._place(origin, rows.family) / name
        known[times] = device
        if is_sound(target.with_suffix(".json")):
            return Outcome.PRESENT, name
        provenance = Provenance(
            schema_version=SCHEMA_VERSION, contribution=name, family=rows.family, rows=len(rows), sha256=sha256,
            times_sha256=times, origin=origin,
        )  # fmt: skip
        self.begin()
        with _writing(f"{target.parent}: expected a folder to write into", "; choose another"):
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target.with_suffix(".parquet")) as part:
                write_shard(part, rows)
            with replacing(target.with_suffix(".json")) as part:
                part.write_bytes(encode(provenance))
        return Outcome.ADDED, name

    def devices_by_times(self) -> dict[str, str]:
        """Return the device of each contribution, by the hash of its times."""
        contributions, _ = self.contributions()
        return {c.provenance.times_sha256: c.provenance.origin.device.name for c in contributions}

    def _place(self, origin: Origin, family: str) -> Path:
        return self.folder / devices.folder_name(origin.device.name) / family / origin.environment_id


def in_shards(rows: Rows) -> Iterator[Rows]:
    """Split rows into parts that fit one shard."""
    rows = rows.canonical()
    for start in range(0, len(rows), MOST_ROWS):
        yield rows.take(np.arange(start, min(start + MOST_ROWS, len(rows))))


def is_sound(sidecar: Path) -> bool:
    """Whether a contribution exists and matches its sidecar."""
    if not sidecar.is_file():
        return False
    try:
        Contribution(read_sidecar(sidecar), sidecar).read()
    except WhatifError:
        return False
    return True


def check_device_of_times(where: Path | str, device: str, times_sha256: str, rows: int, known: dict[str, str]) -> None:
    """Raise WhatifError if ``known`` has the same times under another device, with too many rows for chance."""
    if rows >= FEWEST_DISTINCT_ROWS and known.get(times_sha256, device) != device:
        raise WhatifError(
            f"{where}: expected measurements of {device}, got times already stored for "
            f"{known[times_sha256]}; find out which name is right."
        )


def _is_foreign(path: Path) -> bool:
    """Whether a file in a folder without a marker is anything but a partly written marker."""
    return not path.name.startswith(f".{MARKER}.")


def marker_content() -> bytes:
    """Return the content of the marker file of this version."""
    return json.dumps({"whatif_opdb": SCHEMA_VERSION}).encode() + b"\n"


def check_marker(marker: Path) -> None:
    """Raise WhatifError if a file is not the marker of a database of this version."""
    try:
        with marker.open("rb") as file:
            content = json.loads(file.read(4096))
        version = content["whatif_opdb"] if isinstance(content, dict) else None
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise WhatifError(f"{marker}: expected the marker of an op database, got something else.") from error
    if version != SCHEMA_VERSION:
        raise WhatifError(
            f"{marker}: expected version {SCHEMA_VERSION} of the op database, got {str(version)[:40]!r}; "
            "use the program that wrote it."
        )
