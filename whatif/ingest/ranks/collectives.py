"""The collectives of one rank: which tasks they are, when they ran, and what distinguishes them."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import numpy as np
from msgspec import Struct

from whatif.graph.kernels import collective_of
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Int32,
    Int64,
    TaskKind,
)
from whatif.ingest.events import EventCategory, Events
from whatif.ingest.kineto_fields import dtype_bytes
from whatif.simulation.intervals import interval_of

# How torch's process groups mark a collective on the thread that calls it (NCCL) or runs it (gloo).
CALLED = re.compile(r"^(nccl|rccl|ucc|xccl):(\w+)")
PROFILER_STEP = re.compile(r"^ProfilerStep#(\d+)$")


class Collectives(Struct, frozen=True):
    """The collectives of one rank in the order of their tasks, as columns of shape (n_collectives,)."""

    task: Int32  # of the rank's graph
    start_ns: Int64  # on the rank's own clock, from the graph's origin
    end_ns: Int64
    step: Int64  # by the profiler's own count if known; -1 outside all steps
    size_bytes: Int64  # -1 if unknown
    group_size: Int64  # -1 if unknown
    operation: tuple[str, ...]  # all_reduce, ...; the kernel's name if neither it nor the trace gives one
    group: tuple[str, ...]  # the trace's name of the process group, "" if it is unknown
    first_step: int = 0  # the profiler's number of the graph's step 0

    def __len__(self) -> int:
        return len(self.task)

    @staticmethod
    def of(graph: TaskGraph, events: Events, **columns: Any) -> Collectives:
        """Return the collectives of tasks of ``graph``, which was made of ``events``."""
        # Steps by the user's rule are not those that the profiler counts.
        first_step = 0 if graph.info.step_option else _first_step_of(events)
        task = columns["task"]
        step = graph.step[task].astype(np.int64)
        start_ns = graph.start_ns[task]
        return Collectives(
            start_ns=start_ns,
            end_ns=start_ns + graph.duration_ns[task],
            step=np.where(step >= 0, step + first_step, -1),
            first_step=first_step,
            **columns,
        )


def _first_step_of(events: Events) -> int:
    """Return the number of the first step in the profiler's marks, which is common to all ranks; 0 without marks."""
    found = [int(match.group(1)) for name in events.names if (match := PROFILER_STEP.match(name))]
    return min(found, default=0) if min(found, default=0) < 2**40 else 0


def gpu_collectives(graph: TaskGraph, events: Events) -> Collectives:
    """Return the communication kernels of a rank's graph with their operation, size and group in the trace.

    Old traces lack these: then the annotation around a kernel's launch gives operation and size.
    """
    task = np.flatnonzero(graph.kind == TaskKind.COMMUNICATION).astype(np.int32)
    event = _events_of(graph, events, task)
    known = event >= 0
    at = np.maximum(event, 0)

    def column(values: Array | None) -> Int64:
        return np.where(known, values[at], -1).astype(np.int64) if values is not None and len(values) else _none(task)

    size_bytes, group_size, detail, group = (
        column(values) for values in (events.size_bytes, events.group_size, events.detail, events.group)
    )
    called, called_bytes = _called(graph, events, task)
    names = [graph.names[code] for code in graph.name[task].tolist()]
    operation = []
    for name, code, by_call in zip(names, detail.tolist(), called, strict=True):
        kernel = collective_of(name, events.details[code] if code >= 0 else by_call)
        operation.append(kernel or by_call or name)
    return Collectives.of(
        graph,
        events,
        task=task,
        size_bytes=np.where(size_bytes >= 0, size_bytes, called_bytes),
        group_size=group_size,
        operation=tuple(operation),
        group=tuple(events.details[code] if code >= 0 else "" for code in group.tolist()),
    )


def _none(task: Int32) -> Int64:
    return np.full(len(task), -1, dtype=np.int64)


def _events_of(graph: TaskGraph, events: Events, task: Int32) -> Int64:
    """The kernel event of each task, by its correlation id and its start; -1 where none is found."""
    kernels = np.flatnonzero(events.category == EventCategory.KERNEL)
    if not len(kernels) or not len(task):
        return _none(task)
    kernels = kernels[np.isin(events.correlation[kernels], graph.correlation_id[task])]
    stamps = zip(events.correlation[kernels].tolist(), events.start_ns[kernels].tolist(), strict=True)
    by_key = dict(zip(stamps, kernels.tolist(), strict=True))
    start_ns = graph.start_ns[task] + origin_ns(graph, events)
    keys = zip(graph.correlation_id[task].tolist(), start_ns.tolist(), strict=True)
    return np.array([by_key.get(key, -1) for key in keys], dtype=np.int64)


def origin_ns(graph: TaskGraph, events: Events) -> int:
    """Return the time of the events at which that of the graph is 0."""
    return graph.info.origin_ns - events.base_ns


def _called(graph: TaskGraph, events: Events, task: Int32) -> tuple[list[str], Int64]:
    """The operation and bytes by the annotation around each task's launch; "" and -1 if there is none."""
    names = ["", *(match.group(2) if (match := CALLED.match(name)) else "" for name in events.names)]
    marks = np.array([bool(name) for name in names[1:]], dtype=np.bool_)
    rows = np.flatnonzero(marks.take(events.name)) if len(events) else np.empty(0, dtype=np.int64)
    if not len(rows) or not len(task):
        return [""] * len(task), _none(task)
    launch = graph.launch_of[task]
    launched_ns = graph.start_ns[np.maximum(launch, 0)] + origin_ns(graph, events)
    at = interval_of(launched_ns, events.start_ns[rows], events.start_ns[rows] + events.duration_ns[rows])
    row, inside = rows[at], (launch >= 0) & (at >= 0)
    codes = np.where(inside, events.name[row] + 1, 0)
    return [names[code] for code in codes.tolist()], first_tensor_bytes(events, np.where(inside, events.shape[row], -1))


def first_tensor_bytes(events: Events, shape: Array) -> Int64:
    """Return the bytes of the first tensor of each of n inputs, codes of ``events.shapes``; -1 where unknown."""
    sizes = {code: _shape_bytes(events.shapes[code]) for code in set(shape.tolist()) if code >= 0}
    return np.array([sizes.get(code, -1) for code in shape.tolist()], dtype=np.int64)


def _shape_bytes(shape: tuple[Any, Any, Any]) -> int:
    dims, types, _ = shape
    dims = dims[0] if isinstance(dims, list) and dims else None
    dtype = types[0] if isinstance(types, list) and types else None
    element_bytes = dtype_bytes(_C10.get(dtype, dtype) if isinstance(dtype, str) else None)
    if not isinstance(dims, list) or element_bytes <= 0 or not all(type(d) is int and 0 <= d < 2**40 for d in dims):
        return -1
    size = element_bytes * prod(dims)
    return size if size < 2**62 else -1


# From C++'s names of types to c10's, which the reader's table has.
_C10 = {"long int": "long", "short int": "short", "unsigned char": "byte", "signed char": "char"}
