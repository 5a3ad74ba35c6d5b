"""Hostile traces through the whole pipeline: a prediction with sound numbers, or one sentence; nothing else, ever."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import whatif
from tests import helpers as h
from whatif import WhatifError
from whatif.graph.types import IDLE_NAME

pytestmark = pytest.mark.slow

Event = dict[str, Any]

# Of everything a little: two CPU threads, three streams, copies, synchronisations, events, marks, layers, operators
# one inside the other.
SEED: list[Event] = [
    *[h.mark(f"ProfilerStep#{i}", 200 * i, 200) for i in range(4)],
    *[h.mark("Optimizer.step#SGD.step", 200 * i + 150, 40) for i in range(4)],
    h.module("Linear_0", 10, 30),
    h.op("aten::linear", 12, 20, **{"Sequence number": 3, "Input Dims": [[2, 3], [3, 4]], "Input type": ["float"] * 2}),
    h.op("aten::addmm", 14, 10),
    *h.launched("sgemm", 15, 3, 20, 30, 1),
    h.call("cudaLaunchKernelExC", 30, 5, 50),
    h.call("cuLaunchKernelEx", 31, 2, 51, cat="cuda_driver"),
    h.kernel("elementwise_kernel", 51, 9, 51),
    h.call("cudaEventRecord", 36, 1, 60),
    h.call("cudaStreamWaitEvent", 38, 1, 61),
    *h.launched("ncclDevKernel_AllReduce", 40, 3, 60, 20, 2, stream=8),
    h.op("autograd::engine::evaluate_function: MmBackward0", 60, 60, 2, **{"Sequence number": 3, "Fwd thread id": 1}),
    *h.launched("sgemm", 70, 3, 81, 30, 3, tid=2),
    h.op("aten::item", 125, 50),
    h.call("cudaMemcpyAsync", 126, 40, 4),
    h.copy("DtoH (Device -> Pageable)", 150, 10, 4),
    h.call("cudaDeviceSynchronize", 180, 10, 5),
    h.call("cudaGraphLaunch", 195, 3, 6),
    *[h.kernel(f"graph {i}", 200 + 10 * i, 9, 6, stream=9) for i in range(3)],
    *[e for i in range(1, 4) for e in h.launched("sgemm", 200 * i + 20, 3, 200 * i + 80, 30, 10 + i)],
    h.op("aten::step", 205, 590),
]  # fmt: skip

NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1e300, -1e300, 1e18, 4.6e15, -4.6e15, 2**63, -(2**63), 2**64, 10**400, 1e-9, 0.0005]),
    st.integers(-1000, 1000),
    st.floats(allow_nan=True, allow_infinity=True),
)
ANYTHING = st.one_of(
    NUMBERS, st.none(), st.booleans(), st.text(max_size=3), st.sampled_from(["7", "stream 7", [], {}, [1]])
)
NAMES = st.sampled_from(
    ["cudaStreamSynchronize", "cudaFree", "hipMemcpyWithStream", "cudaEventSynchronize", "cudaStreamWaitEvent",
     "Memcpy HtoD (Pageable -> Device)", "ProfilerStep#7", "Optimizer.step#Adam.step", "nn.Module: x",
     "whatif::layer::",     "enumerate(DataLoader)#x.__next__", "autograd::x", "", "\u0000", "ncclKernel"]
)  # fmt: skip
CATEGORIES = st.sampled_from(
    ["cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_memset", "cuda_sync",
     "python_function", "overhead", "Operator", "mtia_runtime", ""]
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> list[Event]:
    """The seed with a few events changed, doubled, lost or put elsewhere."""
    events = copy.deepcopy(SEED)
    for _ in range(draw(st.integers(1, 8))):
        if not events:
            break
        at = draw(st.integers(0, len(events) - 1))
        event = events[at]
        kind = draw(
            st.sampled_from(["field", "argument", "time", "time", "lose field", "double", "drop", "cross", "move"])
        )
        if kind == "field":
            field = draw(st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur"]))
            event[field] = draw({"cat": CATEGORIES, "name": NAMES}.get(field, ANYTHING))
        elif kind == "argument":
            names = ["correlation", "stream", "device", "bytes", "Sequence number", "Fwd thread id", "wait_on_stream",
                     "wait_on_cuda_event_record_corr_id", "cuda_sync_kind", "Collective name", "In msg nelems",
                     "Input Dims"]  # fmt: skip
            event["args"] = {**(event.get("args") or {}), draw(st.sampled_from(names)): draw(ANYTHING)}
        elif kind == "time":
            event[draw(st.sampled_from(["ts", "dur"]))] = draw(NUMBERS)
        elif kind == "lose field":
            event.pop(draw(st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"])), None)
        elif kind == "double":
            events.append(copy.deepcopy(event))
        elif kind == "drop":
            del events[at]
        elif kind == "cross":
            event["ts"] = draw(st.integers(0, 800))
            event["dur"] = draw(st.integers(0, 400))
        else:
            events.append({**copy.deepcopy(event), "tid": draw(st.integers(0, 9))})
    if draw(st.booleans()):
        events.reverse()
    return events


def sound(numbers: Any) -> bool:
    """Whether all numbers of a report are finite and, but for errors in percent, not negative."""
    if isinstance(numbers, dict):
        return all(sound(v) for k, v in numbers.items() if k not in ("replay_error_pct", "transforms"))
    if isinstance(numbers, list | tuple):
        return all(sound(v) for v in numbers)
    return not isinstance(numbers, int | float) or (math.isfinite(numbers) and numbers >= 0)


def is_a_sentence(error: WhatifError) -> None:
    assert str(error)
    assert "\n" not in str(error)


def survives(data: bytes) -> None:
    """Read and halve: either a checked graph and a sound report, or one sentence."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(data)
        try:
            graph = whatif.read(path)
            prediction = whatif.apply(graph, "scale:kind=all,factor=0.5")
        except WhatifError as error:
            return is_a_sentence(error)
        assert graph.check() is graph
        assert prediction.graph.check() is prediction.graph
        for timeline in (prediction.baseline.timeline, prediction.timeline):
            assert (timeline.start_ns >= 0).all()
            assert (timeline.end_ns >= timeline.start_ns).all()
        report = prediction.to_dict()
        assert sound(report), report
        assert np.isfinite(report["replay_error_pct"])
        json.dumps(report, allow_nan=False)


def written(events: list[Event], **header: Any) -> bytes:
    return json.dumps({**header, "traceEvents": events}).encode()


def test_the_seed_is_read_and_predicted() -> None:
    survives(written(SEED))


FAR_APART = [{**e, "ts": e["ts"] + (4.5e15 if i % 2 else -4.5e15)} for i, e in enumerate(SEED)]
LONG = [{**e, "dur": 4.5e15} for e in SEED]


@pytest.mark.parametrize("events", [FAR_APART, LONG], ids=["far apart", "long"])
def test_times_at_the_edge_of_what_fits_do_not_wrap_around(events: list[Event]) -> None:
    survives(written(events))


def test_operators_without_any_duration_are_no_crash() -> None:
    survives(written([h.op("a", 5, 0), h.op("b", 5, 0)]))


@given(mutated())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_mutated_events_give_a_prediction_or_one_sentence(events: list[Event]) -> None:
    survives(written(events))


@given(st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_flipped_lost_and_inserted_bytes_give_a_prediction_or_one_sentence(data: st.DataObject) -> None:
    text = bytearray(written(SEED))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text) - 1))
        kind = data.draw(st.sampled_from(["flip", "lose", "insert", "cut"]))
        if kind == "flip":
            text[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "lose":
            del text[at : at + data.draw(st.integers(1, 30))]
        elif kind == "insert":
            text[at:at] = data.draw(st.binary(min_size=1, max_size=5))
        elif len(text) > 2:
            del text[max(at, 1) :]
        if not text:
            break
    survives(bytes(text))


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2]), st.integers(0, 60), st.integers(0, 40), st.sampled_from("abc")), max_size=12
    )
)
@settings(max_examples=150, deadline=None)
def test_operators_that_cross_add_up_to_the_time_of_their_thread(rows: list[tuple[int, int, int, str]]) -> None:
    """Whatever crosses or nests: each thread's tasks cover its time from first to last exactly once."""
    events = [h.op(name, ts, dur, tid=tid) for tid, ts, dur, name in rows]
    if not events:
        return
    with tempfile.TemporaryDirectory() as folder:
        graph = h.read_events(Path(folder), events)
    for code, thread in enumerate(graph.threads):
        mine = [e for e in events if thread.name == f"CPU thread {e['tid']}"]
        span_us = max(e["ts"] + e["dur"] for e in mine) - min(e["ts"] for e in mine)
        # On a thread beside the main one a long hole is idle time, which is no work but takes its place.
        idle = np.array([name == IDLE_NAME for name in graph.names])[graph.name]
        assert graph.duration_ns[(graph.thread == code) & (graph.on_cpu | idle)].sum() == 1000 * span_us


HEADERS: dict[str, dict[str, Any]] = {
    "no devices": {"deviceProperties": None},
    "devices of another kind": {"deviceProperties": [3, "x", {"name": 7}, {"name": "A100", "totalGlobalMem": "much"}]},
    "metadata of another kind": {"whatif": [1, 2]},
    "absurd metadata": {"whatif": {"untraced_step_ms": {"median": float("nan")}, "batch_size": 10**400, "gpu": 7}},
    "negative metadata": {"whatif": {"untraced_step_ms": {"median": -3}, "batch_size": -1}},
    "huge metadata": {"whatif": {"untraced_step_ms": {"median": 10**400}, "batch_size": 2**70, "gpu": "x" * 10**5}},
    "true metadata": {"whatif": {"untraced_step_ms": {"median": True}, "batch_size": True}},
}


@pytest.mark.parametrize("what", HEADERS)
def test_odd_headers_do_no_harm(what: str) -> None:
    survives(written(SEED, **HEADERS[what]))


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b"[1, 2]", b'{"traceEvents": {}}', b'{"traceEvents": [[[[[]]]]]}', b"\x1f\x8b\x08",
     b"[" * 10_000, b'{"traceEvents": [' + b'{"ph":"X"},' * 100, b"\x00" * 100, "žluťoučký kůň".encode("utf-16")],
)  # fmt: skip
def test_files_that_are_no_traces_are_refused_in_one_sentence(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(text)
    with pytest.raises(WhatifError) as error:
        whatif.read(path)
    is_a_sentence(error.value)


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(WhatifError):
            whatif.read(path)
