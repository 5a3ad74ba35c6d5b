"""Vocabularies, odd values, tables and refusals, on traces made by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.ingest.kineto_oracle import check_columns
from whatif.ingest.events import MISSING, EventCategory, Events
from whatif.ingest.kineto import FOREIGN_CATEGORIES, read_kineto
from whatif.runtime.errors import WhatifError


def event(name: str = "aten::add", cat: str = "cpu_op", ts: Any = 1, dur: Any = 1, **fields: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": dur} | fields


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read_trace(trace: Any) -> Events:
        path = tmp_path / "trace.json"
        path.write_bytes(trace if isinstance(trace, bytes) else json.dumps(trace).encode())
        events = read_kineto(path)
        check_columns(events)
        return events

    return read_trace


@pytest.mark.parametrize(
    ("cat", "name", "category"),
    [
        ("Kernel", "k", EventCategory.KERNEL),
        ("kernel", "k", EventCategory.KERNEL),
        ("Memcpy", "k", EventCategory.MEMCPY),
        ("gpu_memset", "k", EventCategory.MEMSET),
        ("Runtime", "k", EventCategory.RUNTIME),
        ("cuda_driver", "k", EventCategory.RUNTIME),
        ("CUDA_SYNC", "k", EventCategory.SYNC),
        ("overhead", "k", EventCategory.OVERHEAD),
        ("Operator", "aten::add", EventCategory.CPU_OP),
        ("Operator", "ProfilerStep#3", EventCategory.ANNOTATION),
        ("Operator", "Optimizer.step#SGD.step", EventCategory.ANNOTATION),
        ("Operator", "Optimizer.zero_grad#SGD.zero_grad", EventCategory.ANNOTATION),
        ("Operator", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", EventCategory.ANNOTATION),
        ("python_function", "nn.Module: Linear_0", EventCategory.MODULE),
    ],
)
def test_both_vocabularies(read: Any, cat: str, name: str, category: EventCategory) -> None:
    assert read([event(name, cat)]).category.tolist() == [category]


@pytest.mark.parametrize("cat", ["python_function", "gpu_user_annotation", "Trace"])
def test_ignored_without_a_word(read: Any, cat: str) -> None:
    events = read([event("x", cat)])
    assert len(events) == 0
    assert not events.dropped
    assert events.header == {FOREIGN_CATEGORIES: {}}


def test_begin_events_are_counted(read: Any) -> None:
    assert read([event() | {"ph": "B"}, event() | {"ph": "E"}]).dropped == {"begin without duration": 1}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ts": None}, "no timestamp"),
        ({"ts": "soon"}, "unreadable timestamp"),
        ({"ts": 1e300}, "timestamp out of range"),
        ({"dur": None}, "no duration"),
        ({"dur": -1}, "negative duration"),
        ({"dur": []}, "unreadable duration"),
        ({"dur": 1e300}, "duration out of range"),
        ({"ts": None, "dur": -1}, "no timestamp"),
    ],
)
def test_times_that_are_none_cost_their_event(read: Any, fields: dict[str, Any], reason: str) -> None:
    events = read([event("before"), event("bad") | fields, event("after")])
    assert events.names == ["before", "after"]
    assert events.dropped == {reason: 1}


def test_absent_times(read: Any) -> None:
    bad = event()
    del bad["dur"]
    assert read([bad]).dropped == {"no duration": 1}


def test_display_time_unit_changes_nothing(read: Any) -> None:
    events = read({"displayTimeUnit": "ns", "baseTimeNanoseconds": 5, "traceEvents": [event(ts=2, dur=1.5)]})
    assert (events.start_ns.tolist(), events.duration_ns.tolist()) == ([2000], [1500])
    assert events.header == {"displayTimeUnit": "ns", "baseTimeNanoseconds": 5, FOREIGN_CATEGORIES: {}}


def test_order_is_start_then_longest_then_file(read: Any) -> None:
    rows = [event("c", ts=2), event("b", ts=1, dur=1), event("d", ts=1, dur=1), event("a", ts=1, dur=9)]
    events = read(rows)
    assert [events.names[code] for code in events.name] == ["a", "b", "d", "c"]


def test_python_functions_keep_their_starts_and_tracks(read: Any) -> None:
    rows = [
        event("model.py(3): forward", "python_function", ts=3, tid=5),
        event("nn.Module: Linear_0", "python_function", ts=1, tid=6),
        event("numpy/core.py(7): full", "python_function", ts=2, tid=5, args={"Python id": 1}),
        event("<built-in function len>", "Python_Function", ts=2, tid=7),
    ]
    events = read(rows)
    assert events.tracks == [("1", "5"), ("1", "6"), ("1", "7")]
    assert events.python.time_ns.tolist() == [1000, 2000, 2000, 3000]
    assert events.python.track.tolist() == [1, 0, 2, 0]
    assert [events.names[code] for code in events.name] == ["nn.Module: Linear_0"]


def test_gpu_place_comes_from_args_or_from_the_track(read: Any) -> None:
    rows = [
        event("k", "Kernel", ts=1, pid=0, tid="stream 7"),
        event("k", "kernel", ts=2, pid=3, tid=4, args={"device": 1, "stream": 20}),
        event("k", "kernel", ts=3, pid="", tid=None, args={"device": "2", "stream": None}),
        event("k", "cuda_sync", ts=4, pid=0, tid=9, args={"device": 0, "stream": -1}),
        event("cudaLaunchKernel", "cuda_runtime", ts=5, args={"stream": "0x0"}),
    ]
    events = read(rows)
    assert events.device.tolist() == [0, 1, 2, 0, MISSING]
    assert events.stream.tolist() == [7, 20, MISSING, MISSING, MISSING]
    assert events.tracks == [("0", "stream 7"), ("3", "4"), ("", ""), ("0", "9"), ("1", "2")]


def test_one_track_however_its_numbers_are_written(read: Any) -> None:
    assert read([event(pid=1), event(pid="1"), event(tid="2")]).tracks == [("1", "2")]


def test_identifiers_in_every_spelling(read: Any) -> None:
    rows = [
        event(ts=1, args={"correlation": 5, "External id": 6}),
        event(ts=2, args={"Correlation ID": 5, "external id": 6}),
        event(ts=3, args={"correlation": "5", "External id": 6.0}),
        event(ts=4, args={"correlation": [5], "External id": 2**70}),
        event(ts=5, args="none"),
        event(ts=6, args={"Sequence number": 8, "Fwd thread id": 0}),
        event(ts=7, args={"Sequence number": 8, "Fwd thread id": 1}),
    ]
    events = read(rows)
    assert events.correlation.tolist() == [5, 5, 5, -1, -1, -1, -1]
    assert events.external_id.tolist() == [6, 6, 6, -1, -1, -1, -1]
    assert events.sequence.tolist() == [-1, -1, -1, -1, -1, 8, 8]
    assert events.forward_thread.tolist() == [-1, -1, -1, -1, -1, -1, 1]


def test_shapes_are_shared(read: Any) -> None:
    text = b"""[
      {"ph":"X","cat":"cpu_op","name":"a","ts":1,"dur":1,"args":{"Input Dims":[[2, 3]],"Input type":["float"]}},
      {"ph":"X","cat":"cpu_op","name":"a","ts":2,"dur":1,"args":{"Input dims":[[2,3]],"Input type":["float"]}},
      {"ph":"X","cat":"cpu_op","name":"a","ts":3,"dur":1,"args":{"Input dims":[[2,3]]}},
      {"ph":"X","cat":"cpu_op","name":"a","ts":4,"dur":1,"args":{}}]"""
    events = read(text)
    assert events.shapes == [([[2, 3]], ["float"], None), ([[2, 3]], None, None)]
    assert events.shape.tolist() == [0, 0, 1, MISSING]


def test_sizes(read: Any) -> None:
    collective = {"Collective name": "allreduce", "In msg nelems": 10, "dtype": "BFloat16", "Group size": 8}
    rows = [
        event("k", "gpu_memcpy", ts=1, args={"bytes": 64}),
        event("k", "Memset", ts=2, args={"Bytes": "32"}),
        event("hipMemcpy", "cuda_runtime", ts=3, args={"bytes": "16"}),
        event("nccl", "kernel", ts=4, args=collective),
        event("record_param_comms", "cpu_op", ts=5, args=collective | {"dtype": "Float8_e4m3fn"}),
        event("nccl", "kernel", ts=6, args=collective | {"dtype": "Quaternion"}),
    ]
    events = read(rows)
    assert events.size_bytes.tolist() == [64, 32, MISSING, 20, 10, MISSING]
    assert events.group_size.tolist() == [-1, -1, -1, 8, 8, 8]
    assert events.details == ["allreduce"]
    assert events.detail.tolist() == [-1, -1, -1, 0, 0, 0]


def test_synchronisations(read: Any) -> None:
    args = {"cuda_sync_kind": "Stream Wait Event", "wait_on_stream": 20, "wait_on_cuda_event_record_corr_id": 1385}
    events = read([event("Stream Wait Event", "cuda_sync", args=args)])
    assert events.details == ["Stream Wait Event"]
    assert (events.wait_stream.tolist(), events.wait_correlation.tolist()) == ([20], [1385])


def test_flows_join_by_id(read: Any) -> None:
    def end(ph: str, flow_id: Any, ts: float, tid: int) -> dict[str, Any]:
        return {"ph": ph, "id": flow_id, "pid": 1, "tid": tid, "ts": ts, "cat": "fwdbwd", "name": "fwdbwd"}

    rows = [end("f", 1, 9.5, 3), end("s", 1, 1.25, 2), end("s", 2, 2, 2), end("f", 3, 2, 2), end("s", None, 1, 1)]
    flows = read([*rows, end("s", 4, 1, 2) | {"cat": "ac2g"}, end("f", 4, 1, 2) | {"cat": "ac2g"}]).flows
    assert (flows.source_ns.tolist(), flows.target_ns.tolist()) == ([1250], [9500])
    assert flows.source_track.tolist() != flows.target_track.tolist()


@pytest.mark.parametrize("odd", [None, True, 3, 2.5, "7", "", "Spans"])
def test_odd_scalars_cost_nothing(read: Any, odd: Any) -> None:
    events = read([event("first"), event() | {"pid": odd, "tid": odd, "name": odd, "id": odd}, event("last")])
    assert len(events) == 3
    assert not events.dropped


def test_header_before_and_after_the_array(read: Any) -> None:
    nested = [{"id": 0, "name": "gpu"}, {"id": 1, "name": "gpu"}, {"name": "x", "ts": 3}]
    events = read({"a": nested, "traceEvents": [event(), event()], "b": nested, "c": '}, {"ph": ]', "d": {"e": []}})
    assert len(events) == 2
    assert {key: events.header[key] for key in "abcd"} == {"a": nested, "b": nested, "c": '}, {"ph": ]', "d": {"e": []}}
    assert not events.dropped


@pytest.mark.parametrize("trace", [[], {"traceEvents": []}, b"[", b" \n[ ] ", b"\xef\xbb\xbf[]"])
def test_no_events_is_no_refusal(read: Any, trace: Any) -> None:
    assert len(read(trace)) == 0


def test_nested_objects_that_look_like_events(read: Any) -> None:
    args = {"list": [{"name": "x"}, {"name": "y", "args": [{"ts": 1}, {"ts": 2}]}, {"ph": 1}]}
    events = read([event(str(i), args=args) for i in range(50)])
    assert len(events) == 50
    assert not events.dropped


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps([event()] * 1000).encode()))
    calls: list[tuple[int, int]] = []
    read_kineto(path, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (path.stat().st_size, path.stat().st_size)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "an empty file"),
        (b" \n\t ", "only blanks"),
        (b"hello", "got 'hello'"),
        (b"\x7fELF\x00\x01", "got '\\x7fELF"),
        (b"\xff\xfe{\x00", "expected JSON"),
        (b"[INFO] started", "got '[INFO] started'"),
        (b"[1, 2]", "array of trace events"),
        (b"[[[[", "array of trace events"),
        (b"{}", "'traceEvents'"),
        (b'{"traceEvents": null}', "'traceEvents'"),
        (b'{"nodes": [{"name": "x"}]}', "'traceEvents'"),
        (gzip.compress(b"", mtime=0), "only blanks"),
        (gzip.compress(b"[]", mtime=0)[:5], "the file ends early at byte 5"),
        (b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 50, "damaged gzip data"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(WhatifError) as refusal:
        read_kineto(path)
    message = str(refusal.value)
    assert says in message
    assert message.startswith(str(path))
    assert "expected" in message
    assert "\n" not in message


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match="No such file"):
        read_kineto(tmp_path / "missing.json")
    with pytest.raises(WhatifError, match="got a folder"):
        read_kineto(tmp_path)
    with pytest.raises(WhatifError, match="expected a path"):
        read_kineto(Path("nul\0character"))
