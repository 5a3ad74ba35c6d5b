"""Several workers in one graph: classes of equal workers, each simulated once for any number of members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from msgspec import Struct

from whatif.graph.structure_cache import found
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Int64, TaskKind
from whatif.ingest.ranks.merge import COLLECTIVE, merge
from whatif.runtime.errors import WhatifError

WHAT = ("all", "gpu", "cpu")


def classes(
    graph: TaskGraph,
    factors: Sequence[float],
    *,
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
    slowed: str = "all",
) -> TaskGraph:
    """Return a graph with one worker for each of ``factors``, which scales its compute time.

    All communicate with each other: a communication task begins when all classes have reached it. The first worker's
    steps are timed. ``low`` and ``high`` bound the factors, all of shape (n_classes,); ``slowed``: the work that they
    scale, ``gpu``, ``cpu`` or ``all``. Raises WhatifError on a factor that is not above 0.
    """
    if not factors or not all(np.isfinite(factor) and factor > 0 for factor in factors):
        raise WhatifError(f"expected a factor above 0 for each class of workers, got {list(factors)}.")
    compute = compute_tasks(graph, slowed)
    bounds = zip(factors, low or factors, high or factors, strict=True)
    workers = [
        graph if (factor, least, most) == (1, 1, 1) else graph.scale(compute, factor, low=least, high=most)
        for factor, least, most in bounds
    ]
    return replicate(workers, graph.kind == TaskKind.COMMUNICATION)


def compute_tasks(graph: TaskGraph, side: str) -> Bool:
    """Return a mask, shape (n_tasks,), of the work of the ``gpu``, the ``cpu`` or ``all``, without communication."""
    if side not in WHAT:
        raise WhatifError(f"expected what to be one of {', '.join(WHAT)}, got {side!r}.")
    sides = {"gpu": graph.gpu_work, "cpu": graph.on_cpu, "all": graph.gpu_work | graph.on_cpu}
    return np.asarray(sides[side], dtype=np.bool_)


# Attached while workers are merged: 1 + the task's place among those of all workers.
_ROW = "row of workers"
_TIMES = ("duration_ns", "low_ns", "high_ns")


class _Merged(Struct, frozen=True):
    """A merged graph, cached for workers that differ in times alone, of which a sweep has many."""

    alike: list[Any]
    matched: Bool
    graph: TaskGraph
    row: Int64

    def holds_for(self, workers: Sequence[TaskGraph], matched: Bool) -> bool:
        alike = _all_but_times(workers)
        same = len(alike) == len(self.alike) and all(a is b for a, b in zip(alike, self.alike, strict=True))
        return same and np.array_equal(matched, self.matched)

    def graph_of(self, workers: Sequence[TaskGraph]) -> TaskGraph:
        nothing = np.zeros(1, dtype=np.int64)
        times = {name: np.concatenate([nothing, *(getattr(w, name) for w in workers)])[self.row] for name in _TIMES}
        return self.graph.replace(**times)


def _all_but_times(workers: Sequence[TaskGraph]) -> list[Any]:
    names = [field.name for field in fields(TaskGraph) if field.name not in _TIMES]
    return [getattr(worker, name) for worker in workers for name in names]


def _kept(_: object) -> list[_Merged]:
    return []


def replicate(workers: Sequence[TaskGraph], matched: Bool) -> TaskGraph:
    """Return one graph with the threads of all ``workers``, which have the same tasks and differ in times alone.

    The tasks of the mask ``matched`` (n_tasks,) are collectives: each begins when all workers have reached it. The
    result is a graph of several ranks, as from several recordings (``whatif.ingest.ranks.merge``). Raises WhatifError
    if the workers differ.
    """
    first = workers[0]
    if any(len(worker) != len(first) or worker.threads != first.threads for worker in workers):
        raise WhatifError("replicate: expected workers with the same tasks and threads, got different ones.")
    if len(workers) == 1:
        return first
    for kept in (kept for kept in found(first, "workers", _kept) if kept.holds_for(workers, matched)):
        return kept.graph_of(workers)
    number = np.where(matched, np.cumsum(matched), 0)
    rows = np.arange(len(workers) * len(first)).reshape(len(workers), -1) + 1
    parts = [worker.attach(**{COLLECTIVE: number, _ROW: of}) for worker, of in zip(workers, rows, strict=True)]
    info = replace(first.info, ranks=tuple(worker.info for worker in workers))
    merged = merge(parts, info, list(range(len(workers))), [0] * len(workers))
    row = merged.attached[_ROW]
    merged = merged.replace(attached={name: column for name, column in merged.attached.items() if name != _ROW})
    found(first, "workers", _kept)[:] = [_Merged(_all_but_times(workers), matched, merged, row)]
    return merged
