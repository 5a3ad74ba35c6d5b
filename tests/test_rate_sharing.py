"""Tasks that share what they run on: timelines drawn by hand, an exact slow twin, and what must always hold."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import sharing_twin
from tests.helpers import CHANNEL, CPU, STREAM, Build, ends, starts
from tests.rate_sharing import NCCL, NET, NET_2, H, S, Y, both, simulate, spans, using
from whatif import Anchor, Frontier, TaskGraph, Thread, ThreadKind
from whatif.simulation.sharing import (
    COLUMN,
    USES,
    uses_of,
)

# -- drawn by hand -------------------------------------------------------------------------------------------------


def test_a_collective_on_a_fifth_of_the_gpu_slows_the_kernels_beside_it() -> None:
    """It starts with k1's end and lasts 80: k2 does 64 of its 100 beside it, and the other 36 alone.

    ::

        ns      0         100        180    216        316
        stream  |k1-------|k2--------------|k3---------|
        nccl              |all-reduce|
    """
    build = Build(STREAM, NCCL)
    k1, _, _ = (build.task(0, 100, name) for name in ("k1", "k2", "k3"))
    c = build.task(1, 80, "c")
    build.edge(k1, c)
    graph = using(
        build.graph(), **{k: {"role": Y, "compute": 1.0} for k in ("k1", "k2", "k3")}, c={"role": H, "compute": 0.2}
    )
    assert spans(graph) == {"k1": (0, 100), "k2": (100, 216), "k3": (216, 316), "c": (100, 180)}


def test_a_collective_takes_longer_beside_kernels_and_not_alone() -> None:
    """Slowed by 1.25 beside k: of its 100 it does 64 in 80 while k, at 0.75, does its 60; the other 36 alone.

    ::

        ns      0             80        116
        stream  |k-----------|
        nccl    |c----------------------|
    """
    build = Build(STREAM, NCCL)
    build.task(0, 60, "k")
    build.task(1, 100, "c")
    graph = using(build.graph(), k={"role": Y, "compute": 1.0}, c={"role": H, "compute": 0.25, "slowed": 1.25})
    assert spans(graph) == {"k": (0, 80), "c": (0, 116)}


def test_a_small_kernel_finds_room_beside_a_collective() -> None:
    build = Build(STREAM, NCCL, Thread("stream 9", ThreadKind.STREAM, 0, 9))
    for thread, name in enumerate(("small", "c", "memory")):
        build.task(thread, 100, name)
    graph = using(
        build.graph(), small={"role": Y, "compute": 0.5}, c={"role": H, "compute": 0.5, "memory": 0.2},
        memory={"role": Y, "memory": 1.0},
    )  # fmt: skip
    # The one bound by memory does 80 beside the collective, and the other 20 alone.
    assert spans(graph) == {"small": (0, 100), "c": (0, 100), "memory": (0, 120)}


def test_kernels_of_two_streams_share_the_gpu_by_what_they_fill() -> None:
    """big asks for all, part for a quarter: it has that, and big has the rest until part is done.

    ::

        ns      0      40        110
        stream  |big-------------|      40 at 0.75, then 70
        nccl    |part-|
    """
    build = Build(STREAM, NCCL)
    build.task(0, 100, "big")
    build.task(1, 40, "part")
    graph = using(build.graph(), big={"role": S, "compute": 1.0}, part={"role": S, "compute": 0.25})
    assert spans(graph) == {"big": (0, 110), "part": (0, 40)}
    equal = using(graph, part={"role": S, "compute": 1.0})
    assert spans(equal) == {"big": (0, 140), "part": (0, 80)}


def test_three_transfers_share_a_link() -> None:
    """100, 200 and 300 at once: a third each, then a half, then all.

    ::

        ns      0         300    500  600
        a       |---------|
        b       |----------------|
        c       |---------------------|
    """
    channels = [Thread(name, ThreadKind.CHANNEL) for name in "abc"]
    build = Build(*channels)
    for thread, (name, ns) in enumerate((("a", 100), ("b", 200), ("c", 300))):
        build.task(thread, ns, name)
    graph = using(build.graph(), **{name: {"link": 1, "link_share": 1.0} for name in "abc"})
    assert spans(graph) == {"a": (0, 300), "b": (0, 500), "c": (0, 600)}


def test_latency_uses_no_link() -> None:
    """b sends from 50 on; a has sent 50 by then, both go on at a half, and b has 50 left when a is done.

    ::

        ns      0    50        150  200
        a       |--------------|
        b       |....|--------------|
    """
    build = Build(NET, NET_2)
    build.task(0, 100, "a")
    build.task(1, 150, "b")
    sends = {"link": 1, "link_share": 1.0}
    graph = using(build.graph(), a=sends, b={**sends, "lead_ns": 50})
    assert spans(graph) == {"a": (0, 150), "b": (0, 200)}
    all_latency = using(graph, b={**sends, "lead_ns": 150})
    assert spans(all_latency) == {"a": (0, 100), "b": (0, 150)}


def test_a_transfer_takes_a_part_of_the_core_that_computes() -> None:
    """Half the core for 60: the first operator does 30 of its 40 beside it.

    ::

        ns      0         60   70        110
        CPU     |op1----------|op2-------|
        network |c--------|
    """
    build = Build(CPU, NET)
    build.task(0, 40, "op1")
    build.task(0, 40, "op2")
    build.task(1, 60, "c")
    works = {"role": Y, "compute": 1.0}
    graph = using(build.graph(), op1=works, op2=works, c={"role": H, "compute": 0.5})
    assert spans(graph) == {"op1": (0, 70), "op2": (70, 110), "c": (0, 60)}


def test_dependencies_count_from_the_times_that_sharing_gives() -> None:
    """A call waits for k's end, another for its start, a third for all that was launched.

    ::

        ns      0  10     20             135
        CPU     |l-|later |.......................sync 136|after
        stream     |k--------------------|             k: 100 at 0.8
        nccl       |c--------------------------|
    """
    build = Build(CPU, STREAM, NCCL)
    call, k = build.launch(10, 100, "k")
    c = build.task(2, 200, "c")
    build.edge(call, c)
    later = build.task(0, 1, "later")
    build.edge(k, later, 10, anchor=Anchor.START)
    build.sync(1, scope=1, lag_ns=1)
    build.task(0, 5, "after")
    graph = using(build.graph(), k={"role": Y, "compute": 1.0}, c={"role": H, "compute": 0.2})
    found = spans(graph)
    assert (found["k"], found["c"], found["later"]) == ((10, 135), (10, 210), (20, 21))
    assert found["after"] == (136, 141)


def test_the_launch_queue_holds_back_by_the_slowed_starts() -> None:
    """A queue of two: the third launch waits until the first kernel has started, the fourth until the second has.

    ::

        ns      0  1  2                   125   126
        CPU     |l0|l1|l2|................|l3|
        stream     |k0--------------------|k1-------
        nccl       |c--------------------------------------
    """
    build = Build(CPU, STREAM, NCCL, queue_depth=2)
    first, *_ = [build.launch(1, 100, f"k{i}")[0] for i in range(4)]
    c = build.task(2, 1_000, "c")
    build.edge(first, c)
    kernels = {f"k{i}": {"role": Y, "compute": 1.0} for i in range(4)}
    graph = using(build.graph(), **kernels, c={"role": H, "compute": 0.2})
    found = spans(graph)
    assert found["k0"] == (1, 126)
    assert found["k1"] == (126, 251)
    assert found["launch k2"] == (2, 3)
    assert found["launch k3"] == (126, 127)


def test_a_stream_whose_kernels_overlap_by_a_lag_goes_on_as_recorded() -> None:
    """The next kernel starts 4 before the end of the one ahead (a negative lag), whose end is an event before it.

    ::

        ns      0           121  125          245
        stream  |k0--------------|
                            |k1---------------|       4 alone until the event, the other 96 at 0.8
        nccl    |c-----------------------------------------
    """
    build = Build(Thread("stream 7", ThreadKind.STREAM, 0, 7, lag_ns=-4), NCCL)
    build.task(0, 100, "k0")
    build.task(0, 100, "k1")
    build.task(1, 500, "c")
    works = {"role": Y, "compute": 1.0}
    graph = using(build.graph(), k0=works, k1=works, c={"role": H, "compute": 0.2})
    assert spans(graph) == {"k0": (0, 125), "k1": (121, 245), "c": (0, 500)}


def test_a_schedule_chooses_once_the_channel_is_free() -> None:
    """b and c wait for a's channel, which another transfer slows; the schedule prefers c.

    ::

        ns      0                 200    250    300
        network |a----------------|c-----|b-----|
        other   |d----------------|
    """
    build = Build(CHANNEL, NET)
    for name, ns in (("a", 100), ("b", 50), ("c", 50)):
        build.task(0, ns, name)
    build.task(1, 100, "d")
    sends = {"link": 1, "link_share": 1.0}
    graph = using(build.graph(), a=sends, b=sends, c=sends, d=sends)
    seen: list[set[int]] = []

    def prefers_c(frontier: Frontier) -> int:
        seen.append(set(frontier.ready_ns))
        first = frontier.earliest()
        return 2 if first == 1 and 2 in frontier.ready_ns else first

    timeline = simulate(graph, prefers_c)
    assert starts(timeline) == {"a": 0, "d": 0, "c": 200, "b": 250}
    assert ends(timeline) == {"a": 200, "d": 200, "c": 250, "b": 300}
    # While a is under way nobody is asked: its channel is free at 200 at the earliest, when a has ended.
    assert seen == [{0, 1, 2, 3}, {1, 2, 3}, {1, 2}, {1}]


def test_a_schedule_that_takes_a_later_task_first_gets_it() -> None:
    """Taken at 50 although d could start at 0: what runs beside it until then is not slowed for that."""
    build = Build(CHANNEL, NET, CPU)
    late = build.task(0, 100, "late")
    build.task(1, 100, "d")
    waits = build.task(2, 50, "w")
    build._edges.clear()
    sends = {"link": 1, "link_share": 1.0}
    graph = build.graph().add_dependencies([waits], [late])
    graph = using(graph, late=sends, d=sends)
    order = iter(("w", "late", "d"))
    by_name = {graph.names[code]: task for task, code in enumerate(graph.name.tolist())}
    timeline = simulate(graph, lambda _: by_name[next(order)])
    # d proceeds alone until the clock, 50, and shares the link from then on.
    assert starts(timeline) == {"w": 0, "late": 50, "d": 0}
    assert ends(timeline) == {"w": 50, "d": 150, "late": 200}


# -- against the exact twin ----------------------------------------------------------------------------------------

SHARES_OF_10 = st.integers(0, 10)


@st.composite
def sharing_graphs(draw: st.DrawFn, *, free: bool, min_lag: int, unit: int = 1) -> TaskGraph:
    """Up to a dozen tasks, each of which may use one of two devices and one of two links."""
    threads = draw(
        st.lists(
            st.builds(
                Thread, name=st.just("t"), kind=st.just(ThreadKind.CHANNEL), lag_ns=st.integers(min_lag, 3),
                ordered=st.booleans() if free else st.just(True),
            ),
            min_size=2, max_size=4,
        )
    )  # fmt: skip
    build = Build(*threads)
    n = draw(st.integers(1, 12))
    for _ in range(n):
        build.task(draw(st.integers(0, len(threads) - 1)), unit * draw(st.integers(0, 9)))
    for _ in range(draw(st.integers(0, n)) if n > 1 else 0):
        source = draw(st.integers(0, n - 2))
        anchor = draw(st.sampled_from((Anchor.END, Anchor.START)))
        build.edge(source, draw(st.integers(source + 1, n - 1)), draw(st.integers(min_lag, 3)), anchor=anchor)
    graph = build.graph()
    uses = uses_of(graph)
    for row in range(n):
        uses["device"][row] = draw(st.integers(0, 2))
        uses["role"][row] = draw(st.sampled_from([0, 1, 1, 2, 2, 3, 3]))
        uses["compute"][row], uses["memory"][row] = (draw(SHARES_OF_10) / 10 for _ in range(2))
        if uses["role"][row] == Y and draw(st.booleans()):
            uses["compute"][row] = 1.6
        uses["slowed"][row] = draw(st.sampled_from([0.0, 1.0, 1.25, 2.0]))
        uses["link"][row] = draw(st.sampled_from([0, 0, 1, 2]))
        uses["link_share"][row] = draw(st.integers(1, 10)) / 10
        uses["lead_ns"][row] = unit * draw(st.sampled_from([0, 0, 1, 5]))
    return graph.attach(**{USES: uses})


def by_twin(graph: TaskGraph) -> list[tuple[Fraction, Fraction]]:
    d = graph.dependencies
    uses = graph.attached[USES]
    names: tuple[str, ...] = COLUMN.names or ()
    rows = [{name: Fraction(str(row[name])) for name in names} for row in uses]
    return sharing_twin.simulate(
        list(zip(graph.thread.tolist(), graph.duration_ns.tolist(), strict=True)),
        list(zip(d.source.tolist(), d.target.tolist(), d.lag_ns.tolist(), (d.anchor == 1).tolist(), strict=True)),
        [thread.lag_ns for thread in graph.threads],
        rows,
    )


@pytest.mark.slow
@given(sharing_graphs(free=False, min_lag=0, unit=1_000_000))
@settings(max_examples=80, deadline=None)
def test_the_times_are_those_of_the_exact_twin(graph: TaskGraph) -> None:
    """Within the rounding of every event to a whole ns, which a rate of a hundredth can make a hundredfold."""
    for found, exact in zip(both(graph), by_twin(graph), strict=True):
        assert abs(found[0] - exact[0]) < 5_000
        assert abs(found[1] - exact[1]) < 5_000


@given(sharing_graphs(free=True, min_lag=-3))
@settings(max_examples=150, deadline=None)
def test_plain_python_and_the_compiled_loop_agree(graph: TaskGraph) -> None:
    both(graph)


# -- what must always hold -----------------------------------------------------------------------------------------


@given(sharing_graphs(free=True, min_lag=-3))
@settings(max_examples=80, deadline=None)
def test_nothing_is_faster_than_alone_and_what_waits_waits(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    assert np.all(timeline.end_ns - timeline.start_ns >= graph.duration_ns)
    d = graph.dependencies
    reached = np.where(d.anchor == Anchor.START, timeline.start_ns[d.source], timeline.end_ns[d.source]) + d.lag_ns
    assert np.all(timeline.start_ns[d.target] >= reached)
    for code, thread in enumerate(graph.threads):
        tasks = np.flatnonzero(graph.thread == code)
        if not thread.ordered:
            if thread.lag_ns < 0:
                continue  # a short task can start before the end of one ahead of the one before it
            tasks = tasks[np.lexsort((timeline.end_ns[tasks], timeline.start_ns[tasks]))]
        assert np.all(timeline.start_ns[tasks][1:] >= timeline.end_ns[tasks][:-1] + thread.lag_ns)


@given(sharing_graphs(free=True, min_lag=0))
@settings(max_examples=80, deadline=None)
def test_what_shares_nothing_runs_as_ever(graph: TaskGraph) -> None:
    """Rows of zeros, and rows of tasks that ask for nothing, give the timeline of the plain simulator."""
    plain = simulate(graph.replace(attached={}))
    uses = uses_of(graph)
    for name in ("compute", "memory", "link_share", "slowed"):
        uses[name] = 0
    for column in (uses, np.zeros(len(graph), dtype=COLUMN)):
        found = both(graph.attach(**{USES: column}))
        assert found == list(zip(plain.start_ns.tolist(), plain.end_ns.tolist(), strict=True))


@given(st.lists(st.integers(1, 1_000_000), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_a_shared_link_carries_as_much_as_one_that_serialises(sizes: list[int]) -> None:
    build = Build(*[NET] * len(sizes))
    for thread, ns in enumerate(sizes):
        build.task(thread, ns, f"t{thread}")
    sends = {"link": 1, "link_share": 1.0}
    graph = using(build.graph(), **{f"t{i}": sends for i in range(len(sizes))})
    found = both(graph)
    assert abs(max(end for _, end in found) - sum(sizes)) <= len(sizes)
    # In the order of their sizes, and none before what fair sharing leaves it at least.
    assert [end for _, end in sorted(found, key=lambda one: one[1])] == [
        found[i][1] for i in sorted(range(len(sizes)), key=lambda i: (sizes[i], found[i][1]))
    ]


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=4),
    st.integers(1, 10**6),
    st.lists(SHARES_OF_10, min_size=2, max_size=2),
    st.sampled_from([1.0, 1.34]),
)
@settings(max_examples=100, deadline=None)
def test_the_more_a_collective_holds_the_later_all_ends(
    kernels: list[int], ns: int, shares: list[int], slowed: float
) -> None:
    build = Build(STREAM, NCCL)
    for i, kernel_ns in enumerate(kernels):
        build.task(0, kernel_ns, f"k{i}")
    build.task(1, ns, "c")
    last = []
    for share in sorted(shares):
        c = {"role": H, "compute": share / 10, "slowed": slowed}
        works = {f"k{i}": {"role": Y, "compute": 1.0} for i in range(len(kernels))}
        last.append(max(end for _, end in both(using(build.graph(), **works, c=c))))
    assert last[0] <= last[1] + 1
