"""Real recordings of GPUs through the CUPTI backend: what Kineto or nsys wrote comes out again, however delivered."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.helpers import extra_data, need
from whatif import TaskGraph
from whatif.graph.types import Severity

need("torch")
cupti_machine = need("tests.instrumentation.cupti_machine")
replay = need("tests.instrumentation.replayed")
nsys = need("tests.instrumentation.replayed_nsys")
session = need("whatif.instrumentation.cupti.session")
trace_module = need("whatif.instrumentation.cupti.trace")

# An A100 with one stream, an H100, one of eight V100s with NCCL's streams, and a program of events and three streams.
RECORDINGS = (
    "harryjmoss-a100-batch/bs64.run0.pt.trace.json.gz", "triosim-vgg13-h100/vgg13_bs512_adam.json.gz",
    "param-dlrm-8xv100/rank0.json.gz", "hta/cuda_event_sync_multi_stream.json.gz",
)  # fmt: skip
# An A100's reports by Nsight Systems: kernel after kernel, and CUDA graphs of which it wrote no kernels.
REPORT = "zx3xyy-a100-2.7b/result_2_7B_clean.sqlite"
OF_GRAPHS = "zx3xyy-a100-2.7b/result_2_7B_compile_ro.sqlite"
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def library_of(records: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    found = cupti_machine.Library()
    found.pending = list(records)
    monkeypatch.setattr(session, "load_cupti", lambda: found)
    cupti_machine.no_gpu_to_wait_for(monkeypatch)
    return found


def recorded(played: Any, library: Any) -> dict[str, Any]:
    """The trace that a session writes of the library's records and the file's spans."""
    made = session.CuptiSession()
    made.start()
    made.stop()
    window = trace_module.Window(played.begin_ns, played.end_ns)
    builder = trace_module.TraceBuilder(made.records, played.spans, played.process, made.callback_name, window)
    trace: dict[str, Any] = builder.trace([{"id": 0, "name": "NVIDIA A100-SXM4-40GB", "totalGlobalMem": 40 << 30}])
    trace["cupti"] |= {"dropped_records": made.dropped_records}
    assert not library.enabled
    return trace


def gpu_work(events: list[dict[str, Any]], zero_ns: int = 0) -> Counter[tuple[Any, ...]]:
    """Every kernel, copy and memset: name, time in ns, place, and the call that launched it."""
    return Counter(
        (
            e["cat"].lower(), e["name"], round(e["ts"] * 1000) - zero_ns, round(e["dur"] * 1000),
            e["args"]["device"], e["args"]["stream"], e["args"]["correlation"],
        )
        for e in events if str(e.get("cat", "")).lower() in GPU_WORK
    )  # fmt: skip


@pytest.mark.parametrize("delivery", ["in order", "late and out of order", "another clock"])
@pytest.mark.parametrize("name", RECORDINGS)
def test_what_kineto_saw_comes_out_again(name: str, delivery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events, base_ns = replay.events_of(extra_data("traces", name))
    offset_ns = 86_400_000_000_123 if delivery == "another clock" else 0
    played = replay.replayed(events, base_ns, offset_ns)
    library = library_of(played.records, monkeypatch)
    library.shuffles = delivery == "late and out of order"
    trace = recorded(played, library)
    zero_ns = played.begin_ns - offset_ns - base_ns
    expected = gpu_work(events, zero_ns)
    assert gpu_work(trace["traceEvents"]) == expected
    assert len(expected) > 3
    launches = {e["args"]["correlation"]: e["tid"] for e in events if e["cat"] == "cuda_runtime"}
    again = {e["args"]["correlation"]: e["tid"] for e in trace["traceEvents"] if e.get("cat") == "cuda_runtime"}
    # Bookkeeping is left out; no call is new, or on another thread.
    assert again.items() <= launches.items()
    assert {key[-1] for key in expected} & launches.keys() <= again.keys()
    assert trace["cupti"]["dropped_records"] == 0
    external = {e["args"]["correlation"]: e["args"].get("External id") for e in events if e["cat"] == "cuda_runtime"}
    for event in trace["traceEvents"]:
        if event.get("cat") == "cuda_runtime" and external[event["args"]["correlation"]]:
            assert event["args"]["External id"] == external[event["args"]["correlation"]]


def read(trace: dict[str, Any], path: Path) -> TaskGraph:
    path.write_text(json.dumps(trace))
    return whatif.read(path)


def check_same_gpu(own: TaskGraph, other: TaskGraph) -> None:
    """The GPU's work is the same to the nanosecond, and so are the steps; the whole takes as long."""
    np.testing.assert_array_equal(own.duration_ns[own.on_gpu], other.duration_ns[other.on_gpu])
    starts = [graph.start_ns[graph.on_gpu] for graph in (own, other)]
    np.testing.assert_array_equal(*(start - start[0] for start in starts))
    assert own.info.n_steps == other.info.n_steps
    assert whatif.simulate(own).makespan_ns == pytest.approx(whatif.simulate(other).makespan_ns, rel=1e-3)


def test_the_reader_sees_one_step_in_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kineto's file and the replayed one: the same GPU tasks, at the same distances, launched from the same calls."""
    path = extra_data("traces", RECORDINGS[0])
    events, base_ns = replay.events_of(path)
    played = replay.replayed(events, base_ns)
    own, other = whatif.read(path), read(recorded(played, library_of(played.records, monkeypatch)), tmp_path / "a.json")
    for graph in (own, other):
        assert graph.on_gpu.sum() > 500
    check_same_gpu(own, other)


@pytest.mark.parametrize(("loses", "severity"), [(10, Severity.VOIDS), (100, Severity.DOUBT)])
def test_dropped_records_are_counted_and_found(
    loses: int, severity: Severity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel of ten, or of a hundred: the trace says how many, and the reader how far to trust it."""
    events, base_ns = replay.events_of(extra_data("traces", RECORDINGS[0]))
    played = replay.replayed(events, base_ns)
    library = library_of(played.records, monkeypatch)
    library.loses = loses
    trace = recorded(played, library)
    lost = -(-sum(e.get("cat") == "kernel" for e in events) // loses)
    assert trace["cupti"]["dropped_records"] == lost
    assert trace["cupti"]["launches_without_gpu_task"] == lost
    [finding] = [f for f in read(trace, tmp_path / "a.json").info.findings if "no kernel" in f.sentence]
    assert finding.severity == severity
    assert finding.count == lost


@pytest.mark.parametrize("delivery", ["in order", "late and out of order", "another clock"])
@pytest.mark.parametrize("name", [REPORT, OF_GRAPHS])
def test_what_nsys_saw_comes_out_again(name: str, delivery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = extra_data("traces", name)
    played = nsys.replayed(path, 86_400_000_000_123 if delivery == "another clock" else 0)
    library = library_of(played.records, monkeypatch)
    library.shuffles = delivery == "late and out of order"
    trace = recorded(played, library)
    kernels, calls = list(nsys.rows_of(path, "KERNEL")), list(nsys.rows_of(path, "RUNTIME"))
    first_ns = min(row["start"] for row in (*kernels, *calls))
    assert gpu_work(trace["traceEvents"]) == Counter(
        (
            "kernel", row["name"], row["start"] - first_ns, row["end"] - row["start"], row["deviceId"],
            row["streamId"], row["correlationId"],
        )
        for row in kernels
    )  # fmt: skip
    again = {e["args"]["correlation"]: e["name"] for e in trace["traceEvents"] if e.get("cat") == "cuda_runtime"}
    launched = {row["correlationId"]: row["name"].partition("_v")[0] for row in calls if "Launch" in row["name"]}
    assert launched.items() <= again.items()
    assert len(launched) > 30
    assert trace["cupti"]["dropped_records"] == 0


def test_the_reader_sees_the_same_gpu_in_an_nsys_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = extra_data("traces", REPORT)
    played = nsys.replayed(path)
    own, other = whatif.read(path), read(recorded(played, library_of(played.records, monkeypatch)), tmp_path / "a.json")
    assert own.on_gpu.sum() > 10_000
    check_same_gpu(own, other)
