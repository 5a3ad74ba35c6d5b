"""Behind which task of its thread a new one is put, and behind which call of the CPU its launch."""

from __future__ import annotations

import numpy as np

from whatif.errors import WhatifError
from whatif.graph import TaskGraph
from whatif.types import Array, Int64


def task_before(graph: TaskGraph, tasks: Array) -> Int64:
    """Give the task before each of ``tasks`` (ids) on its thread, shape (n,); the task itself where it is the first."""
    before = graph.neighbours[0][tasks]
    return np.where(before >= 0, before, tasks).astype(np.int64)


def calls_of(graph: TaskGraph, tasks: Array) -> Int64:
    """Give the call that launched each of ``tasks`` (ids of GPU tasks), shape (n,).

    Where none is known: the latest that launched a task ahead of it, else what the CPU did before, else its first task.
    Raises WhatifError where the recording has no CPU task.
    """
    launch = graph.launch_of.astype(np.int64)
    found = launch[tasks]
    if (found >= 0).all():
        return found
    cpu = np.flatnonzero(graph.on_cpu)
    if not len(cpu):
        raise WhatifError("expected a recording with the CPU's calls, which launch what a what-if adds, got none.")
    found = np.where(found >= 0, found, np.maximum.accumulate(launch)[tasks])
    return np.where(found >= 0, found, cpu[np.maximum(np.searchsorted(cpu, tasks) - 1, 0)])
