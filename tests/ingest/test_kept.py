"""Graphs in the cache folder are those that are read, whatever happens to files, entries and other processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import whatif
from whatif import TaskGraph
from whatif.cli.main import main
from whatif.graph.columns import TASK_COLUMNS
from whatif.ingest import kept
from whatif.ingest.find_steps import StepRule
from whatif.ingest.saved_graph import arrays_of

RECORDING = "resnet18_cifar_cpu.json.gz"


@pytest.fixture
def trace(own_traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a recording, and an empty cache folder."""
    monkeypatch.setenv(kept.CACHE_VARIABLE, str(tmp_path / "cache"))
    return Path(shutil.copy(own_traces / RECORDING, tmp_path / RECORDING))


def assert_same(one: TaskGraph, other: TaskGraph) -> None:
    """Hold every field of two graphs alike, bit for bit."""
    for group, columns in arrays_of(one).items():
        others = arrays_of(other)[group]
        assert columns.keys() == others.keys()
        for name, column in columns.items():
            assert column.dtype == others[name].dtype
            assert column.tobytes() == others[name].tobytes(), name
    arrays = {*TASK_COLUMNS, "attached", "dependencies", "waits", "order"}
    for field in fields(one):
        if field.name not in arrays:
            assert repr(getattr(one, field.name)) == repr(getattr(other, field.name)), field.name


def entry_of(trace: Path) -> kept.Entry:
    entry = kept.entry_of(trace, StepRule())
    assert entry is not None
    return entry


def test_a_second_reading_takes_the_same_graph_from_the_cache(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = whatif.read(trace, cache=True)
    monkeypatch.setattr("whatif.ingest.read_events.read_events", lambda *_: pytest.fail("read again"))
    second = whatif.read(trace, cache=True)
    assert_same(first, second)
    assert whatif.apply(first, "amp").to_dict() == whatif.apply(second, "amp").to_dict()
    assert not second.duration_ns.flags.writeable
    assert type(second.duration_ns) is np.ndarray


def test_columns_are_files_that_numpy_maps_without_unpickling(trace: Path) -> None:
    graph = whatif.read(trace, cache=True)
    folder = entry_of(trace).folder
    mapped = np.load(folder / "columns.duration_ns.npy", mmap_mode="r", allow_pickle=False)
    assert np.array_equal(mapped, graph.duration_ns)
    assert {file.suffix for file in folder.iterdir()} == {".npy", ".json"}


def test_nothing_is_kept_unless_it_is_asked_for(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whatif.read(trace)
    assert main(["info", "--no-cache", str(trace)]) == 0
    assert kept.contents() == []
    assert main(["info", str(trace)]) == 0
    assert len(kept.contents()) == 1
    monkeypatch.setenv(kept.CACHE_VARIABLE, "")
    assert kept.entry_of(trace, StepRule()) is None


def test_a_small_file_a_folder_and_a_missing_file_are_not_kept(trace: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.json"
    small.write_text("{}")
    for path in (small, tmp_path, tmp_path / "missing.json", Path("\0")):
        assert kept.entry_of(path, StepRule()) is None


def test_the_place_follows_the_file_its_time_its_bytes_and_the_steps_that_were_asked_for(trace: Path) -> None:
    place = entry_of(trace).folder
    times = trace.stat()
    assert kept.entry_of(trace, StepRule(3, None)).folder != place  # type: ignore[union-attr]
    os.utime(trace, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert entry_of(trace).folder != place
    os.utime(trace, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert entry_of(trace).folder == place
    changed = bytearray(trace.read_bytes())
    changed[len(changed) // 2] ^= 1
    trace.write_bytes(changed)
    os.utime(trace, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert entry_of(trace).folder != place


def test_another_version_of_the_reader_finds_nothing(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = entry_of(trace).folder
    monkeypatch.setattr(kept, "_makers", lambda: "another")
    assert entry_of(trace).folder != place


def test_a_file_that_changes_while_it_is_read_is_not_kept(trace: Path) -> None:
    graph, entry = whatif.read(trace), entry_of(trace)
    trace.write_bytes(trace.read_bytes() + b" ")
    kept.keep(entry, graph)
    assert kept.contents() == []


@pytest.mark.parametrize("damage", ["zeros", "cut", "missing", "no column", "text", "empty text", "pickle"])
def test_a_damaged_entry_is_read_anew(trace: Path, damage: str) -> None:
    first = whatif.read(trace, cache=True)
    entry = entry_of(trace)
    column, rest = entry.folder / "columns.duration_ns.npy", entry.folder / "graph.json"
    if damage == "zeros":
        column.write_bytes(column.read_bytes()[:-800] + bytes(800))
    elif damage == "cut":
        column.write_bytes(column.read_bytes()[:-8])
    elif damage == "missing":
        column.unlink()
    elif damage == "no column":
        column.write_bytes(b"")
    elif damage == "pickle":
        np.save(column, np.array([{}], dtype=object))
    else:
        rest.write_bytes(b"" if damage == "empty text" else rest.read_bytes()[:-100])
    assert_same(first, whatif.read(trace, cache=True))
    recalled = kept.recall(entry)
    if damage == "missing":  # as of another process that is removing it
        kept.clear()
        assert kept.recall(entry) is None
    else:
        assert recalled is not None


def test_the_least_recently_used_go_first(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = whatif.read(trace, cache=True)
    size_bytes = kept.contents()[0][1]
    monkeypatch.setattr(kept, "MOST_BYTES", int(2.5 * size_bytes))
    entries = [entry_of(trace)]
    for number in (1, 2):
        copy = Path(shutil.copy(trace, tmp_path / f"{number}.json.gz"))
        entries.append(entry_of(copy))
        os.utime(entries[0].folder)  # used again
        kept.keep(entries[number], graph)
        os.utime(entries[number].folder, (number, number))
    kept.keep(entry_of(Path(shutil.copy(trace, tmp_path / "3.json.gz"))), graph)
    assert [entry.folder.is_dir() for entry in entries] == [True, False, False]
    monkeypatch.setattr(kept, "MOST_BYTES", size_bytes)
    other = entry_of(Path(shutil.copy(trace, tmp_path / "4.json.gz")))
    kept.keep(other, graph)  # larger than half of the room
    assert not other.folder.exists()


def test_a_folder_that_cannot_be_written_is_no_error(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(kept.CACHE_VARIABLE, str(tmp_path / "file"))
    assert len(whatif.read(trace, cache=True))
    assert kept.contents() == []


def test_threads_and_processes_that_read_at_once_get_the_same(trace: Path) -> None:
    ask = f"import whatif; print(whatif.apply(whatif.read({str(trace)!r}, cache=True), 'amp').predicted_ms)"
    processes = [subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE) for _ in range(2)]
    found: list[TaskGraph] = []
    threads = [threading.Thread(target=lambda: found.append(whatif.read(trace, cache=True))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = {float(process.communicate()[0]) for process in processes}
    answers |= {whatif.apply(graph, "amp").predicted_ms for graph in found}
    assert len(found) == 4
    assert len(answers) == 1
    assert [folder.name for folder, _, _ in kept.contents()] == [entry_of(trace).folder.name]


def test_an_entry_that_is_removed_while_it_is_used_stays_readable(trace: Path) -> None:
    first = whatif.read(trace, cache=True)
    second = whatif.read(trace, cache=True)
    kept.clear()
    assert kept.contents() == []
    assert_same(first, second)


def test_the_command_shows_and_clears(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whatif.read(trace, cache=True)
    assert main(["cache"]) == 0
    assert "1 recording," in capsys.readouterr().out
    assert main(["cache", "--clear", "--json"]) == 0
    assert '"removed": 1' in capsys.readouterr().out
    assert kept.contents() == []


def test_nothing_else_in_the_folder_is_removed(trace: Path) -> None:
    whatif.read(trace, cache=True)
    other = entry_of(trace).folder.parent / "mine"
    other.mkdir()
    kept.clear()
    assert other.is_dir()


def test_every_recording_is_kept_exactly(own_traces: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LEAST_FILE_BYTES", 0)
    for path in sorted(own_traces.glob("*.json.gz")):
        graph = whatif.read(path, cache=True)
        recalled = kept.recall(entry_of(path))
        assert recalled is not None, path
        assert_same(graph, recalled)


@pytest.mark.slow
def test_every_public_recording_is_kept_exactly(
    shared_traces: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LEAST_FILE_BYTES", 0)
    n_kept = 0
    for path in sorted([*shared_traces.rglob("*.json"), *shared_traces.rglob("*.json.gz")]):
        try:
            graph = whatif.read(path, cache=True)
        except whatif.WhatifError:
            continue
        recalled = kept.recall(entry_of(path))
        if recalled is not None:  # a rank's folder or a timeline of whatif's is not kept
            assert_same(graph, recalled)
            n_kept += 1
    assert n_kept > 40
