"""The tasks of a graph that a transform changed, added or removed."""

from __future__ import annotations

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Int64

SAME, CHANGED, ADDED, REMOVED = "same", "changed", "added", "removed"


def task_changes(before: TaskGraph, after: TaskGraph) -> tuple[list[str], list[str]]:
    """Return the change of every task of both graphs, and the origin of every task of ``after``.

    Tasks are equal if recorded start, thread, kind and name are; of several such tasks the first is paired with
    the first. A pair is changed if its durations differ.
    """
    keys = _keys(before, after)
    n = len(before)
    old, new = np.intersect1d(keys[:n], keys[n:], assume_unique=True, return_indices=True)[1:]
    differs = before.duration_ns[old] != after.duration_ns[new]
    was = np.full(n, REMOVED, dtype=object)
    became = np.full(len(after), ADDED, dtype=object)
    was[old] = became[new] = np.where(differs, CHANGED, SAME)
    return was.tolist(), became.tolist()


def _keys(before: TaskGraph, after: TaskGraph) -> Int64:
    """A number for each task, unique within a graph and equal for the same task of both."""
    columns = [
        np.concatenate([before.start_ns, after.start_ns]),
        np.concatenate([before.kind, after.kind]),
        _codes([before.names, after.names], [before.name, after.name]),
        _codes([[t.name for t in g.threads] for g in (before, after)], [before.thread, after.thread]),
    ]
    graph = np.repeat([0, 1], [len(before), len(after)])
    order = np.lexsort((np.arange(len(graph)), graph, *columns))
    opens = np.zeros(len(order), dtype=np.bool_)
    opens[:1] = True
    for column in columns:
        opens[1:] |= column[order][1:] != column[order][:-1]
    group = np.cumsum(opens)
    opens[1:] |= graph[order][1:] != graph[order][:-1]
    first = np.maximum.accumulate(np.where(opens, np.arange(len(order)), 0))
    rank = np.arange(len(order)) - first
    keys = np.empty(len(order), dtype=np.int64)
    keys[order] = group * (int(rank.max(initial=0)) + 1) + rank
    return keys


def _codes(tables: list[list[str]] | list[tuple[str, ...]], columns: list[Array]) -> Int64:
    """Codes of both graphs' columns into one common table: equal texts get equal codes."""
    common: dict[str, int] = {}
    mapped = [np.array([common.setdefault(text, len(common)) for text in table], dtype=np.int64) for table in tables]
    return np.concatenate([codes[column] for codes, column in zip(mapped, columns, strict=True)])
