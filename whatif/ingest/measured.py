"""The tasks of operators that were measured alone (see ``whatif.models.durations.measured``)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from whatif.graph.order import each_once
from whatif.graph.recorded import Recorded
from whatif.graph.types import Array, Int32, Int64
from whatif.ingest.events import EventCategory, Events
from whatif.ingest.operator_calls import without_layouts
from whatif.simulation.intervals import interval_of


def measured_rows(events: Events, operator: Array, recorded: Recorded) -> Int32:
    """Return the row of "operator_times" for each task, shape (n_tasks,), -1 where its operator was not measured.

    ``operator`` is the row of the innermost operator of each task, -1 if there is none. The measured operators are
    outermost ``aten::`` ones: no other one of the same thread encloses them.
    """
    rows = np.full(len(operator), -1, dtype=np.int32)
    known = _row_of_signature(recorded)
    if not known:
        return rows
    tasks = np.flatnonzero(operator >= 0)
    outermost = _outermost(events)[operator[tasks].astype(np.int64)]
    tasks, outermost = tasks[outermost >= 0], outermost[outermost >= 0]
    if not len(tasks):
        return rows
    # One number per pair of name and shapes; each distinct pair is looked up once.
    key = events.name[outermost].astype(np.int64) * (len(events.shapes) + 1) + events.shape[outermost] + 1
    pairs, which = np.unique(key, return_inverse=True)
    found = np.full(len(pairs), -1, dtype=np.int32)
    for at, pair in enumerate(pairs.tolist()):
        name, shape = divmod(pair, len(events.shapes) + 1)
        if shape:
            found[at] = known.get(_signature(events.names[name], *events.shapes[shape - 1]), -1)
    rows[tasks] = found[np.asarray(which).reshape(-1)]
    return rows


def _row_of_signature(recorded: Recorded) -> dict[bytes, int]:
    rows = enumerate(recorded.operator_times)
    return {_signature(row.op, row.dims, row.types, row.concrete): number for number, row in rows}


def _signature(op: Any, dims: Any, types: Any, concrete: Any) -> bytes:
    return msgspec.json.encode([op, dims, types, without_layouts(concrete)])


def _outermost(events: Events) -> Int64:
    """For each event the outermost ``aten::`` operator that it is or lies in, shape (n_events,); -1 where none."""
    result = np.full(len(events), -1, dtype=np.int64)
    is_aten = np.array([name.startswith("aten::") for name in events.names], dtype=np.bool_)
    operators = events.of_category[EventCategory.CPU_OP]
    for track in each_once(events.track[operators]):
        on_track = operators[events.track[operators] == track]
        aten = on_track[is_aten[events.name[on_track]]]
        if not len(aten):
            continue
        # Rows are sorted by (start, -duration): one that ends no later than any before it lies inside another.
        end_ns = events.end_ns[aten]
        reach_ns = np.maximum.accumulate(end_ns)
        outer = np.append(True, events.start_ns[aten][1:] >= reach_ns[:-1])
        roots, root_end_ns = aten[outer], end_ns[outer]
        at = interval_of(events.start_ns[on_track], events.start_ns[roots], root_end_ns)
        result[on_track] = np.where(at >= 0, roots[at], -1)
    return result
