"""A Nsight Systems report as what CUPTI would have delivered of it: its rows become CUPTI's own records.

The tables are read here by plain SQL, not by the reader that is tested beside them. Reports without NVTX ranges have no
spans; whole CUDA graphs (CUPTI_ACTIVITY_KIND_GRAPH_TRACE) are left out, which our session does not ask CUPTI for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.instrumentation import cupti_machine as machine
from tests.instrumentation.replayed import Replayed, callback_of

_TABLE = "CUPTI_ACTIVITY_KIND_"
# The lowest 24 bits of a serialized thread are the thread's, the 24 above them the process's.
_BITS = 24


def rows_of(path: Path, table: str) -> Iterator[sqlite3.Row]:
    """Yield the rows of one of CUPTI's tables in the order of the file, with names in place of their numbers."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        database.row_factory = sqlite3.Row
        named = {"KERNEL": "demangledName", "RUNTIME": "nameId"}.get(table)
        if named is None:
            yield from database.execute(f"SELECT * FROM {_TABLE}{table}")
            return
        yield from database.execute(
            f"SELECT rows.*, value AS name FROM {_TABLE}{table} rows JOIN StringIds ON id = {named} ORDER BY rows.rowid"
        )


def epoch_ns(path: Path) -> int:
    """Return the report's zero of time, ns since 1970."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        [(zero_ns,)] = database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")
    return int(zero_ns)


def replayed(path: Path, clock_offset_ns: int = 0) -> Replayed:
    """Return what CUPTI would have delivered; its clock is ``clock_offset_ns`` ahead of the report's."""
    zero_ns = epoch_ns(path) + clock_offset_ns
    calls = list(rows_of(path, "RUNTIME"))
    records = [_call(row, zero_ns) for row in calls]
    records += [_kernel(row, zero_ns) for row in rows_of(path, "KERNEL")]
    records += [_wait(row, zero_ns) for row in rows_of(path, "SYNCHRONIZATION")]
    process = calls[0]["globalTid"] >> _BITS & (1 << _BITS) - 1
    return Replayed(records, [], min(r.start for r in records), max(r.end for r in records) + 1, process)


def _kernel(row: sqlite3.Row, zero_ns: int) -> Any:
    record = machine.kernel(
        row["name"], zero_ns + row["start"], zero_ns + row["end"], row["correlationId"], row["streamId"],
        registers_per_thread=row["registersPerThread"], dynamic_shared_memory=row["dynamicSharedMemory"],
        **{f"{what}_{axis}": row[f"{what}{axis.upper()}"] for what in ("grid", "block") for axis in "xyz"},
    )  # fmt: skip
    return machine.fill(record, device_id=row["deviceId"], context_id=row["contextId"])


def _call(row: sqlite3.Row, zero_ns: int) -> Any:
    driver = not row["name"].startswith("cuda")
    number = callback_of(row["name"].partition("_v")[0], driver)
    thread = row["globalTid"] & (1 << _BITS) - 1
    return machine.call(
        number, zero_ns + row["start"], zero_ns + row["end"], row["correlationId"], thread, driver=driver
    )


def _wait(row: sqlite3.Row, zero_ns: int) -> Any:
    record = machine.sync(
        row["syncType"], zero_ns + row["start"], zero_ns + row["end"], row["correlationId"], stream=row["streamId"],
        event=row["eventId"],
    )  # fmt: skip
    return machine.fill(record, context_id=row["contextId"])
