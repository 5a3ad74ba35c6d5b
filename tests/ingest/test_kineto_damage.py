"""Damaged, truncated and hostile files: what is sound is read, what is not is counted, and it ends."""

from __future__ import annotations

import contextlib
import gzip
import inspect
import json
import os
import tempfile
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ingest.kineto_oracle import as_rows, check_columns, read_bytes
from whatif.ingest import file_bytes, json_chunks, scanned
from whatif.ingest.events import DROPPED_FAR, Events
from whatif.ingest.file_bytes import ends_early
from whatif.ingest.kineto import FOREIGN_CATEGORIES, read_kineto
from whatif.runtime.errors import WhatifError


def event(index: int, **fields: Any) -> dict[str, Any]:
    args = {"External id": index, "Input Dims": [[index, 2], []], "Input type": ["float", ""]}
    row = {"ph": "X", "cat": "cpu_op", "name": f"op {index}", "pid": 1, "tid": 2, "ts": index, "dur": 1, "args": args}
    return row | fields


def text_of(n_events: int, indent: int | None = 1) -> bytes:
    trace = {"schemaVersion": 1, "traceEvents": [event(i) for i in range(n_events)], "traceName": "x"}
    return json.dumps(trace, indent=indent).encode()


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], Events]:
    def read_text(text: bytes) -> Events:
        path = tmp_path / "trace"
        path.write_bytes(text)
        events = read_kineto(path)
        check_columns(events)
        return events

    return read_text


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_chunks, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(file_bytes, "PIECE_BYTES", 700)


# Python 3.14 reads as deep as the stack of its thread goes.
TOO_DEEP = b"[" * 2_000_000 + b"]" * 2_000_000


def names_of(events: Events) -> list[str]:
    return [events.names[code] for code in events.name.tolist()]


def all_but(*missing: int) -> list[str]:
    return [f"op {i}" for i in range(10) if i not in missing]


@pytest.mark.parametrize("chunks", ["one chunk", "small chunks"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"ts": 4', b'"ts": NaN'),
        (b'"ts": 4', b'"ts": Infinity'),
        (b'"ts": 4', b'"ts": 4.5.6'),
        (b'"ts": 4', b'"ts": '),
        (b'"name": "op 4"', b'"name": "op \\q4"'),
        (b'"name": "op 4"', b'"name": "op \xff4"'),
        (b'"name": "op 4"', b'"name": "op \\ud800"'),
        (b'"name": "op 4"', b'"name": "op 4'),  # the quote is lost
        (b'"name": "op 4"', b'"name": ["op 4"]'),
        (b'"name": "op 4"', b'"name": {"op 4": {}'),  # a brace is lost
        (b'"name": "op 4"', b'"name": "op 4"]'),  # a bracket too many
        (b'"name": "op 4"', b'"name": "op 4", "x": ' + TOO_DEEP),
        (b'"name": "op 4"', b'"name": "op 4", "x": ' + b"[" * 5000),
        (b'"name": "op 4"', b'"name" "op 4"'),
        (b'"name": "op 4"', b'"name": "op \n4"'),
    ],
)
def test_one_bad_event_costs_one_event(
    read: Callable[[bytes], Events], request: pytest.FixtureRequest, chunks: str, old: bytes, new: bytes
) -> None:
    if chunks == "small chunks":
        request.getfixturevalue("small_chunks")
    text = text_of(10)
    assert old in text
    events = read(text.replace(old, new))
    assert names_of(events) == all_but(4)
    assert events.dropped == {"invalid JSON": 1}
    assert events.header == {"schemaVersion": 1, "traceName": "x", FOREIGN_CATEGORIES: {}}


@pytest.mark.parametrize("depth", [10, 500, 2_000, 5_000, 12_000, 50_000])
def test_a_deep_event_costs_at_most_itself(read: Callable[[bytes], Events], depth: int) -> None:
    """How deep the decoder goes is up to the interpreter: 3.13 lets compiled code go ten times deeper than 3.11."""
    deep = b'"name": "op 4", "x": ' + b"[" * depth + b"]" * depth
    events = read(text_of(10).replace(b'"name": "op 4"', deep))
    lost = events.dropped["invalid JSON"]
    assert names_of(events) == (all_but(4) if lost else all_but())
    assert lost <= 1


def test_a_pipe_is_read_like_a_file(tmp_path: Path, read: Callable[[bytes], Events]) -> None:
    """It has neither a size nor a second reading: gzip data that is damaged is looked at twice."""
    whole = gzip.compress(text_of(2000))
    damaged = whole[: len(whole) // 2] + bytes(40) + whole[len(whole) // 2 + 40 :]
    for content in (text_of(10), whole, damaged):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        writer = threading.Thread(target=pipe.write_bytes, args=(content,), daemon=True)
        writer.start()
        done: list[tuple[int, int]] = []
        found, expected = read_kineto(pipe, progress=lambda *at, done=done: done.append(at)), read(content)
        writer.join()
        pipe.unlink()
        assert names_of(found) == names_of(expected)
        assert found.dropped == expected.dropped
        assert done[0][1] == len(content)


def test_an_empty_pipe_is_an_empty_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"",), daemon=True)
    writer.start()
    with pytest.raises(WhatifError, match="got an empty file"):
        read_kineto(tmp_path / "pipe")
    writer.join()


def test_a_brace_too_many_leaves_half_an_event(read: Callable[[bytes], Events]) -> None:
    events = read(text_of(10).replace(b'"name": "op 4"', b'"name": "op 4"}'))
    assert names_of(events) == all_but(4)
    assert events.dropped == {"no timestamp": 1, "invalid JSON": 1}


def test_times_and_durations_of_a_broken_clock_are_left_out(read: Callable[[bytes], Events]) -> None:
    broken = [event(10, ts=2e12), event(11, dur=2e12)]
    events = read(json.dumps([*(event(i) for i in range(3)), *broken]).encode())
    assert len(events) == 3
    assert events.dropped == {DROPPED_FAR: 2}


@pytest.mark.parametrize("separator", [b"", b" ", b",,", b" ,\r\n\t "])
def test_odd_separators_cost_nothing(read: Callable[[bytes], Events], small_chunks: None, separator: bytes) -> None:
    rows = separator.join(json.dumps(event(i)).encode() for i in range(10))
    events = read(b"[" + rows + b"]")
    assert names_of(events) == all_but()
    assert not events.dropped


def test_what_is_no_object_is_counted(read: Callable[[bytes], Events]) -> None:
    rows = [event(0), None, event(1), 17, "}, {", [event(2)], event(3), ["]"], event(4)]
    events = read(json.dumps(rows).encode())
    assert names_of(events) == ["op 0", "op 1", "op 3", "op 4"]
    assert events.dropped == {"invalid JSON": 3}  # a stretch of what is no event counts one


def test_the_last_of_duplicate_keys_counts(read: Callable[[bytes], Events]) -> None:
    events = read(b'[{"ph":"M","ph":"X","ts":1,"ts":2,"dur":3,"dur":4,"cat":"kernel","args":{"stream":1,"stream":5}}]')
    assert (events.start_ns.tolist(), events.duration_ns.tolist(), events.stream.tolist()) == ([2000], [4000], [5])


def test_invalid_utf8_outside_of_what_is_read_costs_nothing(read: Callable[[bytes], Events]) -> None:
    assert names_of(read(text_of(10).replace(b'"float"', b'"flo\xffat"'))) == all_but()


def test_a_damaged_header_costs_no_event(read: Callable[[bytes], Events]) -> None:
    events = read(text_of(10).replace(b'"schemaVersion": 1', b'"schemaVersion": }'))
    assert names_of(events) == all_but()
    assert events.header == {"traceName": "x", FOREIGN_CATEGORIES: {}}
    assert events.dropped == {"damaged header": 1}


@pytest.mark.parametrize("indent", [None, 1])
def test_truncated_at_every_byte(read: Callable[[bytes], Events], small_chunks: None, indent: int | None) -> None:
    text = text_of(6, indent)
    array_start, array_end = text.index(b"[") + 1, text.rindex(b"]") + 1
    ends = [text.index(f'"op {i}"'.encode()) for i in range(6)]
    ends = [text.index(b"}", text.index(b"}", end) + 1) + 1 for end in ends]
    for size_bytes in range(array_start, len(text)):
        events = read(text[:size_bytes])
        assert len(events) == sum(end <= size_bytes for end in ends)
        assert events.dropped[ends_early(size_bytes)] == (size_bytes < array_end)
        assert events.ends_early_at == size_bytes
        assert set(events.dropped) <= {ends_early(size_bytes), "damaged header"}


@pytest.mark.parametrize("inflater", ["isal", "zlib"])
def test_truncated_gzip_at_every_byte(
    read: Callable[[bytes], Events], monkeypatch: pytest.MonkeyPatch, inflater: str
) -> None:
    if inflater == "zlib":
        monkeypatch.setattr(file_bytes, "fast_zlib", zlib)
    text = text_of(20)
    compressed = gzip.compress(text)
    n_before = 0
    for size_bytes in range(1, len(compressed)):
        try:
            events = read(compressed[:size_bytes])
        except WhatifError as error:
            refusal = str(error)
            assert n_before == 0
            assert f": {ends_early(size_bytes)}, before its first event;" in refusal
            continue
        assert len(events) >= n_before
        assert events.dropped[ends_early(size_bytes)] == 1
        n_before = len(events)
    assert n_before == 20  # without the checksum alone, everything is there


@pytest.mark.parametrize("inflater", ["isal", "zlib"])
def test_a_wrong_checksum_costs_no_event(
    read: Callable[[bytes], Events], monkeypatch: pytest.MonkeyPatch, inflater: str
) -> None:
    if inflater == "zlib":
        monkeypatch.setattr(file_bytes, "fast_zlib", zlib)
    compressed = bytearray(gzip.compress(text_of(5000)))
    compressed[-6] ^= 1
    events = read(bytes(compressed))
    assert len(events) == 5000
    assert events.dropped == {"damaged gzip data": 1}


@pytest.mark.parametrize("inflater", ["isal", "zlib"])
def test_gzip_damaged_in_the_middle(
    read: Callable[[bytes], Events], monkeypatch: pytest.MonkeyPatch, inflater: str
) -> None:
    if inflater == "zlib":
        monkeypatch.setattr(file_bytes, "fast_zlib", zlib)
    text = text_of(3000)
    compressed = gzip.compress(text)
    middle = len(compressed) // 2
    events = read(compressed[:middle] + b"\xff" * 40 + compressed[middle + 40 :])
    sound_bytes = len(zlib.decompressobj(31).decompress(compressed[:middle]))
    n_sound = text[:sound_bytes].count(b'"name"') - 1
    assert names_of(events)[:n_sound] == [f"op {i}" for i in range(n_sound)]
    assert events.dropped["damaged gzip data"] == 1


def test_gzip_in_several_members_and_padded(read: Callable[[bytes], Events]) -> None:
    text = text_of(100)
    events = read(gzip.compress(text[:5000]) + gzip.compress(text[5000:]) + bytes(100))
    assert len(events) == 100
    assert not events.dropped


def test_real_trace_truncated(read: Callable[[bytes], Events], shared_traces: Path) -> None:
    path = shared_traces / "hta" / "alexnet_fwd_a100.json.gz"
    text = read_bytes(path)
    rows = as_rows(read_kineto(path))
    compressed = path.read_bytes()
    for cut in range(40):
        size_bytes = 5000 + (len(text) - 5000) * cut // 40
        events = read(text[:size_bytes])
        assert set(as_rows(events)) <= set(rows) if cut == 0 else len(events) > 0
        assert events.dropped[ends_early(size_bytes)] == 1
        if cut > 10:
            events = read(compressed[: len(compressed) * cut // 40])
            assert events.ends_early_at == len(compressed) * cut // 40
    assert as_rows(read(text[: text.rindex(b"]") + 1])) == rows


SMALL = text_of(8, None)
EDIT = st.tuples(st.sampled_from(["flip", "insert", "delete"]), st.integers(0, len(SMALL) - 1), st.binary(max_size=4))


def edited(text: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for kind, position, data in edits:
        length = max(1, len(data))
        if kind == "flip":
            text = (
                text[:position]
                + bytes(byte ^ 0x15 for byte in text[position : position + length])
                + text[position + length :]
            )
        else:
            text = (
                text[:position] + (data if kind == "insert" else b"") + text[position + (kind == "delete") * length :]
            )
    return text


def check_damaged(content: bytes, n_sound: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace")
        path.write_bytes(content)
        try:
            events = read_kineto(path)
        except WhatifError:
            assert n_sound == 0
            return
    check_columns(events)
    assert {f"op {i}" for i in range(n_sound)} <= set(names_of(events))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(EDIT, min_size=1, max_size=4))
def test_any_damage_leaves_the_events_before_it(edits: list[tuple[str, int, bytes]]) -> None:
    intact = SMALL[: min(position for _, position, _ in edits)]
    # The event right before the damage may grow a tail; the ones before it may not change.
    check_damaged(edited(SMALL, edits), max(0, intact.count(b'{"ph"') - 1))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(EDIT, min_size=1, max_size=3))
def test_any_damage_of_a_gzip_is_survived(edits: list[tuple[str, int, bytes]]) -> None:
    compressed = gzip.compress(SMALL)
    check_damaged(edited(compressed, [(k, p % len(compressed), d) for k, p, d in edits]), 0)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", b"[", b'{"traceEvents":[', b'[{"ph":"X"', b"\x1f\x8b\x08\x00"]))
def test_any_bytes_are_survived(data: bytes, start: bytes) -> None:
    check_damaged(start + data, 0)


def hostile(kind: str, size_bytes: int) -> bytes:
    row = json.dumps(event(0)).encode()
    start, unit, end = {
        "blanks": (b"", b" ", b""),
        "blanks in the array": (b"[", b" ", b""),
        "blanks between events": (b"[" + row, b" ", b"," + row + b"]"),
        "blanks in the header": (b'{"a":', b" ", b""),
        "blanks in an event": (b'[{"ph":', b" ", b""),
        "open brackets": (b"", b"[", b""),
        "open brackets in the array": (b'{"traceEvents":[', b"[", b""),
        "open brackets in an event": (b'[{"ph":', b"[", b""),
        "objects in objects": (b"", b'{"a":', b""),
        "objects in objects in the array": (b"[", b'{"a":', b""),
        "objects in objects that look like events": (b"[", b'{"args":', b""),
        "damaged objects that look like events": (b"[", b'{"name":{},', b""),
        "closed brackets": (b"[{", b"}", b""),
        "closed brackets of the array": (b"[" + row, b"]", b""),
        "an endless string": (b'[{"name":"', b"x", b""),
        "an endless string of escapes": (b'[{"name":"', b'\\"', b""),
        "commas": (b"[{}", b",", b""),
        "numbers": (b"[{}", b",1", b""),
        "quotes": (b"[{}", b'"', b""),
        "events that lack a brace": (b"[", row[:-1] + b",", b"]"),
        "events that lack a quote": (b"[", row.replace(b'op 0"', b"op 0") + b",", b"]"),
        "events that hold events": (b"[" + row[:-2], b',"x":[' + row + b"," + row + b"]", b"}}]"),
    }[kind]
    return start + unit * (size_bytes // len(unit)) + end


HOSTILE = [line.split('"')[1] for line in inspect.getsource(hostile).splitlines() if line.startswith(" " * 8 + '"')]


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_take_linear_time_and_bounded_memory(
    kind: str, read: Callable[[bytes], Events], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Scaled down 80 times, so that megabytes do what hundreds of megabytes would.
    monkeypatch.setattr(file_bytes, "PIECE_BYTES", 50_000)
    monkeypatch.setattr(json_chunks, "CHUNK_BYTES", 50_000)
    monkeypatch.setattr(json_chunks, "MAX_EVENT_BYTES", 100_000)
    monkeypatch.setattr(json_chunks, "_MAX_HEADER_BYTES", 200_000)
    monkeypatch.setattr(scanned, "_MOST_ROWS", 256)

    def measure(size_bytes: int, measure_memory: bool) -> tuple[float, int]:
        text = hostile(kind, size_bytes)
        start_s = time.process_time()
        if measure_memory:
            tracemalloc.start()
        with contextlib.suppress(WhatifError):
            read(text)
        peak_bytes = tracemalloc.get_traced_memory()[1] if measure_memory else 0
        tracemalloc.stop()
        return time.process_time() - start_s, peak_bytes

    small_s, _ = measure(500_000, False)
    large_s, _ = measure(2_000_000, False)
    assert large_s < 8 * small_s + 1  # quadratic would be 16 times
    _, peak_bytes = measure(1_000_000, True)
    assert peak_bytes < 3.5 * 1_000_000


@pytest.mark.slow
def test_a_gzip_bomb_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * 100_000_000 + json.dumps(event(0)).encode() + b"]", 1))
    tracemalloc.start()
    events = read_kineto(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(events) == 1
    assert peak_bytes < 40_000_000


@pytest.mark.slow
def test_memory_stays_below_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_bytes, "PIECE_BYTES", 200_000)
    monkeypatch.setattr(json_chunks, "CHUNK_BYTES", 200_000)
    path = tmp_path / "trace.json"
    path.write_bytes(json.dumps([event(i % 500, ts=i) for i in range(50_000)], indent=1).encode())
    tracemalloc.start()
    assert len(read_kineto(path)) == 50_000
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1.5 * path.stat().st_size
