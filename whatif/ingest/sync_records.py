"""Recorded waits for events, from CUPTI's synchronisation records, each with the last task before the event."""

from __future__ import annotations

import numpy as np

from whatif.ingest.events import MISSING, EventCategory, Events
from whatif.ingest.gpu_side import Calls, GpuSide, launch_order


def recorded_sources(events: Events, calls: Calls, gpu: GpuSide) -> list[tuple[int, int, int]]:
    """Return (waiting call, id of the waiting stream, GPU task) for every recorded wait for an event.

    The task is the last one launched on the event's stream before the event was recorded; -1 if there is none.
    """
    rows = events.of_category[EventCategory.SYNC]
    rows = rows[events.wait_correlation[rows] > 0]
    if not len(rows) or not len(calls.event):
        return []
    call_of = {c: i for i, c in enumerate(events.correlation[calls.event].tolist()) if c > 0}
    code_of = {stream: code for code, (_, stream) in enumerate(gpu.streams)}
    on_stream = [np.flatnonzero(gpu.stream == code) for code in range(len(gpu.streams))]
    launched_ns = launch_order(calls, gpu)
    found = []
    for row in rows.tolist():
        waiting, record = call_of.get(int(events.correlation[row])), call_of.get(int(events.wait_correlation[row]))
        awaited = code_of.get(int(events.wait_stream[row]))
        if waiting is None or record is None or awaited is None:
            continue
        tasks = on_stream[awaited]
        before = int(np.searchsorted(launched_ns[tasks], calls.start_ns[record], side="left")) - 1
        found.append((waiting, int(events.stream[row]), int(tasks[before]) if before >= 0 else MISSING))
    return found
