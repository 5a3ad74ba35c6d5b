"""Replace values in a graph's columns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy.typing as npt

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array


def with_values(graph: TaskGraph, tasks: Array, **values: npt.ArrayLike) -> TaskGraph:
    """Return the graph with ``values`` in the named columns at ``tasks`` (ids or a mask)."""
    columns = {name: getattr(graph, name).copy() for name in values}
    for name, value in values.items():
        columns[name][tasks] = value
    return graph.replace(**columns)


def named(graph: TaskGraph, tasks: Mapping[str, Array]) -> TaskGraph:
    """Return the graph with the tasks (ids or a mask) of each name renamed to it."""
    table = tuple(dict.fromkeys((*graph.names, *tasks)))
    name = graph.name.copy()
    for text, chosen in tasks.items():
        name[chosen] = table.index(text)
    return graph.replace(names=table, name=name)
