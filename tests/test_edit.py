"""Every edit by hand, with the timeline before and after, and what must hold of all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import CPU, OTHER, STREAM, Build, equal, names, need, replace, starts, step
from whatif import (
    Anchor,
    DependencyKind,
    NewTasks,
    Phase,
    TaskGraph,
    TaskKind,
    WhatifError,
    simulate,
)
from whatif.graph.columns import TASK_COLUMNS
from whatif.graph.edit import reorder
from whatif.graph.types import Waits


def test_the_step_before_any_edit() -> None:
    assert starts(simulate(step())) == {
        "l0": 0, "g0": 3, "l1": 5, "g1": 8, "l2": 10, "g2": 13, "sync": 15, "k0": 5, "k1": 15, "k2": 25, "wait": 35,
    }  # fmt: skip


# -- scale, with_duration ------------------------------------------------------------------------------------------


def test_scale_multiplies_durations_and_their_bounds() -> None:
    """Kernels twice as fast: the stream runs dry at no time, and the synchronisation comes 15 sooner.

    ::

        CPU     |l0|g0|l1|g1|l2|g2|s|..w|
        stream       |k0--|k1--|k2--|
    """
    graph = step()
    half = graph.scale(graph.on_gpu, 0.5, low=0.4, high=1.5)
    assert starts(simulate(half))["wait"] == 20
    assert half.duration_ns[half.on_gpu].tolist() == [5, 5, 5]
    assert half.low_ns[half.on_gpu].tolist() == [4, 4, 4]
    assert half.high_ns[half.on_gpu].tolist() == [15, 15, 15]
    assert half.duration_ns[half.on_cpu].tolist() == graph.duration_ns[graph.on_cpu].tolist()


def test_scale_rounds_to_the_nearest_nanosecond() -> None:
    graph = step()
    assert graph.scale(graph.on_gpu, 1 / 3).duration_ns[graph.on_gpu].tolist() == [3, 3, 3]
    assert graph.scale(graph.on_gpu, 0.16).duration_ns[graph.on_gpu].tolist() == [2, 2, 2]


@pytest.mark.parametrize("factor", [-0.1, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["factor", "low", "high"])
def test_scale_refuses_what_is_no_factor(factor: float, where: str) -> None:
    graph = step()
    given_factors: dict[str, float] = {"factor": 1.0, where: factor}
    with pytest.raises(WhatifError, match="factor of 0 or more"):
        graph.scale(graph.on_gpu, **given_factors)


def test_with_duration_takes_one_number_or_one_per_task_by_mask_or_ids() -> None:
    graph = step()
    kernels = np.flatnonzero(graph.on_gpu)
    assert graph.with_duration(graph.on_gpu, 4).duration_ns[kernels].tolist() == [4, 4, 4]
    several = graph.with_duration(kernels, [1, 2.6, 3], low_ns=[0, 0, 9], high_ns=5)
    assert several.duration_ns[kernels].tolist() == [1, 3, 3]
    assert several.low_ns[kernels].tolist() == [0, 0, 3]
    assert several.high_ns[kernels].tolist() == [5, 5, 5]
    several.check()


@pytest.mark.parametrize("duration", [-1, [1, 2, -3], float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_with_duration_refuses_what_is_no_duration(duration: Any) -> None:
    graph = step()
    with pytest.raises(WhatifError, match="0 ns or more"):
        graph.with_duration(graph.on_gpu, duration)


# -- split, attach, dependencies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_split_keeps_every_total(parts: int) -> None:
    graph = step()
    cut = graph.split(graph.select(name="^k1$"), parts).check()
    assert len(cut) == len(graph) + parts - 1
    for column in ("duration_ns", "low_ns", "high_ns", "size_bytes", "flops"):
        before, after = getattr(graph, column), getattr(cut, column)
        chosen = graph.select(name="^k1$"), cut.select(name="^k1$")
        assert after[chosen[1]].sum() == before[chosen[0]].sum(), column
        assert after[~chosen[1]].tolist() == before[~chosen[0]].tolist(), column
    assert simulate(cut).makespan_ns == simulate(graph).makespan_ns


def test_split_leaves_what_it_does_not_cut_as_it_is() -> None:
    """A size of 0 is known to be 0, not unknown."""
    build = Build(CPU, STREAM)
    build.task(1, 10, "empty copy", TaskKind.MEMCPY, size_bytes=0, flops=0)
    build.task(1, 10, "copy", TaskKind.MEMCPY, size_bytes=64, flops=0)
    cut = build.graph().split(np.array([1]), 2)
    assert cut.size_bytes.tolist() == [0, 32, 32]
    assert cut.flops.tolist() == [0, 0, 0]


def test_splitting_a_wait_leaves_the_timeline_as_it_is() -> None:
    """The wait lasts 6 behind the end of the kernel, in one piece or in two."""
    build = Build(CPU, STREAM)
    build.launch(3, 10, "k")
    _, wait = build.sync(1)
    graph = build.graph().with_duration(np.array([wait]), 6)
    cut = graph.split(np.array([wait]), 2).check()
    assert (simulate(graph).makespan_ns, simulate(cut).makespan_ns) == (19, 19)


def test_split_moves_dependencies_to_the_right_part() -> None:
    """What waits for the start waits for the first part, what waits for the end for the last."""
    build = Build(CPU, STREAM, OTHER)
    a = build.task(0, 10, "a")
    b, c = build.task(1, 5, "b"), build.task(2, 5, "c")
    build.edge(a, b, 1, anchor=Anchor.START)
    build.edge(a, c, 1)
    cut = build.graph().split(np.array([a]), 4).check()
    timeline = simulate(cut)
    assert {n: s for n, s in zip(names(cut), timeline.start_ns.tolist(), strict=True) if n != "a"} == {"b": 1, "c": 11}


def test_split_refuses_no_part() -> None:
    with pytest.raises(WhatifError, match="1 part or more"):
        step().split(np.array([0]), 0)


def test_a_dependency_that_points_backward_renumbers_the_tasks() -> None:
    build = Build(CPU, STREAM)
    build.task(0, 5, "a")
    build.task(1, 7, "b")
    graph = build.graph().attach(priority=np.array([1, 2]))
    turned = graph.add_dependencies([1], [0], lag_ns=3).check()
    assert names(turned) == ["b", "a"]
    assert turned.attached["priority"].tolist() == [2, 1]
    assert starts(simulate(turned)) == {"b": 0, "a": 10}


@pytest.mark.parametrize(("source", "target"), [(2, 0), (1, 1), (5, 2)])
def test_dependencies_that_close_a_cycle_are_refused(source: int, target: int) -> None:
    """k0 cannot hold back its own launch, nor a task itself, nor k1 the kernel before it."""
    with pytest.raises(WhatifError, match="cycle"):
        step().add_dependencies([source], [target])


def test_as_many_factors_as_tasks_and_sources_as_targets() -> None:
    graph = step()
    with pytest.raises(WhatifError, match=r"expected one factor, or one for each of the 3 tasks, got 2\.$"):
        graph.scale([0, 1, 2], [1.0, 2.0])
    with pytest.raises(WhatifError, match=r"expected a source for each target, got 2 and 1 tasks\.$"):
        graph.add_dependencies([0, 1], [4])


@pytest.mark.parametrize(("source", "target"), [(0, 11), (-1, 3)])
def test_dependencies_between_tasks_that_do_not_exist_are_refused(source: int, target: int) -> None:
    with pytest.raises(WhatifError, match=r"expected ids of tasks in 0\.\.10"):
        step().add_dependencies([source], [target])


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([3, -1], r"ids of tasks in 0\.\.10, got -1; -1 stands for an unknown task, as in launch_of: leave it out\.$"),
        ([-2], r"ids of tasks in 0\.\.10, got -2\.$"),
        ([11], r"ids of tasks in 0\.\.10, got 11\.$"),
        ([1.0, 0.5], r"whole ids of tasks, got 0\.5\.$"),
        ("k0", r"ids of tasks: expected numbers, got 'k0'\.$"),
    ],
)
def test_every_edit_refuses_ids_of_no_task(tasks: Any, said: str) -> None:
    """The last task took what was meant for an unknown launch: numpy counts -1 from the end."""
    graph = step()
    for edit in (
        lambda: graph.scale(tasks, 2.0),
        lambda: graph.with_duration(tasks, 3),
        lambda: graph.remove(tasks),
        lambda: graph.split(tasks, 2),
    ):
        with pytest.raises(WhatifError, match=said):
            edit()


def test_attach_wants_a_value_for_every_task() -> None:
    graph = step()
    assert graph.attach(p=np.arange(11)).attached["p"].tolist() == list(range(11))
    with pytest.raises(WhatifError, match="expected 11 values for column 'p', got 3"):
        graph.attach(p=np.arange(3))


def test_attached_columns_follow_their_tasks_through_edits() -> None:
    graph = step().attach(own=np.arange(11))
    cut = graph.split(graph.select(name="^k0$"), 2)
    inserted = cut.insert(NewTasks([0], "new", TaskKind.CPU_OP, 1)).graph
    left = inserted.remove(inserted.select(name="^k1$"))
    by_name = {name: task for task, name in enumerate(names(graph))}
    assert left.attached["own"].tolist() == [by_name.get(name, 0) for name in names(left)]


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(WhatifError, match="mask of 11 tasks, got one of 3"):
        step().remove(np.ones(3, dtype=np.bool_))


def test_a_pattern_that_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(WhatifError, match=r"regular expression, got '\('"):
        step().select(name="(")


def test_selections_compose() -> None:
    graph = step()
    chosen = graph.select(name="^k", layer="layer[02]") & ~graph.select(layer="0") | graph.select(kind=TaskKind.WAIT)
    assert [names(graph)[i] for i in np.flatnonzero(chosen)] == ["k2", "wait"]
    assert graph.select(thread=1, phase=Phase.FORWARD, step=4).ids.tolist() == graph.on_gpu.ids.tolist()
    assert graph.select(kind=[TaskKind.GAP, TaskKind.WAIT]).sum() == 4


# -- what holds of every edit --------------------------------------------------------------------------------------


@st.composite
def traced(draw: st.DrawFn) -> TaskGraph:
    """A program of one or two CPU threads that launches onto three streams, with gaps, events and synchronisations."""
    build = Build(
        CPU, CPU, replace(STREAM, lag_ns=draw(st.integers(0, 1))), OTHER,
        replace(OTHER, stream=9),
        launch_lag_ns=draw(st.integers(-1, 2)), queue_depth=draw(st.sampled_from([0, 0, 2, 3])),
    )  # fmt: skip
    kernels: list[int] = []
    for _ in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(["launch", "launch", "launch", "sync", "stream sync"]))
        cpu = draw(st.integers(0, 1))
        if kind == "launch":
            _, kernel = build.launch(
                draw(st.integers(0, 3)), draw(st.integers(0, 9)), f"k{len(kernels)}", cpu, 2 + draw(st.integers(0, 2))
            )
            if kernels and draw(st.booleans()):
                build.edge(draw(st.sampled_from(kernels)), kernel, kind=DependencyKind.EVENT)
            kernels.append(kernel)
        else:
            scope = -1 if kind == "sync" else draw(st.integers(2, 4))
            build.sync(draw(st.integers(0, 2)), scope, draw(st.integers(0, 2)), cpu)
        if draw(st.booleans()):
            build.task(cpu, draw(st.integers(0, 3)), "gap", TaskKind.GAP)
    return build.graph()


EDITS: dict[str, Any] = {
    "scale": lambda g, some: g.scale(some, 0.5),
    "with_duration": lambda g, some: g.with_duration(some, 3),
    "remove": lambda g, some: g.remove(some),
    "split": lambda g, some: g.split(some, 3),
    "insert": lambda g, some: g.insert(NewTasks(np.flatnonzero(some), "new", g.kind[some], 4)).graph,
    "attach": lambda g, some: g.attach(p=some),
    "note": lambda g, some: g.note("a sentence"),
}


@pytest.mark.parametrize("edit", EDITS)
@given(graph=traced(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_an_edit_leaves_its_graph_alone_and_gives_a_sound_one(edit: str, graph: TaskGraph, data: st.DataObject) -> None:
    some = np.array(data.draw(st.lists(st.booleans(), min_size=len(graph), max_size=len(graph))))
    untouched = {name: getattr(graph, name).copy() for name in TASK_COLUMNS}
    before = simulate(graph)
    edited = EDITS[edit](graph, some)
    assert edited.check() is edited
    assert (simulate(edited).start_ns >= 0).all()
    assert all(np.array_equal(untouched[name], getattr(graph, name)) for name in TASK_COLUMNS)
    assert simulate(graph).start_ns.tolist() == before.start_ns.tolist()


def test_untouched_columns_are_shared() -> None:
    graph = step()
    for edited in (graph.scale(graph.on_gpu, 2), graph.with_duration(graph.on_gpu, 2), graph.attach(p=np.zeros(11))):
        assert edited.name is graph.name
        assert edited.dependencies is graph.dependencies


@given(traced())
@settings(max_examples=60, deadline=None)
def test_edits_that_change_nothing_change_nothing(graph: TaskGraph) -> None:
    every = np.ones(len(graph), dtype=np.bool_)
    assert equal(graph.scale(every, 1.0), graph)
    assert equal(graph.with_duration(every, graph.duration_ns, low_ns=graph.low_ns, high_ns=graph.high_ns), graph)
    assert equal(graph.remove(~every), graph)
    assert equal(graph.split(every, 1), graph)
    assert equal(graph.split(~every, 5), graph)
    assert equal(graph.add_dependencies([], []), graph)
    assert equal(reorder(graph)[0], graph)


def reaches(graph: TaskGraph) -> np.ndarray[Any, Any]:
    """Which task must end before which other can start, by stored dependencies and thread order."""
    n = len(graph)
    linked = np.zeros((n, n), dtype=np.bool_)
    waits = Waits(graph.waits.task[:0], graph.waits.scope[:0], graph.waits.lag_ns[:0])
    info = replace(graph.info, queue_depth=0)
    every = graph.replace(waits=waits, info=info).all_dependencies()
    linked[every.source, every.target] = True
    for middle in range(n):
        linked |= linked[:, [middle]] & linked[[middle], :]
    return linked


@given(traced(), st.data())
@settings(max_examples=200, deadline=None)
def test_removing_gpu_tasks_keeps_the_order_of_all_other_gpu_tasks(graph: TaskGraph, data: st.DataObject) -> None:
    """Of two GPU tasks that stay, one that had to wait for the other over a removed one still has to."""
    kernels = np.flatnonzero(graph.on_gpu)
    gone = graph.on_gpu & np.isin(np.arange(len(graph)), data.draw(st.lists(st.sampled_from([-1, *kernels.tolist()]))))
    graph = graph.attach(was=np.arange(len(graph)))
    left = graph.remove(gone).check()
    was = left.attached["was"]
    gpu_only = reaches(
        graph.replace(dependencies=graph.dependencies.take(graph.dependencies.kind == DependencyKind.EVENT))
    )
    after = reaches(left)
    on_gpu = np.flatnonzero(left.on_gpu)
    for a in on_gpu.tolist():
        for b in on_gpu.tolist():
            assert after[a, b] or not gpu_only[was[a], was[b]], f"{names(left)[b]} no longer waits for {names(left)[a]}"


@given(traced(), st.data())
@settings(max_examples=100, deadline=None)
def test_removing_gpu_work_makes_nothing_later(graph: TaskGraph, data: st.DataObject) -> None:
    """Where no queue and no negative lag says otherwise."""
    graph = graph.replace(info=replace(graph.info, queue_depth=0)).attach(was=np.arange(len(graph)))
    gone = graph.on_gpu & np.array(data.draw(st.lists(st.booleans(), min_size=len(graph), max_size=len(graph))))
    left = graph.remove(gone)
    before, after = simulate(graph), simulate(left)
    assert (after.start_ns <= before.start_ns[left.attached["was"]]).all()


@given(traced(), st.data())
@settings(max_examples=150, deadline=None)
def test_inserting_and_removing_again_restores_the_timeline(graph: TaskGraph, data: st.DataObject) -> None:
    """A new kernel behind any kernel, launched behind any task of the CPU that called for that kernel or earlier."""
    kernels = np.flatnonzero(graph.on_gpu).tolist()
    if not kernels:
        return
    chosen = data.draw(st.lists(st.sampled_from(kernels), min_size=1, max_size=3))
    done = graph.insert(
        NewTasks(chosen, "new", TaskKind.KERNEL, 5, launched_after=graph.launch_of[chosen], launch_ns=2)
    )
    done.graph.check()
    back = done.graph.remove(done.ids).check()
    assert back.duration_ns.tolist() == graph.duration_ns.tolist()
    assert simulate(back).start_ns.tolist() == simulate(graph).start_ns.tolist()


# -- misuse --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda graph: graph.scale(graph.on_gpu, "2"), "scale: expected numbers, got '2'"),
        (lambda graph: graph.scale(graph.on_gpu, 0.5, low=object()), "scale: expected numbers, got '<object"),
        (lambda graph: graph.scale(graph.on_gpu, 0.5, low=1.0, high=0.4), "scale: expected low to be at most high"),
        (lambda graph: graph.scale(graph.on_gpu, [1, 2, 3, 4, 5, 6, 7]), "scale: expected one factor, or one for each"),
        (lambda graph: graph.scale("2", 0.5), "ids of tasks: expected numbers, got '2'"),
        (lambda graph: graph.scale([0.5], 0.5), "expected whole ids of tasks, got 0.5"),
        (lambda graph: graph.scale([10**9], 0.5), r"expected ids of tasks in 0\.\.10, got 1000000000"),
        (lambda graph: graph.with_duration(graph.on_gpu, "2"), "durations: expected numbers, got '2'"),
        (lambda graph: graph.with_duration(graph.on_gpu, [[1], [2, 3]]), "durations: expected numbers"),
        (lambda graph: graph.remove(-1), r"expected ids of tasks in 0\.\.10, got -1"),
        (lambda graph: graph.remove(graph.launch_of), r"expected ids of tasks in 0\.\.10, got -1"),
        (lambda graph: graph.split([0], 1.5), "split: expected 1 part or more, got 1.5"),
        (lambda graph: graph.attach(rank=3), "attach: expected 11 values for column 'rank', got 1"),
        (lambda graph: graph.select(kind=99), "expected a TaskKind, as in TaskKind.KERNEL, got 99"),
        (lambda graph: graph.select(name=3), "expected a regular expression for name, got 3"),
        (lambda graph: graph.add_dependencies([0, 1], [2]), "a source for each target, got 2 and 1 tasks"),
        (lambda graph: graph.add_dependencies([0], [2], lag_ns=[1, 2]), "one for each of the 1 dependencies, got 2"),
        (lambda graph: graph.insert("task"), "insert: expected NewTasks.*, got str"),
        (lambda graph: graph.insert(NewTasks([0], 3, TaskKind.CPU_OP, 5)), "expected a text as the name, got 3"),
        (lambda graph: graph.insert(NewTasks([0], "new", None, 5)), "expected a TaskKind.*got None"),
        (
            lambda graph: graph.insert(NewTasks([0], "new", TaskKind.CPU_OP, [1, 2])),
            "or one for each of the 1 new tasks",
        ),
        (lambda graph: TaskGraph.from_networkx("a", graph), "expected a networkx graph, got str"),
    ],
)
def test_what_an_edit_cannot_take_is_refused_in_a_sentence(misuse: Callable[[TaskGraph], object], says: str) -> None:
    with pytest.raises(WhatifError, match=says):
        misuse(step())


# -- exchange ------------------------------------------------------------------------------------------------------


@given(traced())
@settings(max_examples=40, deadline=None)
def test_networkx_and_back_gives_the_same_timeline(graph: TaskGraph) -> None:
    need("networkx")
    back = TaskGraph.from_networkx(graph.to_networkx(), graph)
    assert simulate(back).start_ns.tolist() == simulate(graph).start_ns.tolist()


def test_networkx_spells_the_names_out_and_takes_new_ones() -> None:
    need("networkx")
    graph = step()
    nodes = graph.to_networkx()
    assert [nodes.nodes[task]["name"] for task in range(3)] == ["l0", "g0", "k0"]
    assert nodes.nodes[2]["kind"] == "KERNEL"
    assert nodes.nodes[2]["thread"] == graph.threads[graph.thread[2]].name
    nodes.nodes[2]["name"] = "mine"
    nodes.nodes[2]["layer"] = "my.layer"
    back = TaskGraph.from_networkx(nodes, graph)
    assert (back.names[back.name[2]], back.layers[back.layer[2]]) == ("mine", "my.layer")
    assert back.name.tolist()[:2] == graph.name.tolist()[:2]
    nodes.nodes[2]["kind"] = "KERNAL"
    with pytest.raises(WhatifError, match=r"'kind': expected one of .*KERNEL.*, got 'KERNAL'"):
        TaskGraph.from_networkx(nodes, graph)


def test_networkx_writes_graphml_and_gexf_and_reads_them_back(tmp_path: Path) -> None:
    networkx = need("networkx")
    graph = step()
    exchanged = graph.to_networkx()
    networkx.write_gexf(exchanged, tmp_path / "graph.gexf")
    networkx.write_graphml(exchanged, tmp_path / "graph.graphml")
    again = networkx.read_graphml(tmp_path / "graph.graphml", node_type=int)
    back = TaskGraph.from_networkx(again, graph)
    assert simulate(back).start_ns.tolist() == simulate(graph).start_ns.tolist()
    again.add_edge(0, 2, kind=DependencyKind.USER, lag_ns=5, anchor="START")
    assert DependencyKind.USER in TaskGraph.from_networkx(again, graph).dependencies.kind
    again.add_edge(0, 2, kind="USED", lag_ns=5, anchor="START")
    with pytest.raises(WhatifError, match=r"'kind': expected one of .*USER, got 'USED'"):
        TaskGraph.from_networkx(again, graph)


def test_networkx_and_back_keeps_every_column() -> None:
    need("networkx")
    graph = step()
    assert (graph.family < 0).any()
    back = TaskGraph.from_networkx(graph.to_networkx(), graph)
    for column in TASK_COLUMNS:
        assert getattr(back, column).tolist() == getattr(graph, column).tolist(), column


def test_threads_of_one_name_stay_apart() -> None:
    need("networkx")
    graph = step()
    same = graph.replace(threads=tuple(replace(thread, name="CPU") for thread in graph.threads))
    assert TaskGraph.from_networkx(same.to_networkx(), same).thread.tolist() == graph.thread.tolist()
    assert set(same.to_pandas()["thread"]) == {"CPU", "CPU #1"}


def test_pandas_spells_the_names_out() -> None:
    table = step().to_pandas()
    assert table["name"].tolist()[:3] == ["l0", "g0", "k0"]
    assert table["kind"].tolist()[:3] == ["RUNTIME", "GAP", "KERNEL"]
    assert table["phase"].tolist()[2] == "FORWARD"
    assert table["layer"].tolist()[2] == "layer0"


def test_a_kernel_that_falls_to_an_earlier_call_does_not_wait_for_itself() -> None:
    """Two threads launch in turn, the queue holds two. Without its own launch k2 is launched by k0's::

    CPU A   |L0|    |L2|
    CPU B       |L1|
    stream  |k0|k1|k2|
    """
    build = Build(CPU, CPU, STREAM, queue_depth=2)
    first = build.launch(1, 1, cpu=0, stream=2)
    build.launch(1, 1, cpu=1, stream=2)
    third = build.launch(1, 1, cpu=0, stream=2)
    graph = build.graph().remove(np.array([third[0]])).check()
    assert len(graph) == 5
    assert graph.launch_of[np.flatnonzero(graph.on_gpu)].tolist().count(first[0]) == 2
    simulate(graph)
