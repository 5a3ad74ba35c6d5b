"""Arrows of a timeline file: from launches to their tasks, along communication, between the ranks of a collective.

An arrow is bound to the slice of its row that is open at its time, so that each end is inside its slice as drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from whatif.graph.types import (
    Anchor,
    Array,
    Bool,
    DependencyKind,
    Int64,
    TaskKind,
)
from whatif.ingest.ranks.merge import COLLECTIVE
from whatif.simulation.timeline import Timeline

LAUNCH, COMMUNICATION, COLLECTIVE_FLOW = "launch", "communication", "collective"


def flows(timeline: Timeline, drawn: Bool, drawn_ns: Int64) -> Iterator[tuple[str, Array, Array, Array, Array]]:
    """Return kind, source, target (task ids), and the two times, ns, of all arrows, as columns by kind.

    ``drawn`` is the mask of the tasks that are slices and ``drawn_ns`` their lengths; both have shape (n_tasks,).
    """
    launch = timeline.graph.launch_of
    launched = np.flatnonzero((launch >= 0) & drawn)
    # From the launch's start, as in the profiler's traces.
    yield _kept(LAUNCH, launch[launched], launched, timeline.start_ns[launch[launched]], timeline, drawn)
    edges = timeline.graph.dependencies
    edges = edges.take(edges.kind == DependencyKind.COMMUNICATION)
    inside = np.maximum(timeline.start_ns + drawn_ns - 1, timeline.start_ns)[edges.source]
    begin_ns = np.where(edges.anchor == Anchor.START, timeline.start_ns[edges.source], inside)
    yield _kept(COMMUNICATION, edges.source, edges.target, begin_ns, timeline, drawn)
    source, target = _between_ranks(timeline)
    yield _kept(COLLECTIVE_FLOW, source, target, timeline.start_ns[source], timeline, drawn)


def _kept(
    kind: str, source: Array, target: Array, begin_ns: Array, timeline: Timeline, drawn: Bool
) -> tuple[str, Array, Array, Array, Array]:
    """The arrows between slices that do not lead back in time."""
    end_ns = timeline.start_ns[target]
    kept = drawn[source] & drawn[target] & (begin_ns <= end_ns)
    return kind, source[kept], target[kept], begin_ns[kept], end_ns[kept]


def _between_ranks(timeline: Timeline) -> tuple[Int64, Int64]:
    """Return pairs of the last rank's part of each collective and each of the other parts."""
    graph = timeline.graph
    collective = np.abs(graph.attached.get(COLLECTIVE, np.zeros(len(graph), dtype=np.int64)))
    part = np.flatnonzero((collective > 0) & (graph.kind != TaskKind.WAIT))
    if not len(part):
        return part, part
    arrived_ns = np.zeros(int(collective.max()) + 1, dtype=np.int64)
    arrival = np.flatnonzero((collective > 0) & (graph.kind == TaskKind.WAIT))
    np.maximum.at(arrived_ns, collective[arrival], timeline.end_ns[arrival])
    rank = np.array([thread.rank for thread in graph.threads], dtype=np.int64)
    came_last = np.full(len(arrived_ns), -1, dtype=np.int64)
    latest = arrival[timeline.end_ns[arrival] == arrived_ns[collective[arrival]]][::-1]
    came_last[collective[latest]] = rank[graph.thread[latest]]  # ties: the first, which is written last
    is_source = rank[graph.thread[part]] == came_last[collective[part]]
    source = np.full(len(arrived_ns), -1, dtype=np.int64)
    source[collective[part[is_source]]] = part[is_source]
    targets = part[~is_source]
    targets = targets[source[collective[targets]] >= 0]
    return source[collective[targets]], targets
