"""Plain rows from CUPTI's activity records, whose buffer is released once they are delivered.

Field names are those of the structures in cupti_activity.h (CUPTI documentation, "CUPTI Activity API"). Newer versions
append fields to the structures, so only those of CUPTI 13.0 are read: with a newer binding and an older library the
other fields hold no data.
"""

import functools
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from .names import copy_name, memset_name, overhead_name, sync_name

# Value of a synchronization record without a stream or an event: all bits set.
_NONE = 2**32 - 1
_GPU_TASK = attrgetter("start", "end", "device_id", "context_id", "stream_id", "correlation_id")
_GRID, _BLOCK = attrgetter("grid_x", "grid_y", "grid_z"), attrgetter("block_x", "block_y", "block_z")
_CALL = attrgetter("cbid", "start", "end", "process_id", "thread_id", "correlation_id")


class KernelRow(NamedTuple):
    """One run of a kernel."""

    name: str  # the mangled symbol
    start_ns: int
    end_ns: int
    device: int
    context: int
    stream: int
    correlation: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int
    shared_bytes: int
    graph_node: int  # 0 outside CUDA graphs


class CopyRow(NamedTuple):
    """One copy or one memset."""

    is_memset: bool
    name: str
    start_ns: int
    end_ns: int
    device: int
    context: int
    stream: int
    correlation: int
    size_bytes: int


class CallRow(NamedTuple):
    """One call of the runtime's or the driver's API."""

    is_driver: bool
    callback: int
    start_ns: int
    end_ns: int
    process: int
    thread: int
    correlation: int


class SyncRow(NamedTuple):
    """One synchronization; stream and event are -1 if it has none."""

    name: str
    start_ns: int
    end_ns: int
    context: int
    stream: int
    event: int
    correlation: int


class EventRow(NamedTuple):
    """One recording of a CUDA event."""

    context: int
    event: int
    stream: int
    correlation: int


class OverheadRow(NamedTuple):
    """Time spent by CUPTI itself or internally by the driver."""

    name: str
    start_ns: int
    end_ns: int


class Records:
    """All records delivered so far, as rows in order of delivery; `add` appends more.

    `cupti` is the module `cupti.cupti`: its enumerations identify the kinds. `external_ids` maps correlation ids to the
    ids that were pushed around the call. Records of other kinds are ignored.
    """

    def __init__(self, cupti: Any) -> None:
        self.kernels: list[KernelRow] = []
        self.copies: list[CopyRow] = []
        self.calls: list[CallRow] = []
        self.syncs: list[SyncRow] = []
        self.events: list[EventRow] = []
        self.overheads: list[OverheadRow] = []
        self.external_ids: dict[int, int] = {}
        kind = cupti.ActivityKind
        self._external_kind = int(cupti.ExternalCorrelationKind.CUSTOM2)
        self._copy_kind = _enum_names(cupti.ActivityMemcpyKind)
        self._memory_kind = _enum_names(cupti.ActivityMemoryKind)
        self._sync_kind = _enum_names(cupti.ActivitySynchronizationType)
        self._overhead_kind = _enum_names(cupti.ActivityOverheadKind)
        self._readers: dict[int, Callable[[Any], None]] = {
            int(kind.CONCURRENT_KERNEL): self._kernel,
            int(kind.MEMCPY): self._copy,
            int(kind.MEMCPY2): self._copy,
            int(kind.MEMSET): self._memset,
            int(kind.RUNTIME): functools.partial(self._call, False),
            int(kind.DRIVER): functools.partial(self._call, True),
            int(kind.SYNCHRONIZATION): self._sync,
            int(kind.CUDA_EVENT): self._event,
            int(kind.OVERHEAD): self._overhead,
            int(kind.EXTERNAL_CORRELATION): self._external,
        }

    @property
    def kinds(self) -> list[int]:
        """The activity kinds that are read, which a session has to enable."""
        return list(self._readers)

    def add(self, records: Iterable[Any]) -> None:
        """Copy the needed fields out of the records; keeps no record."""
        readers = self._readers
        for record in records:
            if read := readers.get(int(record.kind)):
                read(record)

    def _kernel(self, record: Any) -> None:
        shared_bytes = record.static_shared_memory + record.dynamic_shared_memory
        registers, node = record.registers_per_thread, record.graph_node_id
        launched = (_GRID(record), _BLOCK(record), registers, shared_bytes, node)
        self.kernels.append(KernelRow._make((record.name, *_GPU_TASK(record), *launched)))

    def _copy(self, record: Any) -> None:
        memory = self._memory_kind
        kinds = self._copy_kind.get(record.copy_kind, ""), memory.get(record.src_kind, "Unknown")
        self._add_copy(record, False, copy_name(*kinds, memory.get(record.dst_kind, "Unknown")))

    def _memset(self, record: Any) -> None:
        self._add_copy(record, True, memset_name(self._memory_kind.get(record.memory_kind, "Unknown")))

    def _add_copy(self, record: Any, is_memset: bool, name: str) -> None:
        self.copies.append(CopyRow._make((is_memset, name, *_GPU_TASK(record), record.bytes)))

    def _call(self, is_driver: bool, record: Any) -> None:
        self.calls.append(CallRow(is_driver, *_CALL(record)))

    def _sync(self, record: Any) -> None:
        name = sync_name(self._sync_kind.get(record.type, ""))
        stream, event = _or_none(record.stream_id), _or_none(record.cuda_event_id)
        row = SyncRow(name, record.start, record.end, record.context_id, stream, event, record.correlation_id)
        self.syncs.append(row)

    def _event(self, record: Any) -> None:
        self.events.append(EventRow(record.context_id, record.event_id, record.stream_id, record.correlation_id))

    def _overhead(self, record: Any) -> None:
        kind = self._overhead_kind.get(record.overhead_kind, "Unknown")
        self.overheads.append(OverheadRow(overhead_name(kind), record.start, record.end))

    def _external(self, record: Any) -> None:
        # The two kinds before this one are Kineto's.
        if record.external_kind == self._external_kind:
            self.external_ids[record.correlation_id] = record.external_id


def _or_none(number: int) -> int:
    return -1 if number == _NONE else number


def _enum_names(enumeration: Any) -> dict[int, str]:
    return {int(member): str(member.name) for member in enumeration}
