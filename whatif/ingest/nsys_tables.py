"""The CUDA tables of a Nsight Systems report as event columns: calls, kernels, copies, memsets, synchronisations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from whatif.graph.types import (
    Array,
    Bool,
    Int32,
    Int64,
)
from whatif.ingest.decimal_ns import TimeStatus
from whatif.ingest.events import MISSING, NO_NAME, EventCategory
from whatif.ingest.kineto_columns import DROPPED_DURATION, DROPPED_NEGATIVE, DROPPED_TIMESTAMP
from whatif.ingest.kineto_fields import THREADS_PER_WARP
from whatif.ingest.nsys_database import ABSENT, Database

_TABLE = "CUPTI_ACTIVITY_KIND_"
KERNELS, COPIES, MEMSETS, GRAPHS = f"{_TABLE}KERNEL", f"{_TABLE}MEMCPY", f"{_TABLE}MEMSET", f"{_TABLE}GRAPH_TRACE"
CALLS, SYNCS, CUDA_EVENTS = f"{_TABLE}RUNTIME", f"{_TABLE}SYNCHRONIZATION", f"{_TABLE}CUDA_EVENT"
GPU_TABLES = (KERNELS, COPIES, MEMSETS, GRAPHS)

_TIMES = ("start", "end")
_GPU = (*_TIMES, "deviceId", "streamId", "correlationId", "globalPid")
_GRID, _BLOCK = ("gridX", "gridY", "gridZ"), ("blockX", "blockY", "blockZ")
# Sums of later times overflow.
_LATEST_NS = 2**62
# The driver writes all ones where an identifier does not apply.
_NO_ID = 2**32 - 1

# Runtime calls carry the version of CUDA in which their interface last changed: cudaLaunchKernel_v7000.
_VERSION = re.compile(r"(_ptsz)?_v\d{4,5}$")
# CUpti_ActivityMemcpyKind of the CUPTI documentation, in Kineto's words.
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH",
               10: "PtoP"}  # fmt: skip
_LAST_EXPLICIT_COPY = 10  # larger ones are migrations of managed memory
# Values of ENUM_CUDA_MEM_KIND in reports without that table (Nsight Systems 2024.6 writes these).
_MEMORY_KINDS = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static",
                 6: "Managed Static"}  # fmt: skip
# CUpti_ActivitySynchronizationType, in Kineto's words.
_EVENT_SYNC, _STREAM_WAIT, _STREAM_SYNC = 1, 2, 3
_SYNC_KINDS = {_EVENT_SYNC: "Event Sync", _STREAM_WAIT: "Stream Wait Event", _STREAM_SYNC: "Stream Sync",
               4: "Context Sync"}  # fmt: skip

DROPPED_MIGRATION = "migration of managed memory, which no stream orders"


class Block(Struct, frozen=True):
    """Some rows of ``Events``: columns by name (those not given are MISSING), and a name and a detail per row.

    ``process`` is the report's number of the row's process, ABSENT if unknown; ``thread`` is the serialized thread of
    CPU rows, ABSENT on the GPU.
    """

    category: EventCategory
    start_ns: Int64
    duration_ns: Int64
    names: list[str]
    name: Int32  # into `names`
    process: Int64
    thread: Int64
    columns: dict[str, Array] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.start_ns)

    def take(self, index: Bool | Array) -> Block:
        """Return the rows at ``index``."""
        columns = {name: column[index] for name, column in self.columns.items()}
        return Block(
            self.category, self.start_ns[index], self.duration_ns[index], self.names, self.name[index],
            self.process[index], self.thread[index], columns, self.details,
        )  # fmt: skip


def process_of(global_id: Int64) -> Int64:
    """Return the part of a serialized identifier that gives the process: all but its lowest 24 bits, the thread's."""
    return np.where(global_id == ABSENT, ABSENT, global_id >> 24)


def timed(rows: dict[str, Int64], dropped: Counter[str], *, both_zero_is_unknown: bool = False) -> dict[str, Int64]:
    """Return the rows whose ``start`` and ``end`` are sound; count the others by reason."""
    start_ns, end_ns = rows["start"], rows["end"]
    unknown = both_zero_is_unknown & (start_ns == 0) & (end_ns == 0)
    wrong = {  # the first that holds is the reason
        DROPPED_TIMESTAMP[TimeStatus.ABSENT]: (start_ns == ABSENT) | unknown,
        DROPPED_TIMESTAMP[TimeStatus.OUT_OF_RANGE]:
            (np.abs(start_ns) > _LATEST_NS) | ((end_ns != ABSENT) & (np.abs(end_ns) > _LATEST_NS)),
        DROPPED_DURATION[TimeStatus.ABSENT]: end_ns == ABSENT,
        DROPPED_NEGATIVE: end_ns < start_ns,
    }  # fmt: skip
    which = np.select(list(wrong.values()), range(len(wrong)), default=len(wrong))
    for number, reason in enumerate(wrong):
        if n_bad := int((which == number).sum()):
            dropped[reason] += n_bad
    sound = which == len(wrong)
    return rows if sound.all() else {name: column[sound] for name, column in rows.items()}


def read_calls(database: Database, dropped: Counter[str]) -> Block:
    """Runtime and driver calls, which share one table; versions are cut off their names."""
    rows = timed(database.integers(CALLS, (*_TIMES, "globalTid", "correlationId", "nameId")), dropped)
    names, name = _strings(database, rows["nameId"])
    return Block(
        EventCategory.RUNTIME, rows["start"], rows["end"] - rows["start"], [_VERSION.sub("", n) for n in names], name,
        process_of(rows["globalTid"]), rows["globalTid"], {"correlation": _known(rows["correlationId"])},
    )  # fmt: skip


def _gpu_rows(database: Database, table: str, columns: tuple[str, ...], dropped: Counter[str]) -> dict[str, Int64]:
    return timed(database.integers(table, (*_GPU, *columns)), dropped, both_zero_is_unknown=True)


def read_kernels(database: Database, dropped: Counter[str]) -> Block:
    """Kernels by their full names, or by their short ones if the report has no others."""
    fields = ("demangledName", "shortName", "registersPerThread", *_GRID, *_BLOCK)
    rows = _gpu_rows(database, KERNELS, fields, dropped)
    name_id = np.where(rows["demangledName"] == ABSENT, rows["shortName"], rows["demangledName"])
    names, name = _strings(database, name_id)
    block = _gpu_block(EventCategory.KERNEL, rows, names, name)
    # In float64: damaged sizes overflow in a product of integers.
    blocks, threads = (np.prod([rows[key] for key in keys], axis=0, dtype=np.float64) for keys in (_GRID, _BLOCK))
    warps = blocks * np.ceil(threads / THREADS_PER_WARP)
    complete = np.all([rows[key] > 0 for key in (*_GRID, *_BLOCK)], axis=0) & (warps < 2**53)
    block.columns["registers"] = _small(rows["registersPerThread"])
    block.columns["warps"] = np.where(complete, warps, MISSING).astype(np.int64)
    return block


def read_copies(database: Database, dropped: Counter[str]) -> Block:
    """Copies with Kineto's names: "Memcpy HtoD (Pageable -> Device)"."""
    rows = _gpu_rows(database, COPIES, ("bytes", "copyKind", "srcKind", "dstKind"), dropped)
    migrates = rows["copyKind"] > _LAST_EXPLICIT_COPY
    if n_migrations := int(migrates.sum()):
        dropped[DROPPED_MIGRATION] += n_migrations
        rows = {key: column[~migrates] for key, column in rows.items()}
    kinds = _MEMORY_KINDS | database.labels("ENUM_CUDA_MEM_KIND")

    def name_of(copy: int, source: int, target: int) -> str:
        ends = f" ({kinds.get(source, 'Unknown')} -> {kinds.get(target, 'Unknown')})" if source != ABSENT else ""
        return f"Memcpy {_COPY_KINDS.get(copy, 'Unknown')}{ends}"

    names, name = _names_of([rows["copyKind"], rows["srcKind"], rows["dstKind"]], name_of)
    return _gpu_block(EventCategory.MEMCPY, rows, names, name)


def read_memsets(database: Database, dropped: Counter[str]) -> Block:
    """Memsets with Kineto's names: "Memset (Device)"."""
    rows = _gpu_rows(database, MEMSETS, ("bytes", "memKind"), dropped)
    kinds = _MEMORY_KINDS | database.labels("ENUM_CUDA_MEM_KIND")
    names, name = _names_of([rows["memKind"]], lambda kind: f"Memset ({kinds.get(kind, 'Unknown')})")
    return _gpu_block(EventCategory.MEMSET, rows, names, name)


def read_graphs(database: Database, dropped: Counter[str]) -> Block:
    """CUDA graphs that were recorded as a whole (the default): each launch is one task."""
    rows = _gpu_rows(database, GRAPHS, ("graphId",), dropped)
    names, name = _names_of([rows["graphId"]], lambda graph: f"CUDA graph {max(graph, 0)}")
    return _gpu_block(EventCategory.KERNEL, rows, names, name)


def read_syncs(database: Database, dropped: Counter[str]) -> Block:
    """Synchronisation records, joined with the event that each waits for if the report has events."""
    rows = _gpu_rows(database, SYNCS, ("syncType", "eventId", "eventSyncId"), dropped)
    names, name = _names_of([rows["syncType"]], lambda kind: _SYNC_KINDS.get(kind, "Unknown"))
    block = _gpu_block(EventCategory.SYNC, rows, names, name)
    record, stream = _awaited_records(database, rows)
    block.columns.update(detail=name, wait_correlation=record, wait_stream=stream)
    # CUPTI: the stream is not valid for the other kinds.
    of_stream = (rows["syncType"] == _STREAM_WAIT) | (rows["syncType"] == _STREAM_SYNC)
    block.columns["stream"] = np.where(of_stream, block.columns["stream"], MISSING)
    return replace(block, details=names)


def _awaited_records(database: Database, syncs: dict[str, Int64]) -> tuple[Int64, Int64]:
    """The call that recorded the event each synchronisation waits for, by correlation id, and its stream.

    An event may be recorded several times: newer reports number the records (``eventSyncId``); in others the last
    record before the wait counts, and correlation ids grow with time.
    """
    fields = ("eventId", "eventSyncId", "correlationId", "streamId", "globalPid")
    records = database.integers(CUDA_EVENTS, fields)
    by_number: dict[tuple[int, int], int] = {}
    by_event: dict[tuple[int, int], list[tuple[int, int]]] = {}
    process = process_of(records["globalPid"]).tolist()
    for row, (event, number, call) in enumerate(
        zip(*(records[key].tolist() for key in ("eventId", "eventSyncId", "correlationId")), strict=True)
    ):
        if number > 0:
            by_number[process[row], number] = row
        by_event.setdefault((process[row], event), []).append((call, row))
    found = np.full(len(syncs["start"]), MISSING, dtype=np.int64)
    waits = np.flatnonzero((syncs["syncType"] == _EVENT_SYNC) | (syncs["syncType"] == _STREAM_WAIT))
    of_sync = process_of(syncs["globalPid"])
    calls_of = {key: np.array(sorted(rows), dtype=np.int64) for key, rows in by_event.items()}
    for row in waits.tolist():
        number, event = int(syncs["eventSyncId"][row]), int(syncs["eventId"][row])
        if number > 0 and (int(of_sync[row]), number) in by_number:
            found[row] = by_number[int(of_sync[row]), number]
            continue
        candidates = calls_of.get((int(of_sync[row]), event))
        if candidates is not None and number <= 0:
            before = int(np.searchsorted(candidates[:, 0], syncs["correlationId"][row])) - 1
            found[row] = candidates[before, 1] if before >= 0 else MISSING
    at = np.maximum(found, 0)
    if not len(records["eventId"]):
        return found, found.copy()
    return (
        np.where(found >= 0, _known(records["correlationId"])[at], MISSING),
        np.where(found >= 0, _known(records["streamId"])[at], MISSING),
    )


def _gpu_block(category: EventCategory, rows: dict[str, Int64], names: list[str], name: Int32) -> Block:
    columns: dict[str, Array] = {
        "correlation": _known(rows["correlationId"]),
        "device": _small(rows["deviceId"]),
        "stream": _small(rows["streamId"]),
    }
    if "bytes" in rows:
        columns["size_bytes"] = _known(rows["bytes"])
    process, thread = process_of(rows["globalPid"]), np.full(len(name), ABSENT)
    return Block(category, rows["start"], rows["end"] - rows["start"], names, name, process, thread, columns)


def _known(numbers: Int64) -> Int64:
    """Identifiers and sizes, with MISSING for those that are absent or do not apply."""
    return np.where((numbers < 0) | (numbers == _NO_ID), MISSING, numbers)


def _small(numbers: Int64) -> Int64:
    """Known numbers that fit in 32 bits; what does not is damage."""
    known = _known(numbers)
    return np.where(known < 2**31, known, MISSING)


def _strings(database: Database, ids: Int64) -> tuple[list[str], Int32]:
    """The distinct strings of a column of references, and each row's place among them."""
    values, place = distinct(ids)
    found = database.strings(values)
    return [found.get(key, NO_NAME) for key in values.tolist()], place.astype(np.int32)


def _names_of(columns: list[Int64], compose: Callable[..., str]) -> tuple[list[str], Int32]:
    """Names made of the values of columns, once for each distinct combination."""
    if not len(columns[0]):
        return [], np.empty(0, dtype=np.int32)
    places = [distinct(column)[1] for column in columns]
    key = np.ravel_multi_index(places, [int(place.max()) + 1 for place in places])
    _, first, name = np.unique(key, return_index=True, return_inverse=True)
    names = [compose(*(int(column[row]) for column in columns)) for row in first.tolist()]
    return names, name.astype(np.int32)


def distinct(values: Int64) -> tuple[Int64, Int64]:
    """Return the distinct values, sorted, and each value's place among them; small numbers need no sorting."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low > 4 * len(values):
        found, place = np.unique(values, return_inverse=True)
        return found, np.asarray(place, dtype=np.int64).reshape(-1)
    shifted = values - low
    present = np.zeros(high - low + 1, dtype=np.bool_)
    present[shifted] = True
    return np.flatnonzero(present) + low, (np.cumsum(present) - 1)[shifted]
