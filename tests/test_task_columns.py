"""The table of the graph's columns: it is complete, edits follow it, and columns cannot be written to."""

from __future__ import annotations

import dataclasses
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import whatif
from tests.helpers import extra_data, loops_in_form, step
from whatif import NewTasks, Phase, TaskGraph, TaskKind, WhatifError
from whatif.graph.columns import COLUMNS, TASK_COLUMNS, bytes_of, filled
from whatif.graph.structure_cache import Later, of_columns, of_graph, unread
from whatif.graph.types import Array


def test_the_table_lists_the_fields_of_the_graph() -> None:
    fields = [field.name for field in dataclasses.fields(TaskGraph)]
    assert fields[: len(COLUMNS)] == list(TASK_COLUMNS)
    assert fields[len(COLUMNS)] == "dependencies"


def test_edits_and_ingest_keep_the_types_of_the_table() -> None:
    graph = step()
    inserted = graph.insert(NewTasks(graph.on_cpu, "new", TaskKind.CPU_OP, 5)).graph
    for each in (graph, inserted, graph.split(graph.on_gpu, 2), graph.remove(graph.on_gpu)):
        for column in COLUMNS:
            assert getattr(each, column.name).dtype == column.dtype, column.name


def test_an_inserted_task_inherits_or_has_the_default() -> None:
    graph = step()
    (behind,) = graph.select(name="^k1$").ids
    made = graph.insert(NewTasks([behind], "new", TaskKind.KERNEL, 5))
    (new,) = made.ids
    for column in COLUMNS:
        value = getattr(made.graph, column.name)[new]
        if column.inherits:
            assert value == getattr(graph, column.name)[behind], column.name
        elif column.name not in ("name", "kind", "duration_ns", "low_ns", "high_ns"):
            assert value == column.default, column.name


def test_the_parts_of_a_split_task_add_up_where_the_table_says_so() -> None:
    graph = step()
    whole = graph.select(name="^k1$")
    parts = graph.split(whole, 3)
    of = parts.select(name="^k1$")
    for column in COLUMNS:
        before, after = getattr(graph, column.name)[whole], getattr(parts, column.name)[of]
        assert len(after) == 3
        if column.divides and before[0] >= 0:
            assert after.sum() == before[0], column.name
        else:
            assert set(after.tolist()) == set(before.tolist()), column.name


def test_filled_columns_have_the_types_and_defaults_of_the_table() -> None:
    columns = filled(2, {"duration_ns": [3, 4], "layer": 1})
    assert list(columns) == list(TASK_COLUMNS)
    assert columns["duration_ns"].tolist() == [3, 4]
    assert columns["layer"].tolist() == [1, 1]
    assert columns["start_ns"].tolist() == [-1, -1]
    assert all(columns[column.name].dtype == column.dtype for column in COLUMNS)
    with pytest.raises(WhatifError, match=r"expected columns of the task graph, got colour"):
        filled(2, {"colour": 1})


@pytest.mark.parametrize("edit", ["none", "scale", "insert", "remove", "split", "attach"])
def test_a_caller_cannot_write_into_a_graph(edit: str) -> None:
    graph = step().attach(priority=np.arange(len(step())))
    graph = {
        "none": lambda: graph,
        "scale": lambda: graph.scale(graph.on_gpu, 2.0),
        "insert": lambda: graph.insert(NewTasks([0], "new", TaskKind.CPU_OP, 5)).graph,
        "remove": lambda: graph.remove(graph.select(name="^k1$")),
        "split": lambda: graph.split(graph.on_gpu, 2),
        "attach": lambda: graph.attach(other=np.ones(len(graph))),
    }[edit]()
    arrays = [*(getattr(graph, name) for name in TASK_COLUMNS), *graph.attached.values()]
    arrays += [getattr(graph.dependencies, name) for name in graph.dependencies.__slots__]
    arrays += [getattr(graph.waits, name) for name in graph.waits.__slots__]
    arrays += [graph.launch_of, graph.by_thread, *graph.neighbours, *graph.incoming, graph.on_gpu.mask]
    for array in arrays:
        assert len(array)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_an_edit_leaves_columns_for_later() -> None:
    graph = step()
    edited = graph.remove(graph.select(name="^k1$")).insert(NewTasks([0], "new", TaskKind.CPU_OP, 5)).graph.note("more")
    waiting = {"start_ns", "registers", "operator"}
    assert waiting <= unread(edited).keys() - edited.check().__dict__.keys()
    assert edited.note("and more").start_ns is edited.start_ns
    assert waiting & edited.__dict__.keys() == {"start_ns"}
    copied = pickle.loads(pickle.dumps(edited))
    for name in TASK_COLUMNS:
        assert len(getattr(edited, name)) == len(edited), name
        assert getattr(copied, name).tolist() == getattr(edited, name).tolist(), name
    with pytest.raises(AttributeError, match="'TaskGraph' object has no attribute 'durations'"):
        edited.durations  # noqa: B018


def test_threads_that_read_a_column_first_get_the_same_array() -> None:
    asked = []

    def compute() -> Array:
        asked.append(1)
        time.sleep(0.02)
        return np.arange(3)

    column = Later(compute)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: column.read(), range(4)))
    assert asked == [1]
    assert all(array is found[0] for array in found)
    assert not found[0].flags.writeable


def test_what_is_kept_belongs_to_its_columns() -> None:
    asked = []

    @of_columns("phase")
    def in_backward(graph: TaskGraph) -> list[int]:
        asked.append("phase")
        return np.flatnonzero(graph.phase == Phase.BACKWARD).tolist()

    @of_graph
    def work_ns(graph: TaskGraph) -> int:
        asked.append("graph")
        return int(graph.duration_ns.sum())

    graph = step()
    twice = graph.scale(graph.on_gpu, 2.0)
    assert in_backward(graph) == in_backward(twice)
    assert work_ns(graph) < work_ns(twice)
    assert asked == ["phase", "graph", "graph"]
    assert work_ns(graph) < work_ns(twice)
    assert asked == ["phase", "graph", "graph"]
    assert in_backward(graph.replace(phase=np.full(len(graph), Phase.BACKWARD, np.int8))) == list(range(len(graph)))


def test_only_columns_and_tables_of_a_graph_can_be_replaced() -> None:
    with pytest.raises(TypeError, match="TaskGraph has no durations, kinds"):
        step().replace(kinds=(), durations=())


def test_a_graph_with_read_only_columns_simulates_in_both_forms() -> None:
    graph, makespans = step(), []
    for form in ("plain", "compiled"):
        with loops_in_form(form):
            makespans.append(whatif.simulate(graph.replace()).end_ns.tolist())
    assert makespans[0] == makespans[1]


@pytest.mark.parametrize("name", ["resnet18_cifar_cpu.json.gz", "V100"])
def test_a_task_takes_few_bytes(name: str, request: pytest.FixtureRequest) -> None:
    """All columns, what tasks wait for, and what a simulation adds: as benchmarks/simulating.py counts them."""
    if name == "V100":
        path = extra_data("traces", "hta", "v100_allreduce_rank1of2.json.gz")
    else:
        path = request.getfixturevalue("own_traces") / name
    graph = whatif.read(path)
    stored = [getattr(graph, column) for column in TASK_COLUMNS]
    stored += [getattr(graph.dependencies, column) for column in graph.dependencies.__slots__]
    prepared = sum(array.nbytes for array in graph.incoming)
    assert (bytes_of(stored) + prepared) / len(graph) + 16 <= 102  # 16: start and end


def test_one_value_for_all_tasks_is_stored_once_and_stays_so(own_traces: Path) -> None:
    """Under every edit that moves rows the columns hold what they would hold without."""
    graph = whatif.read(own_traces / "resnet18_cifar_cpu.json.gz")
    constant = [name for name in TASK_COLUMNS if getattr(graph, name).strides == (0,)]
    assert constant
    full = graph.replace(**{name: np.ascontiguousarray(getattr(graph, name)) for name in TASK_COLUMNS})
    some = np.arange(10, 400, 7)
    for edit in (
        lambda g: g.remove(some),
        lambda g: g.split(some, 3),
        lambda g: g.insert(NewTasks(after=some, name="new", kind=TaskKind.CPU_OP, duration_ns=5.0)).graph,
        lambda g: g.insert(NewTasks(after=some, name="new", kind=TaskKind.CPU_OP, duration_ns=5.0, flops=7)).graph,
    ):
        one, other = edit(graph), edit(full)
        for name in TASK_COLUMNS:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert any(getattr(one, name).strides == (0,) for name in constant)
