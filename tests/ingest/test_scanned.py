"""The scanner of bytes against decoding with msgspec, its reference: the same columns of whatever a file holds."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from tests.helpers import both_forms
from whatif.ingest import file_bytes, json_chunks, kineto, scanned
from whatif.ingest.events import Events
from whatif.ingest.kineto import read_kineto
from whatif.ingest.kineto_columns import ColumnBuilder
from whatif.ingest.kineto_fields import RawEvent
from whatif.ingest.scanned import Scanner
from whatif.ingest.scanned_columns import ScannedColumns
from whatif.runtime.errors import WhatifError
from whatif.runtime.loops import Loops

SCAN = "whatif.ingest._scan"
DECODER = msgspec.json.Decoder(list[RawEvent])

X = b'{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.5, "dur": 2, "args": {"stream": 7}}'
# Pieces that are put into events: sound ones, ones that need the decoder, and damage.
PIECES = (
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\x00", b"\xff", b"\xc3\xa9", b"\\ud800", b"\\u0041", b"\\n",
    b"null", b"true", b"1e5", b"-", b".5", b"01", b'"dur":5,', b'"args":{},', b'"name":7,', b" ", b"\n", b"9" * 20,
    b"1.25", b"NaN", b"e", b'"stream":"stream 7",', b'"ph":"X",', b'"ph":"s",', b'"id":3,', b'"cat":"fwdbwd",',
    b'"device":null,', b'{"ph":"X"},', b'"ts":"12.3456785",',
)  # fmt: skip


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that switches the scanner on and off; what it scans with is compiled."""
    if not scanned.LOOPS.compiled:
        both_forms(SCAN)
        pytest.skip("the scanner is not compiled")

    def switch(on: bool) -> None:
        monkeypatch.setattr(kineto.LOOPS, "compiled", on)

    return switch


def events_or_error(path: Path) -> Events | str:
    try:
        return read_kineto(path)
    except WhatifError as error:
        return str(error)


def assert_same(one: Events | str, other: Events | str) -> None:
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
        return
    for field in structs.fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        parts = getattr(mine, "__slots__", None) if not isinstance(mine, str | dict | list) else None
        for name in [None] if parts is None or isinstance(mine, np.ndarray) else parts:
            a, b = (mine, theirs) if name is None else (getattr(mine, name), getattr(theirs, name))
            if isinstance(a, np.ndarray):
                assert a.dtype == b.dtype, field.name
                assert a.tobytes() == b.tobytes(), field.name
            else:
                assert a == b, field.name


def assert_read_alike(path: Path, scans: Any) -> Events | str:
    scans(True)
    one = events_or_error(path)
    scans(False)
    assert_same(one, events_or_error(path))
    return one


def recordings(folder: Path) -> list[Path]:
    return sorted([*folder.rglob("*.json"), *folder.rglob("*.json.gz")])


def test_our_recordings_have_the_same_columns(own_traces: Path, scans: Any) -> None:
    for path in recordings(own_traces):
        assert_read_alike(path, scans)


@pytest.mark.slow
def test_public_recordings_have_the_same_columns(shared_traces: Path, scans: Any) -> None:
    n_events = 0
    for path in recordings(shared_traces):
        read = assert_read_alike(path, scans)
        n_events += 0 if isinstance(read, str) else len(read)
    assert n_events > 500_000


def test_most_events_of_our_recordings_are_scanned(own_traces: Path, scans: Any) -> None:
    """Nothing of these is odd: otherwise the scanner would be there for nothing."""
    for name in ("resnet18_cifar_cpu", "transformer_cpu_fused"):
        text = gzip.decompress((own_traces / f"{name}.json.gz").read_bytes())
        start = text.index(b"[", text.index(b'"traceEvents"')) + 1
        taken_bytes, is_odd = ScannedColumns(ColumnBuilder(Counter())).take(text[start:])
        assert is_odd
        assert text[start + taken_bytes :].lstrip().startswith(b"]")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_read_alike(
    seed: int, own_traces: Path, tmp_path: Path, scans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, text in enumerate(damaged(own_traces, seed, 60)):
        path = tmp_path / f"{number}.json"
        path.write_bytes(text)
        chance = random.Random(number)
        monkeypatch.setattr(json_chunks, "CHUNK_BYTES", chance.choice([4 << 20, 40_000, 10_000]))
        monkeypatch.setattr(file_bytes, "PIECE_BYTES", chance.choice([4 << 20, 700, 5_000]))
        monkeypatch.setattr(json_chunks, "_WINDOW_BYTES", chance.choice([32 << 10, 300, 2_000]))
        assert_read_alike(path, scans)


def damaged(folder: Path, seed: int, times: int) -> Iterator[bytes]:
    """Parts of recordings with bytes changed, lost, put in, or cut off."""
    chance = random.Random(seed)
    names = ("resnet18_cifar_cpu.json.gz", "profiler_cost_cpu/resnet50--shapes-memory-modules.trace.json.gz")
    texts = [gzip.decompress((folder / name).read_bytes()) for name in names]
    for _ in range(times):
        text = chance.choice(texts)
        first = text.index(b"[", text.index(b'"traceEvents"')) + 1
        begin = text.rindex(b"{", 0, text.index(b'"ph"', chance.randrange(first, len(text) - 100_000)))
        part = bytearray(text[:first] + text[begin : begin + chance.choice([3_000, 20_000, 60_000])])
        part += chance.choice([b"", b"]}", b'],"a":1}', b"\n]"])
        for _ in range(chance.choice([0, 1, 1, 2, 5])):
            place, what = chance.randrange(first, len(part)), chance.random()
            if what < 0.3:
                part[place] = chance.randrange(256)
            elif what < 0.5:
                del part[place : place + chance.choice([1, 1, 2, 10, 300])]
            elif what < 0.9:
                found = part.find(chance.choice([b'"', b",", b"{", b'": ']), place)
                place = (place if found < 0 else found) + chance.choice([0, 1])
                part[place:place] = chance.choice(PIECES)
            else:
                del part[place:]
        yield bytes(part)


def test_a_file_cut_at_any_byte_is_read_alike(tmp_path: Path, scans: Any) -> None:
    text = b'{"traceEvents": [' + b",\n".join([X, X.replace(b"7", b'"7"'), X.replace(b"1.5", b"-3")]) + b'], "a": 1}'
    for end in range(len(text)):
        path = tmp_path / "cut.json"
        path.write_bytes(text[:end])
        assert_read_alike(path, scans)


ODD_EVENTS = (
    b'{"ph": "X"}',
    b"{}",
    b"[]",
    b"7",
    X.replace(b'"X"', b"null"),
    X.replace(b'"X"', b'"\\u0058"'),
    X.replace(b'"X"', b'"B"'),
    X.replace(b'"name"', b'"n\\u0061me"'),
    X.replace(b'"k"', b'"\\u212a \xc3\xa9"'),
    X.replace(b'"k"', b'"\xff"'),
    X.replace(b'"k"', b'"\xed\xa0\x80"'),
    X.replace(b'"k"', b'"\\ud800"'),
    X.replace(b'"k"', b'"a\\qb"'),
    X.replace(b'"k"', b'"a\nb"'),
    X.replace(b'"k"', b"null"),
    X.replace(b'"k"', b"1.0"),
    X.replace(b'"k"', b"[1]"),
    X.replace(b'"k", ', b'"k", "name": "l", '),
    X.replace(b"1.5", b'"1.5"'),
    X.replace(b"1.5", b"1669783687464181.1235"),
    X.replace(b"1.5", b"1669783687464181.125"),
    X.replace(b"1.5", b"4611686018427387.904"),
    X.replace(b"1.5", b"4611686018427387.905"),
    X.replace(b"1.5", b"1e3"),
    X.replace(b"1.5", b"-2.0005"),
    X.replace(b"1.5", b"0.00250000000001"),
    X.replace(b"1.5", b"01.5"),
    X.replace(b"1.5", b"null"),
    X.replace(b'"dur": 2', b'"dur": -2'),
    X.replace(b'"stream": 7', b'"stream": "stream 7"'),
    X.replace(b'"stream": 7', b'"stream": ""'),
    X.replace(b'"stream": 7', b'"stream": null'),
    X.replace(b'"stream": 7', b'"stream": 4294967295'),
    X.replace(b'"stream": 7', b'"stream": 1e999'),
    X.replace(b'"stream": 7', b'"correlation": -1, "Correlation ID": "12"'),
    X.replace(b'"stream": 7', b'"grid": [1,2,3], "block": [32, 1, 1], "registers per thread": 8'),
    X.replace(b'"stream": 7', b'"Collective name": "allreduce", "In msg nelems": 4, "dtype": "Float", "Group size": 2'),
    X.replace(b'"stream": 7', b'"Collective name": "\xff"'),
    X.replace(b'"stream": 7', b'"x": {"a": [1, {"b": null}], "c": "d"}'),
    X.replace(b'"stream": 7', b'"x": [1,]'),
    X.replace(b'{"stream": 7}', b"[]"),
    X.replace(b'{"stream": 7}', b"{}"),
    X.replace(b'{"stream": 7}', b'{"x": ' + b"[" * 70 + b"]" * 70 + b"}"),
    X.replace(b"kernel", b"cpu_op").replace(b'"stream": 7', b'"Input Dims": [[1]], "Input type": ["float"]'),
    X.replace(b"kernel", b"cpu_op").replace(b'"stream": 7', b'"Call stack": "a;b"'),
    X.replace(b"kernel", b"cpu_op").replace(b'"stream": 7', b'"Input dims": null, "Fwd thread id": 0'),
    X.replace(b"kernel", b"cpu_op").replace(b'"stream": 7', b'"Input Dims": [], "Input dims": [[2]]'),
    X.replace(b"kernel", b"cuda_sync").replace(b'"stream": 7', b'"cuda_sync_kind": "Stream", "wait_on_stream": 3'),
    X.replace(b"kernel", b"Operator").replace(b'"k"', b'"ProfilerStep#3"'),
    X.replace(b"kernel", b"python_function").replace(b'"k"', b'"nn.Module: Linear_0"'),
    X.replace(b"kernel", b"python_function"),
    X.replace(b"kernel", b"python_function").replace(b'"stream"', b'"Python id"'),
    X.replace(b"kernel", b"python_function").replace(b'"stream"', b'"Python id"').replace(b'"dur": 2', b'"dur": -2'),
    X.replace(b"kernel", b"python_function").replace(b'"k"', b'"\\u006en.Module: Linear_0"'),
    X.replace(b"kernel", b"python_function").replace(b'"name": "k", ', b""),
    X.replace(b"kernel", b"Python_Function").replace(b'"stream": 7', b""),
    X.replace(b"kernel", b"mine"),
    b'{"ph": "s", "cat": "fwdbwd", "id": 1, "pid": 1, "tid": 2, "ts": 3}',
    b'{"ph": "f", "cat": "fwdbwd", "id": 1, "pid": 1, "tid": 3, "ts": 5}',
    b'{"ph": "f", "cat": "fwdbwd", "id": "1", "pid": 1, "tid": 3, "ts": 5}',
    b'{"ph": "s", "cat": "fwdbwd", "id": true, "pid": 1, "ts": 4}',
    b'{"ph": "i", "name": "[memory]", "ts": 1, "args": {"Bytes": 64, "Addr": 1, "Total Allocated": 64}}',
    b'{"ph": "i", "name": "[memory]", "ts": 1, "args": {"bytes": -64, "Addr": "12", "Device Type": 1, "Device Id": 0}}',
    b'{"ph": "i", "name": "[memory]", "ts": 1, "args": {"Bytes": 99999999999999, "Addr": 1}}',
    b'{"ph": "i", "name": "[memory]", "ts": 1}',
    b'{"ph": "i", "name": "[memory]", "args": {"Bytes": 64, "Addr": 1}}',
    b'{"ph": "i", "name": "[memory]", "ts": 1, "args": {"Bytes": 64, "Addr": 1, "stream": 1e999}}',
    X.replace(b'"stream": 7', b'"Device Id": 1e999'),
    b'{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}',
    b'{"ph": "M", "name": "process_name", "pid": 1e999}',
)  # fmt: skip


@pytest.mark.parametrize("loops", both_forms(SCAN))
def test_odd_events_are_taken_as_they_are_decoded_or_left(loops: Loops) -> None:
    """Of each odd event between two usual ones the columns are those of decoding, whichever form reads them."""
    n_taken = 0
    for event in ODD_EVENTS:
        text = b",".join([X, event, X])
        builder = ColumnBuilder(Counter())
        taken_bytes, is_odd = ScannedColumns(builder, Scanner(loops)).take(text)
        if is_odd:
            assert taken_bytes in (len(X), 0)  # 0: what is decoded beside the scanner is damaged
            continue
        n_taken += 1
        assert taken_bytes == len(text)
        reference = ColumnBuilder(Counter())
        reference.add(DECODER.decode(b"[" + text + b"]"))
        assert_same(builder.build({}, None), reference.build({}, None))
    assert 20 < n_taken < len(ODD_EVENTS) - 15


@pytest.mark.parametrize("loops", both_forms(SCAN))
def test_room_grows_with_texts_and_pairs(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanned, "_MOST_ROWS", 64)
    n_events = 3_000 if loops.compiled else 1_100
    same: dict[str, Any] = {"ph": "X", "cat": "cpu_op", "dur": 1}
    events = [
        same | {"name": f"{i} " * (i % 90), "pid": i, "tid": -i, "ts": i, "args": {"Input Dims": [[i]]}}
        for i in range(n_events)
    ]
    text = json.dumps(events).encode()
    builder, reference = ColumnBuilder(Counter()), ColumnBuilder(Counter())
    taken_bytes, _ = ScannedColumns(builder, Scanner(loops)).take(text[1:])
    assert text[1 + taken_bytes :] == b"]"
    reference.add(DECODER.decode(text))
    assert_same(builder.build({}, None), reference.build({}, None))


def test_what_the_scanner_takes_the_decoder_takes(own_traces: Path) -> None:
    """Damage in an unread part raises as well."""
    for value in (
        b"01",
        b"1.",
        b"nul",
        b'"\\q"',
        b'"\x01"',
        b"[1 2]",
        b'{"a" 1}',
        b'{"a":1,}',
        b"NaN",
        b"-",
        b"1e",
        b'"\\u12g4"',
    ):
        text = X.replace(b'"stream": 7', b'"x": ' + value)
        with pytest.raises(msgspec.DecodeError):
            DECODER.decode(b"[" + text + b"]")
        assert Scanner().scan(text, 0) is None, value
