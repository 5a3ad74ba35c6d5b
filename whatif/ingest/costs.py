"""FLOPs, bytes and dtype of tasks, from the operator that launched or is the task, and from the sizes of copies."""

from __future__ import annotations

import numpy as np

from whatif.graph.kernels import MATRIX_FAMILIES, dtype_code
from whatif.graph.order import each_once
from whatif.graph.types import (
    Array,
    Bool,
    Int8,
    Int64,
    among,
)
from whatif.ingest.called import Calls
from whatif.ingest.events import MISSING, Events
from whatif.ingest.grouped import by_track
from whatif.ingest.op_cost import input_dtype, op_cost
from whatif.ingest.rows import of_events


def task_costs(events: Events, columns: dict[str, Array], family: Int8, calls: Calls) -> tuple[Int64, Int64, Int8]:
    """Return FLOPs (-1 unknown), bytes (-1 unknown) and dtype code (0 unknown) of every task, shape (n_tasks,).

    An operator's FLOPs are divided among its matrix kernels by time; its bytes go to its only (matrix) kernel.
    """
    n = len(family)
    flops = np.full(n, MISSING, dtype=np.int64)
    dtype = np.zeros(n, dtype=np.int8)
    event = columns["event"].astype(np.int64)
    size_bytes = of_events(events.size_bytes, event)
    task, operator, which, distinct = calls.task, calls.operator, calls.which, calls.distinct
    if not len(task):
        return flops, size_bytes, dtype
    # Costs are computed once per distinct (operator, shapes).
    costs = [op_cost(events.names[name], *events.shapes[shape]) for name, shape in distinct]
    op_flops = np.array([_number(c.flops) if c else MISSING for c in costs], dtype=np.int64)[which]
    op_bytes = np.array([_number(c.bytes) if c else MISSING for c in costs], dtype=np.int64)[which]
    op_flops = np.where(_counted_inside(events, operator, op_flops), MISSING, op_flops)
    dtypes = [
        c.dtype if c else input_dtype(*events.shapes[shape][:2]) for c, (_, shape) in zip(costs, distinct, strict=True)
    ]
    op_dtype = np.array([dtype_code(d) for d in dtypes], dtype=np.int8)[which]

    dtype[task] = op_dtype
    matrix = among(family[task], MATRIX_FAMILIES)
    duration_ns = columns["duration_ns"][task]
    matrix_ns = np.bincount(operator, weights=duration_ns * matrix)
    kernels = np.bincount(operator)
    matrices = np.bincount(operator, weights=matrix)
    share = duration_ns / np.maximum(matrix_ns[operator], 1)
    counts = matrix & (op_flops >= 0)
    flops[task[counts]] = np.rint(op_flops[counts] * share[counts]).astype(np.int64)
    alone = (op_bytes >= 0) & ((kernels[operator] == 1) | (matrix & (matrices[operator] == 1)))
    alone &= size_bytes[task] < 0
    size_bytes[task[alone]] = op_bytes[alone]
    return flops, size_bytes, dtype


def _counted_inside(events: Events, operator: Int64, flops: Int64) -> Bool:
    """Mask of the operators that call others of known FLOPs (linear calls addmm), the shape of ``operator``."""
    rows = by_track(events, each_once(operator[flops >= 0])).rows
    start_ns, end_ns, track = events.start_ns[rows], events.end_ns[rows], events.track[rows]
    # Calls nest: an outer one is directly followed by the first inside it.
    holds = (track[1:] == track[:-1]) & (start_ns[1:] < end_ns[:-1])
    return np.isin(operator, rows[:-1][holds])


def _number(value: int | None) -> int:
    return MISSING if value is None else min(int(value), 2**62)
