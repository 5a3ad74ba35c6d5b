"""The forward and backward passes of a step, and the work of each part of the model in them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    Int64,
    Phase,
    TaskKind,
)
from whatif.models.layers.gradients import step_of


class Passes(NamedTuple):
    """The work of all passes in order: task ids, their pass and direction, shape (n,) each; steps (n_passes,)."""

    task: Int64
    number: Int64  # a forward pass and the backward pass after it share one
    backward: Bool
    step: Int64  # of each pass


class Use(NamedTuple):
    """One part of the model at work in one direction of one pass: its first and last task, and the first per thread."""

    number: int
    backward: bool
    part: int
    first: int
    last: int
    firsts: tuple[int, ...]


def passes(graph: TaskGraph) -> Passes:
    """Return the passes: a new one begins with each step, and when forward work follows backward work.

    Work is all tasks of GPU streams except collectives; on a CPU its operators.
    """
    worker = graph.kind == TaskKind.CPU_OP
    if graph.has_gpu:
        worker = graph.gpu_work
        # Tasks launched before the recording began have no call to place new calls beside.
        launched = worker & (graph.launch_of >= 0)
        worker = launched if launched.any() else worker
    steps = step_of(graph)
    directed = (graph.phase == Phase.FORWARD) | (graph.phase == Phase.BACKWARD)
    tasks = np.flatnonzero(worker & directed & (steps >= 0))
    tasks = tasks[np.argsort(steps[tasks], kind="stable")]
    step, backward = steps[tasks], graph.phase[tasks] == Phase.BACKWARD
    turns = np.append(False, backward[:-1])[: len(tasks)] & ~backward
    turns[1:] |= step[1:] != step[:-1]
    turns[:1] = False
    number = np.cumsum(turns).astype(np.int64)
    begins = np.append(True, turns[1:])[: len(tasks)]
    return Passes(tasks, number, np.asarray(backward, dtype=np.bool_), step[begins])


def uses(graph: TaskGraph, found: Passes, part_of: Int64) -> list[Use]:
    """Return the uses of each part of the model, in the order of the tasks.

    ``part_of`` (n_tasks,): each task's part of the model, -1 for none.
    """
    part = part_of[found.task]
    of_part = part >= 0
    tasks, part, number, backward = found.task[of_part], part[of_part], found.number[of_part], found.backward[of_part]
    if not len(tasks):
        return []
    n_parts = int(part.max()) + 1
    key = (number * 2 + backward) * n_parts + part
    keys, first_at = np.unique(key, return_index=True)
    last_at = len(key) - 1 - np.unique(key[::-1], return_index=True)[1]
    by_thread = key * len(graph.threads) + graph.thread[tasks]
    _, at = np.unique(by_thread, return_index=True)
    firsts: dict[int, list[int]] = {}
    for owner, task in zip(key[at].tolist(), tasks[at].tolist(), strict=True):
        firsts.setdefault(owner, []).append(task)
    rows: list[Use] = []
    ends: list[Array] = [tasks[first_at], tasks[last_at]]
    for owner, first, last in zip(keys.tolist(), *(column.tolist() for column in ends), strict=True):
        direction, worker_part = divmod(owner, n_parts)
        rows.append(Use(direction // 2, direction % 2 == 1, worker_part, first, last, tuple(firsts[owner])))
    return sorted(rows, key=lambda use: (use.number, use.backward, use.first))
