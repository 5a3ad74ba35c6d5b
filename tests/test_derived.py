"""Derived dependencies: what edits do to synchronizations and to the launch queue."""

from __future__ import annotations

import numpy as np

from tests.helpers import CPU, OTHER, STREAM, Build, ends, id_of, ids_of, starts, step
from whatif import (
    DependencyKind,
    NewTasks,
    TaskGraph,
    TaskKind,
    simulate,
)
from whatif.graph.types import Waits


def test_two_thousand_kernels_before_a_synchronisation_delay_it_and_their_removal_brings_it_back() -> None:
    graph = step()
    done = graph.insert(NewTasks(np.full(2000, id_of(graph, "k1")), "new", TaskKind.KERNEL, 10,
                                 launched_after=np.full(2000, id_of(graph, "l1"))))  # fmt: skip
    before, after = starts(simulate(graph)), dict(ends(simulate(done.graph.check())))
    assert after["wait"] == before["wait"] + 2000 * 10
    assert starts(simulate(done.graph.remove(done.ids).check())) == before


def test_kernels_behind_a_synchronisation_do_not_delay_it() -> None:
    graph = step()
    done = graph.insert(NewTasks(ids_of(graph, "k2"), "new", TaskKind.KERNEL, 100,
                                 launched_after=ids_of(graph, "wait"), launch_ns=1))  # fmt: skip
    timeline = starts(simulate(done.graph.check()))
    assert timeline["wait"] == 35
    assert timeline["new"] == 38


def test_a_stream_synchronisation_waits_for_its_stream_alone() -> None:
    """
    ::

        CPU       |l|l|s|.....w|.................................w|
        stream 7    |a---------|
        stream 8      |b-----------------------------------------|
    """
    build = Build(CPU, STREAM, OTHER)
    build.launch(1, 10, "a")
    build.launch(1, 50, "b", stream=2)
    build.sync(1, scope=1, lag_ns=2)
    timeline = simulate(build.graph())
    assert starts(timeline)["wait"] == 13
    build.task(0, 1, "between")
    wait = build.task(0, 0, "wait for all", TaskKind.WAIT)
    graph = build.graph()
    waits = Waits(*(np.append(c, v).astype(c.dtype) for c, v in zip(
        (graph.waits.task, graph.waits.scope, graph.waits.lag_ns), (wait, -1, 0), strict=True)))  # fmt: skip
    assert starts(simulate(graph.replace(waits=waits).check()))["wait for all"] == 52


def queued(n: int, depth: int) -> TaskGraph:
    build = Build(CPU, STREAM, queue_depth=depth)
    for i in range(n):
        build.launch(1, 10, f"k{i}")
    return build.graph()


def test_a_full_launch_queue_holds_the_call_back() -> None:
    """Two places: the third call waits for the start of the first kernel, the fourth for that of the second.

    ::

        ns      0         10        20        30
        CPU     |0|1|2|......|3|......|4|
        stream    |k0-------|k1-------|k2-------|
    """
    timeline = starts(simulate(queued(5, 2)))
    assert [timeline[f"launch k{i}"] for i in range(5)] == [0, 1, 2, 11, 21]
    assert [timeline[f"k{i}"] for i in range(5)] == [1, 11, 21, 31, 41]
    assert [starts(simulate(queued(5, 0)))[f"launch k{i}"] for i in range(5)] == [0, 1, 2, 3, 4]


def test_an_inserted_kernel_takes_a_place_in_the_queue() -> None:
    """Behind k0 comes n: now k2's call is the fourth and waits for the start of n instead of k0's."""
    graph = queued(4, 2)
    done = graph.insert(NewTasks(ids_of(graph, "k0"), "n", TaskKind.KERNEL, 10,
                                 launched_after=ids_of(graph, "launch k0"), launch_ns=1))  # fmt: skip
    timeline = starts(simulate(done.graph.check()))
    assert [timeline[f"launch k{i}"] for i in range(4)] == [0, 2, 11, 21]
    assert timeline["cudaLaunchKernel"] == 1
    back = done.graph.remove(done.ids).check()
    assert starts(simulate(back)) == starts(simulate(graph))


def test_one_call_for_many_kernels_takes_one_place_in_the_queue() -> None:
    build = Build(CPU, STREAM, queue_depth=1)
    call = build.task(0, 1, "graph launch")
    for name in "abc":
        build.edge(call, build.task(1, 10, name), 0, DependencyKind.LAUNCH)
    build.launch(1, 10, "d")
    build.launch(1, 10, "e")
    timeline = starts(simulate(build.graph()))
    assert timeline["launch d"] == 1
    assert timeline["launch e"] == timeline["d"] == 31
