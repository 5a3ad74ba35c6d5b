"""Ranks as one graph: it replays, it answers, and it comes apart again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build, equal
from tests.ranks.hand import collectives, rank_graph, run_of, two_ranks
from whatif import TaskGraph, TaskKind
from whatif.graph.types import ARRIVAL_NAME, HUB_NAME
from whatif.ingest.ranks.files import Places
from whatif.ingest.ranks.merge import COLLECTIVE, ranks_of, take_apart
from whatif.ingest.ranks.read import merged
from whatif.prediction.predict import Baseline
from whatif.simulation.sharing import USES, uses_of
from whatif.simulation.transfers import WORKERS


def end_of(graph: TaskGraph, rank: int, name: str) -> int:
    timeline = whatif.simulate(graph)
    (task,) = np.flatnonzero(graph.select(name=f"^{name}$") & (ranks_of(graph) == rank))
    return int(timeline.end_ns[task])


def test_the_drawn_step_replays_and_waiting_is_no_work() -> None:
    graph = two_ranks().graph
    assert [thread.name for thread in graph.threads[:2]] == ["rank 0: CPU", "rank 0: stream 7"]
    transfers = graph.select(kind=TaskKind.COMMUNICATION)
    assert graph.duration_ns[transfers].tolist() == [20, 20]
    assert [end_of(graph, rank, "tail") for rank in (0, 1)] == [102, 102]
    assert graph.select(name=rf"^{HUB_NAME.replace('(', '[(]').replace(')', '[)]')}$").sum() == 1
    assert Baseline.of(graph).replay_error_pct == 0


def test_a_quicker_straggler_shortens_everybodys_waiting() -> None:
    graph = two_ranks().graph
    slow = graph.select(name="^gemm$") & (ranks_of(graph) == 1)
    for compute_ns, end_ns in ((70, 102), (50, 82), (20, 52), (10, 52)):
        changed = graph.with_duration(slow, compute_ns)
        assert [end_of(changed, rank, "tail") for rank in (0, 1)] == [end_ns, end_ns]


def test_bandwidth_shortens_transfers_and_no_waiting() -> None:
    prediction = whatif.apply(two_ranks().graph, "bandwidth:factor=2")
    assert prediction.graph.duration_ns[prediction.graph.select(kind=TaskKind.COMMUNICATION)].tolist() == [10, 10]
    assert [end_of(prediction.graph, rank, "tail") for rank in (0, 1)] == [92, 92]
    # What is left is the difference between two runs.
    predicted_ns = prediction.predicted_ms * 1e6
    low_ns, high_ns = prediction.ends_ns
    assert 0.97 * predicted_ns < low_ns < predicted_ns < high_ns < 1.03 * predicted_ns


def test_what_ifs_apply_to_every_rank() -> None:
    graph = two_ranks().graph
    prediction = whatif.apply(graph, "scale:kind=gpu,name=gemm,factor=0.5")
    assert [end_of(prediction.graph, rank, "tail") for rank in (0, 1)] == [67, 67]
    both = whatif.apply(graph, "scale:kind=gpu,name=gemm,factor=0.5", "bandwidth:factor=2")
    assert [end_of(both.graph, rank, "tail") for rank in (0, 1)] == [57, 57]


def test_a_function_is_given_one_rank_after_the_other() -> None:
    seen = []

    def look(graph: TaskGraph) -> TaskGraph:
        """Look."""
        seen.append((len(graph), sorted(graph.names), {thread.rank for thread in graph.threads}))
        return graph

    graph = two_ranks().graph
    assert whatif.apply(graph, look).graph is graph
    assert len(seen) == 2
    assert all(n == 6 and ranks == {0} for n, _, ranks in seen)


def test_what_tasks_share_is_their_own_ranks() -> None:
    """Two kernels of each rank share its GPU, whose threads have other codes in the merged graph."""

    def share(graph: TaskGraph) -> TaskGraph:
        """Let all kernels use half of the GPU that the stream represents."""
        uses = uses_of(graph)
        uses["device"][graph.kind == TaskKind.KERNEL] = 1 + 1
        return graph.attach(**{USES: uses})

    graph = whatif.apply(two_ranks().graph, share).graph
    uses = graph.attached[USES]
    for rank in (0, 1):
        mine = (ranks_of(graph) == rank) & (graph.kind == TaskKind.KERNEL)
        assert {graph.threads[code - 1].name for code in uses["device"][mine].tolist()} == {f"rank {rank}: stream 7"}
    assert [set(part.attached[USES]["device"].tolist()) for part in take_apart(graph)] == [{0, 2}, {0, 2}]


def test_without_the_collective_nobody_waits() -> None:
    def without(graph: TaskGraph) -> TaskGraph:
        """Train alone."""
        return graph.remove(graph.kind == TaskKind.COMMUNICATION)

    graph = whatif.apply(two_ranks().graph, without).graph
    assert [end_of(graph, rank, "tail") for rank in (0, 1)] == [32, 82]
    assert not graph.select(name="arrive").any()


def test_what_a_transform_puts_in_meets_too() -> None:
    def another(graph: TaskGraph) -> TaskGraph:
        """All-reduce once more at the end."""
        (tail,) = np.flatnonzero(graph.select(name="^tail$"))
        new = graph.insert(whatif.NewTasks([tail], "all_reduce of x", TaskKind.COMMUNICATION, 5, thread=1))
        workers = np.zeros(len(new.graph), dtype=np.int64)
        workers[new.ids] = 2
        return new.graph.attach(**{WORKERS: np.maximum(workers, new.graph.attached[WORKERS])})

    graph = whatif.apply(two_ranks().graph, another).graph
    late = graph.with_duration(graph.select(name="^tail$") & (ranks_of(graph) == 1), 30)
    assert [end_of(late, rank, "all_reduce of x") for rank in (0, 1)] == [127, 127]


def test_copies_of_a_collective_meet_their_like() -> None:
    def again(graph: TaskGraph) -> TaskGraph:
        """All-reduce a second time at the end, as a pass that is run again does."""
        (tail,) = np.flatnonzero(graph.select(name="^tail$"))
        new = graph.insert(whatif.NewTasks([tail], "once more", TaskKind.COMMUNICATION, 5, thread=1))
        column = new.graph.attached[COLLECTIVE].copy()
        column[new.ids] = column.max()
        return new.graph.attach(**{COLLECTIVE: column})

    graph = whatif.apply(two_ranks().graph, again).graph
    late = graph.with_duration(graph.select(name="^tail$") & (ranks_of(graph) == 1), 30)
    assert [end_of(late, rank, "once more") for rank in (0, 1)] == [127, 127]


@pytest.mark.parametrize("origin_ns", [0, 12_345, -(10**15), 10**18])
def test_a_shifted_clock_changes_nothing(origin_ns: int) -> None:
    ranks = two_ranks(origin_ns=origin_ns)
    assert ranks.clock_offsets_ns == (0, origin_ns)
    assert equal(ranks.graph, two_ranks().graph)


def test_a_recording_that_begins_later_begins_later() -> None:
    """Rank 1's profiler begins 12 ns after rank 0's: its times count from there.

    ::

        ns of rank 0    2    22                72   92   102
        rank 0 stream   |gemm |all-reduce            |tail|
        rank 1 stream             |gemm         |a-r |tail|
        ns of rank 1              2              60   80   90
    """
    ranks = run_of([rank_graph(20, 70), rank_graph(58, 20)])
    assert ranks.clocks[1].offset_ns == -12
    assert [end_of(ranks.graph, rank, "tail") for rank in (0, 1)] == [102, 102]
    parts = take_apart(ranks.graph)
    assert [part.start_ns[part.select(name="^tail$")].tolist() for part in parts] == [[92], [80]]


def test_who_left_before_the_others_came_waits_for_nobody() -> None:
    """A broadcast: rank 0 sends and goes on, rank 1 receives when it comes."""
    graphs = [rank_graph(20, 5), rank_graph(70, 5)]
    broadcasts = [
        collectives([22], [5], task=[3], operation=("broadcast",)),
        collectives([72], [5], task=[3], operation=("broadcast",)),
    ]
    task = [int(np.flatnonzero(graph.kind == TaskKind.COMMUNICATION)[0]) for graph in graphs]
    assert task == [3, 3]
    graph = merged(graphs, broadcasts, Places((0, 1), 2), ["a", "b"]).graph
    assert [end_of(graph, rank, "tail") for rank in (0, 1)] == [37, 87]
    # The sender comes later than the receiver: now that one waits.
    slow = graph.with_duration(graph.select(name="^gemm$") & (ranks_of(graph) == 0), 100)
    assert [end_of(slow, rank, "tail") for rank in (0, 1)] == [117, 117]


def test_the_queue_of_one_rank_is_its_own() -> None:
    """A wait for all streams is for those of its own machine."""
    graphs = []
    for kernel_ns in (10, 1_000):
        build = Build(CPU, STREAM, n_steps=1, measured_step_ns={"span": (kernel_ns,)})
        build.launch(1, 5, "ncclAllReduce")
        build.launch(1, kernel_ns, "k")
        build.sync(1)
        build.task(0, 3, "after")
        graph = build.graph()
        graphs.append(graph.replace(kind=np.where(np.arange(len(graph)) == 1, TaskKind.COMMUNICATION, graph.kind)))
    graph = run_of(graphs).graph
    assert [end_of(graph, rank, "after") < 100 for rank in (0, 1)] == [True, False]


@st.composite
def rank_graphs(draw: st.DrawFn) -> list[TaskGraph]:
    """Ranks whose steps all have the same all-reduces, each with work of its own between them."""
    n_ranks, n_collectives = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    works = [[draw(st.integers(0, 50)) for _ in range(n_collectives + 1)] for _ in range(n_ranks)]
    begins = [draw(st.integers(0, 30)) for _ in range(n_ranks)]
    transfers = [draw(st.integers(1, 20)) for _ in range(n_collectives)]
    now = [begin + 2 for begin in begins]
    builds = [
        Build(CPU, STREAM, n_steps=1, origin_ns=draw(st.integers(0, 10**12)), measured_step_ns={"span": (1,)})
        for _ in range(n_ranks)
    ]
    for i, transfer_ns in enumerate([*transfers, 0]):
        for rank, build in enumerate(builds):
            call = build.task(0, 0, "launch", start_ns=0)
            kernel = build.task(1, works[rank][i], f"k{i}", start_ns=now[rank] - begins[rank])
            build.edge(call, kernel, 2)
            now[rank] += works[rank][i]
        if i < len(transfers):
            end_ns = max(now) + transfer_ns
            for rank, build in enumerate(builds):
                spent_ns = end_ns - now[rank]
                build.task(1, spent_ns, f"all_reduce {i}", TaskKind.COMMUNICATION, start_ns=now[rank] - begins[rank])
                now[rank] = end_ns
    return [build.graph() for build in builds]


@settings(deadline=None)
@given(rank_graphs())
def test_random_ranks_replay_and_come_apart(graphs: list[TaskGraph]) -> None:
    if len(graphs) < 2:
        return
    ranks = run_of(graphs)
    graph = ranks.graph.check()
    timeline = whatif.simulate(graph)
    # Every task of every rank ends when it did, by one clock.
    begins = [int(clock.offset_ns) for clock in ranks.clocks]
    first = max(begins)
    for rank, part in enumerate(graphs):
        mine = np.flatnonzero((ranks_of(graph) == rank) & (graph.kind == TaskKind.KERNEL))
        measured = (part.start_ns + part.duration_ns)[part.kind == TaskKind.KERNEL] + first - begins[rank]
        assert timeline.end_ns[mine].tolist() == measured.tolist()
    for part, before in zip(take_apart(graph), graphs, strict=True):
        same = part.replace(duration_ns=before.duration_ns, low_ns=before.low_ns, high_ns=before.high_ns,
                            names=before.names, name=before.name, operator=before.operator)  # fmt: skip
        assert equal(same, before)
        assert [part.names[c] for c in part.name] == [before.names[c] for c in before.name]
        assert np.array_equal(part.attached[COLLECTIVE] != 0, part.kind == TaskKind.COMMUNICATION)


@settings(deadline=None)
@given(rank_graphs(), st.integers(0, 3), st.floats(0, 1))
def test_a_quicker_rank_never_makes_anybody_later(graphs: list[TaskGraph], which: int, factor: float) -> None:
    if len(graphs) < 2:
        return
    graph = run_of(graphs).graph
    quicker = graph.scale((ranks_of(graph) == which) & (graph.kind == TaskKind.KERNEL), factor)
    assert np.all(whatif.simulate(quicker).end_ns <= whatif.simulate(graph).end_ns)
    identity = whatif.apply(graph, lambda part: part.replace(notes=("same",)))
    assert np.array_equal(np.sort(identity.timeline.end_ns), np.sort(whatif.simulate(graph).end_ns))


def test_hubs_and_arrivals_are_few() -> None:
    graph = run_of([rank_graph(20 + i, 70 - i) for i in range(40)]).graph
    names = np.array(graph.names)[graph.name]
    assert (names == HUB_NAME).sum() == 1
    assert (names == ARRIVAL_NAME).sum() == 40
    assert len(graph.dependencies) == 40 * 3 + 40 + 80  # launches, one more for each arrival, in and out of the hub
