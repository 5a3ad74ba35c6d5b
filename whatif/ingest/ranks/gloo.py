"""Collectives of a CPU recording: gloo runs them on separate threads, beside the one that computes.

Gloo's threads mark each collective from its start, which waits for the peers, to its end. Here they become tasks on
channels: each begins a recorded time after the call that requested it, and the main thread's gap in which it ends is
a wait for it. Of such a gap only the part after the end is work.
"""

from __future__ import annotations

import numpy as np

from whatif.graph.columns import one_table
from whatif.graph.insert import NewTasks
from whatif.graph.order import each_once
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Anchor,
    Array,
    DependencyKind,
    Int64,
    TaskKind,
    Thread,
    ThreadKind,
)
from whatif.ingest.events import EventCategory, Events
from whatif.ingest.integrity import with_waits_in_collectives
from whatif.ingest.ranks.collectives import (
    Collectives,
    first_tensor_bytes,
    origin_ns,
)

PREFIX = "gloo:"
# Prefix of c10d's operators that request a collective; torch's names lack the underscores of the marks.
CALL_PREFIX = "c10d::"


def with_gloo(graph: TaskGraph, events: Events) -> tuple[TaskGraph, Collectives]:
    """Return a CPU recording's graph with its collectives as tasks, and these; the same graph if it has none."""
    marked = np.array([name.startswith(PREFIX) for name in events.names], dtype=np.bool_)
    # A mark on a thread that computes is the user's.
    computing = {thread.name for thread in graph.threads}
    beside = np.array([f"CPU thread {thread}" not in computing for _, thread in events.tracks], dtype=np.bool_)
    rows = np.flatnonzero(
        marked.take(events.name) & beside.take(events.track) & (events.category == EventCategory.ANNOTATION)
    )
    main = np.flatnonzero(graph.thread == 0)
    start_ns = events.start_ns[rows] - origin_ns(graph, events)
    # Collectives before the main thread's first task have nothing to depend on.
    if len(main):
        rows, start_ns = rows[start_ns >= graph.start_ns[main[0]]], start_ns[start_ns >= graph.start_ns[main[0]]]
    if not len(rows) or not len(main):
        return graph, _collectives(graph, events, rows[:0], np.empty(0, dtype=np.int32))
    requested_ns = np.minimum(_requested_ns(events, rows) - origin_ns(graph, events), start_ns)
    end_ns = start_ns + events.duration_ns[rows]
    callers = main[np.maximum(np.searchsorted(graph.start_ns[main], requested_ns, side="right") - 1, 0)]
    graph, channel = _with_channels(graph, events.track[rows])
    new_names = [events.names[code] for code in events.name[rows].tolist()]
    inserted = graph.insert(
        NewTasks(after=callers, name=PREFIX, kind=TaskKind.COMMUNICATION, duration_ns=events.duration_ns[rows],
                 thread=channel, size_bytes=first_tensor_bytes(events, events.shape[rows]), layer=graph.layer[callers])
    )  # fmt: skip
    ids, moved = inserted.ids, inserted.moved
    graph = _named(inserted.graph, ids, new_names)
    measured_ns = graph.start_ns.copy()
    measured_ns[ids] = start_ns
    requested_ns, free_ns = measured_ns[moved[callers]], _free_ns(events.track[rows], start_ns, end_ns)
    # A collective requested while its thread was busy waited for that thread, whose order delays it.
    lag_ns = start_ns - np.where(free_ns > requested_ns, np.minimum(free_ns, start_ns), requested_ns)
    graph = graph.replace(start_ns=measured_ns)
    graph, main_after = _waiting(graph, moved[main], moved[callers], end_ns)
    graph = graph.add_dependencies(
        moved[callers], ids, kind=DependencyKind.COMMUNICATION, lag_ns=lag_ns, anchor=Anchor.START
    )
    waits = main_after >= 0
    graph = graph.add_dependencies(ids[waits], main_after[waits], kind=DependencyKind.COMMUNICATION)
    order = np.argsort(ids, kind="stable")
    return with_waits_in_collectives(graph), _collectives(graph, events, rows[order], ids[order])


def _collectives(graph: TaskGraph, events: Events, rows: Array, ids: Array) -> Collectives:
    return Collectives.of(
        graph,
        events,
        task=ids.astype(np.int32),
        size_bytes=first_tensor_bytes(events, events.shape[rows]),
        group_size=np.full(len(rows), -1, dtype=np.int64),
        operation=tuple(events.names[code].removeprefix(PREFIX) for code in events.name[rows].tolist()),
        group=("",) * len(rows),
    )


def _requested_ns(events: Events, rows: Array) -> Int64:
    """When each collective was requested: the k-th all_reduce by the k-th c10d::allreduce_, in order of time.

    If their numbers differ, when it started.
    """
    requested_ns = events.start_ns[rows].copy()
    name = events.name[rows]
    operators = events.category == EventCategory.CPU_OP
    for code in each_once(name).tolist():
        wanted = CALL_PREFIX + events.names[code].removeprefix(PREFIX).replace("_", "")
        asking = np.array([n.replace("_", "").rstrip("_") == wanted for n in events.names], dtype=np.bool_)
        calls = np.flatnonzero(operators & asking.take(events.name))
        same_name = np.flatnonzero(name == code)
        if len(calls) == len(same_name):
            requested_ns[same_name] = events.start_ns[calls]
    return requested_ns


def _with_channels(graph: TaskGraph, track: Array) -> tuple[TaskGraph, Array]:
    """The graph with a channel for each of gloo's threads, and the channel of each collective."""
    tracks, which = np.unique(track, return_inverse=True)
    channels = tuple(Thread(f"gloo thread {i + 1}", ThreadKind.CHANNEL) for i in range(len(tracks)))
    return graph.replace(threads=(*graph.threads, *channels)), len(graph.threads) + which


def _free_ns(track: Array, start_ns: Int64, end_ns: Int64) -> Int64:
    """When the thread of each collective finished the one before; before all times for the first one."""
    order = np.lexsort((start_ns, track))
    free_ns = np.full(len(track), np.iinfo(np.int64).min // 2)
    same = track[order][1:] == track[order][:-1]
    free_ns[order[1:][same]] = end_ns[order[:-1][same]]
    return free_ns


def _named(graph: TaskGraph, ids: Array, names: list[str]) -> TaskGraph:
    table, (_, codes) = one_table([graph.names, names])
    column = graph.name.copy()
    column[ids] = codes
    return graph.replace(names=table, name=column)


def _waiting(graph: TaskGraph, main: Array, callers: Array, end_ns: Int64) -> tuple[TaskGraph, Array]:
    """Cut off the part of the main thread's gaps before the last collective that ends in them.

    Returns the graph, and for each collective the task that waited for it, -1 if none did: a collective that ends
    while an operator runs kept no rank waiting.
    """
    begins_ns = graph.start_ns[main]
    at = np.searchsorted(begins_ns, end_ns, side="right") - 1
    gap = main[np.maximum(at, 0)]
    inside = (gap > callers) & (graph.kind[gap] == TaskKind.GAP) & (graph.operator[gap] < 0)
    inside &= end_ns < graph.start_ns[gap] + graph.duration_ns[gap]
    last_ns = graph.start_ns.copy()
    np.maximum.at(last_ns, gap[inside], end_ns[inside])
    cut_ns = last_ns - graph.start_ns
    graph = graph.replace(
        start_ns=last_ns,
        duration_ns=graph.duration_ns - cut_ns,
        low_ns=np.maximum(graph.low_ns - cut_ns, 0),
        high_ns=graph.high_ns - cut_ns,
    )
    # A what-if may change the order of the ends, so the gap waits for each of them.
    return graph, np.where(inside, gap, -1)
