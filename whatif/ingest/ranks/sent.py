"""A rank's graph on its way from the process that read it: small numbers in small types, one value for all once."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from whatif.graph.columns import COLUMNS
from whatif.graph.edit import columns_of
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Dependencies

# The types of a column's numbers, the smallest first.
_SMALL = (np.int8, np.int16, np.int32)
_DEPENDENCY_TYPES: dict[str, type[np.generic]] = {
    "source": np.int32,
    "target": np.int32,
    "kind": np.int8,
    "lag_ns": np.int64,
    "anchor": np.int8,
}
_DTYPES = {each.name: each.dtype for each in COLUMNS}


class Sent(Struct, frozen=True):
    """A task graph without caches, a third of its size; ``graph`` gives it back."""

    frame: dict[str, Any]  # what is no column
    n_tasks: int
    arrays: tuple[Array, ...]  # each distinct column once, shape (n_tasks,), or (1,) if one value is that of all
    column_at: dict[str, int]
    dependencies: dict[str, Array]

    @staticmethod
    def of(graph: TaskGraph) -> Sent:
        """Return the graph in this form."""
        columns = columns_of(graph)
        place = {key: at for at, key in enumerate(dict.fromkeys(map(id, columns.values())))}
        distinct = {id(column): column for column in columns.values()}
        ends = {name: _small(getattr(graph.dependencies, name)) for name in Dependencies.__slots__}
        others = ("waits", "names", "threads", "layers", "info", "attached", "notes", "declined")
        return Sent(
            {name: getattr(graph, name) for name in others},
            len(graph),
            tuple(_small(column) for column in distinct.values()),
            {name: place[id(column)] for name, column in columns.items()},
            ends,
        )

    @property
    def graph(self) -> TaskGraph:
        """The same graph, every column in its own type."""
        columns: dict[int, Array] = {}
        for name, at in self.column_at.items():
            if at not in columns:
                columns[at] = _restored(self.arrays[at], _DTYPES[name], self.n_tasks)
        n = len(self.dependencies["source"])
        ends = {name: _restored(self.dependencies[name], kind, n) for name, kind in _DEPENDENCY_TYPES.items()}
        given: dict[str, Any] = {name: columns[at] for name, at in self.column_at.items()}
        return TaskGraph(**given, dependencies=Dependencies(**ends), **self.frame)


def _small(column: Array) -> Array:
    """The column in the smallest type that holds its numbers, if that is an integer."""
    if column.strides == (0,):
        return column[:1].copy()
    if not len(column) or column.dtype.kind != "i":
        return column
    low, high = int(column.min()), int(column.max())
    for dtype in _SMALL:
        if column.itemsize > dtype().itemsize and np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return column.astype(dtype)
    return column


def _restored(column: Array, dtype: type[np.generic], n: int) -> Array:
    column = column.astype(dtype, copy=False)
    return column if len(column) == n else np.broadcast_to(column, (n,))
