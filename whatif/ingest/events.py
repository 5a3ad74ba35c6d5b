"""The columns that every reader of a profiler's file produces: one row per duration event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field

from whatif.graph.order import order_by
from whatif.graph.types import Array, Int8, Int32, Int64
from whatif.runtime.errors import WhatifError

# Marks a value that the trace lacks in an integer column.
MISSING = -1
# The name of an event whose recording lost it.
NO_NAME = "(no name)"
# The check of a recording whose findings come before all others.
CUT = "end of the file"


class SeveralProcessesError(WhatifError):
    """A report of several processes that keep GPUs busy: ranks of a run, to be read one by one.

    ``processes`` maps the report's number of each process to the process id.
    """

    def __init__(self, path: Path, processes: dict[int, int]) -> None:
        """Name the processes in the message."""
        self.processes = processes
        pids = [str(pid) for pid in processes.values()]
        some = " and ".join(pids[:4]) + (" and more" if len(pids) > 4 else "")
        super().__init__(
            f"{path}: expected a report of one process, got {len(pids)} that use GPUs ({some}); record one report per "
            "rank."
        )


class EventCategory(IntEnum):
    """The kind of an event, independent of the profiler's vocabulary."""

    CPU_OP = 0
    ANNOTATION = 1
    RUNTIME = 2  # CUDA / HIP runtime and driver calls alike
    KERNEL = 3
    MEMCPY = 4
    MEMSET = 5
    SYNC = 6  # CUPTI synchronisation records (category cuda_sync)
    OVERHEAD = 7
    MODULE = 8  # an nn.Module call, from python_function events


# The categories of events on the host and on the device, and of copies: their events have fields of their own.
HOST_CATEGORIES = (EventCategory.CPU_OP, EventCategory.ANNOTATION)
DEVICE_CATEGORIES = (EventCategory.KERNEL, EventCategory.MEMCPY, EventCategory.MEMSET, EventCategory.SYNC)
COPY_CATEGORIES = (EventCategory.MEMCPY, EventCategory.MEMSET)


class Flows(Struct, frozen=True):
    """Forward-to-backward flow arrows, one row each. Times and tracks identify the events they start and end in."""

    source_ns: Int64
    source_track: Int32
    target_ns: Int64
    target_track: Int32


class Allocations(Struct, frozen=True):
    """Allocations and frees of memory, one row each in order of time; columns of shape (n_allocations,)."""

    time_ns: Int64
    size_bytes: Int64  # negative: freed
    address: Int64
    total_bytes: Int64  # held by the allocator afterwards; on a CPU only what was allocated under the profiler
    device_type: Int32  # c10's: 0 is the CPU, 1 is CUDA (and HIP)
    device: Int32

    def __len__(self) -> int:
        return len(self.time_ns)


class Stamps(Struct, frozen=True):
    """Times and tracks of events of which nothing else is kept, sorted by time; columns of shape (n_stamps,)."""

    time_ns: Int64
    track: Int32

    def __len__(self) -> int:
        return len(self.time_ns)

    def in_order(self) -> Stamps:
        """Return the stamps sorted by time; those of most traces already are."""
        if (self.time_ns[1:] >= self.time_ns[:-1]).all():
            return self
        order = np.argsort(self.time_ns, kind="stable")
        return Stamps(self.time_ns[order], self.track[order])

    @staticmethod
    def none() -> Stamps:
        return Stamps(np.empty(0, np.int64), np.empty(0, np.int32))


class Events(Struct, frozen=True, dict=True):
    """Duration events of one trace, sorted by (start_ns, -duration_ns); all columns have shape (n_events,).

    Codes index the tables below; ``MISSING`` (-1) marks values that the trace lacks.
    """

    category: Int8
    name: Int32
    start_ns: Int64
    duration_ns: Int64
    track: Int32
    correlation: Int64
    external_id: Int64
    device: Int32
    stream: Int32
    sequence: Int64  # autograd sequence number
    forward_thread: Int32  # autograd's number of the forward thread; >= 0 marks a backward op
    size_bytes: Int64  # copies and memsets: bytes moved; collectives: bytes of the message
    warps: Int64  # kernels: thread blocks times the warps of one
    registers: Int32  # kernels: of each thread
    group_size: Int32  # collectives: ranks that take part
    shape: Int32  # into `shapes`
    detail: Int32  # into `details`: the collective's name, the kind of a synchronisation
    wait_stream: Int32  # SYNC: the stream whose event is waited for
    wait_correlation: Int64  # SYNC: correlation id of the event record that is waited for
    frames: Int32  # operators: frames of the call stack that was written with them

    names: list[str]
    tracks: list[tuple[str, str]]  # (pid, tid) as text; a GPU stream is a track as well
    shapes: list[tuple[Any, Any, Any]]  # ("Input Dims", "Input type", "Concrete Inputs"), decoded, layouts in the last
    details: list[str]
    flows: Flows
    header: dict[str, Any]  # every top-level field but traceEvents
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> events that were not read
    allocations: Allocations | None = None  # None: not recorded
    python: Stamps = field(default_factory=Stamps.none)  # Python functions, modules included
    by_torch: bool = True  # written by torch's own profiler
    ends_early_at: int | None = None  # the size of a file that was cut, bytes
    group: Int32 | None = None  # collectives: their process group, into `details`; None where unknown

    def __len__(self) -> int:
        return len(self.start_ns)

    @cached_property
    def end_ns(self) -> Int64:
        """The end of each event, ns, shape (n_events,)."""
        return self.start_ns + self.duration_ns

    @cached_property
    def of_category(self) -> tuple[Int64, ...]:
        """The rows of each ``EventCategory``, ascending."""
        return tuple(np.flatnonzero(self.category == category) for category in EventCategory)

    @cached_property
    def on_host(self) -> Int64:
        """The rows of operators and annotations, ascending."""
        return self.of_categories(*HOST_CATEGORIES)

    def of_categories(self, *categories: EventCategory) -> Int64:
        """Return the rows of several categories, ascending."""
        return np.sort(np.concatenate([self.of_category[category] for category in categories]), kind="stable")

    @property
    def base_ns(self) -> int:
        """The header's base of the trace's times, ns; 0 without a valid one."""
        return base_ns_of(self.header)


def base_ns_of(header: Mapping[str, Any]) -> int:
    """Return the base of a trace's times from its header, ns; 0 without a valid one."""
    base = header.get("baseTimeNanoseconds")
    return base if type(base) is int and 0 <= base < 2**62 else 0


# The columns of ``Events`` and their types, from its annotations.
COLUMN_DTYPES = {
    name: np.dtype(kind.split()[0].lower()) for name, kind in Events.__annotations__.items() if kind.startswith("Int")
}

DROPPED_FAR = "more than 13 days from the rest of the trace"
FAR_NS = 2**50


def put_in_order(columns: dict[str, Array], dropped: Counter[str]) -> None:
    """Sort the rows by (start_ns, -duration_ns), stable, and drop those that are days away from the rest."""
    start_ns, duration_ns = columns["start_ns"], columns["duration_ns"]
    if not len(start_ns):
        return
    order = order_by(start_ns, -duration_ns)
    # A damaged clock: sums of such times do not fit in an int64. Within one span no time is far from the median.
    if int(start_ns[order[-1]]) - int(start_ns[order[0]]) > FAR_NS or int(duration_ns.max()) > FAR_NS:
        time_ns = start_ns.astype(np.float64)
        far = (np.abs(time_ns - np.median(time_ns)) > FAR_NS) | (duration_ns > FAR_NS)
        if far.any():
            dropped[DROPPED_FAR] += int(far.sum())
        order = order[~far[order]]
    for name in columns:  # one at a time: the columns of a long trace are large
        columns[name] = columns[name].take(order)
