"""From real CUPTI records to a task graph: records, rows, a trace, a file, and what the reader makes of it.

One step, times in us; four of them in a row, 1,000 us apart::

    main thread 1    |copy|root...........................................|   |Adam......|rec|wait|comm|sync 7.....|
                          |conv: launch|fc: launch|
    thread 2                                           |nll|fc back|conv back|
    stream 7               |copy|conv....|fc....|       |nll|fc back..|conv back......|   |adam.............|
    stream 20                                                                                                |comm|
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whatif.instrumentation.cupti.layers import ANNOTATION, BACKWARD_PREFIX, OPERATOR, Moment, Span
from whatif.instrumentation.cupti.records import Records
from whatif.instrumentation.cupti.trace import TraceBuilder, Window

import whatif
from tests.helpers import names
from tests.instrumentation import cupti_machine as machine
from tests.instrumentation.cupti_machine import cupti
from whatif import DependencyKind, Phase, TaskGraph, TaskKind, simulate
from whatif.cli.main import main

BASE_NS = 1_795_224_489_111_666_252
US = 1_000
STEPS = 4
STEP_US = 1_000
MAIN, WORKER = 1, 2
SIDE_STREAM = 20
PROCESS = 4_711

WAIT_EVENT = int(machine.RUNTIME.cudaStreamWaitEvent_v3020)


def ns(time_us: float) -> int:
    return BASE_NS + round(time_us * US)


def launched(
    name: str, call_us: float, thread: int, start_us: float, end_us: float, correlation: int, stream: int = 7
) -> list[Any]:
    return [
        machine.call(machine.LAUNCH, ns(call_us), ns(call_us + 5), correlation, thread),
        machine.kernel(name, ns(start_us), ns(end_us), correlation, stream),
    ]


def step_records(at: float, first: int) -> list[Any]:
    """The records of a step that begins at ``at`` us; correlation ids count from ``first``."""
    memory, sync = cupti.ActivityMemoryKind, cupti.ActivitySynchronizationType
    return [
        machine.call(machine.COPY, ns(at + 2), ns(at + 8), first, MAIN),
        machine.memcpy(cupti.ActivityMemcpyKind.HTOD, memory.PINNED, memory.DEVICE, ns(at + 10), ns(at + 15), first,
                       1_000_000),
        *launched("conv", at + 15, MAIN, at + 22, at + 52, first + 1),
        *launched("fc", at + 35, MAIN, at + 53, at + 73, first + 2),
        *launched("nll", at + 82, WORKER, at + 89, at + 92, first + 3),
        *launched("fc_back", at + 95, WORKER, at + 102, at + 130, first + 4),
        *launched("conv_back", at + 115, WORKER, at + 131, at + 181, first + 5),
        *launched("adam", at + 165, MAIN, at + 182, at + 282, first + 6),
        machine.call(machine.RECORD_EVENT, ns(at + 204), ns(at + 206), first + 7, MAIN),
        machine.event_record(3, first + 7),
        machine.call(WAIT_EVENT, ns(at + 208), ns(at + 210), first + 8, MAIN),
        machine.sync(sync.STREAM_WAIT_EVENT, ns(at + 208), ns(at + 209), first + 8, stream=SIDE_STREAM, event=3),
        *launched("comm", at + 212, MAIN, at + 284, at + 304, first + 9, SIDE_STREAM),
        machine.call(machine.SYNC_STREAM, ns(at + 220), ns(at + 290), first + 10, MAIN),
        machine.sync(sync.STREAM_SYNCHRONIZE, ns(at + 220), ns(at + 288), first + 10, stream=7),
        machine.external(first + 1, 900 + first),
        machine.overhead(cupti.ActivityOverheadKind.CUPTI_INSTRUMENTATION, ns(at + 30), ns(at + 31)),
    ]  # fmt: skip


def step_spans(at: float, number: int) -> list[Span]:
    def span(category: str, name: str, thread: int, begin: float, end: float, made_in: float | None = None) -> Span:
        moment = None if made_in is None else Moment(MAIN, ns(at + made_in))
        return Span(category, name, thread, ns(at + begin), ns(at + end), number, moment)

    return [
        span(ANNOTATION, f"ProfilerStep#{number}", MAIN, 0, STEP_US),
        span(ANNOTATION, "whatif::layer::(root)", MAIN, 10, 60),
        span(ANNOTATION, "whatif::layer::conv", MAIN, 12, 30),
        span(ANNOTATION, "whatif::layer::fc", MAIN, 32, 58),
        span(OPERATOR, BACKWARD_PREFIX + "NllLossBackward0", WORKER, 80, 90),
        span(OPERATOR, BACKWARD_PREFIX + "AddmmBackward0", WORKER, 92, 110, made_in=32),
        span(OPERATOR, BACKWARD_PREFIX + "ConvolutionBackward0", WORKER, 112, 140, made_in=12),
        span(ANNOTATION, "Optimizer.step#Adam.step", MAIN, 160, 200),
    ]


def trace_of(records: list[Any], spans: list[Span], steps: int = STEPS) -> dict[str, Any]:
    rows = Records(cupti)
    rows.add(records)
    window = Window(ns(0), ns(steps * STEP_US))
    builder = TraceBuilder(rows, spans, PROCESS, machine.callback_name, window)
    return builder.trace([{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 141 << 30}])


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records, spans = [], []
    for number in range(STEPS):
        records += step_records(number * STEP_US, 100 * (number + 1))
        spans += step_spans(number * STEP_US, number)
    path = tmp_path_factory.mktemp("cupti") / "run.json"
    path.write_text(json.dumps(trace_of(records, spans)))
    return path


@pytest.fixture(scope="module")
def graph(recording: Path) -> TaskGraph:
    return whatif.read(recording)


def tasks(graph: TaskGraph, name: str) -> list[int]:
    found = [task for task, known in enumerate(names(graph)) if known == name]
    assert len(found) == STEPS
    return found


def test_steps_threads_and_device(graph: TaskGraph) -> None:
    assert graph.info.n_steps == STEPS
    assert graph.info.step_source == "profiler marks"
    assert graph.info.gpu == "NVIDIA H200"
    assert graph.info.optimizer == "Adam"
    assert [thread.name for thread in graph.threads] == [
        "CPU thread 1", "CPU thread 2", "GPU 0 stream 7", "GPU 0 stream 20",
    ]  # fmt: skip


def test_every_piece_of_gpu_work_has_its_launch(graph: TaskGraph) -> None:
    edges = graph.dependencies
    launch = {
        int(target): int(source)
        for source, target, kind in zip(edges.source, edges.target, edges.kind, strict=True)
        if kind == DependencyKind.LAUNCH
    }
    for name, correlation, call, thread in (
        ("conv", 101, "cudaLaunchKernel", 0),
        ("conv_back", 105, "cudaLaunchKernel", 1),
        ("comm", 109, "cudaLaunchKernel", 0),
        ("Memcpy HtoD (Pinned -> Device)", 100, "cudaMemcpyAsync", 0),
    ):
        first = tasks(graph, name)[0]
        assert graph.correlation_id[first] == correlation
        assert names(graph)[launch[first]] == call
        assert graph.thread[launch[first]] == thread
    assert graph.info.launch_lag_ns == 2 * US


@pytest.mark.parametrize(
    ("name", "layer", "phase"),
    [
        ("conv", "conv", Phase.FORWARD),
        ("fc", "fc", Phase.FORWARD),
        ("nll", "", Phase.BACKWARD),
        ("fc_back", "fc", Phase.BACKWARD),
        ("conv_back", "conv", Phase.BACKWARD),
        ("adam", "", Phase.UPDATE),
    ],
)
def test_layers_and_phases(graph: TaskGraph, name: str, layer: str, phase: Phase) -> None:
    for task in tasks(graph, name):
        assert (graph.layers[graph.layer[task]], Phase(graph.phase[task])) == (layer, phase)


def test_copies_keep_their_bytes(graph: TaskGraph) -> None:
    copies = tasks(graph, "Memcpy HtoD (Pinned -> Device)")
    assert graph.size_bytes[copies].tolist() == [1_000_000] * STEPS
    assert set(graph.kind[copies].tolist()) == {TaskKind.MEMCPY}


def test_a_stream_waits_for_the_event_of_another(graph: TaskGraph) -> None:
    edges = graph.dependencies
    pairs = set(zip(edges.source.tolist(), edges.target.tolist(), strict=True))
    assert set(zip(tasks(graph, "adam"), tasks(graph, "comm"), strict=True)) <= pairs


def test_a_synchronisation_waits_for_its_stream(graph: TaskGraph) -> None:
    streams = {graph.threads[scope].stream for scope in graph.waits.scope.tolist()}
    assert streams == {7}
    assert len(graph.waits.task) == STEPS
    before = simulate(graph)
    after = simulate(graph.scale(graph.select(name="^adam$"), 3.0).check())
    # 200 us more of work, and the call returns as much later.
    wait = graph.waits.task[1]
    assert after.end_ns[wait] - before.end_ns[wait] == pytest.approx(2 * 200 * US, abs=US)


def test_the_graph_replays(graph: TaskGraph) -> None:
    simulated = simulate(graph)
    gpu = np.flatnonzero(graph.on_gpu)
    assert np.abs(simulated.start_ns[gpu] - graph.start_ns[gpu]).max() <= 2 * US


def test_a_faster_gpu_is_predicted(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", "scale:kind=gpu,factor=0.5", str(recording), "--json"]) == 0
    prediction = json.loads(capsys.readouterr().out)
    assert prediction["speedup"] > 1


def test_times_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    odd = launched("odd", 5, MAIN, 12, 20, 1)
    odd[1].start, odd[1].end = ns(12) + 1, ns(20) + 3
    trace = trace_of([*odd], step_spans(0, 0), steps=1)
    (event,) = (event for event in trace["traceEvents"] if event["name"] == "odd")
    assert (trace["baseTimeNanoseconds"], event["ts"], event["dur"]) == (BASE_NS, 12.001, 8.002)
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(trace))
    read = whatif.read(path)
    assert read.duration_ns[read.on_gpu].tolist() == [8_002]


def test_events_look_like_kinetos(recording: Path) -> None:
    trace = json.loads(recording.read_text())
    by_name = {event["name"]: event for event in reversed(trace["traceEvents"]) if event["ph"] == "X"}
    conv, wait, stream = by_name["conv"], by_name["Stream Wait Event"], by_name["Stream Sync"]
    assert (conv["cat"], conv["pid"], conv["tid"]) == ("kernel", 0, 7)
    assert conv["args"]["External id"] == 1_000
    assert wait["args"] | {
        "cuda_sync_kind": "Stream Wait Event", "stream": 20, "wait_on_stream": 7,
        "wait_on_cuda_event_record_corr_id": 107, "wait_on_cuda_event_id": 3,
    } == wait["args"]  # fmt: skip
    assert stream["args"]["stream"] == 7
    assert "wait_on_stream" not in stream["args"]
    assert by_name["Instrumentation"]["cat"] == "overhead"
    assert trace["cupti"] == {"launches_without_gpu_task": 0, "gpu_tasks_without_call": 0}


def test_a_wait_is_for_the_last_recording_of_its_event_before_it() -> None:
    kind = cupti.ActivitySynchronizationType
    records = [
        machine.event_record(3, 5, stream=7),
        machine.event_record(3, 11, stream=8),
        machine.event_record(4, 7, stream=9),
        machine.sync(kind.EVENT_SYNCHRONIZE, ns(1), ns(2), 9, stream=machine.NO_STREAM, event=3),
        machine.sync(kind.EVENT_SYNCHRONIZE, ns(3), ns(4), 12, stream=machine.NO_STREAM, event=3),
        machine.sync(kind.EVENT_SYNCHRONIZE, ns(5), ns(6), 4, stream=machine.NO_STREAM, event=3),
    ]
    found = [event["args"] for event in trace_of(records, [])["traceEvents"] if event["ph"] == "X"]
    assert [(args.get("wait_on_cuda_event_record_corr_id"), args.get("wait_on_stream")) for args in found] == [
        (5, 7), (11, 8), (None, None),
    ]  # fmt: skip


def test_the_window_keeps_what_its_steps_launched() -> None:
    """Of the steps before and after: what runs into the window, but no call."""
    last = STEP_US - 10
    records = [
        *launched("before", -50, MAIN, -20, 5, 1),
        *launched("reaches in", -50, MAIN, 5, 9, 2),
        *launched("inside", 20, MAIN, 30, 40, 3),
        *launched("late", last, MAIN, STEP_US + 5, STEP_US + 9, 4),
        *launched("after", STEP_US + 2, MAIN, STEP_US + 10, STEP_US + 11, 5),
    ]
    events = trace_of(records, step_spans(0, 0), steps=1)["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "kernel"] == ["reaches in", "inside", "late"]
    assert [event["args"]["correlation"] for event in events if event.get("cat") == "cuda_runtime"] == [3, 4]


def test_bookkeeping_calls_are_left_out() -> None:
    records = [
        machine.call(int(machine.RUNTIME.cudaGetDevice_v3020), ns(1), ns(2), 1),
        machine.call(int(machine.DRIVER.cuCtxGetCurrent), ns(2), ns(3), 2, driver=True),
        machine.call(int(machine.DRIVER.cuLaunchKernel), ns(3), ns(5), 3, driver=True),
        machine.kernel("triton_kernel", ns(7), ns(9), 3),
    ]
    events = [event for event in trace_of(records, [])["traceEvents"] if event["ph"] == "X"]
    assert [(event["cat"], event["name"]) for event in events] == [
        ("cuda_driver", "cuLaunchKernel"), ("kernel", "triton_kernel"),
    ]  # fmt: skip


def test_a_lost_kernel_is_counted() -> None:
    whole = launched("whole", 20, MAIN, 30, 40, 3)
    lost = launched("lost", 40, MAIN, 50, 60, 4)[:1]
    orphan = launched("orphan", 60, MAIN, 70, 80, 5)[1:]
    trace = trace_of([*whole, *lost, *orphan], [])
    assert trace["cupti"] == {"launches_without_gpu_task": 1, "gpu_tasks_without_call": 1}


def test_forward_between_two_backward_passes_is_forward(tmp_path: Path) -> None:
    """Accumulated gradients: without operators only the layers show that the second batch runs forward again."""
    records, spans = [], []
    for half in range(2):
        at = 300 * half
        records += [
            *launched(f"forward{half}", at + 15, MAIN, at + 22, at + 52, 10 * half + 1),
            *launched(f"backward{half}", at + 115, WORKER, at + 122, at + 152, 10 * half + 2),
        ]
        spans += [
            Span(ANNOTATION, "whatif::layer::conv", MAIN, ns(at + 12), ns(at + 30)),
            Span(OPERATOR, BACKWARD_PREFIX + "ConvolutionBackward0", WORKER, ns(at + 112), ns(at + 140), 0,
                 Moment(MAIN, ns(at + 12))),
        ]  # fmt: skip
    records += launched("adam", 600, MAIN, 607, 620, 50)
    spans += [
        Span(ANNOTATION, "Optimizer.step#SGD.step", MAIN, ns(590), ns(650)),
        Span(ANNOTATION, "ProfilerStep#0", MAIN, ns(0), ns(STEP_US)),
    ]
    path = tmp_path / "accumulated.json"
    path.write_text(json.dumps(trace_of(records, spans, steps=1)))
    graph = whatif.read(path)
    found = {names(graph)[task]: Phase(graph.phase[task]) for task in np.flatnonzero(graph.on_gpu)}
    assert found == {
        "forward0": Phase.FORWARD, "backward0": Phase.BACKWARD, "forward1": Phase.FORWARD, "backward1": Phase.BACKWARD,
        "adam": Phase.UPDATE,
    }  # fmt: skip
