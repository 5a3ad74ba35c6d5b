"""Cache of task graphs in the user's cache folder, so that a recording is read only once.

An entry is a folder with one memory-mapped ``.npy`` file per column and a JSON file with everything else; nothing is
pickled. Its name is a hash of all inputs of the graph: the file's path, size, time and a sample of its bytes, the
user's step rule, and the code that read it. An entry is written under a temporary name and renamed, so other processes
see a complete entry or none. The least recently used entries are removed first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from whatif.graph.columns import TASK_COLUMNS
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array
from whatif.ingest.find_steps import StepRule
from whatif.ingest.saved_graph import Plain, arrays_of, graph_of, info_of, plain_of
from whatif.runtime.files import cache_home

# Environment variable that names another folder; if it is empty, nothing is cached.
CACHE_VARIABLE = "WHATIF_CACHE"
# Smaller recordings are read about as fast as a cache entry.
LEAST_FILE_BYTES = 100_000
MOST_BYTES = 2 << 30
_SAMPLE_BYTES = 64 << 10
# Unfinished entries, left behind by a killed process, are removed after this time.
_ABANDONED_S = 3600.0
_PART = ".part"
_METADATA = "graph.json"
# The graph depends on the code in these folders.
_MAKERS = ("graph", "hardware", "ingest", "simulation")


class _Metadata(msgspec.Struct, frozen=True):
    """All of a graph but its columns, and the checksum of each column by file name: a disk may lose bytes."""

    plain: Plain
    sums: dict[str, int]


class Entry(Struct, frozen=True):
    """A recording's folder in the cache, and its size and modification time before it was read."""

    folder: Path
    recording: Path
    state: tuple[int, int]


def entry_of(path: Path, rule: StepRule) -> Entry | None:
    """Return the cache entry of a recording; None for a small or irregular file, or without a cache folder."""
    root = cache_folder()
    if root is None:
        return None
    try:
        if not path.is_file():
            return None
        state = _state(path)
        if state[0] < LEAST_FILE_BYTES:
            return None
        key = f"{path.resolve()}\n{state}\n{rule}\n{_makers()}\n".encode("utf-8", "surrogateescape")
        digest = hashlib.sha256(key)
        with path.open("rb") as file:
            for start in (0, (state[0] - _SAMPLE_BYTES) // 2, state[0] - _SAMPLE_BYTES):
                file.seek(max(start, 0))
                digest.update(file.read(_SAMPLE_BYTES))
    except (OSError, ValueError):  # the reader reports the error
        return None
    return Entry(root / digest.hexdigest()[:40], path, state)


def recall(entry: Entry) -> TaskGraph | None:
    """Return the cached graph; None if there is none, or a damaged one, which is removed."""
    try:
        with (entry.folder / _METADATA).open("rb") as file:
            metadata = msgspec.json.decode(file.read(), type=_Metadata)
        groups: dict[str, dict[str, Array]] = {"columns": {}, "attached": {}, "dependencies": {}, "waits": {}}
        for file_name, expected_sum in metadata.sums.items():
            group, _, name = file_name.partition(".")
            column = groups[group][name] = _mapped(entry.folder / f"{file_name}.npy")
            if _sum(column) != expected_sum:
                raise ValueError(f"{file_name}: other bytes than were written")
        graph = graph_of(metadata.plain, replace(info_of(metadata.plain), path=str(entry.recording)), groups)
        os.utime(entry.folder)
    except FileNotFoundError:  # never cached, or just removed by another process
        return None
    except (OSError, EOFError, ValueError, TypeError, KeyError, msgspec.MsgspecError):
        _remove(entry.folder)
        return None
    return graph


def keep(entry: Entry, graph: TaskGraph) -> None:
    """Cache a recording's graph if it fits and can be restored exactly; failing to write it is no error."""
    columns = {
        f"{group}.{name}": column for group, columns in arrays_of(graph).items() for name, column in columns.items()
    }
    if sum(column.nbytes for column in columns.values()) > MOST_BYTES // 2:
        return
    try:
        if _state(entry.recording) != entry.state:  # written while it was read
            return
        metadata = _Metadata(plain_of(graph, graph.info), {name: _sum(column) for name, column in columns.items()})
        text = msgspec.json.encode(metadata)
        decoded = msgspec.json.decode(text, type=_Metadata)
        if msgspec.json.encode(decoded) != text or info_of(decoded.plain) != graph.info or graph.declined:
            return
        entry.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{entry.folder.name}.", suffix=_PART, dir=entry.folder.parent))
    except (OSError, UnicodeEncodeError, TypeError, ValueError, msgspec.MsgspecError):
        return
    try:
        for name, column in columns.items():
            np.save(part / f"{name}.npy", column, allow_pickle=False)
        (part / _METADATA).write_bytes(text)
        os.rename(part, entry.folder)  # fails if another process was first
        _make_room()
    except (OSError, ValueError):
        _remove(part)


def cache_folder() -> Path | None:
    """Return the folder of the cached graphs; None if the user disabled the cache or has no home folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named == "":
        return None
    try:
        return Path(named).expanduser() if named else cache_home() / "graphs"
    except RuntimeError:  # no home folder
        return None


def contents() -> list[tuple[Path, int, float]]:
    """Return each cached graph's folder, size in bytes and time of last use, the most recent first."""
    root = cache_folder()
    found = []
    for folder in _folders(root):
        with suppress(OSError):
            size_bytes = sum(file.stat().st_size for file in folder.iterdir())
            found.append((folder, size_bytes, folder.stat().st_mtime))
    return sorted(found, key=lambda entry: entry[2], reverse=True)


def clear() -> None:
    """Remove every cached graph."""
    for folder in _folders(cache_folder()):
        _remove(folder)


def _folders(root: Path | None) -> Iterator[Path]:
    """Yield the entries, unfinished ones included, and nothing else in the folder."""
    if root is not None and root.is_dir():
        for folder in root.iterdir():
            if len(folder.name.partition(".")[0]) == 40 and folder.is_dir() and not folder.is_symlink():
                yield folder


def _make_room() -> None:
    now, room = time.time(), MOST_BYTES
    for folder, size_bytes, used in contents():
        room -= size_bytes
        if room < 0 or (folder.name.endswith(_PART) and now - used > _ABANDONED_S):
            _remove(folder)


def _remove(folder: Path) -> None:
    """Rename an entry, then remove it: no reader finds half of one."""
    gone = folder
    if not folder.name.endswith(_PART):
        gone = folder.with_name(f"{folder.name}.{os.getpid()}.{time.monotonic_ns()}{_PART}")
        with suppress(OSError):
            os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@cache
def _makers() -> str:
    """Hash of the code that makes graphs: an entry of another version must not be found."""
    package = Path(__file__).parents[1]
    states = sorted(
        f"{folder} {name} {_state(Path(folder, name))}"
        for maker in _MAKERS
        for folder, _, names in os.walk(package / maker)
        if not folder.endswith("__pycache__")
        for name in names
    )
    return hashlib.sha256("\n".join([*states, *TASK_COLUMNS]).encode()).hexdigest()


def _mapped(path: Path) -> Array:
    """Map a column's file into memory; read it if it is small."""
    column: Array = np.load(path, mmap_mode="r", allow_pickle=False) if path.stat().st_size > 4096 else np.load(path)
    return column.view(np.ndarray)


def _sum(column: Array) -> int:
    """Checksum of a column: the sum of its bytes, eight at a time."""
    flat = np.ascontiguousarray(column).view(np.uint8).reshape(-1)
    words = len(flat) // 8 * 8
    return (int(flat[:words].view(np.uint64).sum()) + int(flat[words:].sum(dtype=np.uint64)) + len(flat)) % 2**64
