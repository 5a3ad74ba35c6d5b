"""Tasks on the way to a graph: rows that are not yet in order, and their roles."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from msgspec import Struct

from whatif.graph.order import each_once
from whatif.graph.types import Array, Int64, TaskKind
from whatif.ingest.events import MISSING


class Role(IntEnum):
    """The role of a row; minus its value is the name code of a row without an event."""

    TASK = 0
    CALL_WAIT = 1
    HANDOFF_WAIT = 2
    UNEXPLAINED = 3
    LEAD_IN = 4
    IDLE = 5


class Rows(Struct, frozen=True):
    """Tasks before they are put in order, as columns of shape (n_rows,); ``key_ns`` orders them."""

    columns: dict[str, Array]

    def __len__(self) -> int:
        return len(self.columns["key_ns"])


def wait_rows(columns: dict[str, Array], at: Array, role: Role, **changed: Array) -> Rows:
    """Return waits as copies of the rows ``at``, with the columns common to all waits and those ``changed``."""
    n = len(at)
    common: dict[str, Array] = {
        "kind": np.full(n, TaskKind.WAIT, dtype=np.int8),
        "name": np.full(n, -role, dtype=np.int32),
        "event": np.full(n, MISSING, dtype=np.int32),
        "role": np.full(n, role, dtype=np.int8),
    }
    return Rows({name: column[at] for name, column in columns.items()} | common | changed)


def joined(blocks: Sequence[Rows]) -> Rows:
    """Concatenate blocks of rows with the same columns, which are removed from them: long traces are large."""
    if len(blocks) == 1:
        return blocks[0]
    return Rows({name: np.concatenate([b.columns.pop(name) for b in blocks]) for name in list(blocks[0].columns)})


def rows_of_calls(columns: dict[str, Array], n_calls: int) -> Int64:
    """Return the row of each call's own task, -1 where the call is on no execution thread."""
    rows = np.full(n_calls, MISSING, dtype=np.int64)
    tasks = np.flatnonzero((columns["call"] >= 0) & (columns["role"] == Role.TASK))
    rows[columns["call"][tasks]] = tasks
    return rows


def of_events(values: Array, event: Int64) -> Array:
    """Return the value of each task's event, shape of ``event``; MISSING for tasks without one."""
    return np.append(values, values.dtype.type(MISSING))[event]


def running_maximum(values: Int64, group: Array) -> Int64:
    """Return the running maximum within runs of equal ``group``."""
    result = values.copy()
    begins = np.append(True, group[1:] != group[:-1])[: len(group)]
    bounds = np.append(np.flatnonzero(begins), len(group))
    falls = np.flatnonzero(~begins[1:] & (values[1:] < values[:-1])) + 1
    for run in each_once(np.searchsorted(bounds, falls, side="right") - 1).tolist():
        span = slice(bounds[run], bounds[run + 1])
        result[span] = np.maximum.accumulate(values[span])
    return result
