"""Compressed files that are inflated in a second thread: the same pieces, errors included."""

from __future__ import annotations

import gzip
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from whatif.ingest import file_bytes
from whatif.ingest.file_bytes import FileBytes, ahead

TEXT = b"".join(b"%d," % n for n in range(50_000))


def read(path: Path) -> tuple[bytes, str | None, bool]:
    file = FileBytes(path)
    return b"".join(file), file.damage, file.is_cut


@pytest.mark.parametrize("damage", ["none", "cut", "byte", "two members"])
def test_pieces_are_the_same_whichever_thread_makes_them(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = bytearray(gzip.compress(TEXT))
    if damage == "cut":
        del packed[len(packed) // 2 :]
    elif damage == "byte":
        packed[len(packed) // 2] ^= 255
    elif damage == "two members":
        packed += gzip.compress(TEXT)
    path = tmp_path / "text.gz"
    path.write_bytes(packed)
    monkeypatch.setattr(file_bytes, "PIECE_BYTES", 10_000)
    one = read(path)
    monkeypatch.setattr(file_bytes, "_AHEAD_FROM_BYTES", 0)
    assert read(path) == one
    assert (one[0] == TEXT) == (damage == "none")


def test_an_error_of_the_thread_is_raised_where_the_pieces_are_asked_for() -> None:
    def pieces() -> Iterator[bytes]:
        yield from (b"a", b"b")
        raise zlib.error("damaged")

    got: list[bytes] = []
    with pytest.raises(zlib.error, match="damaged"):
        got.extend(ahead(pieces(), 1))
    assert got == [b"a", b"b"]


def test_the_thread_ends_with_who_asks_for_pieces() -> None:
    before = threading.active_count()
    some = ahead((b"%d" % n for n in range(10**9)), 2)
    assert [next(some) for _ in range(3)] == [b"0", b"1", b"2"]
    some.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_nobody_needs_a_thread_for_the_first_piece() -> None:
    before = threading.active_count()
    some = ahead(iter([b"a", b"b"]), 2)
    assert next(some) == b"a"
    assert threading.active_count() == before
