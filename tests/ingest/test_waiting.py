"""From tiny traces, drawn above each test in us, to graphs: what is waiting, and what it waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import (
    call,
    launched,
    names,
    op,
    read_events,
)
from tests.ingest.drawn import (
    US,
    assert_replays,
    copied,
    end_us,
    handed_over,
    only,
    pairs,
    start_us,
    synchronised,
    times,
)
from whatif import DependencyKind, TaskKind, simulate

# -- synchronisation --------------------------------------------------------------------------------------------------


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


def test_negative_times_give_the_same(tmp_path: Path) -> None:
    """The first synchronisation finds nothing to wait for, whatever the origin of times is."""
    events = [call("cudaDeviceSynchronize", -60, 50, 3), *synchronised()]
    here, below = (
        read_events(tmp_path, [{**event, "ts": event["ts"] + shift_us} for event in events]) for shift_us in (0, -1e6)
    )
    assert here.start_ns.tolist() == below.start_ns.tolist()
    assert here.duration_ns.tolist() == below.duration_ns.tolist()


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


# -- copies -----------------------------------------------------------------------------------------------------------


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


# -- other streams ----------------------------------------------------------------------------------------------------


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
    """No call shows it, but B starts 1 us behind the end of A on another stream and long after its launch."""
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


# -- hand-off ---------------------------------------------------------------------------------------------------------


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
