"""Insert new tasks into a graph, with the calls that launch them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from whatif.graph.columns import COLUMNS
from whatif.graph.edit import (
    Columns,
    as_ids,
    as_ns,
    as_numbers,
    reorder,
    woven_in,
)
from whatif.graph.order import each_once
from whatif.graph.types import (
    CPU_WORK_KINDS,
    GPU_KINDS,
    Array,
    Dependencies,
    DependencyKind,
    Int32,
    Int64,
    TaskKind,
    ThreadKind,
    Waits,
    among,
)
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from whatif.graph.task_graph import TaskGraph


@dataclass(frozen=True)
class NewTasks:
    """Tasks to insert, n at once; a scalar field applies to all of them.

    ``after`` (n,): ids, or a selection, of the tasks after which to insert them; an id may occur several times, and its
    new tasks follow in the order of the array. Layer, phase and step default to those of ``after``. ``thread``: None
    for the thread of ``after``. A kernel or copy needs the thread of a GPU stream and normally a launch; a recording of
    a CPU has neither, so insert ``TaskKind.CPU_OP`` there.

    ``launched_after`` (n,): ids of CPU tasks after which to insert the launching call, which lasts ``launch_ns``; None
    for tasks that no new call launches, which then wait only for the task before them on their thread. ``launched_by``
    (n,): ids of existing calls that also launch the new tasks, like a CUDA graph's call. A launched task comes after
    its launch, even if ``after`` is before it. ``waits_for``: the stream (or ``ALL_STREAMS``) for whose earlier
    launches the tasks of kind WAIT wait; they return ``return_ns`` later.
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
    step: npt.ArrayLike | None = None
    size_bytes: npt.ArrayLike = -1
    flops: npt.ArrayLike = -1
    family: npt.ArrayLike = -1
    dtype: npt.ArrayLike = 0
    launched_after: npt.ArrayLike | None = None
    launch_name: str = "cudaLaunchKernel"
    launch_ns: npt.ArrayLike = 0
    launched_by: npt.ArrayLike | None = None
    waits_for: npt.ArrayLike | None = None
    return_ns: int = 0


class Inserted(NamedTuple):
    """The graph with the new tasks, their ids, their launches' ids (empty without) and the new id of each old task."""

    graph: TaskGraph
    ids: Int32
    launches: Int32
    moved: Int32


def insert(graph: TaskGraph, tasks: NewTasks) -> Inserted:
    """See ``TaskGraph.insert``."""
    return insert_all(graph, [tasks])[0]


def insert_all(graph: TaskGraph, parts: Sequence[NewTasks]) -> list[Inserted]:
    """Insert several groups of new tasks in the time of one insertion; all ids in ``after`` are those of ``graph``.

    New tasks after the same task come in the order of the groups, and of the arrays in them. Raises WhatifError if ids
    or durations are out of range.
    """
    n = len(graph)
    names = {name: code for code, name in enumerate(graph.names)}
    new: list[Columns] = []
    after_old, turn, counts = [], [], []
    n_turns = 0
    for tasks in parts:
        _check_given(tasks)
        after = as_ids(graph, tasks.after)
        count = len(after)
        launched_after, launched_by = (
            _for_each(graph, tasks, name, count) for name in ("launched_after", "launched_by")
        )
        counts.append((count, 0 if launched_after is None else count))
        if not count:
            continue
        first_turn = n_turns + 2 * np.arange(count)
        n_turns += 2 * count
        rows = _rows(graph, tasks, after, names.setdefault(tasks.name, len(names)))
        new.append(rows)
        after_old.append(np.max([ids for ids in (after, launched_after, launched_by) if ids is not None], axis=0))
        turn.append(first_turn + 2)
        if launched_after is not None:
            name_id = names.setdefault(tasks.launch_name, len(names))
            new.append(_launch_rows(graph, tasks, launched_after, name_id, rows))
            after_old.append(launched_after)
            turn.append(first_turn + 1)
    if not new:
        empty = np.empty(0, np.int32)
        return [Inserted(graph, empty, empty, np.arange(n, dtype=np.int32)) for _ in parts]
    return _woven(graph, parts, counts, tuple(names), new, np.concatenate(after_old), np.concatenate(turn))


def _check_given(tasks: NewTasks) -> None:
    """Raise WhatifError if there are no tasks, their name is no text, or their kind is no ``TaskKind``."""
    if not isinstance(tasks, NewTasks):
        raise WhatifError(f"insert: expected NewTasks(after=..., name=..., ...), got {type(tasks).__name__}.")
    if not isinstance(tasks.name, str):
        raise WhatifError(f"insert: expected a text as the name, got {tasks.name!r}.")
    kinds = np.asarray(tasks.kind)
    if kinds.dtype.kind not in "iu" or not among(kinds, TaskKind).all():
        raise WhatifError(f"insert: expected a TaskKind, as in TaskKind.KERNEL, got {tasks.kind!r}.")


def _for_each(graph: TaskGraph, tasks: NewTasks, name: str, count: int) -> Int64 | None:
    given = getattr(tasks, name)
    return None if given is None else _one_or_each(tasks, name, as_ids(graph, given), count)


def _one_or_each(tasks: NewTasks, name: str, given: Array, count: int) -> Array:
    if given.size not in (1, count):
        raise WhatifError(
            f"insert: expected one {name}, or one for each of the {count} new tasks {tasks.name!r}, got {given.size}."
        )
    return np.broadcast_to(given, count)


def _woven(
    graph: TaskGraph, parts: Sequence[NewTasks], counts: list[tuple[int, int]], names: tuple[str, ...],
    new: list[Columns], after_old: Int64, turn: Int64,
) -> list[Inserted]:  # fmt: skip
    """The graph with the new rows, each right after an old one, and the result for each group."""
    # Only the new rows are sorted: each is right after an old one, and the old rows keep their order.
    order = np.lexsort((turn, after_old))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = after_old[order] + 1 + np.arange(len(order))
    rows = {name: np.concatenate([block[name] for block in new]) for name in new[0]}
    edited, moved = woven_in(graph, rows, place)
    found, at = [], 0
    for count, n_launches in counts:
        found.append((place[at : at + count], place[at + count : at + count + n_launches]))
        at += count + n_launches
    dependencies, waits = [edited.dependencies], [edited.waits]
    for tasks, (ids, launches) in zip(parts, found, strict=True):
        if len(launches):
            dependencies.append(Dependencies.of(launches, ids, DependencyKind.LAUNCH, graph.info.launch_lag_ns))
        launched_by = _for_each(graph, tasks, "launched_by", len(ids))
        if launched_by is not None:
            calls = moved[launched_by]
            dependencies.append(Dependencies.of(calls, ids, DependencyKind.LAUNCH, graph.info.launch_lag_ns))
        if tasks.waits_for is not None:
            waiting = np.broadcast_to(np.asarray(tasks.kind), len(ids)) == TaskKind.WAIT
            scopes = as_numbers("insert: waits_for", tasks.waits_for)
            scope = _one_or_each(tasks, "waits_for", scopes, len(ids))[waiting]
            lag_ns = np.full(len(scope), tasks.return_ns, dtype=np.int64)
            waits.append(Waits(ids[waiting].astype(np.int32), scope.astype(np.int32), lag_ns))
    edited = edited.replace(
        names=names,
        dependencies=Dependencies.concatenate(dependencies) if len(dependencies) > 1 else dependencies[0],
        waits=Waits(*(np.concatenate([getattr(w, column) for w in waits]) for column in Waits.__slots__)),
    )
    reordered = None
    # CPU tasks fit at their place; only GPU tasks and waits can change the order.
    if among(rows["kind"], GPU_KINDS).any() or len(waits) > 1:
        edited, reordered = reorder(edited)

    def final_ids(ids: Array) -> Int32:
        return ids.astype(np.int32, copy=False) if reordered is None else reordered.take(ids)

    moved = final_ids(moved)
    return [Inserted(edited, final_ids(ids), final_ids(launches), moved) for ids, launches in found]


def _rows(graph: TaskGraph, tasks: NewTasks, after: Int64, name_id: int) -> Columns:
    count = len(after)

    def column(name: str, default: npt.ArrayLike, dtype: Any) -> npt.NDArray[Any]:
        value = given.get(name)
        result = np.empty(count, dtype=dtype)
        try:
            result[:] = default if value is None else value  # four times faster than to broadcast one value and convert
        except (TypeError, ValueError, OverflowError):
            raise WhatifError(
                f"insert: expected one {name}, or one for each of the {count} new tasks {tasks.name!r}, got "
                + (f"{value!r}." if np.asarray(value).size in (1, count) else f"{np.asarray(value).size}.")
            ) from None
        return result

    given = {**vars(tasks), "name": name_id}
    duration = given["duration_ns"] = as_ns(column("duration_ns", np.nan, np.float64))
    if duration.min() < 0:
        raise WhatifError(f"insert: expected durations of 0 ns or more for {tasks.name!r}, got {duration.min()}.")
    low, high = (as_ns(column(name, duration, np.float64)) for name in ("low_ns", "high_ns"))
    given |= {"low_ns": np.minimum(low, duration), "high_ns": np.maximum(high, duration)}
    rows = {
        each.name: column(each.name, getattr(graph, each.name)[after] if each.inherits else each.default, each.dtype)
        for each in COLUMNS
    }
    _check_threads(graph, tasks, rows["thread"], rows["kind"])
    return rows


# Collectives may also run on a channel, and are called by the CPU.
_STREAM_KINDS = (TaskKind.KERNEL, TaskKind.MEMCPY, TaskKind.MEMSET)


def _check_threads(graph: TaskGraph, tasks: NewTasks, threads: Array, kinds: Array) -> None:
    """Raise WhatifError if kernels or copies would run on a CPU thread, or CPU work on a GPU stream."""
    of_cpu = among(kinds, CPU_WORK_KINDS)
    for code in each_once(threads[of_cpu]).tolist():
        if 0 <= code < len(graph.threads) and graph.threads[code].kind == ThreadKind.STREAM:
            raise WhatifError(
                f"insert: expected a CPU thread for the CPU work {tasks.name!r}, got {graph.threads[code].name!r}; "
                "insert kind=TaskKind.KERNEL with launched_after there, or give the thread of a CPU."
            )
    for code in each_once(threads[among(kinds, _STREAM_KINDS)]).tolist():
        if 0 <= code < len(graph.threads) and graph.threads[code].kind == ThreadKind.CPU:
            raise WhatifError(
                f"insert: expected a GPU stream for the GPU tasks {tasks.name!r}, got the CPU thread "
                f"{graph.threads[code].name!r}; insert kind=TaskKind.CPU_OP in the recording of a CPU, else give the "
                "thread of a stream and launched_after."
            )


def _launch_rows(graph: TaskGraph, tasks: NewTasks, launched_after: Int64, name_id: int, new: Columns) -> Columns:
    launch = NewTasks(launched_after, tasks.launch_name, TaskKind.RUNTIME, tasks.launch_ns, step=tasks.step)
    rows = _rows(graph, launch, launched_after, name_id)
    return {**rows, "layer": new["layer"], "phase": new["phase"]}


# The time from the end of GPU work to the return of a waiting call, if a trace has none: 5 to 15 us in the recordings
# of docs/accuracy.md.
RETURN_NS = 8_000


def synchronize(graph: TaskGraph, after: npt.ArrayLike, *, call_ns: int, name: str, stream: int) -> TaskGraph:
    """See ``TaskGraph.synchronize``.

    ``stream`` is a thread's code, or ``ALL_STREAMS``; ``call_ns`` is the call's own work. Ids of tasks after the first
    insertion change.
    """
    return insert(graph, synchronizing(as_ids(graph, after), call_ns=call_ns, name=name, stream=stream)).graph


def synchronizing(after: npt.ArrayLike, *, call_ns: int, name: str, stream: int) -> NewTasks:
    """Return the tasks of such calls, each after one of the tasks ``after``: the call and its wait."""
    places = np.atleast_1d(np.asarray(after))
    kinds = np.tile([TaskKind.RUNTIME, TaskKind.WAIT], len(places))
    return NewTasks(
        np.repeat(places, 2), name, kinds, np.where(kinds == TaskKind.WAIT, 0, call_ns), waits_for=stream,
        return_ns=RETURN_NS,
    )  # fmt: skip
