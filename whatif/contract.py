"""Take tasks out in bulk: each one's part is taken by a task that stays, or by none. ``remove`` for whole phases."""

from __future__ import annotations

import numpy as np

from whatif.edit import columns_of, reorder
from whatif.graph import TaskGraph
from whatif.types import Bool, Dependencies, DependencyKind, Int64, Waits

STAYS, GOES = -2, -1


def contract(graph: TaskGraph, fate: Int64) -> TaskGraph:
    """Give the graph without the tasks whose ``fate``, shape (n_tasks,), is not ``STAYS``.

    A fate of 0 or more is the task that stands for the one that goes: what waited for that one waits for it, and it
    waits for what that one waited for. So it does for what the gone one launched. With ``GOES`` nobody stands for it:
    its neighbours on its thread do, as in ``TaskGraph.remove``. Neither a gap behind it nor its launch goes with it:
    that is the caller's choice. Dependencies that would point backward bind the next task on the thread instead. Where
    neither a wait for the GPU nor a full launch queue lies between a launch that goes and the earlier task that
    launches in its place, no cycle can come about; else a task may come to wait for itself, and WhatifError is raised.
    """
    gone = fate != STAYS
    if not gone.any():
        return graph
    n = len(graph)
    itself = np.arange(n, dtype=np.int64)
    heir = np.where(fate >= 0, fate, -1)
    # Where tasks of the same thread stand for all that goes, nobody asks for neighbours.
    none = np.full(n, -1, dtype=np.int64)
    alone = gone & ((heir < 0) | (graph.thread != graph.thread[heir]))
    before, after = _kept_neighbours(graph, gone) if alone.any() else (none, none)
    as_source = np.where(gone, np.where(heir >= 0, heir, before), itself)
    as_target = np.where(gone, np.where(heir >= 0, heir, after), itself)

    old = graph.dependencies
    launch = old.kind == DependencyKind.LAUNCH
    # A launch starts what it launched and no other: of a kernel that goes nothing is left to start.
    rows = np.flatnonzero((gone[old.source] | gone[old.target]) & ~(launch & gone[old.target]))
    source, target = as_source[old.source[rows]], as_target[old.target[rows]]
    backward = (source >= target) & gone[old.target[rows]]
    if backward.any() and after is none:
        after = _kept_neighbours(graph, gone)[1]
    target = np.where(backward, after[old.target[rows]], target)
    sound = (source >= 0) & (target >= 0) & (source < target)
    rows, source, target = rows[sound], source[sound], target[sound]
    # A lag told how long after the one task the other came; where the tasks are others a zero lag is what is known.
    lag_ns = np.where(launch[rows], old.lag_ns[rows], np.minimum(old.lag_ns[rows], 0))
    bridged = Dependencies(source.astype(np.int32), target.astype(np.int32), old.kind[rows], lag_ns, old.anchor[rows])
    untouched = old.take(~gone[old.source] & ~gone[old.target])
    joined = Dependencies.concatenate([untouched, bridged, _across_threads(graph, gone, heir, after)])

    new_id = (np.cumsum(~gone) - 1).astype(np.int32)
    moved = Dependencies(new_id[joined.source], new_id[joined.target], joined.kind, joined.lag_ns, joined.anchor)
    stays = ~gone[graph.waits.task]
    waits = Waits(new_id[graph.waits.task[stays]], graph.waits.scope[stays], graph.waits.lag_ns[stays])
    kept = np.flatnonzero(~gone)  # numpy gathers twice as fast by number as by mask
    columns = {name: column[kept] for name, column in columns_of(graph).items()}
    attached = {name: column[kept] for name, column in graph.attached.items()}
    return reorder(graph.replace(**columns, dependencies=moved, waits=waits, attached=attached))[0]


def _kept_neighbours(graph: TaskGraph, gone: Bool) -> tuple[Int64, Int64]:
    """The nearest kept tasks before and after each task on its thread, shape (n_tasks,); -1 where there is none."""
    order = graph.by_thread
    n = len(order)
    thread = graph.thread[order]
    place = np.arange(n)
    kept = ~gone[order]
    last = np.maximum.accumulate(np.where(kept, place, -1))
    following = np.minimum.accumulate(np.where(kept, place, n)[::-1])[::-1]
    before, after = np.full(n, -1, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    known = (last >= 0) & (thread[np.maximum(last, 0)] == thread)
    before[order[known]] = order[last[known]]
    known = (following < n) & (thread[np.minimum(following, n - 1)] == thread)
    after[order[known]] = order[following[known]]
    return before, after


def _across_threads(graph: TaskGraph, gone: Bool, heir: Int64, after: Int64) -> Dependencies:
    """What followed a task on its thread follows the task of another thread that stands for it."""
    tasks = np.flatnonzero(gone & (heir >= 0))
    tasks = tasks[graph.thread[tasks] != graph.thread[heir[tasks]]]
    pairs = heir[tasks] * len(graph) + after[tasks]
    pairs = np.unique(pairs[(after[tasks] > heir[tasks])])
    source, target = np.divmod(pairs, len(graph))
    return Dependencies.of(source, target, DependencyKind.HANDOFF)
