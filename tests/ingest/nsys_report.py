"""Reports as Nsight Systems exports them, made with sqlite3, by hand or from a Kineto trace.

The schema is the one that version 2024.6 writes (SQLite Schema Reference, Nsight Systems user guide), without columns
that nothing here fills.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whatif.ingest.events import EventCategory, Events

PID = 4321
COLUMNS = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId "
    "INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, "
    "demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, graphNodeId INTEGER, gridX INTEGER, gridY INTEGER, "
    "gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER, registersPerThread INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId "
    "INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, "
    "bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId "
    "INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, "
    "value INTEGER NOT NULL, bytes INTEGER NOT NULL, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
    "contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid "
    "INTEGER, graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, "
    "globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
    "contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid "
    "INTEGER, syncType INTEGER NOT NULL, eventId INTEGER NOT NULL, eventSyncId INTEGER",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "timestamp INTEGER, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
    "greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, eventId INTEGER NOT "
    "NULL, eventSyncId INTEGER",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, text TEXT, "
    "globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER",
    "TARGET_INFO_GPU": "vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, totalMemory INTEGER, cuDevice INTEGER",
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "ENUM_CUDA_MEM_KIND": "id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT",
}
MEMORY_KINDS = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown")
COPY_KINDS = {"HtoD": 1, "DtoH": 2, "DtoD": 8, "PtoP": 10}
SYNC_KINDS = {"Event Sync": 1, "Stream Wait Event": 2, "Stream Sync": 3, "Context Sync": 4}


def global_id(pid: int, tid: int = 0) -> int:
    """A serialized identifier as the tool makes them: a machine, 24 bits of process, 24 bits of thread."""
    return 1 << 56 | pid << 24 | tid


class Report:
    """A report under construction; ``write`` gives its file. Tables are made when something is put into them."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}

    def string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings) + 1)

    def add(self, table: str, **values: Any) -> None:
        self.rows.setdefault(table, []).append(values)

    def call(self, start: int, end: int, name: str, correlation: int, *, tid: int = 1, pid: int = PID) -> None:
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, eventClass=0, globalTid=global_id(pid, tid),
                 correlationId=correlation, nameId=self.string(name), returnValue=0)  # fmt: skip

    def kernel(self, start: int, end: int, name: str, correlation: int, *, stream: int = 7, pid: int = PID,
               device: int = 0, **more: Any) -> None:  # fmt: skip
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, deviceId=device, contextId=1, streamId=stream,
                 correlationId=correlation, globalPid=global_id(pid), demangledName=self.string(name),
                 shortName=self.string(name.partition("<")[0]), **more)  # fmt: skip

    def range(self, start: int, end: int | None, text: str, *, tid: int = 1, pid: int = PID, kind: int = 59,
              domain: int = 0, registered: bool = False) -> None:  # fmt: skip
        named = {"textId": self.string(text)} if registered else {"text": text}
        self.add("NVTX_EVENTS", start=start, end=end, eventType=kind, globalTid=global_id(pid, tid), domainId=domain,
                 **named)  # fmt: skip

    def write(self, path: Path, *, without: Iterable[tuple[str, str]] = ()) -> Path:
        """Write the file; ``without`` are (table, column) pairs that this version of the tool does not know."""
        lacking = set(without)
        path.unlink(missing_ok=True)
        connection = sqlite3.connect(path)
        strings = [{"id": key, "value": text} for text, key in self._strings.items()]
        version = [{"name": "EXPORT_SCHEMA_VERSION", "value": "3.16.1"}]
        for table, rows in {"StringIds": strings, "META_DATA_EXPORT": version, **self.rows}.items():
            columns = [c for c in COLUMNS[table].split(", ") if (table, c.split()[0]) not in lacking]
            connection.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
            names = [c.split()[0] for c in columns]
            marks = ", ".join("?" * len(names))
            connection.executemany(
                f"INSERT INTO {table} VALUES ({marks})", [[row.get(name) for name in names] for row in rows]
            )
        connection.commit()
        connection.close()
        return path


def from_kineto(events: Events, *, gpu: str) -> Report:
    """A report of the run that a Kineto trace recorded, with ``emit_nvtx`` switched on.

    What such a report cannot hold is lost: flow arrows, modules, and which operators of a backward pass are nested in
    which forward thread's.
    """
    report = Report()
    report.add("TARGET_INFO_GPU", vmId=0, id=0, name=gpu, totalMemory=32 << 30, cuDevice=0)
    for code, label in enumerate(MEMORY_KINDS):
        report.add("ENUM_CUDA_MEM_KIND", id=code, name=label.upper(), label=label)
    for row in range(len(events)):
        start, end = int(events.start_ns[row]), int(events.start_ns[row] + events.duration_ns[row])
        name, correlation = events.names[events.name[row]], int(events.correlation[row])
        category = EventCategory(int(events.category[row]))
        thread = events.tracks[events.track[row]][1]
        tid = int(thread) % 2**24 if thread.isdigit() else 0
        if category == EventCategory.RUNTIME:
            report.call(start, end, f"{name}_v7000" if name.startswith("cuda") else name, correlation, tid=tid)
        elif category == EventCategory.KERNEL:
            report.kernel(start, end, name, correlation, stream=int(events.stream[row]))
        elif category in (EventCategory.CPU_OP, EventCategory.ANNOTATION):
            sequence = int(events.sequence[row])
            text = f"{name}, seq = {sequence}" if sequence >= 0 else name
            report.range(start, end, f"{text}, op_id = {row}" if category == EventCategory.CPU_OP else text, tid=tid)
        elif category in (EventCategory.MEMCPY, EventCategory.MEMSET, EventCategory.SYNC):
            where = {"start": start, "end": end, "deviceId": int(events.device[row]), "contextId": 1,
                     "streamId": int(events.stream[row]) % 2**32, "correlationId": correlation,
                     "globalPid": global_id(PID)}  # fmt: skip
            size = int(events.size_bytes[row])
            if category == EventCategory.MEMSET:
                report.add("CUPTI_ACTIVITY_KIND_MEMSET", **where, value=0, bytes=size, memKind=2)
            elif category == EventCategory.MEMCPY:
                _, copy, ends = name.split(maxsplit=2)
                source, target = (MEMORY_KINDS.index(end) for end in ends.strip("()").split(" -> "))
                report.add("CUPTI_ACTIVITY_KIND_MEMCPY", **where, bytes=size, copyKind=COPY_KINDS[copy],
                           srcKind=source, dstKind=target)  # fmt: skip
            else:
                _sync(report, events, row, where)
    return report


def _sync(report: Report, events: Events, row: int, where: dict[str, Any]) -> None:
    number = row + 1
    report.add("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", **where, eventId=number, eventSyncId=number,
               syncType=SYNC_KINDS[events.details[events.detail[row]]])  # fmt: skip
    if events.wait_correlation[row] > 0:
        report.add("CUPTI_ACTIVITY_KIND_CUDA_EVENT", timestamp=0, deviceId=0, contextId=1, eventId=number,
                   streamId=int(events.wait_stream[row]), correlationId=int(events.wait_correlation[row]),
                   globalPid=global_id(PID), eventSyncId=number)  # fmt: skip
