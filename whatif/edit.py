"""Edits of a task graph: scale, set, remove, insert, split, add dependencies. Each gives a new graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from whatif.errors import WhatifError
from whatif.order import topological_order
from whatif.types import (
    Anchor,
    Bool,
    Dependencies,
    DependencyKind,
    Int32,
    Int64,
    Phase,
    TaskKind,
    Thread,
    Waits,
)

if TYPE_CHECKING:
    from whatif.graph import TaskGraph

Columns = dict[str, npt.NDArray[Any]]


def scale(graph: TaskGraph, tasks: Bool, factor: float, *, low: float | None, high: float | None) -> TaskGraph:
    """See ``TaskGraph.scale``. Raises WhatifError on a factor that is negative or not finite."""
    for value in (factor, low, high):
        if value is not None and not (np.isfinite(value) and value >= 0):
            raise WhatifError(f"scale: expected a factor of 0 or more, got {value}.")

    def scaled(column: Int64, by: float) -> Int64:
        new = column.copy()
        new[tasks] = np.rint(column[tasks] * by).astype(np.int64)
        return new

    duration_ns = scaled(graph.duration_ns, factor)
    low_ns = scaled(graph.low_ns, factor if low is None else low)
    high_ns = scaled(graph.high_ns, factor if high is None else high)
    return graph.replace(
        duration_ns=duration_ns, low_ns=np.minimum(low_ns, duration_ns), high_ns=np.maximum(high_ns, duration_ns)
    )


def with_duration(
    graph: TaskGraph,
    tasks: npt.NDArray[Any],
    duration_ns: npt.ArrayLike,
    *,
    low_ns: npt.ArrayLike | None,
    high_ns: npt.ArrayLike | None,
) -> TaskGraph:
    """See ``TaskGraph.with_duration``. Raises WhatifError on a negative duration."""

    def put(column: Int64, values: npt.ArrayLike) -> Int64:
        new = column.copy()
        new[tasks] = np.rint(np.asarray(values, dtype=np.float64)).astype(np.int64)
        return new

    duration = put(graph.duration_ns, duration_ns)
    if len(duration) and int(duration.min()) < 0:
        raise WhatifError("with_duration: expected durations of 0 ns or more, got a negative one.")
    low = put(graph.low_ns, duration_ns if low_ns is None else low_ns)
    high = put(graph.high_ns, duration_ns if high_ns is None else high_ns)
    return graph.replace(duration_ns=duration, low_ns=np.minimum(low, duration), high_ns=np.maximum(high, duration))


# -- remove ----------------------------------------------------------------------------------------------------


def remove(graph: TaskGraph, tasks: npt.NDArray[Any]) -> TaskGraph:
    """See ``TaskGraph.remove``.

    What waited for a removed task then waits for what that task waited for: the task before it on its thread, and the
    sources of its dependencies. What a removed task waited for holds back the next task on its thread.
    """
    gone = as_mask(graph, tasks)
    if not gone.any():
        return graph
    gone = _with_launches(graph, gone)
    gone = _with_gaps(graph, gone)
    kept = ~gone
    new_id = np.cumsum(kept, dtype=np.int32) - 1
    dependencies = _bridged(graph, gone)
    moved = Dependencies(
        new_id[dependencies.source],
        new_id[dependencies.target],
        dependencies.kind,
        dependencies.lag_ns,
        dependencies.anchor,
    )
    stays = kept[graph.waits.task]
    waits = Waits(new_id[graph.waits.task[stays]], graph.waits.scope[stays], graph.waits.lag_ns[stays])
    columns = {name: column[kept] for name, column in _columns(graph).items()}
    attached = {name: column[kept] for name, column in graph.attached.items()}
    return graph.replace(**columns, dependencies=moved, waits=waits, attached=attached)


def _with_launches(graph: TaskGraph, gone: Bool) -> Bool:
    """Add the CPU calls that launch nothing any more."""
    launch = graph.launch_of
    launches = launch >= 0
    removed = np.zeros(len(graph), dtype=np.bool_)
    removed[launch[launches & gone]] = True
    still_needed = np.zeros(len(graph), dtype=np.bool_)
    still_needed[launch[launches & ~gone]] = True
    # A blocking copy's call goes with its copy, but never one that other waits hang on.
    return gone | (removed & ~still_needed)


def _with_gaps(graph: TaskGraph, gone: Bool) -> Bool:
    """Add the gap that follows each removed CPU task on its thread."""
    order = np.argsort(graph.thread, kind="stable")
    thread, kind = graph.thread[order], graph.kind[order]
    removed = gone[order]
    calls = removed & np.isin(kind, [TaskKind.RUNTIME, TaskKind.CPU_OP])
    # The wait that belongs to a removed call stands between the call and its gap.
    waits = np.zeros_like(removed)
    waits[1:] = calls[:-1] & (kind[1:] == TaskKind.WAIT) & (thread[1:] == thread[:-1])
    before_gap = calls | waits
    gaps = np.zeros_like(removed)
    gaps[1:] = before_gap[:-1] & (kind[1:] == TaskKind.GAP) & (thread[1:] == thread[:-1])
    result = gone.copy()
    result[order[gaps | waits]] = True
    return result


def _neighbours(graph: TaskGraph, gone: Bool) -> tuple[Int32, Int32]:
    """For each task the nearest kept task before it and after it on its thread (itself if kept); -1 where none is."""
    n = len(graph)
    order = np.argsort(graph.thread, kind="stable").astype(np.int32)
    thread = graph.thread[order]
    kept = ~gone[order]
    position = np.arange(n)
    before = np.maximum.accumulate(np.where(kept, position, -1))
    after = np.minimum.accumulate(np.where(kept, position, n)[::-1])[::-1]
    previous = np.full(n, -1, dtype=np.int32)
    following = np.full(n, -1, dtype=np.int32)
    has_before = (before >= 0) & (thread[np.maximum(before, 0)] == thread)
    has_after = (after < n) & (thread[np.minimum(after, n - 1)] == thread)
    previous[order[has_before]] = order[before[has_before]]
    following[order[has_after]] = order[after[has_after]]
    return previous, following


def _bridged(graph: TaskGraph, gone: Bool) -> Dependencies:
    """The dependencies between kept tasks, those that led over removed ones included."""
    dependencies = graph.dependencies
    source_gone, target_gone = gone[dependencies.source], gone[dependencies.target]
    kept = dependencies.take(~source_gone & ~target_gone)
    previous, following = _neighbours(graph, gone)

    # A launch starts the task that it launched and no other.
    into = dependencies.take(target_gone & ~source_gone & (dependencies.kind != DependencyKind.LAUNCH))
    into_target = following[into.target]
    into = into.take(into_target >= 0)
    forwarded = Dependencies(into.source, following[into.target], into.kind, into.lag_ns, into.anchor)

    # The lag told how long after the removed task the target came; a zero lag is all that is known now.
    out = dependencies.take(source_gone & ~target_gone & (dependencies.kind != DependencyKind.LAUNCH))
    out_source = previous[out.source]
    on_thread = out_source >= 0
    backed = Dependencies.of(out_source[on_thread], out.target[on_thread], DependencyKind.USER)
    backed = Dependencies(
        backed.source, backed.target, out.kind[on_thread], np.minimum(out.lag_ns[on_thread], 0), backed.anchor
    )
    pairs = _across(dependencies, gone, out)
    parts = [kept, forwarded, backed, pairs]
    joined = Dependencies.concatenate(parts)
    return joined.take(joined.source < joined.target)


def _across(dependencies: Dependencies, gone: Bool, out: Dependencies) -> Dependencies:
    """Pairs (kept source of a removed task, kept target of it): source -> removed -> target becomes one dependency."""
    incoming = dependencies.take(gone[dependencies.target] & ~gone[dependencies.source])
    if not len(incoming) or not len(out):
        return Dependencies.concatenate([])
    incoming = incoming.take(np.argsort(incoming.target, kind="stable"))
    first = np.searchsorted(incoming.target, out.source, side="left")
    count = np.searchsorted(incoming.target, out.source, side="right") - first
    outgoing = np.repeat(np.arange(len(out)), count)
    offset = np.arange(len(outgoing)) - np.repeat(np.cumsum(count) - count, count)
    pair = np.repeat(first, count) + offset
    return Dependencies(
        incoming.source[pair],
        out.target[outgoing],
        out.kind[outgoing],
        np.zeros(len(pair), dtype=np.int64),
        incoming.anchor[pair],
    )


# -- insert ----------------------------------------------------------------------------------------------------


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
    kind: TaskKind
    duration_ns: npt.ArrayLike
    thread: npt.ArrayLike | None = None
    low_ns: npt.ArrayLike | None = None
    high_ns: npt.ArrayLike | None = None
    layer: npt.ArrayLike | None = None
    phase: Phase | None = None
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
    major = [np.arange(n, dtype=np.int64), after]
    minor = [np.zeros(n, dtype=np.int64), 2 * np.arange(count) + 2]
    parts = [_columns(graph), new]
    if launched_after is not None:
        parts.append(_launch_rows(graph, tasks, launched_after, name_ids[tasks.launch_name], new))
        major[1] = np.maximum(after, launched_after)
        major.append(launched_after)
        minor.append(2 * np.arange(count) + 1)
    order = np.lexsort((np.concatenate(minor), np.concatenate(major)))
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    moved, ids, launches = place[:n], place[n : n + count], place[n + count :]

    columns = {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}
    attached = {
        name: np.concatenate([column, np.zeros(len(order) - n, dtype=column.dtype)])[order]
        for name, column in graph.attached.items()
    }
    dependencies = _renumbered(graph.dependencies, moved)
    if launched_after is not None:
        launch = Dependencies.of(launches, ids, DependencyKind.LAUNCH, graph.info.launch_lag_ns)
        dependencies = Dependencies.concatenate([dependencies, launch])
    waits = Waits(moved[graph.waits.task], graph.waits.scope, graph.waits.lag_ns)
    edited = graph.replace(**columns, names=tuple(names), dependencies=dependencies, waits=waits, attached=attached)
    edited, again = reorder(edited)
    return Inserted(edited, again[ids], again[launches], again[moved])


def _rows(graph: TaskGraph, tasks: NewTasks, after: Int64, name_id: int) -> Columns:
    count = len(after)

    def column(value: npt.ArrayLike | None, default: npt.ArrayLike, dtype: Any) -> npt.NDArray[Any]:
        return np.broadcast_to(np.asarray(default if value is None else value), (count,)).astype(dtype)

    duration = np.rint(np.broadcast_to(np.asarray(tasks.duration_ns, dtype=np.float64), (count,))).astype(np.int64)
    if duration.min() < 0:
        raise WhatifError(f"insert: expected durations of 0 ns or more for {tasks.name!r}, got {duration.min()}.")
    return {
        "name": column(name_id, 0, np.int32),
        "kind": column(int(tasks.kind), 0, np.int8),
        "thread": column(tasks.thread, graph.thread[after], np.int32),
        "duration_ns": duration,
        "low_ns": np.minimum(column(tasks.low_ns, duration, np.int64), duration),
        "high_ns": np.maximum(column(tasks.high_ns, duration, np.int64), duration),
        "start_ns": column(-1, -1, np.int64),
        "layer": column(tasks.layer, graph.layer[after], np.int32),
        "phase": column(None if tasks.phase is None else int(tasks.phase), graph.phase[after], np.int8),
        "step": graph.step[after],
        "correlation_id": column(-1, -1, np.int64),
        "family": column(tasks.family, -1, np.int8),
        "dtype": column(tasks.dtype, 0, np.int8),
        "size_bytes": column(tasks.size_bytes, -1, np.int64),
        "flops": column(tasks.flops, -1, np.int64),
    }


def _launch_rows(graph: TaskGraph, tasks: NewTasks, launched_after: Int64, name_id: int, new: Columns) -> Columns:
    launch = NewTasks(launched_after, tasks.launch_name, TaskKind.RUNTIME, tasks.launch_ns)
    rows = _rows(graph, launch, launched_after, name_id)
    return {**rows, "layer": new["layer"], "phase": new["phase"]}


# -- split and dependencies ------------------------------------------------------------------------------------


def split(graph: TaskGraph, tasks: npt.NDArray[Any], parts: int) -> TaskGraph:
    """See ``TaskGraph.split``: what waited for a task waits for its last part. Raises WhatifError if parts < 1."""
    if parts < 1:
        raise WhatifError(f"split: expected 1 part or more, got {parts}.")
    mask = as_mask(graph, tasks)
    repeats = np.where(mask, parts, 1)
    index = np.repeat(np.arange(len(graph)), repeats)
    first = np.cumsum(repeats) - repeats
    last = first + repeats - 1
    part = np.arange(len(index)) - first[index]
    columns = {name: column[index] for name, column in _columns(graph).items()}
    for name in ("duration_ns", "low_ns", "high_ns"):
        whole = columns[name]
        of = repeats[index]
        columns[name] = whole // of + (part < whole % of)
    columns["size_bytes"] = np.where(columns["size_bytes"] > 0, columns["size_bytes"] // repeats[index], -1)
    columns["flops"] = np.where(columns["flops"] > 0, columns["flops"] // repeats[index], -1)
    old = graph.dependencies
    source = np.where(old.anchor == Anchor.START, first[old.source], last[old.source])
    dependencies = Dependencies(
        source.astype(np.int32), first[old.target].astype(np.int32), old.kind, old.lag_ns, old.anchor
    )
    waits = Waits(last[graph.waits.task].astype(np.int32), graph.waits.scope, graph.waits.lag_ns)
    attached = {name: column[index] for name, column in graph.attached.items()}
    return graph.replace(**columns, dependencies=dependencies, waits=waits, attached=attached)


def add_dependencies(graph: TaskGraph, new: Dependencies) -> TaskGraph:
    """See ``TaskGraph.add_dependencies``; ids change only where a new dependency points backward."""
    n = len(graph)
    ids = np.concatenate([new.source, new.target])
    if len(ids) and (ids.min() < 0 or ids.max() >= n):
        raise WhatifError(f"add_dependencies: expected ids in 0..{n - 1}, got one outside.")
    return reorder(graph.replace(dependencies=Dependencies.concatenate([graph.dependencies, new])))[0]


def add_thread(graph: TaskGraph, thread: Thread) -> tuple[TaskGraph, int]:
    """Give the graph with one more execution thread, and its code."""
    return graph.replace(threads=(*graph.threads, thread)), len(graph.threads)


def reorder(graph: TaskGraph) -> tuple[TaskGraph, Int32]:
    """Renumber the tasks so that every dependency points forward; give the graph and each task's new id.

    The order of each ordered thread stays. Raises WhatifError on a cycle.
    """
    every = (graph.dependencies, graph.derived)
    if all(bool(np.all(d.source < d.target)) for d in every):
        return graph, np.arange(len(graph), dtype=np.int32)
    order = topological_order(len(graph), graph.all_dependencies())
    if len(order) < len(graph):
        raise WhatifError(
            "graph: the dependencies form a cycle, so no order can run these tasks; see what was added last."
        )
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    columns = {name: column[order] for name, column in _columns(graph).items()}
    attached = {name: column[order] for name, column in graph.attached.items()}
    waits = Waits(place[graph.waits.task], graph.waits.scope, graph.waits.lag_ns)
    dependencies = _renumbered(graph.dependencies, place)
    return graph.replace(**columns, dependencies=dependencies, waits=waits, attached=attached), place


def as_mask(graph: TaskGraph, tasks: npt.NDArray[Any]) -> Bool:
    """Give a mask, shape (n_tasks,), for a mask or ids. Raises WhatifError on a mask of another length."""
    tasks = np.asarray(tasks)
    if tasks.dtype == np.bool_:
        if len(tasks) != len(graph):
            raise WhatifError(f"expected a mask of {len(graph)} tasks, got one of {len(tasks)}.")
        return tasks
    mask = np.zeros(len(graph), dtype=np.bool_)
    mask[tasks.astype(np.int64)] = True
    return mask


def _renumbered(dependencies: Dependencies, new_id: Int32) -> Dependencies:
    return Dependencies(
        new_id[dependencies.source],
        new_id[dependencies.target],
        dependencies.kind,
        dependencies.lag_ns,
        dependencies.anchor,
    )


def _columns(graph: TaskGraph) -> Columns:
    from whatif.graph import TASK_COLUMNS

    return {name: getattr(graph, name) for name in TASK_COLUMNS}
