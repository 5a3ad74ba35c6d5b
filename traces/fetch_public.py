"""Download the public recordings of public.toml, which tests and benchmarks use and the repository does not hold.

python traces/fetch_public.py FOLDER
WHATIF_EXTRA_DATA=FOLDER make test

Writes FOLDER/traces. Each recording is compared with its checksum, and one that differs is not written. A second run
continues where the first one stopped. Exits 1 where a recording could not be had.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import os
import sys
import tarfile
import tomllib
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath

TABLE = Path(__file__).resolve().parent / "public.toml"
TIMEOUT_S = 60
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Recording:
    """One recording: where it goes, where it comes from, and what it holds."""

    path: str
    address: str
    sha256: str  # of the uncompressed content
    size_bytes: int  # of the same
    licence: str
    member: str = ""  # the file's name in a tar archive


class FetchError(Exception):
    """A recording could not be had; the message says why."""


def read_table(path: Path) -> list[Recording]:
    """Return the recordings of a table, in its order."""
    return [Recording(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["recording"]]


def fetch(recordings: list[Recording], folder: Path) -> list[str]:
    """Bring every recording that is not there yet into a folder; return what went wrong, one sentence each."""
    wrong: list[str] = []
    for address, rows in groupby(recordings, key=lambda row: row.address):
        missing = [row for row in rows if not is_there(row, folder / row.path)]
        if not missing:
            continue
        partial = folder / f".{hashlib.sha256(address.encode()).hexdigest()[:16]}.partial"
        try:
            download(address, partial)
        except (OSError, FetchError) as error:  # urllib's errors are OSErrors
            wrong += [f"{row.path}: {address}: {error}" for row in missing]
            continue
        for row in missing:
            try:
                write(row, partial.read_bytes(), folder / row.path)
                print(f"{row.path} ({row.licence})")
            except FetchError as error:
                wrong.append(f"{row.path}: {error}")
        # Also where it was refused: the next run starts anew.
        partial.unlink()
    return wrong


def is_there(row: Recording, path: Path) -> bool:
    """Return whether a file holds the recording."""
    return path.is_file() and checksum(path.read_bytes()) == row.sha256


def download(address: str, partial: Path) -> None:
    """Write what an address holds to a file, behind the bytes that an earlier run has written there."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    there = partial.stat().st_size if partial.is_file() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={there}-"} if there else {})
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and there:  # nothing is behind what is there: it is complete, or not ours
            return
        raise
    with answer, partial.open("ab" if getattr(answer, "status", None) == 206 else "wb") as file:
        expected = int(answer.headers.get("Content-Length") or -1)
        received = 0
        while chunk := answer.read(CHUNK_BYTES):
            file.write(chunk)
            received += len(chunk)
    if expected not in (-1, received):
        raise FetchError(f"the connection ended after {received:,} of {expected:,} bytes; run this again to continue")


def write(row: Recording, received: bytes, path: Path) -> None:
    """Write a recording, compressed where its name says so. Raises FetchError where it is not the one of the table."""
    if row.member:
        received = _member(received, row.member)
    if checksum(received) != row.sha256:
        hint = "; it is a pointer of Git LFS" if received.startswith(b"version https://git-lfs") else ""
        raise FetchError(f"expected the content {row.sha256}, got {checksum(received)}{hint}; not written")
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = path.suffix == ".gz" and not _is_gzip(received)
    whole = path.with_name(f".{path.name}.whole")
    whole.write_bytes(gzip.compress(received, mtime=0) if packed else received)
    os.replace(whole, path)


def checksum(content: bytes) -> str:
    """Return the SHA-256 of the uncompressed content; of the bytes themselves where they are damaged gzip data."""
    if _is_gzip(content):
        with contextlib.suppress(OSError, EOFError, zlib.error):
            content = gzip.decompress(content)
    return hashlib.sha256(content).hexdigest()


def _is_gzip(content: bytes) -> bool:
    return content.startswith(b"\x1f\x8b")


def _member(archive: bytes, name: str) -> bytes:
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                file = tar.extractfile(member) if PurePosixPath(member.name).name == name else None
                if file is not None:
                    return file.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise FetchError(f"expected a tar archive: {error}; not written") from None
    raise FetchError(f"the archive holds no {name}; not written")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what WHATIF_EXTRA_DATA names later")
    parser.add_argument("--table", type=Path, default=TABLE, help="another list of recordings than public.toml")
    args = parser.parse_args(words)
    recordings = read_table(args.table)
    wrong = fetch(recordings, args.folder / "traces")
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    print(f"{len(recordings) - len(wrong)} of {len(recordings)} recordings are in {args.folder / 'traces'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
