"""The gradients of a step: their number, their sizes, and when each is ready."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from whatif.graph.order import each_once
from whatif.graph.structure_cache import of_columns
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Int64, Phase
from whatif.models.layers.layer_facts import layer_codes


class Gradients(NamedTuple):
    """Number of the parameter tensors that get a gradient, and bytes of all gradients."""

    tensors: int
    size_bytes: int


def gradients(graph: TaskGraph) -> Gradients | None:
    """Return the number of parameter tensors with a gradient, and the bytes; None if the recording lists none."""
    known = [row.size_bytes for row in graph.info.recorded.gradients if row.size_bytes is not None]
    return Gradients(len(known), sum(known)) if known else None


class ReadyGradients(NamedTuple):
    """One row per step and parameter, shape (n,) each, by step and then in the order of completion."""

    step: Int64
    row: Int64  # in the recorder's list of gradients
    task: Int64  # the last task of the layer's backward work: a kernel, on a CPU an operator
    size_bytes: Int64


def ready_gradients(graph: TaskGraph) -> ReadyGradients:
    """Return when each parameter's gradient is ready: with the last backward work of its layer.

    A gradient whose layer has no backward work in a step is ready with the one before it in the recorder's list. Empty
    if the recording has no such list (``whatif collect`` records it) or no backward work.
    """
    return ready_in_parts(graph, np.where(graph.on_device.mask, graph.step, -1).astype(np.int64))


def ready_in_parts(graph: TaskGraph, part: Int64) -> ReadyGradients:
    """Return the same for parts of the backward work.

    ``part`` (n_tasks,) has the number of each task's part in place of its step; -1 for none.
    """
    code = layer_codes(graph)
    tasks = np.flatnonzero((graph.phase == Phase.BACKWARD) & (part >= 0))
    key = part[tasks] * len(graph.layers) + graph.layer[tasks]
    # The last task of each part and layer: the first in reverse order.
    keys, place = np.unique(key[::-1], return_index=True)
    last = dict(zip(keys.tolist(), tasks[::-1][place].tolist(), strict=True))
    found: list[tuple[int, int, int, int]] = []
    for number in each_once(part[tasks]).tolist():
        ready = -1
        waiting: list[tuple[int, int]] = []
        for place_in_list, row in enumerate(graph.info.recorded.gradients):
            layer_end = last.get(number * len(graph.layers) + code.get(row.layer, 0), -1)
            ready = max(ready, layer_end) if layer_end >= 0 else ready
            waiting.append((place_in_list, row.size_bytes or 0))
            if ready >= 0:
                found += [(number, in_list, ready, bytes_) for in_list, bytes_ in waiting]
                waiting.clear()
    columns = np.array(found, dtype=np.int64).reshape(-1, 4).T
    return ReadyGradients(columns[0], columns[1], columns[2], columns[3])


@of_columns("phase", "in_optimizer")
def superseded(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the backward work of passes whose gradients are not exchanged.

    Those are passes after which another one follows in the same step without an optimizer's step in between (gradient
    accumulation, SAM): DDP exchanges the gradients of the last one. A pass inside an optimizer's step is its closure.
    """
    forward, backward = (graph.phase == phase for phase in (Phase.FORWARD, Phase.BACKWARD))
    ids = np.flatnonzero(graph.on_cpu & (forward | backward | graph.in_optimizer))
    of_thread = np.array([thread.rank for thread in graph.threads], dtype=np.int64)
    if len(set(of_thread.tolist())) > 1:  # one rank after the other
        ids = ids[np.argsort(of_thread[graph.thread[ids]], kind="stable")]
    forwards, backwards, optimizer = (np.flatnonzero(mask[ids]) for mask in (forward, backward, graph.in_optimizer))
    # A pass is backward work without forward work in between.
    n_forward = np.cumsum(forward[ids], dtype=np.int32)[backwards]
    begins = np.append(True, n_forward[1:] > n_forward[:-1])[: len(backwards)]
    begin = np.flatnonzero(begins)
    before, last = backwards[begin[1:] - 1], np.append(backwards[begin[1:] - 1], backwards[-1:])[1:]
    updated = np.searchsorted(optimizer, [before, forwards[np.searchsorted(forwards, before)], last])
    separate = (updated[0] < updated[1]) & (updated[1] == updated[2])
    first = ids[backwards[begin]]
    step, rank = graph.step[first], of_thread[graph.thread[first]]
    followed = (step[1:] == step[:-1]) & (step[1:] >= 0) & (rank[1:] == rank[:-1]) & ~separate
    found = np.zeros(len(graph), dtype=np.bool_)
    if not followed.any():
        return found
    found[ids[backwards]] = np.append(followed, False)[np.cumsum(begins) - 1]
    launch = graph.launch_of
    return np.where(launch >= 0, found[launch], found)


def step_of(graph: TaskGraph) -> Int64:
    """Return the step of each task, shape (n_tasks,); a recording without step marks is one step."""
    steps = graph.step.astype(np.int64)
    return steps if bool((steps >= 0).any()) else np.zeros(len(graph), dtype=np.int64)


def backward_ends(graph: TaskGraph) -> Int64:
    """Return the id of the last CPU task of the backward pass of each step that has one, shape (n,)."""
    return last_of_steps(graph, graph.on_cpu.mask)


def last_of_steps(graph: TaskGraph, chosen: Bool) -> Int64:
    """Return the last of the chosen tasks in the backward pass of each step, shape (n,)."""
    steps = step_of(graph)
    tasks = np.flatnonzero(chosen & (graph.phase == Phase.BACKWARD) & (steps >= 0))
    _, last = np.unique(steps[tasks][::-1], return_index=True)
    return tasks[::-1][last]
