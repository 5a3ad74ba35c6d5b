"""The kinds of CUDA and HIP calls, by name: the one place where a call's name is read."""

from __future__ import annotations

import re
from enum import IntEnum

import numpy as np

from whatif.graph.types import Bool, Int8


class CallKind(IntEnum):
    """The effect of a runtime or driver call on the GPU."""

    OTHER = 0
    LAUNCH = 1  # returns once the work is queued; blocks when the queue is full
    GRAPH_LAUNCH = 2
    COPY = 3
    DEVICE_SYNC = 4
    STREAM_SYNC = 5
    EVENT_SYNC = 6
    FREE = 7  # waits for the device like a synchronisation, then works
    STREAM_WAIT_EVENT = 8
    EVENT_RECORD = 9
    POLL = 10


# The first pattern that matches decides; names carry versions such as cudaLaunchKernel_v7000 in CUPTI's spelling.
_PATTERNS = (
    (r"GraphLaunch", CallKind.GRAPH_LAUNCH),
    (r"^(cuda|hip)(Device|Ctx)Synchronize|^cuCtxSynchronize", CallKind.DEVICE_SYNC),
    (r"^(cuda|hip)StreamSynchronize|^cuStreamSynchronize", CallKind.STREAM_SYNC),
    (r"^(cuda|hip)EventSynchronize|^cuEventSynchronize", CallKind.EVENT_SYNC),
    (r"^(cuda|hip)(Free|FreeHost|HostFree|FreeArray|HostUnregister)(_|$)|^cuMemFree(Host)?(_|$)", CallKind.FREE),
    (r"StreamWaitEvent", CallKind.STREAM_WAIT_EVENT),
    (r"EventRecord", CallKind.EVENT_RECORD),
    (r"EventQuery|StreamQuery", CallKind.POLL),
    (r"^(cuda|hip|cu)Memcpy", CallKind.COPY),
    (r"Launch|^(cuda|hip|cu)Memset", CallKind.LAUNCH),
)


def call_kinds(names: list[str], called: Bool) -> Int8:
    """Return the ``CallKind`` of every name in the mask ``called``, shape (len(names),); ``OTHER`` for the others."""
    compiled = [(re.compile(pattern), kind) for pattern, kind in _PATTERNS]
    kinds = np.zeros(len(names), dtype=np.int8)
    for code in np.flatnonzero(called).tolist():
        for pattern, kind in compiled:
            if pattern.search(names[code]):
                kinds[code] = kind
                break
    return kinds
