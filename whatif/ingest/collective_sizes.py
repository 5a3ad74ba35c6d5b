"""Process groups of collectives, and sizes that kernels lack: from "nccl:all_reduce" around their launches."""

from __future__ import annotations

import numpy as np

from whatif.graph.kernels import KernelFamily
from whatif.graph.order import each_once
from whatif.graph.types import Array, Int8, Int32, Int64, ProcessGroup, TaskKind
from whatif.ingest.events import MISSING, EventCategory, Events
from whatif.ingest.gpu_side import Calls
from whatif.ingest.grouped import by_track, rows_named
from whatif.ingest.nest import Nest
from whatif.ingest.op_cost import input_tensors

PREFIX = "nccl:"


def process_groups(events: Events, columns: dict[str, Array]) -> tuple[Int32, tuple[ProcessGroup, ...]]:
    """Return each task's row in a table of process groups, shape (n_tasks,), -1 where none is known; and the table."""
    row = np.full(len(columns["event"]), MISSING, dtype=np.int32)
    if events.group is None or not len(events.group):
        return row, ()
    tasks = np.flatnonzero((columns["kind"] == TaskKind.KERNEL) & (columns["event"] >= 0))
    tasks = tasks[events.group[columns["event"][tasks]] >= 0]
    event = columns["event"][tasks]
    # One number per pair: np.unique sorts rows of a table ten times slower.
    pairs = (events.group[event].astype(np.int64) << 32) + (events.group_size[event].astype(np.int64) + 2**31)
    distinct = each_once(pairs)
    row[tasks] = np.searchsorted(distinct, pairs)
    groups = [(pair >> 32, (pair & 0xFFFFFFFF) - 2**31) for pair in distinct.tolist()]
    names = [(*events.details[code].partition(" ")[::2], size) for code, size in groups]
    return row, tuple(ProcessGroup(name, ranks, size) for name, ranks, size in names)


def with_collective_sizes(
    events: Events, calls: Calls, columns: dict[str, Array], family: Int8, size_bytes: Int64
) -> Int64:
    """Return the bytes of every task, shape (n_tasks,), with those of collectives whose tensors torch recorded."""
    named = np.fromiter((name.startswith(PREFIX) for name in events.names), dtype=np.bool_, count=len(events.names))
    if not named.any():
        return size_bytes
    tasks = np.flatnonzero(family == KernelFamily.COMMUNICATION)
    tasks = tasks[(size_bytes[tasks] < 0) & (columns["call"][tasks] >= 0) & (columns["event"][tasks] >= 0)]
    around_calls = rows_named(events, EventCategory.ANNOTATION, named)
    around = by_track(events, around_calls[events.shape[around_calls] >= 0])
    call = columns["call"][tasks].astype(np.int64)
    found = size_bytes.copy()
    for track in each_once(calls.track[call]).tolist():
        rows = around[track]
        on_track = np.flatnonzero(calls.track[call] == track)
        if not len(rows):
            continue
        at = Nest(events.start_ns[rows], events.end_ns[rows]).innermost(calls.start_ns[call[on_track]])
        for task, row in zip(tasks[on_track[at >= 0]].tolist(), rows[at[at >= 0]].tolist(), strict=True):
            tensors = input_tensors(*events.shapes[events.shape[row]][:2]) or []
            known = [tensor for tensor in tensors if tensor is not None]
            if known:
                found[task] = sum(tensor.size_bytes for tensor in known)
    return found
