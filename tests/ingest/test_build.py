"""From tiny traces, drawn above each test in us, to graphs: what is work, what is waiting, and what waits for what.

A trace with fewer than five samples takes the default lags: a kernel starts 2 us after its call returned (0 + 2), and
1 us after the kernel before it where it was queued.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import (
    Event,
    call,
    copy,
    end_of,
    kernel,
    launched,
    mark,
    module,
    names,
    op,
    read_events,
    write_trace,
)
from whatif import DependencyKind, Phase, TaskGraph, TaskKind, WhatifError, read, simulate

US = 1_000


def of_name(graph: TaskGraph, name: str) -> list[int]:
    return [task for task, found in enumerate(names(graph)) if found == name]


def only(graph: TaskGraph, name: str) -> int:
    (task,) = of_name(graph, name)
    return task


def start_us(graph: TaskGraph, name: str) -> float:
    return float(simulate(graph).start_ns[only(graph, name)]) / US


def end_us(graph: TaskGraph, name: str) -> float:
    return end_of(simulate(graph), name) / US


def times(graph: TaskGraph, name: str, factor: float) -> TaskGraph:
    return graph.scale(graph.select(name=f"^{name}$"), factor).check()


def assert_replays(graph: TaskGraph) -> None:
    """Every task of the simulation starts when it was measured."""
    simulated = simulate(graph).start_ns
    late = {names(graph)[i]: (int(s), int(m)) for i, (s, m) in enumerate(zip(simulated, graph.start_ns)) if s != m}  # noqa: B905
    assert not late, f"(simulated, measured) of {late}"


def pairs(graph: TaskGraph, kind: DependencyKind) -> set[tuple[str, str]]:
    d, n = graph.dependencies, names(graph)
    rows = zip(d.source.tolist(), d.target.tolist(), d.kind.tolist(), strict=True)
    return {(n[source], n[target]) for source, target, k in rows if k == kind}


def backward(name: str, ts: float, dur: float, sequence: int) -> Event:
    """An operator of autograd's thread, with the number of the forward operator that it belongs to."""
    numbers = {"Sequence number": sequence, "Fwd thread id": 1}
    return op(f"autograd::engine::evaluate_function: {name}", ts, dur, tid=2, **numbers)


# -- launches ------------------------------------------------------------------------------------------------------


def test_a_kernel_starts_a_lag_after_its_launch(tmp_path: Path) -> None:
    """
    ::

        us      0    5         15
        CPU     |op-----------|
                 |L--|
        stream        ..|K----|
                        7
    """
    graph = read_events(tmp_path, [op("aten::add", 0, 12), *launched("K", 1, 4, 7, 8, 5)])
    assert graph.info.launch_lag_ns == 2 * US
    assert pairs(graph, DependencyKind.LAUNCH) == {("cudaLaunchKernel", "K")}
    assert graph.correlation_id[only(graph, "K")] == 5
    assert_replays(graph)
    earlier = graph.with_duration(graph.select(name="cudaLaunchKernel"), 1 * US)
    assert start_us(earlier, "K") == 4


def queued_kernels() -> list[Event]:
    """Three launches in a row; the kernels queue up behind one another::

    us      0    3    6    9   12
    CPU     |L1-|L2-|L3-|
    stream       .|K1---------|.|K2---------|.|K3---------|
                  5          25 26         46 47         67
    """
    return [
        op("aten::add", 0, 9),
        *launched("K1", 0, 3, 5, 20, 1),
        *launched("K2", 3, 3, 26, 20, 2),
        *launched("K3", 6, 3, 47, 20, 3),
    ]


def test_queued_kernels_follow_one_another(tmp_path: Path) -> None:
    graph = read_events(tmp_path, queued_kernels())
    assert_replays(graph)
    assert start_us(times(graph, "K1", 0.5), "K3") == 37
    assert end_us(times(graph, "K2", 0), "K3") == 47
    assert not (graph.kind == TaskKind.WAIT).any()


def test_the_launch_lag_is_the_median_of_the_trace(tmp_path: Path) -> None:
    """Six launches onto an idle stream: lags 1, 2, 2, 3, 3, 3 us."""
    events = [op("aten::add", 0, 600)]
    for i, lag in enumerate((1, 2, 2, 3, 3, 3)):
        events += launched(f"K{i}", 100 * i, 4, 100 * i + 4 + lag, 10, i + 1)
    assert read_events(tmp_path, events).info.launch_lag_ns == 2_500


def test_one_call_launches_many_kernels(tmp_path: Path) -> None:
    """A CUDA graph: one call, one correlation id, three kernels."""
    graph = read_events(
        tmp_path,
        [
            call("cudaGraphLaunch", 0, 10, 4),
            *[kernel(f"K{i}", 12 + 11 * i, 10, 4) for i in range(3)],
        ],
    )
    assert pairs(graph, DependencyKind.LAUNCH) == {("cudaGraphLaunch", f"K{i}") for i in range(3)}
    assert_replays(graph)


def test_a_kernel_whose_launch_was_not_recorded_keeps_its_place_on_its_stream(tmp_path: Path) -> None:
    """K0 was launched before the recording: it runs at its measured time and holds back K1::

    CPU     |L1-|
    stream  ....|K0------------|.|K1---|
                10            40 41
    """
    graph = read_events(tmp_path, [op("aten::add", 0, 5), kernel("K0", 10, 30, 77), *launched("K1", 0, 3, 41, 10, 1)])
    assert graph.launch_of[only(graph, "K0")] == -1
    assert [start_us(graph, name) for name in ("K0", "K1")] == [10, 41]
    assert start_us(times(graph, "K0", 0.5), "K1") == 26


def test_a_trace_of_kernels_alone_replays(tmp_path: Path) -> None:
    """No calls, no operators: each stream in its order, from the first kernel on.

    ::

        stream 7   |A---|.|B---|
        stream 8       |C-----------|
    """
    graph = read_events(tmp_path, [kernel("A", 0, 10, 0), kernel("B", 11, 10, 0), kernel("C", 5, 20, 0, stream=8)])
    assert {name: start_us(graph, name) for name in "ABC"} == {"A": 0, "B": 11, "C": 5}


def test_nested_calls_are_one_call(tmp_path: Path) -> None:
    """A runtime call that calls the driver, whose correlation id the kernel carries::

    |cudaLaunchKernelExC-------|
        |cuLaunchKernelEx--|
    """
    graph = read_events(
        tmp_path,
        [
            call("cudaLaunchKernelExC", 0, 10, 1),
            call("cuLaunchKernelEx", 2, 5, 2, cat="cuda_driver"),
            kernel("K", 12, 10, 2),
        ],
    )
    assert names(graph) == ["cudaLaunchKernelExC", "K"]
    assert graph.duration_ns.tolist() == [10 * US, 10 * US]
    assert pairs(graph, DependencyKind.LAUNCH) == {("cudaLaunchKernelExC", "K")}


def test_a_thread_that_only_polls_is_left_out(tmp_path: Path) -> None:
    watchdog = [call("cudaEventQuery", 10 * i, 1, 100 + i, tid=9) for i in range(20)]
    graph = read_events(tmp_path, [*queued_kernels(), *watchdog])
    assert [t.name for t in graph.threads] == ["CPU thread 1", "GPU 0 stream 7"]
    assert "cudaEventQuery" not in names(graph)
    assert_replays(graph)


# -- synchronisation -----------------------------------------------------------------------------------------------


def synchronised() -> list[Event]:
    """A synchronisation waits for a kernel and returns 5 us behind its end::

    us      0   3     10                   35   40
    CPU     |L-|gap--|cudaDeviceSynchronize----|gap-|
    stream       ..|K----------------------|
                   5                       35
    """
    return [op("aten::add", 0, 10), *launched("K", 0, 3, 5, 30, 1), call("cudaDeviceSynchronize", 10, 30, 2),
            op("aten::mul", 40, 10)]  # fmt: skip


def test_a_synchronisation_is_waiting_not_work(tmp_path: Path) -> None:
    graph = read_events(tmp_path, synchronised())
    assert_replays(graph)
    wait = only(graph, "(waits for the GPU)")
    assert graph.kind[wait] == TaskKind.WAIT
    assert graph.duration_ns[wait] == 0
    assert graph.waits.task.tolist() == [wait]
    assert graph.waits.lag_ns.tolist() == [5 * US]
    # The call itself works as long as one that finds nothing to wait for.
    assert graph.duration_ns[only(graph, "cudaDeviceSynchronize")] == 4 * US


@pytest.mark.parametrize(("factor", "end"), [(2, 80), (1, 50), (0.5, 35), (0.2, 26), (0, 24)])
def test_a_synchronisation_follows_its_kernels(tmp_path: Path, factor: float, end: int) -> None:
    """Twice as long: 30 later. Shorter: sooner, but never before the CPU has done its own work (24 us)."""
    graph = read_events(tmp_path, synchronised())
    assert end_us(times(graph, "K", factor), names(graph)[-1]) == end


def test_synchronising_one_stream_does_not_wait_for_the_other(tmp_path: Path) -> None:
    """
    ::

        CPU        |L1|L2|cudaStreamSynchronize--|op|
        stream 7     |A-------------------------|
        stream 8        |B---------------------------------------------|
    """
    graph = read_events(
        tmp_path,
        [
            op("aten::add", 0, 6),
            *launched("A", 0, 3, 5, 30, 1),
            *launched("B", 3, 3, 8, 90, 2, stream=8),
            call("cudaStreamSynchronize", 6, 34, 3),
            op("aten::mul", 40, 10),
        ],
    )
    assert_replays(graph)
    assert start_us(times(graph, "B", 3), "(waits for the GPU)") == 40
    assert start_us(times(graph, "A", 2), "(waits for the GPU)") == 70


# -- copies --------------------------------------------------------------------------------------------------------


def copied(direction: str, size: int = 1_000_000, call_us: float = 40) -> list[Event]:
    """A kernel, then a copy behind it, whose call returns 5 us behind the copy's end where it blocks::

    us      0   3 5        14                    45 50
    CPU     |L-|gap|cudaMemcpyAsync---------------|op|
    stream       |K--------------|.|copy------|
                 5              30 31        45
    """
    return [
        op("aten::add", 0, 10),
        *launched("K", 0, 3, 5, 25, 1),
        call("cudaMemcpyAsync", 10, call_us, 2),
        copy(direction, 31, 14, 2, size),
        op("aten::mul", 50, 10),
    ]


@pytest.mark.parametrize("direction", ["DtoH (Device -> Pageable)", "HtoD (Pageable -> Device)"])
def test_a_pageable_copy_blocks_its_call(tmp_path: Path, direction: str) -> None:
    graph = read_events(tmp_path, copied(direction))
    assert_replays(graph)
    assert end_us(times(graph, "K", 2), "aten::mul") == 60 + 25


def test_a_copy_that_queued_behind_a_kernel_comes_sooner_with_it(tmp_path: Path) -> None:
    """The call's own work is 4 us, the rest of the time in front of the copy was waiting for K::

    us      0   3 5  10 14 16            30 35
    CPU     |L-|gap|call|................|  |op|
    stream       |K-|    |copy----------|
    """
    graph = read_events(tmp_path, copied("DtoH (Device -> Pageable)"))
    assert graph.duration_ns[only(graph, "cudaMemcpyAsync")] == 4 * US
    assert end_us(times(graph, "K", 0.2), "aten::mul") == 45


@pytest.mark.parametrize(
    ("direction", "size", "call_us"),
    [
        ("HtoD (Pageable -> Device)", 4096, 6),
        ("HtoD (Pinned -> Device)", 10**7, 6),
        ("DtoH (Device -> Pinned)", 10**7, 6),
        ("DtoH (Device -> Pinned)", 10**7, 40),
        ("HtoD (Pinned -> Device)", 10**7, 40),
    ],
)
def test_a_staged_or_pinned_copy_does_not_block(tmp_path: Path, direction: str, size: int, call_us: float) -> None:
    """Whatever its call took, that was work: a longer kernel does not hold the CPU up."""
    graph = read_events(tmp_path, copied(direction, size, call_us))
    assert not (graph.kind == TaskKind.WAIT).any()
    assert graph.duration_ns[only(graph, "cudaMemcpyAsync")] == call_us * US
    slower = times(graph, "K", 3)
    assert simulate(slower).end_ns[slower.on_cpu].max() == 60 * US


# -- other streams -------------------------------------------------------------------------------------------------


def test_a_stream_waits_for_the_event_of_another_one(tmp_path: Path) -> None:
    """
    ::

        CPU        |L1|cudaStreamWaitEvent|L2|
        stream 7     |A-------------------------|
        stream 8                                |B-----|
    """
    graph = read_events(
        tmp_path,
        [
            op("aten::add", 0, 12),
            *launched("A", 0, 3, 5, 30, 1),
            call("cudaEventRecord", 3, 1, 2),
            call("cudaStreamWaitEvent", 5, 1, 3),
            *launched("B", 7, 3, 35, 10, 4, stream=8),
        ],
    )
    assert pairs(graph, DependencyKind.EVENT) == {("A", "B")}
    assert_replays(graph)
    assert start_us(times(graph, "A", 2), "B") == 65
    assert start_us(times(graph, "A", 0), "B") == 12


def test_a_late_kernel_waited_for_what_ended_just_before(tmp_path: Path) -> None:
    """No call tells, but B starts 1 us behind the end of A on another stream and long after its launch."""
    graph = read_events(
        tmp_path,
        [op("aten::add", 0, 6), *launched("A", 0, 3, 5, 80, 1), *launched("B", 3, 3, 86, 10, 2, stream=8)],
    )
    assert pairs(graph, DependencyKind.EVENT) == {("A", "B")}
    assert start_us(times(graph, "A", 0.5), "B") == 45


def test_what_nothing_explains_is_an_unexplained_wait(tmp_path: Path) -> None:
    """
    ::

        CPU      |L--|
        stream        ..[unexplained 95]|K---|
                        5               100
    """
    graph = read_events(tmp_path, [op("aten::add", 0, 6), *launched("K", 0, 3, 100, 10, 1)])
    wait = only(graph, "(unexplained wait)")
    assert abs(graph.duration_ns[wait] - 95 * US) <= 1 * US  # with or without the lag of the stream
    assert (graph.low_ns[wait], graph.high_ns[wait]) == (0, graph.duration_ns[wait])
    simulated = simulate(graph)
    assert simulated.start_ns[only(graph, "K")] == 100 * US, "the wait begins when the kernel could have, not before"


def test_an_unexplained_wait_behind_a_kernel_replays(tmp_path: Path) -> None:
    """Queued behind K1, K2 starts 50 us late: the lag of the stream counts once."""
    graph = read_events(
        tmp_path, [op("aten::add", 0, 6), *launched("K1", 0, 3, 5, 30, 1), *launched("K2", 3, 3, 86, 10, 2)]
    )
    assert abs(graph.duration_ns[only(graph, "(unexplained wait)")] - 50 * US) <= 1 * US
    assert simulate(graph).start_ns[only(graph, "K2")] == 86 * US


# -- hand-off ------------------------------------------------------------------------------------------------------


def handed_over() -> list[Event]:
    """The main thread stands still while autograd's thread works::

    us        0      20                              120    140
    main      |fwd--|. . . . . . . . . . . . . . . . .|opt--|
    autograd          |bwd--------------------------|
                      22                            118
    """
    return [
        op("aten::linear", 0, 20, tid=1, **{"Sequence number": 7}),
        backward("AddmmBackward0", 22, 96, 7),
        op("aten::add_", 120, 20, tid=1),
        *launched("F", 5, 3, 10, 10, 1),
        *launched("B", 50, 3, 55, 10, 2, tid=2),
        *launched("U", 125, 3, 130, 10, 3),
    ]  # fmt: skip


def test_the_main_thread_waits_for_the_autograd_thread(tmp_path: Path) -> None:
    graph = read_events(tmp_path, handed_over())
    wait = only(graph, "(waits for another thread)")
    assert graph.kind[wait] == TaskKind.WAIT
    assert graph.duration_ns[wait] == 0
    assert_replays(graph)
    autograd = graph.on_cpu & (graph.thread == 1)
    assert graph.duration_ns[autograd].sum() == 96 * US
    halved = graph.scale(autograd, 0.5)
    assert start_us(halved, "U") == 130 - 48
    assert start_us(graph.scale(autograd, 2), "U") == 130 + 96
    later = graph.scale(graph.on_cpu & (graph.thread == 0) & (graph.start_ns < 20 * US), 2)
    assert start_us(later, "B") == 55 + 22, "the main thread works for 22 us before it hands over"


def test_work_beside_the_main_thread_is_no_hand_off(tmp_path: Path) -> None:
    """A loader's thread that works through pauses and busy times alike hands nothing over."""
    graph = read_events(
        tmp_path,
        [
            op("aten::linear", 0, 20, tid=1),
            op("aten::copy_", 10, 100, tid=2),
            op("aten::add_", 60, 20, tid=1),
            *launched("F", 5, 3, 10, 10, 1),
        ],
    )
    assert "(waits for another thread)" not in names(graph)
    assert not pairs(graph, DependencyKind.HANDOFF)


# -- steps ---------------------------------------------------------------------------------------------------------


def steps(n: int, marks: list[Event], period: float = 100) -> list[Event]:
    """n steps of ten different kernels each."""
    events = [op("aten::step", period * i + 1, period - 2) for i in range(n)]
    for i in range(n):
        for k in range(10):
            at = period * i + 2 + 8 * k
            events += launched(f"K{k}", at, 3, at + 5, 2, 100 * i + k + 1)
    return [*events, *marks]


def test_steps_by_profiler_marks(tmp_path: Path) -> None:
    graph = read_events(tmp_path, steps(5, [mark(f"ProfilerStep#{i}", 100 * i, 100) for i in range(5)]))
    assert (graph.info.step_source, graph.info.n_steps, graph.info.steady) == ("profiler marks", 5, (1, 4))
    assert np.bincount(graph.step[graph.on_gpu]).tolist() == [10] * 5
    assert graph.info.measured_step_ns["mark"] == (100 * US,) * 5
    assert graph.info.measured_step_ns["gpu"] == (100 * US,) * 4
    assert_replays(graph)


def test_a_kernel_belongs_to_the_step_of_its_launch(tmp_path: Path) -> None:
    """The GPU is behind: the last kernel of step 0 runs in step 1."""
    events = [mark("ProfilerStep#0", 0, 50), mark("ProfilerStep#1", 50, 50), op("aten::a", 0, 100)]
    events += [
        *launched("long", 10, 3, 15, 70, 1),
        *launched("late", 20, 3, 86, 5, 2),
        *launched("next", 60, 3, 92, 5, 3),
    ]
    graph = read_events(tmp_path, events)
    assert [int(graph.step[only(graph, name)]) for name in ("long", "late", "next")] == [0, 0, 1]


def test_a_stub_mark_at_the_end_is_no_step(tmp_path: Path) -> None:
    marks = [mark(f"ProfilerStep#{i}", 100 * i, 100) for i in range(4)] + [mark("ProfilerStep#4", 400, 1)]
    assert read_events(tmp_path, steps(4, marks)).info.n_steps == 4


def test_steps_by_optimizer_marks(tmp_path: Path) -> None:
    """A step ends with its optimizer; the first one began with the recording."""
    graph = read_events(tmp_path, steps(4, [mark("Optimizer.step#SGD.step", 100 * i + 80, 20) for i in range(4)]))
    assert (graph.info.step_source, graph.info.n_steps) == ("optimizer marks", 4)
    assert np.bincount(graph.step[graph.on_gpu]).tolist() == [10] * 4


def test_optimizer_marks_that_are_recorded_twice_count_once(tmp_path: Path) -> None:
    marks = [mark("Optimizer.step#SGD.step", 100 * i + 80, 20) for i in range(4)]
    marks += [mark("Optimizer.step#SGD.step", 100 * i + 81, 18) for i in range(4)]
    assert read_events(tmp_path, steps(4, marks)).info.n_steps == 4


def test_steps_by_repetition(tmp_path: Path) -> None:
    graph = read_events(tmp_path, steps(5, []))
    assert (graph.info.step_source, graph.info.n_steps) == ("repetition", 5)
    assert np.bincount(graph.step[graph.on_gpu] + 1, minlength=6)[1:5].tolist() == [10] * 4


def test_optimizer_marks_without_any_cpu_thread_are_read(tmp_path: Path) -> None:
    """Only kernels and annotations: there is no main thread, and no crash."""
    marks = [mark("Optimizer.step#SGD.step", 100 * i + 80, 20) for i in range(3)]
    graph = read_events(tmp_path, [*[kernel("K", 100 * i, 10, 0) for i in range(3)], *marks])
    assert len(of_name(graph, "K")) == 3


# -- labels --------------------------------------------------------------------------------------------------------


def training(layer: Any) -> list[Event]:
    """A step of two layers with backward and update; ``layer`` makes a layer's mark.

    ::

        us     0     10      20       30            60            90      100
        main   |load|net: fc1------|relu--|. . . . . . . . . . . . |opt--|
        grad                              |relu'------|fc1'-------|
    """
    return [
        mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 8),
        op("aten::stack", 0, 6),
        layer("Net_0", 8, 24),
        layer("Linear_0", 10, 10),
        op("aten::linear", 11, 8, **{"Sequence number": 3}),
        *launched("F1", 12, 3, 17, 4, 1),
        layer("ReLU_0", 21, 9),
        op("aten::relu", 22, 7, **{"Sequence number": 4}),
        *launched("F2", 23, 3, 28, 4, 2),
        backward("ReluBackward0", 34, 20, 4),
        *launched("B2", 40, 3, 45, 4, 3, tid=2),
        backward("AddmmBackward0", 56, 30, 3),
        *launched("B1", 60, 3, 65, 4, 4, tid=2),
        op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 86, 2, tid=2),
        mark("Optimizer.step#SGD.step", 90, 10),
        op("aten::_foreach_add_", 91, 8),
        *launched("U", 92, 3, 97, 4, 5),
    ]  # fmt: skip


def annotated(name: str, ts: float, dur: float) -> Event:
    return mark(f"whatif::layer::{name}", ts, dur)


@pytest.mark.parametrize("layer", [module, annotated], ids=["nn.Module events", "own annotations"])
def test_layers_forward_by_their_marks_and_backward_by_sequence_numbers(tmp_path: Path, layer: Any) -> None:
    graph = read_events(tmp_path, training(layer))
    found = {k: graph.layers[graph.layer[only(graph, k)]] for k in ("F1", "F2", "B2", "B1", "U")}
    assert found == {"F1": "Linear_0", "F2": "ReLU_0", "B2": "ReLU_0", "B1": "Linear_0", "U": ""}


def test_phases_of_a_step(tmp_path: Path) -> None:
    graph = read_events(tmp_path, training(module))
    found = {k: Phase(graph.phase[only(graph, k)]).name for k in ("F1", "F2", "B2", "B1", "U")}
    assert found == {"F1": "FORWARD", "F2": "FORWARD", "B2": "BACKWARD", "B1": "BACKWARD", "U": "UPDATE"}
    assert not (graph.phase == Phase.UNKNOWN).any()


def test_data_loading_is_a_kind_of_its_own(tmp_path: Path) -> None:
    graph = read_events(tmp_path, training(module))
    loading = graph.kind == TaskKind.DATA_LOADING
    assert graph.duration_ns[loading].sum() == 8 * US
    assert (graph.phase[loading] == Phase.DATA).all()
    assert start_us(graph.scale(loading, 0), "U") == 97 - 8


def test_the_whole_step_replays(tmp_path: Path) -> None:
    assert_replays(read_events(tmp_path, training(module)))


# -- without a GPU -------------------------------------------------------------------------------------------------


def nested() -> list[Event]:
    """Operators one inside the other::

    us   0      10     20     30     40     50     60
    a    |------------------------------------|
    b           |-------------|
    c                  |------|
    d                                              |------|
    """
    return [op("a", 0, 50), op("b", 10, 20), op("c", 20, 10), op("d", 55, 10)]


def test_a_cpu_trace_is_cut_into_the_own_time_of_its_operators(tmp_path: Path) -> None:
    graph = read_events(tmp_path, nested())
    own = {}
    for task, name in enumerate(names(graph)):
        own[name] = own.get(name, 0) + int(graph.duration_ns[task])
    assert own == {"a": 30 * US, "b": 10 * US, "c": 10 * US, "": 5 * US, "d": 10 * US}
    assert graph.duration_ns.sum() == 65 * US
    assert graph.kind[only(graph, "c")] == TaskKind.CPU_OP
    assert graph.kind[only(graph, "")] == TaskKind.GAP
    assert_replays(graph)


def test_operators_that_cross_still_add_up(tmp_path: Path) -> None:
    """A clock that jumps, a lost end: no time is counted twice or lost."""
    graph = read_events(tmp_path, [op("a", 0, 30), op("b", 20, 30), op("c", 40, 30), op("d", 41, 2)])
    assert graph.duration_ns.sum() == 70 * US
    assert_replays(graph)


def test_a_cpu_trace_has_steps_by_mark(tmp_path: Path) -> None:
    events = [mark(f"ProfilerStep#{i}", 100 * i, 100) for i in range(5)]
    events += [op("aten::conv", 100 * i + 5, 90) for i in range(5)]
    graph = read_events(tmp_path, events)
    assert graph.info.measured_step_ns["mark"] == (100 * US,) * 5
    assert "gpu" not in graph.info.measured_step_ns
    assert_replays(graph)


# -- every trace ---------------------------------------------------------------------------------------------------

TRACES = {
    "queued": queued_kernels,
    "synchronised": synchronised,
    "copied": lambda: copied("DtoH (Device -> Pageable)"),
    "handed over": handed_over,
    "steps": lambda: steps(5, [mark(f"ProfilerStep#{i}", 100 * i, 100) for i in range(5)]),
    "training": lambda: training(module),
    "nested": nested,
}


@pytest.mark.parametrize("trace", TRACES)
def test_every_task_has_a_measured_start(tmp_path: Path, trace: str) -> None:
    graph = read_events(tmp_path, TRACES[trace]())
    assert (graph.start_ns >= 0).all()
    assert graph.start_ns.min() == 0
    assert_replays(graph)


@pytest.mark.parametrize("trace", TRACES)
def test_where_a_trace_begins_does_not_matter(tmp_path: Path, trace: str) -> None:
    """The same events at the times of 2024, in microseconds since 1970."""
    here = read_events(tmp_path, TRACES[trace]())
    later = read_events(tmp_path, [{**e, "ts": e["ts"] + 1_700_000_000_000_000} for e in TRACES[trace]()])
    assert later.start_ns.tolist() == here.start_ns.tolist()
    assert later.duration_ns.tolist() == here.duration_ns.tolist()


@pytest.mark.parametrize("trace", TRACES)
def test_the_order_of_the_events_in_the_file_does_not_matter(tmp_path: Path, trace: str) -> None:
    here = read_events(tmp_path, TRACES[trace]())
    turned = read_events(tmp_path, TRACES[trace]()[::-1])
    assert names(turned) == names(here)
    assert simulate(turned).start_ns.tolist() == simulate(here).start_ns.tolist()


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("factor", [0.0, 0.1, 0.5])
def test_faster_kernels_never_make_it_slower_nor_beat_the_cpu(tmp_path: Path, trace: str, factor: float) -> None:
    graph = read_events(tmp_path, TRACES[trace]())
    faster = graph.scale(graph.on_gpu, factor).check()
    before, after = simulate(graph), simulate(faster)
    assert (after.start_ns <= before.start_ns).all()
    busiest = np.bincount(graph.thread[graph.on_cpu], weights=graph.duration_ns[graph.on_cpu]).max(initial=0)
    assert after.makespan_ns >= busiest


def test_gzip_is_read_alike(tmp_path: Path) -> None:
    zipped = read(write_trace(tmp_path / "trace.json.gz", queued_kernels()))
    assert names(zipped) == names(read_events(tmp_path, queued_kernels()))


@pytest.mark.parametrize(
    ("events", "message"),
    [([], "no event at all"), ([call("cudaLaunchKernel", 0, 1, 1)], "lost its GPU half"),
     ([{"ph": "X", "cat": "v8", "name": "gc", "pid": 1, "tid": 1, "ts": 1, "dur": 1}], "another tool"),
     ([mark("ProfilerStep#1", 0, 5)], "no event at all|another tool|operators")],
)  # fmt: skip
def test_a_file_without_work_is_refused_in_one_sentence(tmp_path: Path, events: list[Event], message: str) -> None:
    with pytest.raises(WhatifError, match=message):
        read_events(tmp_path, events)
