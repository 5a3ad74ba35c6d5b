"""Added work that a step leaves unfinished is a warning; work that something waits for is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import whatif
from tests.cli.test_commands import training
from tests.helpers import write_trace
from whatif import NewTasks, TaskGraph, TaskKind, Thread, ThreadKind


def last_kernels(graph: TaskGraph) -> list[int]:
    """The last GPU task of each step."""
    gpu = np.flatnonzero(graph.on_gpu & (graph.step >= 0))
    return [int(gpu[graph.step[gpu] == step].max()) for step in np.unique(graph.step[gpu])]


def with_copies(ms: float, *, on_new_thread: bool = True, joined: bool = False) -> whatif.Transform:
    """A copy of the given ms after each step's last kernel, on a separate thread; the next step may wait for it."""

    def transform(graph: TaskGraph) -> TaskGraph:
        thread = None
        if on_new_thread:
            graph = graph.replace(threads=(*graph.threads, Thread("copies", ThreadKind.CHANNEL)))
            thread = len(graph.threads) - 1
        after = last_kernels(graph)
        done = graph.insert(NewTasks(after, "copy away", TaskKind.COMMUNICATION, ms * 1e6, thread=thread))
        if joined:
            kernels = done.graph.on_gpu.ids
            first = [int(kernels[done.graph.step[kernels] == step].min()) for step in range(1, len(after))]
            return done.graph.add_dependencies(done.ids[: len(first)], first)
        return done.graph

    return whatif.Transform("copies", "copies", "", transform)


def warned(graph: TaskGraph, transform: whatif.Transform) -> list[str]:
    return [sentence for sentence in whatif.apply(graph, transform).warnings if "added work" in sentence]


def test_what_a_step_leaves_unfinished_is_reported(tmp_path: Path) -> None:
    graph = whatif.read(write_trace(tmp_path / "a.json", training()))
    before = whatif.apply(graph)
    after = whatif.apply(graph, with_copies(50))
    assert after.predicted_ms == before.baseline_ms  # nothing waits for it
    (sentence,) = warned(graph, with_copies(50))
    assert sentence.startswith("added work ('copy away') still runs for ")
    assert not warned(graph, with_copies(0))


def test_work_that_something_waits_for_is_in_the_step(tmp_path: Path) -> None:
    graph = whatif.read(write_trace(tmp_path / "a.json", training()))
    for transform in (with_copies(50, joined=True), with_copies(50, on_new_thread=False)):
        assert whatif.apply(graph, transform).predicted_ms > whatif.apply(graph).baseline_ms
        assert not warned(graph, transform)
