"""Remove tasks from a graph and keep the dependencies through them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from whatif.graph.edit import as_mask, renumbered, reorder, with_rows
from whatif.graph.order import each_once, loops, streams
from whatif.graph.selection import Tasks
from whatif.graph.types import (
    Anchor,
    Bool,
    Dependencies,
    DependencyKind,
    Int32,
    Int64,
    TaskKind,
    among,
)
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from whatif.graph.task_graph import TaskGraph


def remove(graph: TaskGraph, tasks: Tasks) -> TaskGraph:
    """See ``TaskGraph.remove``.

    Successors of a removed task then wait for its predecessors: the task before it on its thread, and the sources of
    its dependencies. So does the next task on its thread.
    """
    gone = as_mask(graph, tasks)
    if not gone.any():
        return graph
    gone = _with_gaps(graph, _with_launches(graph, gone))
    try:
        return _without(graph, gone, _bridged(graph, gone))[0]
    except WhatifError:
        # A task that loses its launch counts as launched earlier, so that its own predecessor may come to wait for it.
        graph = _with_all_launches(graph)
        calls = gone & _launches_any(graph, ~gone)
        graph, gone = graph.with_duration(calls, 0), gone & ~calls
        return _without(graph, gone, _bridged(graph, gone))[0]


def _with_all_launches(graph: TaskGraph) -> TaskGraph:
    """Return the graph in which a stream's tasks without a launch are launched with the one before them."""
    launched = np.full(len(graph), -1, dtype=np.int32)
    for _, tasks, launch in streams(graph):
        launched[tasks] = launch
    rows = np.flatnonzero((graph.launch_of < 0) & (launched >= 0))
    new = Dependencies.of(launched[rows], rows, DependencyKind.LAUNCH, anchor=Anchor.START)
    return graph.replace(dependencies=Dependencies.concatenate([graph.dependencies, new]))


def _without(graph: TaskGraph, gone: Bool, dependencies: Dependencies) -> tuple[TaskGraph, Int32]:
    """Return the graph without the tasks ``gone``, and each task's new id, shape (n_tasks,); -1 if removed.

    ``dependencies`` (by old ids) are those between the others. Raises WhatifError if these have no valid order.
    """
    kept = np.flatnonzero(~gone)  # numpy gathers by number much faster than by mask
    new_id = np.full(len(graph), -1, dtype=np.int32)
    new_id[kept] = np.arange(len(kept), dtype=np.int32)
    # A kernel whose call was removed counts as launched earlier: a wait of another thread may now wait for it.
    left, place = reorder(with_rows(graph, kept, renumbered(dependencies, new_id), new_id))
    new_id[kept] = place
    return left, new_id


def _launches_any(graph: TaskGraph, tasks: Bool) -> Bool:
    """Return a mask of the calls that launch any of ``tasks``."""
    launch, calls = graph.launch_of, np.zeros(len(graph), dtype=np.bool_)
    calls[launch[np.flatnonzero(tasks & (launch >= 0))]] = True
    return calls


def _with_launches(graph: TaskGraph, gone: Bool) -> Bool:
    """Add the CPU calls that launch nothing any more."""
    removed = _launches_any(graph, gone)
    if not removed.any():
        return gone
    # A blocking copy's call is removed with its copy, but never one that other waits depend on.
    still_needed = _launches_any(graph, ~gone)
    return np.asarray(gone | (removed & ~still_needed & (graph.kind == TaskKind.RUNTIME)), dtype=np.bool_)


def _with_gaps(graph: TaskGraph, gone: Bool) -> Bool:
    """Add the gap that follows each removed CPU task on its thread."""
    # An inserted call has no gap: the one after it belongs to the task before it.
    calls = np.flatnonzero(gone & (graph.start_ns >= 0) & among(graph.kind, [TaskKind.RUNTIME, TaskKind.CPU_OP]))
    result = gone.copy()
    # The wait of a removed call is between the call and its gap.
    waits = _next_of_kind(graph, calls, TaskKind.WAIT)
    result[waits] = result[_next_of_kind(graph, np.concatenate([calls, waits]), TaskKind.GAP)] = True
    return result


def _next_of_kind(graph: TaskGraph, tasks: Int64, kind: TaskKind) -> Int64:
    """The tasks of a kind that come right after one of ``tasks`` (ids) on its thread."""
    following = graph.neighbours[1][tasks]
    following = following[following >= 0]
    return np.asarray(following[graph.kind[following] == kind], dtype=np.int64)


def _kept_neighbours(graph: TaskGraph, gone: Bool) -> tuple[Int32, Int32]:
    """For each task the nearest kept task before it and after it on its thread (itself if kept); -1 if none."""
    newest = np.full(len(graph.threads), -1, dtype=np.int32)
    previous, following = np.empty(len(graph), dtype=np.int32), np.empty(len(graph), dtype=np.int32)
    loops.kept_neighbours(graph.thread, gone.view(np.uint8), newest, previous, following)
    return previous, following


def _bridged(graph: TaskGraph, gone: Bool) -> Dependencies:
    """The dependencies between kept tasks, including those through removed ones."""
    dependencies = graph.dependencies
    source_gone, target_gone = gone[dependencies.source], gone[dependencies.target]
    kept = dependencies.take(~source_gone & ~target_gone)
    previous, following = _kept_neighbours(graph, gone)
    launch = dependencies.kind == DependencyKind.LAUNCH

    # A launch starts the task that it launched and no other.
    into = dependencies.take(target_gone & ~source_gone & ~launch)
    forwarded = replace(into, target=following[into.target])

    # Tasks of a removed call are launched by the task before the call.
    calls = dependencies.take(source_gone & ~target_gone & launch)
    relaunched = replace(calls, source=previous[calls.source])

    # The lag was between the removed task and the target; only a zero lag is known now.
    out = dependencies.take(source_gone & ~target_gone & ~launch)
    backed = replace(
        out, source=previous[out.source], lag_ns=np.minimum(out.lag_ns, 0), anchor=np.full_like(out.anchor, Anchor.END)
    )
    pairs = _across(dependencies, gone, out)
    chains = _through_chains(graph, gone, previous, following)
    joined = Dependencies.concatenate([kept, forwarded, backed, pairs, relaunched, chains])
    # A missing neighbour has the id -1.
    return joined.take((joined.source >= 0) & (joined.source < joined.target))


def _through_chains(graph: TaskGraph, gone: Bool, previous: Int32, following: Int32) -> Dependencies:
    """Dependencies through chains of removed tasks: the last kept task of each thread still counts."""
    d = graph.dependencies
    rows = np.flatnonzero(
        (gone[d.source] | gone[d.target]) & (d.kind != DependencyKind.LAUNCH) & (d.anchor == Anchor.END)
    )
    into: dict[int, list[int]] = {}
    out: dict[int, list[int]] = {}
    for source, target in zip(d.source[rows].tolist(), d.target[rows].tolist(), strict=True):
        if gone[target]:
            into.setdefault(target, []).append(source)
        else:
            out.setdefault(source, []).append(target)
    if not into or not (out or any(gone[source] for sources in into.values() for source in sources)):
        return Dependencies.concatenate([])
    reached: dict[int, dict[int, int]] = {}  # removed task -> thread -> last kept task there that it waited for
    newest: dict[int, int] = {}  # thread -> last removed task on it
    found: set[tuple[int, int]] = set()
    for task in np.flatnonzero(gone).tolist():
        thread = int(graph.thread[task])
        before = newest.get(thread)
        # Only tasks of one run of removed neighbours pass on their dependencies; else a kept task is between them.
        joined = before is not None and previous[before] == previous[task]
        last_kept = dict(reached[before]) if joined and before is not None else {}
        if previous[task] >= 0:
            last_kept[thread] = int(previous[task])
        for source in into.get(task, ()):
            for other, last in (reached[source] if gone[source] else {int(graph.thread[source]): source}).items():
                last_kept[other] = max(last_kept.get(other, -1), last)
        reached[task], newest[thread] = last_kept, task
        targets = [*out.get(task, ()), *([int(following[task])] if following[task] >= 0 else [])]
        found.update((last, target) for target in targets for last in last_kept.values()
                     if graph.thread[last] != graph.thread[target])  # fmt: skip
    pairs = np.array(sorted(found), dtype=np.int32).reshape(-1, 2)
    return Dependencies.of(pairs[:, 0], pairs[:, 1], DependencyKind.EVENT)


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
    return replace(
        out.take(outgoing), source=incoming.source[pair], lag_ns=np.zeros_like(pair), anchor=incoming.anchor[pair]
    )


STAYS, GOES = -2, -1


def contract(graph: TaskGraph, fate: Int64) -> TaskGraph:
    """Return the graph without the tasks whose ``fate``, shape (n_tasks,), is not ``STAYS``.

    A fate of 0 or more is the task that replaces the removed one: it takes over its predecessors, its successors and
    the tasks that it launched. With ``GOES`` its neighbours on its thread replace it, as in ``TaskGraph.remove``.
    Neither a gap after it nor its launch is removed with it: that is the caller's choice. Dependencies that would point
    backward bind the next task on the thread instead. If neither a wait for the GPU nor a full launch queue lies
    between a removed launch and the earlier task that launches instead, no cycle can arise; else a task may come to
    wait for itself, and WhatifError is raised.
    """
    return contracted(graph, fate)[0]


def contracted(graph: TaskGraph, fate: Int64) -> tuple[TaskGraph, Int32]:
    """Return the result of ``contract``, and each task's new id, shape (n_tasks,); -1 if it is removed."""
    gone = fate != STAYS
    if not gone.any():
        return graph, np.arange(len(graph), dtype=np.int32)
    tasks = np.flatnonzero(gone)
    heir = fate[tasks]  # the task that replaces each removed one
    # If tasks of the same thread replace all removed ones, neighbours are not needed.
    elsewhere = (heir < 0) | (graph.thread[tasks] != graph.thread[heir])
    before = after = not_computed = np.full(len(graph), -1, dtype=np.int32)
    if elsewhere.any():
        before, after = _kept_neighbours(graph, gone)

    old = graph.dependencies
    launch = old.kind == DependencyKind.LAUNCH
    source_gone, target_gone = gone.take(old.source), gone.take(old.target)
    # A launch starts only what it launched: a removed kernel leaves nothing to start.
    rows = np.flatnonzero((source_gone | target_gone) & ~(launch & target_gone))
    source, target = _replaced(old.source[rows], fate, before), _replaced(old.target[rows], fate, after)
    backward = (source >= target) & target_gone[rows]
    if backward.any() and after is not_computed:
        after = _kept_neighbours(graph, gone)[1]
    target = np.where(backward, after[old.target[rows]], target)
    valid = (source >= 0) & (target >= 0) & (source < target)
    rows, source, target = rows[valid], source[valid], target[valid]
    # A lag is the time between two particular tasks; between other tasks only a zero lag is known.
    lag_ns = np.where(launch[rows], old.lag_ns[rows], np.minimum(old.lag_ns[rows], 0))
    bridged = Dependencies(source.astype(np.int32), target.astype(np.int32), old.kind[rows], lag_ns, old.anchor[rows])
    untouched = old.take(~(source_gone | target_gone))
    across = _across_threads(graph, heir[elsewhere], after[tasks[elsewhere]])
    return _without(graph, gone, Dependencies.concatenate([untouched, bridged, across]))


def _replaced(tasks: Int32, fate: Int64, neighbour: Int32) -> Int64:
    """The replacement of each of ``tasks`` (ids): the task itself, that of its fate, or its ``neighbour``."""
    fates = fate.take(tasks)
    return np.where(fates >= 0, fates, np.where(fates == STAYS, tasks, neighbour.take(tasks)))


def _across_threads(graph: TaskGraph, heir: Int64, after: Int32) -> Dependencies:
    """Dependencies from the ``heir`` of each removed task to the task ``after`` it on its thread, shape (n,) each.

    None without an heir, or if the heir comes later.
    """
    follows = (heir >= 0) & (after > heir)
    pairs = each_once(heir[follows] * len(graph) + after[follows])
    source, target = np.divmod(pairs, len(graph))
    return Dependencies.of(source, target, DependencyKind.HANDOFF)
