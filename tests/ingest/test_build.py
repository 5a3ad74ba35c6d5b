"""From tiny traces, drawn above each test in us, to graphs: launches, and what holds for every trace.

A trace with fewer than five samples takes the default lags: a kernel starts 2 us after its call returned (0 + 2), and
1 us after the kernel before it where it was queued.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers import (
    Event,
    call,
    kernel,
    launched,
    mark,
    module,
    names,
    op,
    read_events,
    write_trace,
)
from tests.ingest.drawn import (
    US,
    assert_replays,
    copied,
    end_us,
    handed_over,
    nested,
    only,
    pairs,
    start_us,
    steps,
    synchronised,
    times,
    training,
)
from whatif import DependencyKind, TaskKind, WhatifError, read, simulate

# -- launches ---------------------------------------------------------------------------------------------------------


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


def test_a_call_behind_its_kernel_did_not_launch_it(tmp_path: Path) -> None:
    """The id counter ran twice: the second run's call has the id of the first run's kernel."""
    events = [op("aten::add", 0, 600), *launched("K0", 0, 4, 10, 5, 1), kernel("K1", 50, 5, 2),
              call("cudaLaunchKernel", 300, 4, 2)]  # fmt: skip
    graph = read_events(tmp_path, events)
    targets = graph.dependencies.target[graph.dependencies.kind == DependencyKind.LAUNCH]
    assert [graph.names[code] for code in graph.name[targets]] == ["K0"]
    assert graph.info.quirks == ()


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


# -- every trace ------------------------------------------------------------------------------------------------------


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
