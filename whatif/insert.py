"""Put new tasks into a graph, with the calls that launch them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from whatif.edit import Columns, as_ns, columns_of, renumbered, reorder
from whatif.errors import WhatifError
from whatif.types import GPU_KINDS, Dependencies, DependencyKind, Int32, Int64, TaskKind, Waits, among

if TYPE_CHECKING:
    from whatif.graph import TaskGraph


@dataclass(frozen=True)
class NewTasks:
    """Tasks to insert, n at once; a scalar field counts for all of them.

    ``after`` (n,): ids of the tasks behind which they are put; their layer, phase and step are taken over where not
    given. ``thread``: None for the thread of ``after``. ``launched_after`` (n,): ids of CPU tasks behind which the
    launching call is put, which lasts ``launch_ns``; None for tasks that no call launches. A task that is launched
    stands behind its launch even where ``after`` lies before it.
    """

    after: npt.ArrayLike
    name: str
    kind: TaskKind | npt.NDArray[Any]
    duration_ns: npt.ArrayLike
    thread: npt.ArrayLike | None = None
    low_ns: npt.ArrayLike | None = None
    high_ns: npt.ArrayLike | None = None
    layer: npt.ArrayLike | None = None
    phase: npt.ArrayLike | None = None
    size_bytes: npt.ArrayLike = -1
    flops: npt.ArrayLike = -1
    family: npt.ArrayLike = -1
    dtype: npt.ArrayLike = 0
    launched_after: npt.ArrayLike | None = None
    launch_name: str = "cudaLaunchKernel"
    launch_ns: npt.ArrayLike = 0


class Inserted(NamedTuple):
    """The graph with the new tasks, their ids, their launches' ids (empty without) and the new id of each old task."""

    graph: TaskGraph
    ids: Int32
    launches: Int32
    moved: Int32


def insert(graph: TaskGraph, tasks: NewTasks) -> Inserted:
    """See ``TaskGraph.insert``. Raises WhatifError where ids or durations are out of range."""
    after = np.atleast_1d(np.asarray(tasks.after, dtype=np.int64))
    count = len(after)
    n = len(graph)
    if count == 0:
        return Inserted(graph, np.empty(0, np.int32), np.empty(0, np.int32), np.arange(n, dtype=np.int32))
    launched_after = (
        None if tasks.launched_after is None else np.broadcast_to(np.asarray(tasks.launched_after, np.int64), (count,))
    )
    for given in (after, launched_after):
        if given is not None and (given.min() < 0 or given.max() >= n):
            raise WhatifError(f"insert: expected ids of tasks in 0..{n - 1}, got one outside.")

    names = dict.fromkeys(graph.names)
    names.setdefault(tasks.name)
    if launched_after is not None:
        names.setdefault(tasks.launch_name)
    name_ids = {name: code for code, name in enumerate(names)}

    new = _rows(graph, tasks, after, name_ids[tasks.name])
    behind, rank = after, 2 * np.arange(count) + 2
    if launched_after is not None:
        launch_rows = _launch_rows(graph, tasks, launched_after, name_ids[tasks.launch_name], new)
        new = {name: np.concatenate([column, launch_rows[name]]) for name, column in new.items()}
        behind = np.concatenate([np.maximum(after, launched_after), launched_after])
        rank = np.concatenate([rank, 2 * np.arange(count) + 1])
    # Only the new rows are sorted: each stands right behind an old one, which keeps its order.
    order = np.lexsort((rank, behind))
    place = np.empty(len(order), dtype=np.int32)
    place[order] = behind[order] + 1 + np.arange(len(order))
    is_old = np.ones(n + len(order), dtype=np.bool_)
    is_old[place] = False
    moved = np.flatnonzero(is_old).astype(np.int32)
    ids, launches = place[:count], place[count:]

    def woven(column: npt.NDArray[Any], inserted: npt.ArrayLike) -> npt.NDArray[Any]:
        result = np.empty(len(is_old), dtype=column.dtype)
        result[is_old] = column
        result[place] = inserted
        return result

    columns = {name: woven(column, new[name]) for name, column in columns_of(graph).items()}
    attached = {name: woven(column, 0) for name, column in graph.attached.items()}
    dependencies = renumbered(graph.dependencies, moved)
    if launched_after is not None:
        launch = Dependencies.of(launches, ids, DependencyKind.LAUNCH, graph.info.launch_lag_ns)
        dependencies = Dependencies.concatenate([dependencies, launch])
    waits = Waits(moved[graph.waits.task], graph.waits.scope, graph.waits.lag_ns)
    edited = graph.replace(**columns, names=tuple(names), dependencies=dependencies, waits=waits, attached=attached)
    if not among(new["kind"], GPU_KINDS).any():
        # CPU tasks fit where they are put; only what the GPU runs can change who waits for whom.
        return Inserted(edited, ids, launches, moved)
    edited, again = reorder(edited)
    return Inserted(edited, again[ids], again[launches], again[moved])


def _rows(graph: TaskGraph, tasks: NewTasks, after: Int64, name_id: int) -> Columns:
    count = len(after)

    def column(value: npt.ArrayLike | None, default: npt.ArrayLike, dtype: Any) -> npt.NDArray[Any]:
        return np.broadcast_to(np.asarray(default if value is None else value), (count,)).astype(dtype)

    duration = as_ns(np.broadcast_to(np.asarray(tasks.duration_ns, dtype=np.float64), (count,)))
    if duration.min() < 0:
        raise WhatifError(f"insert: expected durations of 0 ns or more for {tasks.name!r}, got {duration.min()}.")
    return {
        "name": column(name_id, 0, np.int32),
        "kind": column(tasks.kind, 0, np.int8),
        "thread": column(tasks.thread, graph.thread[after], np.int32),
        "duration_ns": duration,
        "low_ns": np.minimum(column(tasks.low_ns, duration, np.int64), duration),
        "high_ns": np.maximum(column(tasks.high_ns, duration, np.int64), duration),
        "start_ns": column(-1, -1, np.int64),
        "layer": column(tasks.layer, graph.layer[after], np.int32),
        "phase": column(tasks.phase, graph.phase[after], np.int8),
        "step": graph.step[after],
        "correlation_id": column(-1, -1, np.int64),
        "family": column(tasks.family, -1, np.int8),
        "dtype": column(tasks.dtype, 0, np.int8),
        "size_bytes": column(tasks.size_bytes, -1, np.int64),
        "flops": column(tasks.flops, -1, np.int64),
        "operator": np.full(count, -1, dtype=np.int32),
        "in_optimizer": np.zeros(count, dtype=np.bool_),
        "measured": np.full(count, -1, dtype=np.int32),
        "profiler_events": np.zeros(count, dtype=np.int32),
    }


def _launch_rows(graph: TaskGraph, tasks: NewTasks, launched_after: Int64, name_id: int, new: Columns) -> Columns:
    launch = NewTasks(launched_after, tasks.launch_name, TaskKind.RUNTIME, tasks.launch_ns)
    rows = _rows(graph, launch, launched_after, name_id)
    return {**rows, "layer": new["layer"], "phase": new["phase"]}
