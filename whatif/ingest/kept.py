"""Graphs of recordings that were read before, in the user's cache folder: a second question need not read again.

An entry is a folder with one memory-mapped ``.npy`` file for each column and a JSON text with the rest; nothing is
pickled. It is named after everything that the graph follows from: the file's path, size, time and a sample of its
bytes, what the user said of its steps, and the code that read it. Entries are written beside their place and renamed
into it, so that other processes see all of one or nothing. The least recently used ones go first.
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

# Names another folder than the user's own; empty: nothing is kept.
CACHE_VARIABLE = "WHATIF_CACHE"
# Smaller files are read about as fast as an entry.
LEAST_FILE_BYTES = 100_000
MOST_BYTES = 2 << 30
_SAMPLE_BYTES = 64 << 10
# What the process that wrote it left behind when it was killed is removed after this time.
_ABANDONED_S = 3600.0
_PART = ".part"
_REST = "graph.json"
# Of these folders' files a graph is made.
_MAKERS = ("graph", "hardware", "ingest", "simulation")


class _Rest(msgspec.Struct, frozen=True):
    """What is no column, and of each column by its file's name a sum over its bytes: a disk may have lost some."""

    plain: Plain
    sums: dict[str, int]


class Entry(Struct, frozen=True):
    """A recording's place in the cache, and the file's state when it was looked at."""

    folder: Path
    recording: Path
    state: tuple[int, int]


def entry_of(path: Path, rule: StepRule) -> Entry | None:
    """Return the place of a recording's graph; None where nothing is kept: no regular file, a small one, no folder."""
    root = cache_folder()
    if root is None:
        return None
    try:
        if not path.is_file():
            return None
        state = _state(path)
        if state[0] < LEAST_FILE_BYTES:
            return None
        told = f"{path.resolve()}\n{state}\n{rule}\n{_makers()}\n".encode("utf-8", "surrogateescape")
        named = hashlib.sha256(told)
        with path.open("rb") as file:
            for start in (0, (state[0] - _SAMPLE_BYTES) // 2, state[0] - _SAMPLE_BYTES):
                file.seek(max(start, 0))
                named.update(file.read(_SAMPLE_BYTES))
    except (OSError, ValueError):  # the reader says what is wrong
        return None
    return Entry(root / named.hexdigest()[:40], path, state)


def recall(entry: Entry) -> TaskGraph | None:
    """Return the kept graph; None where there is none, or a damaged one, which is removed."""
    try:
        with (entry.folder / _REST).open("rb") as file:
            rest = msgspec.json.decode(file.read(), type=_Rest)
        groups: dict[str, dict[str, Array]] = {"columns": {}, "attached": {}, "dependencies": {}, "waits": {}}
        for file_name, told in rest.sums.items():
            group, _, name = file_name.partition(".")
            column = groups[group][name] = _mapped(entry.folder / f"{file_name}.npy")
            if _sum(column) != told:
                raise ValueError(f"{file_name}: other bytes than were written")
        graph = graph_of(rest.plain, replace(info_of(rest.plain), path=str(entry.recording)), groups)
        os.utime(entry.folder)
    except FileNotFoundError:  # never kept, or removed by another process just now
        return None
    except (OSError, EOFError, ValueError, TypeError, KeyError, msgspec.MsgspecError):
        _remove(entry.folder)
        return None
    return graph


def keep(entry: Entry, graph: TaskGraph) -> None:
    """Keep a recording's graph, where there is room and it can be kept exactly; a failure to do so is no error."""
    columns = {
        f"{group}.{name}": column for group, columns in arrays_of(graph).items() for name, column in columns.items()
    }
    if sum(column.nbytes for column in columns.values()) > MOST_BYTES // 2:
        return
    try:
        if _state(entry.recording) != entry.state:  # written while it was read
            return
        rest = _Rest(plain_of(graph, graph.info), {name: _sum(column) for name, column in columns.items()})
        text = msgspec.json.encode(rest)
        again = msgspec.json.decode(text, type=_Rest)
        if msgspec.json.encode(again) != text or info_of(again.plain) != graph.info or graph.declined:
            return
        entry.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{entry.folder.name}.", suffix=_PART, dir=entry.folder.parent))
    except (OSError, UnicodeEncodeError, TypeError, ValueError, msgspec.MsgspecError):
        return
    try:
        for name, column in columns.items():
            np.save(part / f"{name}.npy", column, allow_pickle=False)
        (part / _REST).write_bytes(text)
        os.rename(part, entry.folder)  # fails where another process was first
        _make_room()
    except (OSError, ValueError):
        _remove(part)


def cache_folder() -> Path | None:
    """Return the folder of the kept graphs; None where the user wants none."""
    named = os.environ.get(CACHE_VARIABLE)
    if named == "":
        return None
    try:
        return Path(named).expanduser() if named else cache_home() / "graphs"
    except RuntimeError:  # no home folder
        return None


def contents() -> list[tuple[Path, int, float]]:
    """Return each kept graph's folder, size in bytes and time of last use, the most recent first."""
    root = cache_folder()
    found = []
    for folder in _folders(root):
        with suppress(OSError):
            found.append((folder, _size_bytes(folder), folder.stat().st_mtime))
    return sorted(found, key=lambda one: one[2], reverse=True)


def clear() -> None:
    """Remove every kept graph."""
    for folder in _folders(cache_folder()):
        _remove(folder)


def _folders(root: Path | None) -> Iterator[Path]:
    """The entries, unfinished ones among them: nothing else that may lie in the folder."""
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
    """Remove an entry: renamed first, so that no reader finds half of one."""
    gone = folder
    if not folder.name.endswith(_PART):
        gone = folder.with_name(f"{folder.name}.{os.getpid()}.{time.monotonic_ns()}{_PART}")
        with suppress(OSError):
            os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@cache
def _makers() -> str:
    """The state of the code that graphs are made by: a graph of another version must not be found."""
    package = Path(__file__).parents[1]
    told = sorted(
        f"{folder} {name} {_state(Path(folder, name))}"
        for maker in _MAKERS
        for folder, _, names in os.walk(package / maker)
        if not folder.endswith("__pycache__")
        for name in names
    )
    return hashlib.sha256("\n".join([*told, *TASK_COLUMNS]).encode()).hexdigest()


def _mapped(path: Path) -> Array:
    """A column as its file's pages, none of which is copied."""
    column: Array = np.load(path, mmap_mode="r", allow_pickle=False) if path.stat().st_size > 4096 else np.load(path)
    return column.view(np.ndarray)


def _sum(column: Array) -> int:
    """A sum over the bytes of a column, eight at a time."""
    flat = np.ascontiguousarray(column).view(np.uint8).reshape(-1)
    words = len(flat) // 8 * 8
    return (int(flat[:words].view(np.uint64).sum()) + int(flat[words:].sum(dtype=np.uint64)) + len(flat)) % 2**64
