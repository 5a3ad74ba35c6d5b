"""The columns of the task graph, listed once: type, default and what edits and merges do with each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.graph.types import Array, Int32, Phase, TaskKind
from whatif.runtime.errors import WhatifError

_T = TypeVar("_T")
Table = TypeVar("Table", bound=Struct)


class Column(Struct, frozen=True):
    """One column: ``default`` is the value of unknown entries.

    ``codes`` is what the values index: a sequence, or the name of a table of the graph. ``inherits``: an inserted task
    takes the value of the task before it. ``divides``: the parts of a split task share the value; else each part has
    the full value. ``across_ranks``: the treatment of each rank's values in a merge of ranks.
    """

    name: str
    dtype: type[np.generic]
    default: int = -1
    codes: type[IntEnum] | tuple[str, ...] | Literal["names", "threads", "layers", "operators", "groups"] | None = None
    inherits: bool = False
    divides: bool = False
    # "table": codes of a table that the ranks then share; "number": numbers stay distinct; "time": since the first one.
    across_ranks: Literal["keep", "table", "number", "time"] = "keep"


# In the order in which users see them. ``TaskGraph`` has a field for each; a test compares the two.
COLUMNS = (
    Column("name", np.int32, 0, codes="names", across_ranks="table"),
    Column("kind", np.int8, 0, codes=TaskKind),
    Column("thread", np.int32, 0, codes="threads", inherits=True, across_ranks="table"),
    Column("duration_ns", np.int64, 0, divides=True),
    Column("low_ns", np.int64, 0, divides=True),
    Column("high_ns", np.int64, 0, divides=True),
    Column("start_ns", np.int64, across_ranks="time"),
    Column("layer", np.int32, 0, codes="layers", inherits=True, across_ranks="table"),
    Column("phase", np.int8, 0, codes=Phase, inherits=True),
    Column("step", np.int32, inherits=True),
    Column("correlation_id", np.int64),
    Column("family", np.int8, codes=KernelFamily),
    Column("dtype", np.int8, 0, codes=DTYPES),
    Column("size_bytes", np.int64, divides=True),
    Column("flops", np.int64, divides=True),
    Column("warps", np.int64, divides=True),
    Column("registers", np.int32),
    Column("operator", np.int32, across_ranks="number"),
    Column("in_optimizer", np.bool_, 0),
    Column("recomputed", np.bool_, 0),
    Column("measured", np.int32),
    Column("called", np.int32, codes="operators", across_ranks="table"),
    Column("group", np.int32, codes="groups", across_ranks="table"),
    Column("profiler_ns", np.int32, 0, divides=True),
    Column("profiler_events", np.int32, 0, divides=True),
)
TASK_COLUMNS = tuple(column.name for column in COLUMNS)


def filled(n_tasks: int, given: Mapping[str, npt.ArrayLike]) -> dict[str, Any]:
    """Return every column of ``n_tasks`` tasks: the given ones in the types of the table, defaults for the others.

    A given value is one number or one per task. Raises WhatifError on a name that is not a column.
    """
    unknown = given.keys() - set(TASK_COLUMNS)
    if unknown:
        raise WhatifError(f"expected columns of the task graph, got {', '.join(sorted(unknown))}.")
    return {column.name: _filled(n_tasks, given.get(column.name, column.default), column.dtype) for column in COLUMNS}


def _filled(n_tasks: int, values: npt.ArrayLike, dtype: type[np.generic]) -> Array:
    array = np.asarray(values)
    return np.full(n_tasks, array, dtype=dtype) if array.ndim == 0 else array.astype(dtype, copy=False)


def compact(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns with less memory: one value for all tasks is stored once, and equal times are one array.

    Columns that loops read (thread, durations) stay full arrays.
    """
    if not len(columns["duration_ns"]):
        return columns
    kept = dict(columns)
    for name in columns.keys() - {"thread", "duration_ns", "low_ns", "high_ns", "start_ns"}:
        column = columns[name]
        if column[0] == column[-1] == column.max() == column.min():
            kept[name] = np.broadcast_to(column[:1].copy(), column.shape) if len(column) > 1 else column
    for name in ("low_ns", "high_ns"):
        if columns[name] is columns["duration_ns"] or np.array_equal(columns[name], columns["duration_ns"]):
            kept[name] = columns["duration_ns"]
    return kept


def bytes_of(columns: Iterable[Array]) -> int:
    """Return the memory of the columns: each array once, one value for all tasks once."""
    distinct = {id(column): column for column in columns}.values()
    return sum(column.itemsize if column.strides == (0,) else column.nbytes for column in distinct)


def taken(column: Array, rows: Array) -> Array:
    """Return ``column[rows]``, for ids; one value for all tasks stays one."""
    return np.broadcast_to(column[:1], rows.shape) if column.strides == (0,) else column.take(rows)


def one_table(tables: Iterable[Iterable[_T]]) -> tuple[tuple[_T, ...], list[Int32]]:
    """Return one table of all distinct entries, and for each table the places of its entries in it."""
    code: dict[_T, int] = {}
    places = [np.array([code.setdefault(entry, len(code)) for entry in table], dtype=np.int32) for table in tables]
    return tuple(code), places


def concatenated(parts: Sequence[Table]) -> Table:
    """Return one table of columns from several, each column's parts in their order."""
    names = parts[0].__struct_fields__
    return type(parts[0])(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
