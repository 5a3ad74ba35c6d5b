"""traces/fetch_public.py, on files of a server on this machine: checksums, archives, and downloads that stop."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import os
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers import EXTRA_DATA, replace

ROOT = Path(__file__).resolve().parent.parent
CONTENT = os.urandom(64) * 50
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(scope="module")
def public() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_public", ROOT / "traces" / "fetch_public.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Server:
    """Files by path; ``cut`` ends the next answer after that many bytes; ``asked`` records paths and ranges."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: int | None = None
        self.asked: list[tuple[str, str | None]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                server.asked.append((self.path, wanted))
                content = server.files.get(self.path)
                begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
                status = 404 if content is None else 416 if begin >= len(content) else 206 if wanted else 200
                body = (content or b"")[begin:] if status < 300 else b""
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: server.cut])
                server.cut = None

            def log_message(self, *_: Any) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.thread.join()
    made.http.server_close()


def one(public: ModuleType, address: str, path: str = "a/b.json.gz", **other: Any) -> Any:
    return public.Recording(path, address, SHA256, len(CONTENT), "MIT", **other)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["b.json.gz", "b.sqlite"])
def test_a_file_is_brought_once(public: ModuleType, tmp_path: Path, name: str, packed: bool) -> None:
    there = tmp_path / "there"
    there.write_bytes(gzip.compress(CONTENT) if packed else CONTENT)
    rows = [one(public, there.as_uri(), f"a/{name}")]
    assert public.fetch(rows, tmp_path / "traces") == []
    written = tmp_path / "traces" / "a" / name
    if name.endswith(".gz"):
        assert gzip.decompress(written.read_bytes()) == CONTENT
    assert [path.name for path in (tmp_path / "traces").rglob("*") if path.is_file()] == [name]
    there.unlink()
    assert public.fetch(rows, tmp_path / "traces") == []  # nothing is asked for


def test_another_content_is_refused(public: ModuleType, server: Server, tmp_path: Path) -> None:
    server.files["/x"] = CONTENT[:-1]
    (wrong,) = public.fetch([one(public, f"{server.address}/x")], tmp_path)
    assert SHA256 in wrong
    assert "not written" in wrong
    assert list(tmp_path.rglob("*.gz")) == []
    server.files["/x"] = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    (wrong,) = public.fetch([one(public, f"{server.address}/x")], tmp_path)
    assert "a pointer of Git LFS" in wrong
    server.files["/x"] = CONTENT
    assert public.fetch([one(public, f"{server.address}/x")], tmp_path) == []


def test_a_damaged_copy_is_brought_again(public: ModuleType, server: Server, tmp_path: Path) -> None:
    server.files["/x"] = CONTENT
    path = tmp_path / "a" / "b.json.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(CONTENT)[:-9])
    assert public.fetch([one(public, f"{server.address}/x")], tmp_path) == []
    assert gzip.decompress(path.read_bytes()) == CONTENT


def test_a_download_that_stopped_goes_on(public: ModuleType, server: Server, tmp_path: Path) -> None:
    server.files["/x"], server.cut = CONTENT, 1000
    rows = [one(public, f"{server.address}/x")]
    (wrong,) = public.fetch(rows, tmp_path)
    assert "1,000 of 3,200 bytes" in wrong
    assert not (tmp_path / "a").exists()
    assert public.fetch(rows, tmp_path) == []
    assert server.asked == [("/x", None), ("/x", "bytes=1000-")]
    assert gzip.decompress((tmp_path / "a" / "b.json.gz").read_bytes()) == CONTENT


def test_one_that_is_missing_does_not_stop_the_others(public: ModuleType, server: Server, tmp_path: Path) -> None:
    server.files["/x"] = CONTENT
    rows = [one(public, f"{server.address}/none", "none.json.gz"), one(public, f"{server.address}/x")]
    (wrong,) = public.fetch(rows, tmp_path)
    assert "404" in wrong
    assert (tmp_path / "a" / "b.json.gz").is_file()


def test_an_archive_is_brought_once_for_all_of_its_files(public: ModuleType, server: Server, tmp_path: Path) -> None:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for name in ("inside/one.json", "inside/two.json"):
            found = tarfile.TarInfo(name)
            found.size = len(CONTENT)
            tar.addfile(found, io.BytesIO(CONTENT))
    server.files["/x.tar.gz"] = held.getvalue()
    row = one(public, f"{server.address}/x.tar.gz", member="one.json")
    rows = [row, replace(row, path="2.json.gz", member="two.json"), replace(row, path="3.gz", member="three.json")]
    (wrong,) = public.fetch(rows, tmp_path)
    assert wrong == "3.gz: the archive holds no three.json; not written"
    assert len(server.asked) == 1
    assert gzip.decompress((tmp_path / "2.json.gz").read_bytes()) == CONTENT


def test_the_command(public: ModuleType, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.toml"
    table.write_text(
        f'[[recording]]\npath = "a/b.json.gz"\naddress = "{server.address}/x"\nsha256 = "{SHA256}"\n'
        f'size_bytes = {len(CONTENT)}\nlicence = "MIT"\n'
    )
    words = [str(tmp_path / "data"), "--table", str(table)]
    assert public.main(words) == 1
    assert "0 of 1 recordings" in capsys.readouterr().out
    server.files["/x"] = CONTENT
    assert public.main(words) == 0
    assert "1 of 1 recordings" in capsys.readouterr().out
    assert (tmp_path / "data" / "traces" / "a" / "b.json.gz").is_file()


def test_the_table_is_sound(public: ModuleType) -> None:
    rows = public.read_table(public.TABLE)
    assert len({row.path for row in rows}) == len({row.sha256 for row in rows}) == len(rows) >= 30
    for row in rows:
        assert row.address.startswith("https://")
        assert len(row.sha256) == 64
        assert row.licence
        assert row.size_bytes > 0
        assert row.path.count("/") == 1


@pytest.mark.skipif(not os.environ.get(EXTRA_DATA), reason=f"{EXTRA_DATA} is not set (traces/fetch_public.py)")
def test_the_recordings_that_tests_use_are_those_of_the_table(public: ModuleType) -> None:
    folder = Path(os.environ[EXTRA_DATA], "traces")
    there = [row for row in public.read_table(public.TABLE) if (folder / row.path).is_file()]
    assert there
    assert [row.path for row in there if not public.is_there(row, folder / row.path)] == []
