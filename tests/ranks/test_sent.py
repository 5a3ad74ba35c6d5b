"""A rank's graph on its way between processes, and merges of columns in threads."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import whatif
from whatif.graph.columns import COLUMNS
from whatif.graph.edit import columns_of
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Dependencies, Waits
from whatif.ingest.ranks.read import read_ranks
from whatif.ingest.ranks.sent import Sent
from whatif.runtime import threads


def tables_of(graph: TaskGraph) -> dict[str, np.ndarray]:
    ends = {name: getattr(graph.dependencies, name) for name in Dependencies.__slots__}
    return {**columns_of(graph), **{f"from {name}": column for name, column in ends.items()}, **graph.attached}


def assert_equal(one: TaskGraph, other: TaskGraph) -> None:
    before, after = tables_of(one), tables_of(other)
    assert before.keys() == after.keys()
    for name, column in before.items():
        assert column.dtype == after[name].dtype, name
        assert np.array_equal(column, after[name]), name
    for name in Waits.__slots__:
        assert np.array_equal(getattr(one.waits, name), getattr(other.waits, name))
    for name in ("names", "threads", "layers", "info", "notes", "declined"):
        assert getattr(one, name) == getattr(other, name)


def test_a_sent_graph_arrives_unchanged(own_traces: Path) -> None:
    graph = whatif.read(own_traces / "transformer_cpu.json.gz")
    sent = pickle.dumps(Sent.of(graph))
    arrived = pickle.loads(sent).graph
    assert_equal(graph, arrived)
    # One value for all tasks, and one column for two, stay so; a pickled graph has them in full.
    assert {name for name, column in columns_of(arrived).items() if column.strides == (0,)} == {
        name for name, column in columns_of(graph).items() if column.strides == (0,)
    }
    assert (arrived.high_ns is arrived.duration_ns) == (graph.high_ns is graph.duration_ns)
    assert len(sent) < len(pickle.dumps(graph)) / 2
    assert_equal(graph.remove(np.arange(len(graph))), Sent.of(graph.remove(np.arange(len(graph)))).graph)


@pytest.mark.parametrize("bits", [7, 15, 31, 62])
def test_numbers_at_the_ends_of_a_type_arrive(own_traces: Path, bits: int) -> None:
    graph = whatif.read(own_traces / "transformer_cpu.json.gz")
    for low, high in ((-(2**bits), 2**bits - 1), (-(2**bits) - 1, 0), (0, 2**bits)):
        values = np.where(np.arange(len(graph)) % 2 == 0, low, high)
        changed = graph.replace(
            **{each.name: values for each in COLUMNS if each.name == "size_bytes"},
            duration_ns=np.full(len(graph), high), low_ns=np.full(len(graph), low),
        )  # fmt: skip
        assert_equal(changed, Sent.of(changed).graph)


def test_columns_merged_in_threads_are_the_same(own_traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_traces / "ranks_cpu" / "twice_the_batch"
    alone = read_ranks([folder]).graph
    monkeypatch.setattr(threads, "WORTH", 0)
    assert_equal(alone, read_ranks([folder]).graph)
