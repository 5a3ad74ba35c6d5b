"""A database in an object store, or on another machine: any URL that fsspec has a driver for (file, s3, gs, ssh, ...).

It has the same files at the same paths as a folder (``whatif.opdb.store``). A shard is uploaded first, then its sidecar
under a temporary name, which is then renamed: until then the contribution does not exist. Downloads go into a
temporary folder, are checked there like any foreign files, and only then added. No name chosen by the remote becomes
a path on this machine.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct

from whatif.opdb.provenance import LARGEST_SIDECAR_BYTES, Provenance, read_sidecar
from whatif.opdb.rows import Rows
from whatif.opdb.shard import LARGEST_SHARD_BYTES
from whatif.opdb.store import MARKER, Contribution, check_marker, marker_content
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import file_system, reaching

_AGAIN = "check the address, access rights and connection, then run it again: a partial copy does no harm."
_PIECE_BYTES = 4_000_000
_LARGEST_MARKER_BYTES = 4096
# DEVICE/FAMILY/ENVIRONMENT/CONTRIBUTION, below the database's root.
_DEPTH = 4


class Listed(Struct, frozen=True):
    """A contribution at a URL: its sidecar, and the path of its files without their suffixes."""

    provenance: Provenance
    path: str


@dataclass
class Remote:
    """The database at a URL. Every method raises WhatifError if the remote refuses."""

    url: str
    _files: Any = field(repr=False)
    _root: str = field(repr=False)
    _is_marked: bool = field(default=False, repr=False)

    @staticmethod
    def open(url: str, *, create: bool = False) -> Remote:
        """Open the database at ``url``; with ``create`` it may be empty, and the first ``put`` initializes it."""
        remote = Remote(url, *file_system(url))
        marker = remote._path(MARKER)
        with reaching(url, _AGAIN):
            remote._files.invalidate_cache()
            exists = remote._files.isfile(marker)
            foreign = not exists and remote._files.isdir(remote._root) and bool(remote._files.ls(remote._root))
        if exists:
            with remote._fetched(marker, _LARGEST_MARKER_BYTES) as local:
                check_marker(local)
        elif not create:
            raise WhatifError(f"{url}: expected an op database, got no {MARKER} there; `whatif opdb push` makes one.")
        elif foreign:
            raise WhatifError(f"{url}: expected an op database or an empty folder, got other files; name another.")
        remote._is_marked = exists
        return remote

    def contributions(self) -> tuple[list[Listed], list[str]]:
        """Return the contributions with both files, by id, and an error message for each invalid sidecar."""
        with reaching(self.url, _AGAIN):
            found = self._files.find(self._root, maxdepth=_DEPTH, detail=True)
        files = {path for path, facts in found.items() if facts.get("type") == "file"}
        listed: dict[str, Listed] = {}
        damaged = []
        for path in sorted(files):
            name = path.removesuffix(".json").rpartition("/")[2]
            parts = path.removeprefix(self._root).strip("/").split("/")
            if len(parts) != _DEPTH or not path.endswith(".json") or not re.fullmatch(r"[0-9a-f]{24}", name):
                continue
            if path.removesuffix(".json") + ".parquet" not in files:
                continue  # an unfinished upload
            try:
                with self._fetched(path, LARGEST_SIDECAR_BYTES) as local:
                    provenance = read_sidecar(local)
                if provenance.contribution != name:
                    raise WhatifError(f"{path}: expected the name computed from its content; push it again.")
            except WhatifError as error:
                damaged.append(str(error))
                continue
            listed[name] = Listed(provenance, path.removesuffix(".json"))
        return [listed[name] for name in sorted(listed)], damaged

    def read(self, listed: Listed) -> Rows:
        """Fetch a contribution and read its rows. Raises WhatifError if they are not those its sidecar describes."""
        with self._fetched(f"{listed.path}.parquet", LARGEST_SHARD_BYTES) as shard:
            return Contribution(listed.provenance, shard.with_suffix(".json")).read()

    def put(self, contribution: Contribution, place: tuple[str, ...]) -> None:
        """Write a contribution's files into the folder ``place`` below the root, the sidecar last."""
        target = self._path(*place, contribution.provenance.contribution)
        with reaching(self.url, _AGAIN):
            if not self._is_marked:
                self._files.makedirs(self._root, exist_ok=True)
                self._publish(self._path(MARKER), marker_content())
                self._is_marked = True
            self._files.makedirs(posixpath.dirname(target), exist_ok=True)
            self._files.put_file(str(contribution.shard), f"{target}.parquet")
            size = self._files.info(f"{target}.parquet")["size"]
            if size != contribution.shard.stat().st_size:
                raise OSError(f"{size} of {contribution.shard.stat().st_size} bytes arrived")
            self._publish(f"{target}.json", contribution.sidecar.read_bytes())

    def _publish(self, path: str, content: bytes) -> None:
        """Write a small file atomically."""
        part = posixpath.join(posixpath.dirname(path), f".{posixpath.basename(path)}.{os.getpid()}.part")
        try:
            self._files.pipe_file(part, content)
            self._files.mv(part, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._files.rm_file(part)
            raise

    @contextlib.contextmanager
    def _fetched(self, path: str, most_bytes: int) -> Iterator[Path]:
        """Download a file of at most ``most_bytes`` to a temporary path; its stated size is not trusted.

        Errors about the copy name the remote path.
        """
        with TemporaryDirectory() as folder:
            local = Path(folder, posixpath.basename(path))
            with reaching(self.url, _AGAIN), self._files.open(path, "rb") as source, local.open("wb") as copy:
                while piece := source.read(min(_PIECE_BYTES, most_bytes + 1)):
                    copy.write(piece)
                    if copy.tell() > most_bytes:
                        raise WhatifError(f"{path}: expected a file of at most {most_bytes:,} bytes, got a larger one.")
            try:
                yield local
            except WhatifError as error:
                raise WhatifError(str(error).replace(str(local), path)) from error

    def _path(self, *parts: str) -> str:
        return posixpath.join(self._root, *parts)
