"""Hand-offs: the main thread waits while another thread (autograd's) works for it."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from whatif.graph.order import places
from whatif.graph.types import Int64
from whatif.ingest.events import Events
from whatif.ingest.gpu_side import Calls
from whatif.ingest.nest import loops

# Clocks of two threads are read at slightly different moments.
TOLERANCE_NS = 2_000
# A pause is a wait for another thread only if that thread works for at least this share of it.
MIN_SHARE = 0.3


class Handoffs(Struct, frozen=True):
    """Bursts of work that one thread did while the main thread waited; shape (n_bursts,), sorted by start."""

    track: int
    start_ns: Int64
    end_ns: Int64
    # All busy intervals of the thread: starts and ends of the union of its operators and calls.
    busy_start_ns: Int64
    busy_end_ns: Int64


def activity(events: Events, calls: Calls, operators: Int64, track: int) -> tuple[Int64, Int64]:
    """Return the disjoint intervals in which ``operators`` (rows) or calls of a track run."""
    span = calls.of_track.span(track)
    operating = events.start_ns[operators], events.end_ns[operators]
    calling = calls.start_ns[span], calls.end_ns[span]
    start_ns, end_ns = np.empty((2, len(operators) + len(calling[0])), dtype=np.int64)
    n = loops.busy(*operating, *calling, start_ns, end_ns)
    return start_ns[:n], end_ns[:n]


def find_handoffs(track: int, main: tuple[Int64, Int64], other: tuple[Int64, Int64]) -> Handoffs:
    """Find the bursts of thread ``track`` that lie wholly inside a pause of the main thread.

    ``main`` and ``other`` are the starts and ends of what the two run (see ``activity``).
    """
    main_start_ns, main_end_ns = main
    busy_start_ns, busy_end_ns = other
    none = np.empty(0, dtype=np.int64)
    if not len(busy_start_ns) or len(main_start_ns) < 2:
        return Handoffs(track, none, none, busy_start_ns, busy_end_ns)
    pause_start_ns, pause_end_ns = main_end_ns[:-1], main_start_ns[1:]
    first = places(busy_start_ns, pause_start_ns - TOLERANCE_NS)
    last = places(busy_end_ns, pause_end_ns + TOLERANCE_NS, side="right") - 1
    # Work that straddles an end of the pause ran beside the main thread, not for it.
    before = np.append(np.iinfo(np.int64).min, busy_end_ns)[first]
    after = np.append(busy_start_ns, np.iinfo(np.int64).max)[last + 1]
    inside = (last >= first) & (before <= pause_start_ns + TOLERANCE_NS) & (after >= pause_end_ns - TOLERANCE_NS)
    work_ns = busy_end_ns[np.maximum(last, 0)] - busy_start_ns[np.minimum(first, len(busy_start_ns) - 1)]
    inside &= work_ns >= MIN_SHARE * (pause_end_ns - pause_start_ns)
    first, last = first[inside], last[inside]
    return Handoffs(
        track,
        np.maximum(busy_start_ns[first], pause_start_ns[inside]),
        np.minimum(busy_end_ns[last], pause_end_ns[inside]),
        busy_start_ns,
        busy_end_ns,
    )
