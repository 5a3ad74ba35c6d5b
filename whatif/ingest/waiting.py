"""Split calls that wait for the GPU into their work and their wait, which is never work."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from whatif.graph.insert import RETURN_NS
from whatif.graph.order import each_once
from whatif.graph.types import (
    ALL_STREAMS,
    Array,
    Bool,
    Int8,
    Int64,
    among,
)
from whatif.ingest.calls import CallKind
from whatif.ingest.events import MISSING, EventCategory, Events
from whatif.ingest.gpu_side import LATE_NS, LONG_AGO_NS, Calls, GpuSide, launch_order
from whatif.ingest.sync_records import recorded_sources

# A synchronisation returns up to this long before the recorded end of what it waited for: their clocks differ.
EARLY_NS = 3_000
# Pageable host-to-device copies up to this size are staged and return at once (CUDA driver API, "API synchronization
# behavior": 64 KB), unless the trace shows that they block.
STAGED_BYTES = 65_536
# Duration of a synchronisation that need not wait, if the trace has no such call (2 to 6 us observed).
DEFAULT_ISSUE_NS = 4_000

# What a waiting call waits for: a scope of Waits, or one task.
ONE_TASK = -2


class CallTimes(Struct, frozen=True):
    """The calls' own work and what they wait for; all of shape (n_calls,)."""

    work_ns: Int64
    key_ns: Int64  # orders the call among all tasks: when it entered the queue, for a launch held back by a full one
    can_wait: Bool
    scope: Int64  # ALL_STREAMS, a stream's code, or ONE_TASK
    target: Int64  # the GPU task for ONE_TASK
    lag_ns: Int64  # from the end of the GPU's work to the return of the call
    excess_ns: Int64  # time in the call that neither its work nor the GPU explains


def call_times(events: Events, calls: Calls, gpu: GpuSide) -> CallTimes:
    """Split every call into work and waiting."""
    n = len(calls.event)
    held = np.flatnonzero(gpu.queued_ns > calls.start_ns)
    work_ns = calls.end_ns - calls.start_ns
    work_ns[held] = np.minimum(calls.end_ns[held] - gpu.queued_ns[held], gpu.usual_ns[held])
    key_ns = gpu.queued_ns
    can_wait, scope, target, done_ns = _targets(events, calls, gpu)
    times = CallTimes(
        work_ns, key_ns, can_wait, scope, target, np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    )
    if len(gpu.event):
        waiting = np.flatnonzero(can_wait)
        task = target[waiting]
        # Copies in the two directions return at different moments: each direction is a group.
        direction = np.where(task >= 0, _copy_directions(events.names)[events.name[gpu.event[task]]] + 1, 0)
        group = calls.name[waiting].astype(np.int64) * 8 + direction
        for code in each_once(group):
            _split(times, waiting[group == code], calls, gpu, done_ns)
    return times


def _split(times: CallTimes, rows: Array, calls: Calls, gpu: GpuSide, done_ns: Int64) -> None:
    """Split the calls ``rows`` of one group into work, wait and return, in place."""
    start_ns, end_ns, done = calls.start_ns[rows], calls.end_ns[rows], done_ns[rows]
    copies = times.scope[rows] == ONE_TASK
    waited = done > start_ns
    # The work before the wait: of a copy, until it starts; of a synchronisation, its usual duration without a wait.
    target = np.maximum(times.target[rows], 0)
    unqueued = copies & (gpu.before_ns[target] <= start_ns) & (calls.kind[rows] == CallKind.COPY)
    issue_ns = np.clip(gpu.start_ns[target] - gpu.launch_lag_ns - start_ns, 0, end_ns - start_ns)
    # A first copy pays for page faults and lazy loading: the quickest one shows the usual work.
    without_wait_ns = np.array([issue_ns[unqueued].min()]) if unqueued.any() else (end_ns - start_ns)[~waited]
    usual_ns = int(np.median(without_wait_ns)) if len(without_wait_ns) else DEFAULT_ISSUE_NS
    longest_ns = np.where(copies & (calls.kind[rows] == CallKind.COPY), issue_ns, end_ns - start_ns)
    work_ns = np.where(waited, np.minimum(usual_ns, longest_ns), end_ns - start_ns)
    work_ns = np.where(unqueued & waited, issue_ns, work_ns)
    # From the end of the GPU's work to the return. Freeing memory works on after its wait, each time as measured.
    # A staged copy returns while its last piece is still on the way: its lag is negative.
    back_ns = end_ns - np.maximum(done, start_ns + work_ns)
    late = waited & (done > start_ns + work_ns)
    lag_ns = int(np.median(back_ns[late])) if late.any() else RETURN_NS
    excess_ns = np.where(late, np.maximum(back_ns - lag_ns, 0), 0)
    frees = calls.kind[rows] == CallKind.FREE
    times.work_ns[rows] = work_ns
    times.lag_ns[rows] = np.where(frees & late, back_ns, lag_ns)
    times.excess_ns[rows] = np.where(frees | (excess_ns <= LATE_NS), 0, excess_ns)


def _targets(events: Events, calls: Calls, gpu: GpuSide) -> tuple[Bool, Int64, Int64, Int64]:
    """For each call: whether it can wait, its scope, its task, and when what it waits for ended (long ago: nothing)."""
    n = len(calls.event)
    can_wait = np.zeros(n, dtype=np.bool_)
    scope = np.full(n, ALL_STREAMS, dtype=np.int64)
    target = np.full(n, MISSING, dtype=np.int64)
    done_ns = np.full(n, LONG_AGO_NS)  # times may be negative
    if not len(gpu.event):
        return can_wait, scope, target, done_ns
    launched_ns = launch_order(calls, gpu)
    known = _recorded_streams(events, calls, gpu)
    waiting = [CallKind.DEVICE_SYNC, CallKind.STREAM_SYNC, CallKind.FREE]
    syncs = np.flatnonzero(among(calls.kind, waiting))
    last = _last_launched(launched_ns, gpu, calls.start_ns[syncs])
    ends = np.where(last >= 0, gpu.end_ns[np.maximum(last, 0)], LONG_AGO_NS)
    everything = among(calls.kind[syncs], [CallKind.DEVICE_SYNC, CallKind.FREE])
    possible = (last >= 0) & (ends <= calls.end_ns[syncs][:, None] + EARLY_NS)
    # Of one stream: the recorded one, else the one whose last task ends latest without outlasting the call.
    recorded = known[syncs]
    best = np.where(recorded >= 0, recorded, np.where(possible, ends, LONG_AGO_NS).argmax(axis=1))
    picked = np.arange(len(syncs))
    # A call that returns while every stream is still busy waited for none of them.
    can_wait[syncs] = everything | (recorded >= 0) | possible.any(axis=1)
    scope[syncs] = np.where(everything, ALL_STREAMS, best)
    possible_ends = np.where(possible, ends, LONG_AGO_NS)
    latest = np.where(everything, possible_ends.max(axis=1, initial=LONG_AGO_NS), possible_ends[picked, best])
    done_ns[syncs] = np.minimum(latest, calls.end_ns[syncs])
    _event_targets(events, calls, gpu, launched_ns, can_wait, scope, target, done_ns)
    _copy_targets(events, calls, gpu, can_wait, scope, target, done_ns)
    return can_wait, scope, target, done_ns


def _last_launched(launched_ns: Int64, gpu: GpuSide, time_ns: Int64) -> Array:
    """The last task of each stream launched before each time, shape (n_times, n_streams); -1 if there is none."""
    last = np.full((len(time_ns), len(gpu.streams)), MISSING, dtype=np.int64)
    for code in range(len(gpu.streams)):
        tasks = np.flatnonzero(gpu.stream == code)
        at = np.searchsorted(launched_ns[tasks], time_ns, side="left") - 1
        last[:, code] = np.where(at >= 0, tasks[np.maximum(at, 0)], MISSING)
    return last


def _recorded_streams(events: Events, calls: Calls, gpu: GpuSide) -> Int64:
    """The stream that a synchronisation record gives for each call, -1 where none does."""
    known = np.full(len(calls.event), MISSING, dtype=np.int64)
    rows = events.of_category[EventCategory.SYNC]
    rows = rows[(events.stream[rows] >= 0) & (events.correlation[rows] > 0)]
    if not len(rows):
        return known
    code_of = {stream: code for code, (_, stream) in enumerate(gpu.streams)}
    order = np.argsort(events.correlation[rows], kind="stable")
    rows = rows[order]
    wanted = events.correlation[calls.event]
    at = np.minimum(np.searchsorted(events.correlation[rows], wanted), len(rows) - 1)
    hit = events.correlation[rows[at]] == wanted
    known[hit] = [code_of.get(int(stream), MISSING) for stream in events.stream[rows[at[hit]]]]
    return known


def _event_targets(
    events: Events,
    calls: Calls,
    gpu: GpuSide,
    launched_ns: Int64,
    can_wait: Bool,
    scope: Int64,
    target: Int64,
    done_ns: Int64,
) -> None:
    """Bind event synchronisations to the last task before the event, in place.

    A synchronisation record gives the event. Without one it is the latest task that ended while the call waited, as an
    event may be recorded long before the last launch; a call that did not wait is bound to none.
    """
    source_of = {call: source for call, _, source in recorded_sources(events, calls, gpu) if source >= 0}
    by_end = np.argsort(gpu.end_ns, kind="stable")
    ends = gpu.end_ns[by_end]
    for call in np.flatnonzero(calls.kind == CallKind.EVENT_SYNC).tolist():
        begin_ns, end_ns = int(calls.start_ns[call]), int(calls.end_ns[call])
        source = source_of.get(call, MISSING)
        if source < 0:
            first, last = np.searchsorted(ends, [begin_ns, end_ns + EARLY_NS], side="right")
            fits = by_end[first:last][launched_ns[by_end[first:last]] < begin_ns]
            source = int(fits[-1]) if len(fits) else MISSING
        if source >= 0 and gpu.end_ns[source] <= end_ns + EARLY_NS:
            can_wait[call] = True
            target[call], scope[call] = source, ONE_TASK
            done_ns[call] = min(int(gpu.end_ns[source]), end_ns)


def _copy_targets(
    events: Events, calls: Calls, gpu: GpuSide, can_wait: Bool, scope: Int64, target: Int64, done_ns: Int64
) -> None:
    """Copies from and to pageable memory wait for themselves, in place."""
    rows = np.flatnonzero((events.category[gpu.event] == EventCategory.MEMCPY) & (gpu.call >= 0))
    if not len(rows):
        return
    direction = _copy_directions(events.names)[events.name[gpu.event[rows]]]
    call = gpu.call[rows]
    # A copy that starts after its call returned was only queued by it.
    during = gpu.start_ns[rows] < calls.end_ns[call]
    large = events.size_bytes[gpu.event[rows]] > STAGED_BYTES
    blocking = during & (
        (direction == _TO_PAGEABLE)
        | ((direction == _FROM_PAGEABLE) & (large | (calls.end_ns[call] - calls.start_ns[call] > LATE_NS)))
        | (_waits_by_name(events.names)[calls.name[call]] & (direction != _ON_DEVICE))
    )
    chosen, tasks = call[blocking], rows[blocking]
    can_wait[chosen] = True
    scope[chosen] = ONE_TASK
    target[chosen] = tasks
    done_ns[chosen] = gpu.end_ns[tasks]


_TO_PAGEABLE, _FROM_PAGEABLE, _ON_DEVICE, _ELSEWHERE = 0, 1, 2, 3


def _copy_directions(names: list[str]) -> Int8:
    directions = np.full(len(names), _ELSEWHERE, dtype=np.int8)
    for code, name in enumerate(names):
        if "DtoH" in name and ("Pageable" in name or "(" not in name):
            directions[code] = _TO_PAGEABLE
        elif "HtoD" in name and ("Pageable" in name or "(" not in name):
            directions[code] = _FROM_PAGEABLE
        elif "DtoD" in name:
            directions[code] = _ON_DEVICE
    return directions


def _waits_by_name(names: list[str]) -> Bool:
    """Mask of the names of calls that block whatever they copy: without Async, and HIP's copy with a stream."""
    waits = [
        ("emcpy" in name and "Async" not in name and "Peer" not in name) or name.startswith("hipMemcpyWithStream")
        for name in names
    ]
    return np.array(waits, dtype=np.bool_)
