"""Waits and the work they wait for, idle threads, and the forward pass: tiny traces, times in us.

Each case once misled the graph although it replayed well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers import Event, call, kernel, launched, mark, names, op, read_events
from whatif import Phase, TaskGraph, TaskKind, simulate
from whatif.graph.types import IDLE_NAME

US = 1_000


def start_us(graph: TaskGraph, name: str) -> float:
    return float(simulate(graph).start_ns[names(graph).index(name)]) / US


def slower(graph: TaskGraph, factor: float) -> TaskGraph:
    return graph.scale(graph.on_gpu, factor).check()


def sync_record(kind: str, ts: float, dur: float, correlation: int, record: int, stream: int = 7) -> Event:
    args: dict[str, Any] = {
        "cuda_sync_kind": kind,
        "stream": stream,
        "correlation": correlation,
        "wait_on_stream": stream,
        "wait_on_cuda_event_record_corr_id": record,
    }
    return {"ph": "X", "cat": "cuda_sync", "name": kind, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


def test_an_event_synchronisation_waits_for_the_recorded_event_alone(tmp_path: Path) -> None:
    """::

    CPU     |LA|rec|LB|....|sync|op
    stream     |A--||B------------------------...
    """
    events = [
        *launched("A", 0, 5, 7, 10, 1),
        call("cudaEventRecord", 6, 2, 2),
        *launched("B", 9, 5, 18, 2000, 3),
        call("cudaEventSynchronize", 400, 4, 4),
        sync_record("Event Sync", 400, 4, 4, record=2),
        op("after", 410, 5),
        *launched("C", 411, 3, 2019, 5, 5),
    ]
    graph = read_events(tmp_path, events)
    second = names(graph).index("cudaLaunchKernel", names(graph).index("(waits for the GPU)"))
    before, after = simulate(graph), simulate(slower(graph, 3))
    assert before.start_ns[second] == after.start_ns[second] == 411 * US
    # Were A to last longer than all that, the call would wait for it.
    a = np.array([names(graph).index("A")])
    assert simulate(graph.with_duration(a, 1000 * US)).start_ns[second] > 1000 * US


def test_a_synchronisation_with_an_idle_stream_waits_for_no_busy_one(tmp_path: Path) -> None:
    """The call returns at once although a kernel runs for 2 ms: it was for another, empty stream."""
    events = [
        *launched("long", 0, 5, 7, 2000, 1),
        call("cudaStreamSynchronize", 30, 4, 2),
        *launched("next", 50, 5, 2008, 5, 3),
        op("aten::op", 0, 60),
    ]
    graph = read_events(tmp_path, events)
    second = len(graph) - 1 - names(graph)[::-1].index("cudaLaunchKernel")
    assert simulate(graph).start_ns[second] == 50 * US
    assert not graph.info.quirks


def test_a_thread_beside_the_main_one_idles_and_does_not_work(tmp_path: Path) -> None:
    """0.6 ms of operators in 100 ms: the rest is idle, and `scale kind=cpu` leaves it."""
    other = [op("aten::copy_", at, 200, tid=2) for at in (0, 50_000, 99_800)]
    main = [op("aten::mm", 1000 * i, 990) for i in range(100)]
    graph = read_events(tmp_path, [*main, *other])
    thread = next(i for i, t in enumerate(graph.threads) if t.name.endswith(" 2"))
    mine = graph.thread == thread
    assert graph.duration_ns[mine & graph.on_cpu].sum() == 600 * US
    idle = mine & np.array([name == IDLE_NAME for name in names(graph)])
    assert graph.duration_ns[idle].sum() == 99_400 * US


def test_a_thread_that_pins_memory_is_no_backward_thread(tmp_path: Path) -> None:
    """A pinning thread works inside a pause of the main thread, which does not wait for it."""
    main = [op("aten::mm", 0, 50), *launched("mm", 10, 5, 20, 30, 1), op("aten::mm", 1000, 50),
            *launched("mm2", 1010, 5, 1020, 30, 2)]  # fmt: skip
    pin = [call("cudaHostAlloc", 100, 700, 8, tid=2), call("cudaEventRecord", 810, 5, 9, tid=2)]
    graph = read_events(tmp_path, [*main, *pin])
    assert not np.any(graph.phase == Phase.BACKWARD)
    pause = graph.select(kind=TaskKind.GAP) & (graph.thread == 0)
    # From the end of one call to the start of the next.
    assert graph.duration_ns[pause].max() == 995 * US


def accumulated(tmp_path: Path) -> TaskGraph:
    """Two passes, each two forward and two backward operators, then the update; one thread."""
    events: list[Event] = []
    for i in range(2):
        at = 1000 * i
        events += [op("aten::linear", at, 100, **{"Sequence number": 10 * i + 1}),
                   op("aten::relu", at + 150, 100, **{"Sequence number": 10 * i + 2}),
                   op("autograd::engine::evaluate_function: ReluBackward0", at + 400, 100),
                   op("autograd::engine::evaluate_function: AddmmBackward0", at + 550, 100)]  # fmt: skip
    events += [mark("Optimizer.step#Adam.step", 2000, 100), op("aten::add_", 2010, 50), mark("ProfilerStep#1", 0, 2200)]
    return read_events(tmp_path, events)


def test_the_forward_pass_between_two_backward_passes_is_forward(tmp_path: Path) -> None:
    graph = accumulated(tmp_path)
    by_phase = {phase: graph.select(phase=phase, kind=TaskKind.CPU_OP).sum() for phase in Phase}
    assert by_phase[Phase.FORWARD] == 4
    assert by_phase[Phase.BACKWARD] == 4
    assert by_phase[Phase.UPDATE] == 1


def test_the_gap_inside_a_backward_pass_is_backward(tmp_path: Path) -> None:
    graph = accumulated(tmp_path)
    gaps = graph.select(kind=TaskKind.GAP, phase=Phase.BACKWARD)
    # Between the two backward operators of each pass.
    assert sorted(graph.start_ns[gaps] // US) == [500, 1500]


def test_what_clips_gradients_is_update_but_not_the_optimizers(tmp_path: Path) -> None:
    events = [
        op("autograd::engine::evaluate_function: MmBackward0", 0, 100),
        op("aten::linalg_vector_norm", 150, 50),
        mark("Optimizer.step#Adam.step", 300, 100),
        op("aten::add_", 310, 50),
    ]
    graph = read_events(tmp_path, events)
    norm, add = (names(graph).index(name) for name in ("aten::linalg_vector_norm", "aten::add_"))
    assert graph.phase[norm] == graph.phase[add] == Phase.UPDATE
    assert not graph.in_optimizer[norm]
    assert graph.in_optimizer[add]


def test_two_optimizers_without_a_backward_pass_between_end_one_step(tmp_path: Path) -> None:
    events: list[Event] = []
    for i in range(5):
        at = 1000 * i
        events += [op("autograd::engine::evaluate_function: MmBackward0", at + 100, 300),
                   mark("Optimizer.step#Adam.step", at + 500, 100), op("aten::add_", at + 510, 20),
                   mark("Optimizer.step#SGD.step", at + 700, 100), op("aten::add_", at + 710, 20)]  # fmt: skip
    graph = read_events(tmp_path, events)
    assert graph.info.step_source == "optimizer marks"
    assert np.median(graph.info.measured_step_ns["mark"]) == 1000 * US


def test_layers_that_repeat_are_no_steps(tmp_path: Path) -> None:
    """One pass of ten equal layers between kernels that come once."""
    kernels = ["embed", *[f"k{i}" for _ in range(10) for i in range(8)], "norm", "head", "loss"]
    events = [kernel(name, 20 * i, 10, 0) for i, name in enumerate(kernels)]
    assert read_events(tmp_path, events).info.n_steps == 0
