"""What CUPTI's synchronisation records tell: which event a wait is for, and which task lies ahead of that event."""

from __future__ import annotations

import numpy as np

from whatif.ingest.events import MISSING, EventCategory, Events
from whatif.ingest.gpu_side import LONG_AGO_NS, Calls, GpuSide, of_calls


def recorded_sources(events: Events, calls: Calls, gpu: GpuSide) -> list[tuple[int, int]]:
    """Give (waiting call, GPU task) for every recorded wait for an event; -1 where no task lies ahead of the event.

    The task is the last one launched on the event's stream before the event was recorded.
    """
    rows = np.flatnonzero((events.category == EventCategory.SYNC) & (events.wait_correlation > 0))
    if not len(rows) or not len(calls.event):
        return []
    call_of = {c: i for i, c in enumerate(events.correlation[calls.event].tolist()) if c > 0}
    code_of = {stream: code for code, (_, stream) in enumerate(gpu.streams)}
    launch_ns = of_calls(calls.start_ns, gpu.call, LONG_AGO_NS)
    on_stream = [np.flatnonzero(gpu.stream == code) for code in range(len(gpu.streams))]
    launched_ns = [np.maximum.accumulate(launch_ns[tasks]) for tasks in on_stream]
    found = []
    for row in rows.tolist():
        asked, recorded = call_of.get(int(events.correlation[row])), call_of.get(int(events.wait_correlation[row]))
        awaited = code_of.get(int(events.wait_stream[row]))
        if asked is None or recorded is None or awaited is None:
            continue
        before = int(np.searchsorted(launched_ns[awaited], calls.start_ns[recorded], side="left")) - 1
        found.append((asked, int(on_stream[awaited][before]) if before >= 0 else MISSING))
    return found
