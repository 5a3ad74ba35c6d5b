"""Read a report of Nsight Systems, exported to SQLite (``nsys export --type sqlite``), into event columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from whatif.graph.columns import one_table
from whatif.graph.types import (
    Array,
    Bool,
    Int32,
    Int64,
)
from whatif.ingest.events import COLUMN_DTYPES, MISSING, Events, Flows, SeveralProcessesError, put_in_order
from whatif.ingest.nsys_database import ABSENT, Database
from whatif.ingest.nsys_ranges import read_ranges
from whatif.ingest.nsys_tables import (
    CALLS,
    GPU_TABLES,
    Block,
    distinct,
    read_calls,
    read_copies,
    read_graphs,
    read_kernels,
    read_memsets,
    read_syncs,
)
from whatif.runtime.errors import WhatifError

_GPU_READERS = (read_kernels, read_copies, read_memsets, read_graphs)
_THREAD_BITS = 24
# A process with less than this share of the busiest one's GPU time is a helper, no rank.
BUSY_SHARE = 0.1


def pid_of(process: int) -> int:
    """Return the number that the system gave a process of a report."""
    return process & ((1 << _THREAD_BITS) - 1)


def read_nsys(path: Path, *, process: int | None = None, progress: Callable[[int, int], None] | None = None) -> Events:
    """Return the duration events of one process of a report, sorted by (start_ns, -duration_ns).

    Without ``process`` it is the only one that keeps a GPU busy; several ones raise SeveralProcessesError.
    Times are nanoseconds from the start of the session. Damaged rows are left out and counted by reason in
    ``Events.dropped``. ``progress`` is called with (bytes, bytes in all), as if all tables were of one size.

    Raises WhatifError, one sentence, if the file is damaged as a whole, is another tool's database or holds no GPU
    work.
    """
    dropped: Counter[str] = Counter()
    size_bytes = path.stat().st_size
    n_reads = len(_GPU_READERS) + 3

    def done(reads: int) -> None:
        if progress is not None:
            progress(size_bytes * reads // n_reads, size_bytes)

    with Database(path, dropped) as database:
        gpu = []
        for reads, reader in enumerate(_GPU_READERS):
            gpu.append(reader(database, dropped))
            done(reads + 1)
        calls = read_calls(database, dropped)
        if not any(len(block) for block in gpu):
            raise WhatifError(_no_gpu_work(path, calls, database, dropped))
        if process is None:
            busy = _busy_processes(gpu, calls)
            if len(busy) > 1:
                raise SeveralProcessesError(path, {process: pid_of(process) for process in busy})
            process = busy[0]

        def of_process(processes: Int64) -> Bool:
            chosen: Bool = (processes == process) | (processes == ABSENT) | (process == ABSENT)
            return chosen

        done(len(_GPU_READERS) + 1)
        syncs = read_syncs(database, dropped)
        done(len(_GPU_READERS) + 2)
        operators, annotations, shapes = read_ranges(database, dropped, of_process)
        done(n_reads)
        kept = [_of_process(block, of_process, process, dropped) for block in (*gpu, calls, syncs)]
        header = {"deviceProperties": _devices(database, kept[: len(gpu)])}
    return _events([*kept, operators, annotations], shapes, header, dropped)


def _no_gpu_work(path: Path, calls: Block, database: Database, dropped: Counter[str]) -> str:
    lost = sum(dropped.values())
    spoiled = f" ({lost} of its events could not be read)" if lost else ""
    got = f"{len(calls)} CUDA calls and no kernel" if len(calls) else "no CUDA activity"
    tables = "" if any(table in database for table in (CALLS, *GPU_TABLES)) else " at all"
    return (
        f"{path}{spoiled}: expected GPU kernels in the Nsight Systems report, got {got}{tables}; record again with "
        "`nsys profile --trace=cuda,nvtx`."
    )


def _busy_processes(gpu: list[Block], calls: Block) -> list[int]:
    """The processes that keep a GPU busy, ascending; the one with most calls if GPU tasks have no process."""
    process = np.concatenate([block.process for block in gpu])
    weight = np.concatenate([block.duration_ns for block in gpu]).astype(np.float64) + 1.0
    if (process == ABSENT).all():
        known = calls.process[calls.process != ABSENT]
        processes, count = np.unique(known, return_counts=True)
        return [int(processes[count.argmax()])] if len(known) else [ABSENT]
    processes, place = distinct(process[process != ABSENT])
    time_ns = np.bincount(place, weights=weight[process != ABSENT])
    return sorted(processes[time_ns >= BUSY_SHARE * time_ns.max()].tolist())


def _of_process(block: Block, belongs: Callable[[Int64], Bool], process: int, dropped: Counter[str]) -> Block:
    chosen = belongs(block.process)
    if chosen.all():
        return block
    dropped[f"of processes other than {pid_of(process)}, which uses the GPU most"] += int((~chosen).sum())
    return block.take(chosen)


def _devices(database: Database, gpu: list[Block]) -> list[dict[str, Any]]:
    """The GPU with most tasks, as Kineto describes devices; empty if the report does not name it."""
    rows = database.integers("TARGET_INFO_GPU", ("id", "cuDevice", "totalMemory"))
    names = [name or "" for name in database.texts("TARGET_INFO_GPU", "name")]
    numbers = np.concatenate([block.columns["device"] for block in gpu])
    values, count = np.unique(numbers[numbers >= 0], return_counts=True)
    used = int(values[count.argmax()]) if len(values) else 0
    # CUDA's number of a device is not the report's if some devices are hidden from the process.
    cuda = np.where(rows["cuDevice"] == ABSENT, rows["id"], rows["cuDevice"])
    at = int((cuda == used).argmax()) if len(cuda) else 0
    if at >= len(names) or not names[at]:
        return []
    return [{"name": names[at], "totalGlobalMem": int(rows["totalMemory"][at])}]


def _events(
    blocks: list[Block], shapes: list[tuple[Any, Any, Any]], header: dict[str, Any], dropped: Counter[str]
) -> Events:
    """Put the blocks together: one table of names and of tracks, rows in order of time."""
    names, name = _one_table([block.names for block in blocks], [block.name for block in blocks])
    details, detail = _one_table(
        [block.details for block in blocks],
        [block.columns.get("detail", np.full(len(block), MISSING)) for block in blocks],
    )
    tracks, track = _tracks(blocks)
    columns: dict[str, Array] = {
        "category": np.concatenate([np.full(len(block), block.category, dtype=np.int8) for block in blocks]),
        "name": name,
        "start_ns": np.concatenate([block.start_ns for block in blocks]),
        "duration_ns": np.concatenate([block.duration_ns for block in blocks]),
        "track": track,
        "detail": detail,
    }
    for key, dtype in COLUMN_DTYPES.items():
        if key not in columns:
            values = np.concatenate([block.columns.get(key, np.full(len(block), MISSING)) for block in blocks])
            most = np.iinfo(dtype).max
            columns[key] = np.where(np.abs(values) <= most, values, MISSING).astype(dtype)
    put_in_order(columns, dropped)
    ordered: dict[str, Any] = columns
    none = np.empty(0, dtype=np.int64)
    return Events(
        **ordered,
        names=names,
        tracks=tracks,
        shapes=shapes,
        details=details,
        flows=Flows(none, none.astype(np.int32), none, none.astype(np.int32)),
        header=header,
        by_torch=False,
        dropped=dropped,
    )


def _one_table(tables: list[list[str]], codes: list[Array]) -> tuple[list[str], Int32]:
    """One table of the blocks' distinct strings, and the codes of all rows in it; MISSING stays MISSING."""
    table, new_codes = one_table(tables)
    # A code that is MISSING (-1) is the last entry.
    moved = [np.append(to, np.int32(MISSING))[code] for to, code in zip(new_codes, codes, strict=True)]
    return list(table), np.concatenate(moved)


def _tracks(blocks: list[Block]) -> tuple[list[tuple[str, str]], Int32]:
    """The threads and streams of all rows, and each row's place among them."""
    names, places = [], []
    for block in blocks:
        on_gpu = "stream" in block.columns
        # One number per pair of device and stream, both of 32 bits.
        key = (block.columns["device"] << 32) + block.columns["stream"] if on_gpu else block.thread
        ids, place = distinct(key) if len(block) else (key, key)
        names.append([_gpu_track(number) if on_gpu else _cpu_track(number) for number in ids.tolist()])
        places.append(place)
    table, new_places = one_table(names)
    return list(table), np.concatenate([to[place] for to, place in zip(new_places, places, strict=True)])


def _gpu_track(key: int) -> tuple[str, str]:
    # A stream may be MISSING (-1), which borrows one from the device.
    return f"GPU {key + 1 >> 32}", f"stream {(key + 1 & 0xFFFFFFFF) - 1}"


def _cpu_track(thread: int) -> tuple[str, str]:
    """Process and thread, from the serialized identifier: 24 bits each (Nsight Systems user guide)."""
    if thread == ABSENT:
        return "", ""
    mask = (1 << _THREAD_BITS) - 1
    return str(thread >> _THREAD_BITS & mask), str(thread & mask)
