"""Selections: what they give, how they compose, and that a graph refuses one made before an edit changed ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build, ids_of, launched, names, read_events, step
from whatif import DependencyKind, NewTasks, Selection, TaskGraph, TaskKind, WhatifError
from whatif.graph.edit import as_mask, columns_of

STALE = r"expected a selection of this graph, got one of a graph whose tasks have other ids.*; select again"

# -- what a selection gives ----------------------------------------------------------------------------------------


def test_a_selection_is_not_written_into() -> None:
    with pytest.raises(WhatifError, match=r"which is read-only; use its \.mask\.copy\(\)\.$"):
        step().on_gpu[0] = True


def test_times_are_one_or_one_for_each_task() -> None:
    graph = step()
    with pytest.raises(WhatifError, match=r"expected one time, or one for each of the 3 tasks, got 2\.$"):
        graph.with_duration(graph.select(name="^k"), [1, 2])


def test_a_selection_has_mask_ids_and_length() -> None:
    graph = step()
    chosen = graph.select(name="^k")
    assert isinstance(chosen, whatif.Selection)
    assert chosen.mask.tolist() == [name.startswith("k") for name in names(graph)]
    assert chosen.ids.tolist() == list(chosen) == np.flatnonzero(chosen).tolist()
    assert len(chosen) == chosen.sum() == 3
    assert repr(chosen) == f"Selection(3 of {len(graph)} tasks)"
    assert chosen.any()
    assert chosen
    assert not chosen.all()
    nothing = graph.select(name="no such task")
    assert not nothing.any()
    assert not nothing
    assert len(nothing) == 0
    assert (nothing | ~nothing).all()
    assert ~nothing.any()
    assert not ~chosen.any()
    for array in (chosen.mask, chosen.ids):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_selection_indexes_columns_and_works_in_numpy_functions() -> None:
    graph = step()
    chosen = graph.select(name="^k")
    assert graph.duration_ns[chosen].tolist() == [10, 10, 10]
    assert np.where(chosen, 1, 0).sum() == 3
    assert (graph.duration_ns * chosen).sum() == 30
    assert chosen[chosen.ids].all()
    assert not chosen[~chosen].any()
    assert isinstance(chosen == chosen.mask, np.ndarray)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int8])
def test_a_selection_does_not_become_ids_by_accident(dtype: type) -> None:
    with pytest.raises(WhatifError, match=r"expected ids, got a selection.*use its \.ids"):
        np.asarray(step().on_gpu, dtype=dtype)


def test_selections_compose_with_each_other_and_with_masks() -> None:
    graph = step()
    gpu, mask = graph.on_gpu, graph.duration_ns == 3
    for composed, expected in (
        (gpu & mask, gpu.mask & mask),
        (mask & gpu, gpu.mask & mask),
        (gpu | mask, gpu.mask | mask),
        (mask | gpu, gpu.mask | mask),
        (mask ^ gpu, gpu.mask ^ mask),
        (~gpu | graph.on_cpu, ~gpu.mask | graph.on_cpu.mask),
        (np.logical_and(mask, gpu), gpu.mask & mask),
        (gpu & True, gpu.mask),
    ):
        assert isinstance(composed, Selection)
        assert composed.mask.tolist() == expected.tolist()
        assert as_mask(graph, composed) is composed.mask


@pytest.mark.parametrize("other", [np.ones(3, dtype=np.bool_), np.arange(9), np.ones((2, 9), dtype=np.bool_)])
def test_a_selection_does_not_compose_with_other_arrays(other: Any) -> None:
    with pytest.raises(WhatifError, match="expected a selection or a mask of 11 tasks to combine"):
        step().on_gpu & other
    with pytest.raises(WhatifError, match="expected a selection or a mask of 11 tasks to combine"):
        other | step().on_gpu


def test_composing_does_not_change_what_it_starts_from() -> None:
    graph = step()
    tasks = graph.on_gpu
    tasks &= graph.select(name="k1")
    assert len(tasks) == 1
    assert len(graph.on_gpu) == 3


# -- to which graphs it belongs ------------------------------------------------------------------------------------


def test_a_mask_of_relu_never_scales_another_kernel(tmp_path: Path) -> None:
    kernels = [("gemm_a", 7, 7), ("relu_b", 8, 12), ("gemm_c", 7, 30), ("relu_d", 8, 30), ("gemm_e", 7, 60),
               ("relu_f", 8, 60)]  # fmt: skip
    events = [
        event
        for number, (name, stream, start) in enumerate(kernels)
        for event in launched(name, 5 * number, 5, start, 10, number + 1, stream=stream)
    ]
    graph = read_events(tmp_path, events)
    first, last = graph.select(name="gemm_c"), graph.select(name="relu_f")
    edited = graph.add_dependencies(last, first)
    assert names(edited)[last.ids[0]] != "relu_f"  # the ids have changed
    with pytest.raises(WhatifError, match=STALE):
        edited.scale(last, 0.1)
    scaled = edited.scale(edited.select(name="relu_f"), 0.1)
    assert [n for n, a, b in zip(names(edited), edited.duration_ns, scaled.duration_ns, strict=True) if a != b] == [
        "relu_f"
    ]


def keeps_ids(graph: TaskGraph) -> dict[str, TaskGraph]:
    source, target = ids_of(graph, "l0", "k2")
    return {
        "scale": graph.scale(graph.on_gpu, 2.0),
        "with_duration": graph.with_duration(graph.on_gpu, 7),
        "attach": graph.attach(priority=np.arange(len(graph))),
        "note": graph.note("a sentence"),
        "replace": graph.replace(family=np.zeros(len(graph), dtype=np.int8)),
        "a dependency that points forward": graph.add_dependencies([source], [target]),
        "nothing removed": graph.remove(graph.select(name="no such task")),
        "nothing split": graph.split(graph.on_gpu, 1),
        "nothing inserted": graph.insert(NewTasks([], "new", TaskKind.KERNEL, 1)).graph,
    }


def changes_ids(graph: TaskGraph) -> dict[str, TaskGraph]:
    return {
        "remove": graph.remove(graph.select(name="^k1$")),
        "split": graph.split(graph.select(name="^k1$"), 2),
        "insert": graph.insert(NewTasks(ids_of(graph, "k1"), "new", TaskKind.KERNEL, 1)).graph,
        "synchronize": graph.synchronize(graph.select(name="^l1$"), call_ns=1),
        "all columns": graph.replace(**columns_of(graph)),
    }


@pytest.mark.parametrize("edit", list(keeps_ids(step())))
def test_an_edit_that_keeps_ids_keeps_selections(edit: str) -> None:
    graph = step()
    chosen = graph.select(name="^k")
    edited = keeps_ids(graph)[edit]
    assert edited.scale(chosen & edited.on_gpu, 2.0).duration_ns[chosen].sum() > 0


TAKES: dict[str, Callable[[TaskGraph, Selection], object]] = {
    "scale": lambda graph, tasks: graph.scale(tasks, 2.0),
    "with_duration": lambda graph, tasks: graph.with_duration(tasks, 7),
    "remove": lambda graph, tasks: graph.remove(tasks),
    "split": lambda graph, tasks: graph.split(tasks, 2),
    "insert after": lambda graph, tasks: graph.insert(NewTasks(tasks, "new", TaskKind.CPU_OP, 1)),
    "insert launched_after": lambda graph, tasks: graph.insert(
        NewTasks(graph.on_gpu.ids[:1], "new", TaskKind.KERNEL, 1, launched_after=tasks)
    ),
    "insert launched_by": lambda graph, tasks: graph.insert(
        NewTasks(graph.on_gpu.ids[:1], "new", TaskKind.KERNEL, 1, launched_by=tasks)
    ),
    "synchronize": lambda graph, tasks: graph.synchronize(tasks, call_ns=1),
    "dependency source": lambda graph, tasks: graph.add_dependencies(tasks, [len(graph) - 1]),
    "dependency target": lambda graph, tasks: graph.add_dependencies([0], tasks),
    "attach": lambda graph, tasks: graph.attach(chosen=tasks),
    "replace": lambda graph, tasks: graph.replace(in_optimizer=tasks),
}


@pytest.mark.parametrize("method", list(TAKES))
@pytest.mark.parametrize("edit", list(changes_ids(step())))
def test_every_method_refuses_a_selection_from_before_an_edit(method: str, edit: str) -> None:
    graph = step()
    name = "^k2$" if method.startswith("dependency") else "^l0$"
    before = graph.select(name=name)
    edited = changes_ids(graph)[edit]
    with pytest.raises(WhatifError, match=STALE):
        TAKES[method](edited, before)
    TAKES[method](edited, edited.select(name=name))
    with pytest.raises(WhatifError, match="expected selections of one graph, got two"):
        before & edited.on_gpu


def test_a_selection_as_ids_stands_for_its_ids() -> None:
    graph = step()
    chosen = graph.select(name="^k[01]$")
    made = graph.insert(NewTasks(chosen, "new", TaskKind.KERNEL, [1, 2]))
    assert names(made.graph).count("new") == 2
    assert made.graph.duration_ns[made.ids].tolist() == [1, 2]
    linked = graph.add_dependencies(graph.select(name="^l0$"), graph.select(name="^k2$"))
    new = linked.dependencies.kind == DependencyKind.USER
    assert linked.dependencies.source[new].tolist() == ids_of(graph, "l0").tolist()


# -- random graphs and random edits --------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    build = Build(CPU, STREAM, launch_lag_ns=1)
    for number in range(draw(st.integers(1, 6))):
        build.launch(draw(st.integers(1, 9)), draw(st.integers(1, 9)), f"task {number}")
    return build.graph().attach(was=np.arange(2 * number + 2))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_fresh_selection_selects_what_it_says_and_a_stale_one_is_refused(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    for _ in range(data.draw(st.integers(1, 4))):
        some = st.lists(st.integers(0, len(graph) - 1), min_size=1, max_size=3, unique=True)
        ids = np.array(sorted(data.draw(some)))
        chosen = graph.select(name=data.draw(st.sampled_from(["task [0-2]", "launch", "new", ".", "nothing"])))
        before = {"name": names(graph), "was": graph.attached["was"].tolist(), "n": len(graph)}
        edit = data.draw(st.sampled_from(["scale", "remove", "split", "insert", "add_dependencies"]))
        if edit == "scale":
            edited = graph.scale(ids, 2.0)
        elif edit == "remove":
            edited = graph.remove(ids)
        elif edit == "split":
            edited = graph.split(ids, data.draw(st.integers(1, 3)))
        elif edit == "insert":
            edited = graph.insert(NewTasks(ids, "new", TaskKind.CPU_OP, 1, thread=0)).graph
        else:
            try:
                edited = graph.add_dependencies(ids[:1], [data.draw(st.integers(0, len(graph) - 1))])
            except WhatifError:  # a cycle
                continue
        same_ids = len(edited) == before["n"] and edited.attached["was"].tolist() == before["was"]
        if edited.order is graph.order:
            assert same_ids
            assert as_mask(edited, chosen).tolist() == chosen.mask.tolist()
        else:
            assert not same_ids
            with pytest.raises(WhatifError, match=STALE):
                edited.scale(chosen, 0.5)
        fresh = edited.select(name="task [0-2]")
        slower = edited.scale(fresh, 3.0).duration_ns != edited.duration_ns
        expected = [
            name in ("task 0", "task 1", "task 2", "launch task 0", "launch task 1", "launch task 2") and duration > 0
            for name, duration in zip(names(edited), edited.duration_ns.tolist(), strict=True)
        ]
        assert slower.tolist() == expected
        if not len(edited):
            return
        graph = edited.attach(was=np.arange(len(edited)))


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        ({"kind": "kernel"}, "TaskKind.KERNEL, got 'kernel'"),
        ({"phase": "backward"}, "Phase.BACKWARD, got 'backward'"),
        ({"thread": "stream 7"}, "a thread's number"),
        ({"step": "2"}, "a step's number"),
        ({"kind": [TaskKind.KERNEL, "memcpy"]}, "TaskKind.KERNEL, got 'memcpy'"),
        ({"kind": whatif.Phase.UPDATE}, "TaskKind.KERNEL, got <Phase.UPDATE: 4>"),
        ({"phase": TaskKind.KERNEL}, "Phase.BACKWARD, got <TaskKind.KERNEL: 3>"),
        ({"layer": 3}, "a regular expression for layer, got 3"),
    ],
)
def test_a_text_for_a_number_does_not_select_nothing(criterion: dict[str, Any], expected: str) -> None:
    with pytest.raises(WhatifError, match=expected):
        Build(CPU).graph().select(**criterion)
