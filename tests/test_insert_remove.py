"""Tasks taken out and put in, by hand: the timeline before and after."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import (
    CPU,
    OTHER,
    STREAM,
    Build,
    ends,
    id_of,
    ids_of,
    launched,
    names,
    op,
    read_events,
    replace,
    starts,
    step,
)
from whatif import (
    DependencyKind,
    NewTasks,
    Phase,
    TaskKind,
    Thread,
    ThreadKind,
    WhatifError,
    simulate,
)
from whatif.graph.edit import add_thread
from whatif.models.layers.calls import last_gpu_before

# -- remove --------------------------------------------------------------------------------------------------------


def test_removing_the_middle_kernel_takes_its_launch_and_gap_and_keeps_the_order() -> None:
    """
    ::

        CPU     |l0|g0|l2|g2|s|......w|
        stream       |k0--------|k2--------|
    """
    graph = step()
    left = graph.remove(graph.select(name="^k1$")).check()
    assert starts(simulate(left)) == {
        "l0": 0, "g0": 3, "l2": 5, "g2": 8, "sync": 10, "k0": 5, "k2": 15, "wait": 25,
    }  # fmt: skip


@pytest.mark.parametrize("gone", [["k0"], ["k2"], ["k0", "k2"], ["k0", "k1", "k2"]])
def test_removing_kernels_is_as_if_they_had_never_been(gone: list[str]) -> None:
    graph = step()
    left = graph.remove(ids_of(graph, *gone)).check()
    build = Build(CPU, STREAM, launch_lag_ns=2)
    for i in range(3):
        if f"k{i}" not in gone:
            call = build.task(0, 3, f"l{i}")
            build.task(0, 2, f"g{i}", TaskKind.GAP)
            build.edge(call, build.task(1, 10, f"k{i}"), 2, DependencyKind.LAUNCH)
    build.sync(1)
    assert starts(simulate(left)) == starts(simulate(build.graph()))


def test_a_call_that_launches_several_kernels_stays_until_the_last_is_gone() -> None:
    build = Build(CPU, STREAM)
    call = build.task(0, 3, "graph launch")
    for name in "ab":
        build.edge(call, build.task(1, 10, name), 0, DependencyKind.LAUNCH)
    graph = build.graph()
    assert names(graph.remove(graph.select(name="^a$"))) == ["graph launch", "b"]
    assert names(graph.remove(graph.on_gpu)) == []


def test_removing_a_copy_removes_the_wait_of_its_call() -> None:
    """The copy's call waits for it; without the copy there is neither call nor wait, nor the gap behind them."""
    build = Build(CPU, STREAM)
    _, copy = build.launch(3, 10, "copy")
    wait = build.task(0, 0, "wait", TaskKind.WAIT)
    build.edge(copy, wait, 1, DependencyKind.SYNC)
    build.task(0, 2, "gap", TaskKind.GAP)
    build.task(0, 4, "next")
    graph = build.graph()
    assert starts(simulate(graph))["next"] == 16
    assert starts(simulate(graph.remove(graph.select(name="^copy$")).check())) == {"next": 0}


def test_removing_a_call_keeps_its_kernel_behind_what_came_before_the_call() -> None:
    """What waited for a removed task waits for the task before it: the kernel cannot run ahead of its program.

    ::

        before  |first--|call|          after   |first--|
                             |k--|                      |k--|
    """
    build = Build(CPU, STREAM)
    build.task(0, 8, "first")
    build.launch(3, 5, "k")
    graph = build.graph()
    left = graph.remove(graph.select(name="^launch k$")).check()
    assert starts(simulate(left))["k"] == 8


def test_removing_a_task_bridges_events_between_streams() -> None:
    """A -> x -> B over streams, x alone on its own: without x, B still waits for A::

    stream 7   |A---|
    stream 8        |x--|
    stream 9            |B--|
    """
    build = Build(CPU, STREAM, OTHER, replace(OTHER, stream=9))
    a, x, b = build.task(1, 5, "A"), build.task(2, 4, "x"), build.task(3, 3, "B")
    build.edge(a, x, kind=DependencyKind.EVENT)
    build.edge(x, b, kind=DependencyKind.EVENT)
    graph = build.graph()
    left = graph.remove(np.array([x])).check()
    assert starts(simulate(left)) == {"A": 0, "B": 5}


def test_removing_neighbours_bridges_events_through_all_of_them() -> None:
    """A -> x -> y -> B with x and y one behind the other on a stream, or on two: without both, B still waits for A."""
    for y_thread in (2, 3):
        build = Build(CPU, STREAM, OTHER, replace(OTHER, stream=9), replace(OTHER, stream=10))
        a, x = build.task(1, 5, "A"), build.task(2, 4, "x")
        y, b = build.task(y_thread, 4, "y"), build.task(4, 3, "B")
        build.edge(a, x, kind=DependencyKind.EVENT)
        if y_thread != 2:
            build.edge(x, y, kind=DependencyKind.EVENT)
        build.edge(y, b, kind=DependencyKind.EVENT)
        left = build.graph().remove(np.array([x, y])).check()
        assert starts(simulate(left)) == {"A": 0, "B": 5}, f"x and y on {'one stream' if y_thread == 2 else 'two'}"


def test_removing_a_task_never_makes_a_lag_that_it_had_hold_back_others() -> None:
    build = Build(CPU, STREAM)
    call, x = build.launch(3, 10, "x")
    end = build.task(0, 4, "end")
    build.edge(x, end, 50)
    graph = build.graph()
    assert starts(simulate(graph))["end"] == 63
    assert starts(simulate(graph.remove(np.array([x])).check())) == {"end": 0}
    assert call == 0


def test_what_waited_with_a_lag_waits_for_the_task_before_without_it() -> None:
    """x ends at 23 and "end" starts 50 later; without x it waits for k alone, whose end says nothing of that lag."""
    build = Build(CPU, STREAM)
    _, k = build.launch(3, 10, "k")
    _, x = build.launch(3, 10, "x")
    end = build.task(0, 4, "end")
    build.edge(x, end, 50)
    graph = build.graph()
    assert starts(simulate(graph))["end"] == 73
    left = simulate(graph.remove(np.array([x])).check())
    assert starts(left)["end"] == left.end_ns[k] == 13


# -- insert --------------------------------------------------------------------------------------------------------


def test_an_inserted_kernel_brings_its_launch() -> None:
    """A kernel of 6 behind k0, launched behind g0 by a call of 4::

    CPU     |l0|g0|new-|l1|g1|l2|g2|s|
    stream       |k0--------|new---|k1--------|k2--------|
    """
    graph = step()
    done = graph.insert(
        NewTasks(ids_of(graph, "k0"), "new", TaskKind.KERNEL, 6, launched_after=ids_of(graph, "g0"), launch_ns=4)
    )
    assert starts(simulate(done.graph.check())) == {
        "l0": 0, "g0": 3, "cudaLaunchKernel": 5, "l1": 9, "g1": 12, "l2": 14, "g2": 17, "sync": 19,
        "k0": 5, "new": 15, "k1": 21, "k2": 31, "wait": 41,
    }  # fmt: skip
    (new,), (launch,) = done.ids.tolist(), done.launches.tolist()
    assert done.graph.launch_of[new] == launch
    assert (done.graph.layer[new], done.graph.phase[new], done.graph.step[new]) == (
        graph.layer[id_of(graph, "k0")],
        Phase.FORWARD,
        4,
    )
    assert done.graph.start_ns[new] == -1
    assert names(done.graph)[done.moved[id_of(graph, "k2")]] == "k2"


def test_several_inserted_tasks_keep_the_order_given() -> None:
    graph = step()
    at = id_of(graph, "g0")
    done = graph.insert(NewTasks([at, at, at], "new", TaskKind.CPU_OP, [1, 20, 3]))
    order = np.argsort(done.ids)
    assert order.tolist() == [0, 1, 2]
    assert ends(simulate(done.graph.check()))["l1"] == 5 + 24 + 3
    assert len(done.launches) == 0


def test_inserting_on_a_new_thread_needs_no_neighbour_there() -> None:
    graph, channel = add_thread(step(), Thread("network", ThreadKind.CHANNEL))
    done = graph.insert(NewTasks(ids_of(graph, "k0"), "all-reduce", TaskKind.COMMUNICATION, 50, thread=channel))
    joined = done.graph.add_dependencies(done.moved[ids_of(graph, "k0")], done.ids, lag_ns=5)
    assert starts(simulate(joined.check()))["all-reduce"] == 20


def test_inserting_nothing_gives_the_same_graph() -> None:
    graph = step()
    assert graph.insert(NewTasks([], "new", TaskKind.KERNEL, 1)).graph is graph


@pytest.mark.parametrize("after", [[-1], [10**6]])
def test_insert_refuses_places_that_do_not_exist(after: list[int]) -> None:
    with pytest.raises(WhatifError, match="ids of tasks in 0"):
        step().insert(NewTasks(after, "new", TaskKind.KERNEL, 1))
    with pytest.raises(WhatifError, match="ids of tasks in 0"):
        step().insert(NewTasks([0], "new", TaskKind.KERNEL, 1, launched_after=after))


@pytest.mark.parametrize("kind", [TaskKind.KERNEL, TaskKind.MEMCPY, TaskKind.MEMSET])
def test_insert_refuses_gpu_work_on_a_cpu_thread(kind: TaskKind) -> None:
    graph = step()
    call = id_of(graph, "l1")
    with pytest.raises(WhatifError, match="expected a GPU stream for the GPU tasks 'new', got the CPU thread"):
        graph.insert(NewTasks([call], "new", kind, 1))
    stream = int(graph.thread[id_of(graph, "k1")])
    assert graph.insert(NewTasks([call], "new", kind, 1, thread=stream)).graph.check()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"duration_ns": [3, 4, 5]}, r"expected one duration_ns, or one for each of the 2 new tasks 'new', got 3\.$"),
        ({"low_ns": [1, 2, 3]}, r"expected one low_ns, or one for each of the 2 new tasks 'new', got 3\.$"),
        ({"kind": "KERNEL"}, r"expected a TaskKind, as in TaskKind.KERNEL, got 'KERNEL'\.$"),
        (
            {"launched_after": [0, 0, 0]},
            r"expected one launched_after, or one for each of the 2 new tasks .*, got 3\.$",
        ),
        ({"launched_by": [0, 0, 0]}, r"expected one launched_by, or one for each of the 2 new tasks 'new', got 3\.$"),
        ({"duration_ns": None}, "durations: expected 0 ns or more"),
        ({"high_ns": np.nan}, "durations: expected 0 ns or more"),
        ({"size_bytes": 1e300}, r"expected one size_bytes, or one for each of the 2 new tasks 'new', got 1e\+300\.$"),
        (
            {"kind": TaskKind.WAIT, "waits_for": [1, 1, 1]},
            r"expected one waits_for, or one for each of the 2 .*, got 3\.$",
        ),
    ],
)
def test_insert_says_which_field_does_not_fit_its_tasks(given: dict[str, Any], said: str) -> None:
    graph = step()
    fields = {"after": ids_of(graph, "k0", "k1"), "name": "new", "kind": TaskKind.KERNEL, "duration_ns": 1, **given}
    with pytest.raises(WhatifError, match=said):
        graph.insert(NewTasks(**fields))


def test_insert_refuses_cpu_work_on_a_stream() -> None:
    graph = step()
    with pytest.raises(WhatifError, match="expected a CPU thread for the CPU work 'new', got"):
        graph.insert(NewTasks([id_of(graph, "k1")], "new", TaskKind.CPU_OP, 1))


def test_insert_refuses_a_negative_duration() -> None:
    with pytest.raises(WhatifError, match="0 ns or more"):
        step().insert(NewTasks([0], "new", TaskKind.KERNEL, -1))


def test_removing_what_was_inserted_gives_the_old_timeline_back() -> None:
    graph = step()
    done = graph.insert(NewTasks(ids_of(graph, "k0", "k2"), "new", TaskKind.KERNEL, 6,
                                 launched_after=ids_of(graph, "g0", "g2"), launch_ns=4))  # fmt: skip
    back = done.graph.remove(done.ids).check()
    assert starts(simulate(back)) == starts(simulate(graph))


def test_a_hundred_thousand_insertions_in_one_call_stay_linear() -> None:
    """Ten times as many tasks may take thirty times as long at most; a quadratic insertion takes a hundred."""
    build = Build(CPU, STREAM, launch_lag_ns=2)
    build.launch(3, 10, "k")
    build.sync(1)
    graph = build.graph()

    def cpu_time(n: int) -> float:
        new = NewTasks(np.ones(n, np.int64), "new", TaskKind.KERNEL, 6, launched_after=np.zeros(n), launch_ns=4)
        best = float("inf")
        for _ in range(3):
            before = time.process_time()
            done = graph.insert(new)
            best = min(best, time.process_time() - before)
            assert len(done.graph) == 4 + 2 * n
        return best

    assert cpu_time(100_000) < 30 * cpu_time(10_000)


def test_what_the_gpu_ran_last_is_by_launches_not_by_a_collective_in_between(tmp_path: Path) -> None:
    """
    ::

        CPU     1 2                      3
        GPU         one = sum = two ===========  three   the sum has no launch, and two is launched before it runs
    """
    kernels = [("one", 5, 30, 50), ("two", 10, 150, 100), ("three", 200, 300, 5)]
    events = [op("aten::mm", 0, 5)]
    for correlation, (name, call, at, us) in enumerate(kernels):
        events += launched(name, call, 2, at, us, 1 + correlation)
    graph = read_events(tmp_path, events)
    graph = graph.insert(NewTasks(ids_of(graph, "one"), "sum", TaskKind.COMMUNICATION, 20_000)).graph
    calls = graph.launch_of[ids_of(graph, "three")]
    assert id_of(graph, "sum") < calls[0]
    assert last_gpu_before(graph, calls).tolist() == [id_of(graph, "two")]
