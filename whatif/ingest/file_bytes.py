"""The bytes of a plain or gzip file in pieces, as far as they are readable."""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from whatif.runtime.errors import WhatifError
from whatif.runtime.files import GZIP_MAGIC

try:
    from isal import isal_zlib as fast_zlib  # three times faster than zlib, and optional
except ImportError:  # pragma: no cover
    import zlib as fast_zlib  # type: ignore[no-redef]

PIECE_BYTES = 1 << 20
# Compressed input is read in smaller pieces: JSON traces shrink 10 to 20 times.
_COMPRESSED_PIECE_BYTES = 256 << 10
_SPOOLED_IN_MEMORY_BYTES = 64 << 20
# Compressed files from this size on are inflated in a second thread, this many pieces ahead.
_AHEAD_FROM_BYTES = 1 << 20
_PIECES_AHEAD = 4
_GZIP_WBITS = 31

_INFLATE_ERRORS: Any = (zlib.error, fast_zlib.error)

DAMAGED_GZIP = "damaged gzip data"


def ends_early(size_bytes: int) -> str:
    """Return the words in which every reader reports a cut file; ``size_bytes`` is its size on the disk."""
    return f"the file ends early at byte {size_bytes}"


def cut_first(path: Path | str, size_bytes: int, error: WhatifError) -> WhatifError:
    """Return ``error`` of a cut file with the cut as its first reason."""
    reason = str(error).removeprefix(f"{path}: ").rstrip(".")
    if reason.startswith(ends_early(size_bytes)):
        return error
    return WhatifError(f"{path}: {ends_early(size_bytes)}; copy or record it again (error in the rest: {reason}).")


class FileBytes:
    """Uncompressed bytes of a file, in pieces of at most ``PIECE_BYTES``; ``damage`` says why they ended early."""

    def __init__(self, path: Path, progress: Callable[[int, int], None] | None = None) -> None:
        self.path = path
        self.damage: str | None = None
        self.is_cut = False  # the damage is that the file ends too early
        self.size_bytes = 0  # on the disk; known once the first piece is read
        self._progress = progress

    def __iter__(self) -> Iterator[bytes]:
        """Yield the pieces. Raises WhatifError if the file cannot be opened or read."""
        try:
            if self.path.is_dir():
                raise WhatifError(f"{self.path}: expected a trace file, got a folder; name one file inside it")
            with self._open() as file:
                self.size_bytes = file.seek(0, os.SEEK_END)
                file.seek(0)
                magic = file.read(len(GZIP_MAGIC))
                file.seek(0)
                yield from self._gzip_pieces(file) if magic == GZIP_MAGIC else self._plain_pieces(file)
        except OSError as error:
            reason = error.strerror or str(error)
            raise WhatifError(f"{self.path}: expected a readable trace file, got '{reason}'; check the path") from error
        except ValueError as error:  # a NUL character in the path
            raise WhatifError(f"{str(self.path)!r}: expected a path, got '{error}'; check the path") from error

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        """Open the file; a pipe, which cannot be read twice, is copied first, because damaged data is read again."""
        with self.path.open("rb") as file:
            if file.seekable():
                yield file
                return
            with tempfile.SpooledTemporaryFile(_SPOOLED_IN_MEMORY_BYTES) as copy:
                shutil.copyfileobj(file, copy)
                yield copy

    def _read(self, file: IO[bytes], size_bytes: int) -> bytes:
        data = file.read(size_bytes)
        if self._progress is not None:
            self._progress(file.tell(), self.size_bytes)
        return data

    def _plain_pieces(self, file: IO[bytes]) -> Iterator[bytes]:
        while piece := self._read(file, PIECE_BYTES):
            yield piece

    def _gzip_pieces(self, file: IO[bytes]) -> Iterator[bytes]:
        delivered_bytes = 0
        pieces = self._inflate(file, fast_zlib.decompressobj(_GZIP_WBITS))
        try:
            for piece in pieces if self.size_bytes < _AHEAD_FROM_BYTES else ahead(pieces, _PIECES_AHEAD):
                delivered_bytes += len(piece)
                yield piece
        except _INFLATE_ERRORS:
            self.damage = DAMAGED_GZIP
            file.seek(0)
            yield from _salvage(file, delivered_bytes)

    def _inflate(self, file: IO[bytes], inflater: Any) -> Iterator[bytes]:
        pending = b""
        while True:
            if not pending:
                pending = self._read(file, _COMPRESSED_PIECE_BYTES)
                if not pending:
                    break
            if inflater.eof:  # a further gzip member, or padding after the last one
                if not pending.startswith(GZIP_MAGIC[:1]):
                    break
                inflater = fast_zlib.decompressobj(_GZIP_WBITS)
            if piece := inflater.decompress(pending, PIECE_BYTES):
                yield piece
            pending = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
        while not inflater.eof and (piece := inflater.decompress(b"", PIECE_BYTES)):
            yield piece
        if not inflater.eof:
            self.damage, self.is_cut = ends_early(self.size_bytes), True


def ahead(pieces: Iterator[bytes], most: int) -> Iterator[bytes]:
    """Yield pieces that a second thread makes, at most ``most`` ahead; its exceptions are raised here."""
    for piece in pieces:
        yield piece  # reading only the start needs no thread
        break
    ready: queue.Queue[bytes | BaseException | None] = queue.Queue(most)
    stopped = threading.Event()

    def make() -> None:
        last: BaseException | None = None
        try:
            for piece in pieces:
                ready.put(piece)
                if stopped.is_set():
                    return
        except BaseException as error:  # as of a damaged file
            last = error
        ready.put(last)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while isinstance(got := ready.get(), bytes):
            yield got
        if got is not None:
            raise got
    finally:
        stopped.set()
        while thread.is_alive():  # it may wait for room
            with suppress(queue.Empty):
                ready.get(timeout=0.01)


def _salvage(file: IO[bytes], skip_bytes: int) -> Iterator[bytes]:
    """Yield the bytes between the first ``skip_bytes`` and the damage.

    An inflater that fails does not return what it inflated in that call, so the call is repeated byte by byte.
    """
    inflater = zlib.decompressobj(_GZIP_WBITS)
    while compressed := file.read(4 << 10):
        while compressed:
            if inflater.eof:
                inflater = zlib.decompressobj(_GZIP_WBITS)
            before = inflater.copy()
            try:
                parts = [inflater.decompress(compressed)]
                failed = False
            except zlib.error:
                parts = list(_byte_by_byte(before, compressed))
                failed = True
            piece = b"".join(parts)
            if len(piece) > skip_bytes:
                yield piece[skip_bytes:]
            skip_bytes = max(0, skip_bytes - len(piece))
            if failed:
                return
            compressed = inflater.unused_data


def _byte_by_byte(inflater: Any, compressed: bytes) -> Iterator[bytes]:
    for index in range(len(compressed)):
        try:
            yield inflater.decompress(compressed[index : index + 1])
        except zlib.error:
            return
