"""The GPU's half of a recording: streams, the calls that launched their tasks, and trace-wide launch constants."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from whatif.graph.order import each_once, places
from whatif.graph.types import (
    Array,
    Bool,
    Int8,
    Int32,
    Int64,
    among,
)
from whatif.ingest.calls import CallKind, call_kinds
from whatif.ingest.events import HOST_CATEGORIES, MISSING, EventCategory, Events
from whatif.ingest.grouped import Grouped, by_track
from whatif.ingest.nest import loops
from whatif.ingest.rows import running_maximum

GPU_CATEGORIES = (EventCategory.KERNEL, EventCategory.MEMCPY, EventCategory.MEMSET)

# A start later than its known causes by more than this is a wait for something else: three times the largest
# inter-kernel gap seen on a busy stream (facts from 18 traces, docs/design.md).
LATE_NS = 20_000
# Launch to start on an idle stream, and end to start on a busy one, if a trace has too few samples of its own
# (medians of other traces: 1 to 3 us and 1 to 2 us, docs/design.md).
DEFAULT_LAUNCH_LAG_NS = 2_000
# Longer ones are no property of the machine: 33 us after the call's start was the most (MI300).
MAX_LAUNCH_LAG_NS = 50_000
DEFAULT_STREAM_LAG_NS = 1_000
MIN_SAMPLES = 5
# Pending tasks per stream at which a CUDA launch blocks, exact on V100 and H100 traces; no such limit was seen on AMD.
DEFAULT_QUEUE_DEPTH = 1021
# A launch counts as blocked when it is this much slower than its kind's median, with nearly that many tasks pending.
BLOCKED_NS, BLOCKED_FACTOR, BLOCKED_PENDING = 30_000, 4, 900


class Calls(Struct, frozen=True):
    """Runtime and driver calls, nested ones merged into the outer one; shape (n_calls,), sorted by (track, start)."""

    event: Int64  # the outer call's row in Events
    track: Int32
    of_track: Grouped  # the calls of each track
    start_ns: Int64
    end_ns: Int64
    kind: Int8
    name: Int32
    of_event: Int64  # shape (n_events,): the call that each event belongs to, -1 for none


class GpuSide(Struct, frozen=True):
    """GPU tasks, shape (n_gpu,), sorted by (stream, start), and what launched them."""

    event: Int64
    stream: Int32  # index into `streams`
    streams: list[tuple[int, int]]  # (device, stream id)
    start_ns: Int64
    end_ns: Int64
    correlated: Int64  # index into Calls by correlation id, -1 for none
    call: Int64  # the same if it launched the task, -1 if the launch was not recorded
    before_ns: Int64  # end of the task before on the stream, LONG_AGO_NS if there is none
    launch_lag_ns: int
    stream_lag_ns: Int64  # (n_streams,)
    queue_depth: int
    queued_ns: Int64  # (n_calls,): when the call entered the launch queue; its start if there was room
    usual_ns: Int64  # (n_calls,): the usual duration of the call's API, 0 if that launches nothing


# The launch time of tasks whose launch was not recorded.
LONG_AGO_NS = int(np.iinfo(np.int64).min) // 2


def of_calls(values: Int64, call: Int64, default: int | Int64) -> Int64:
    """Return the value of each task's call, and ``default`` if the call was not recorded."""
    if not len(values):
        return np.broadcast_to(np.asarray(default, dtype=np.int64), (len(call),)).copy()
    found = values[call]
    unknown = np.flatnonzero(call < 0)
    found[unknown] = default if isinstance(default, int) else default[unknown]
    return found


def find_calls(events: Events) -> Calls:
    """Return the calls of a trace; threads that only poll are left out."""
    rows = events.of_category[EventCategory.RUNTIME]
    called = np.zeros(len(events.names), dtype=np.bool_)
    called[events.name[rows]] = True
    kinds = call_kinds(events.names, called)
    by_thread = by_track(events, rows)
    rows = by_thread.rows
    polling = _polling_tracks(events, by_thread, kinds)
    if polling:
        rows = np.concatenate([rows[:0], *(calls for track, calls in by_thread.items() if track not in polling)])
    group, first, end_ns = np.empty((3, len(rows)), dtype=np.int64)
    n = loops.overlapping(events.track[rows], events.start_ns[rows], events.end_ns[rows], group, first, end_ns)
    outer = rows[first[:n]]
    inner = np.flatnonzero(group[1:] == group[:-1]) + 1
    inner_kind = np.zeros(n, dtype=np.int8)
    np.maximum.at(inner_kind, group[inner], kinds[events.name[rows[inner]]])
    kind = kinds.take(events.name[outer])
    other = np.flatnonzero(kind == CallKind.OTHER)
    kind[other] = inner_kind[other]
    of_event = np.full(len(events), MISSING, dtype=np.int64)
    of_event[rows] = group
    return Calls(
        event=outer,
        track=events.track[outer],
        of_track=Grouped(np.arange(n), events.track[outer]),
        start_ns=events.start_ns[outer],
        end_ns=end_ns[:n].copy(),
        kind=kind,
        name=events.name[outer],
        of_event=of_event,
    )


def _polling_tracks(events: Events, calls: Grouped, kinds: Int8) -> set[int]:
    """The tracks without operators and annotations whose calls only poll."""
    works = ~among(kinds, [CallKind.POLL, CallKind.OTHER])
    # The first calls of most threads show it.
    polling = {t for t, rows in calls.items() if not any(works[events.name[part]].any() for part in (rows[:99], rows))}
    if polling:
        for category in HOST_CATEGORIES:
            polling.difference_update(each_once(events.track[events.of_category[category]]).tolist())
    return polling


def find_gpu_side(events: Events, calls: Calls, *, is_amd: bool) -> GpuSide:
    """Join GPU events with their calls and measure the trace's launch lag, stream lags and queue depth."""
    rows = events.of_categories(*GPU_CATEGORIES)
    # If the stream is unknown, the task's track takes its place.
    unknown = events.stream[rows] == MISSING
    device = np.where(unknown, -2 - events.track[rows], events.device[rows]).astype(np.int64)
    # One number per pair: np.unique sorts rows of a table ten times slower.
    key = (device << 32) + (events.stream[rows].astype(np.int64) + 2**31)
    codes = each_once(key)
    stream: Int32 = np.searchsorted(codes, key).astype(np.int32)
    streams = np.stack([codes >> 32, (codes & 0xFFFFFFFF) - 2**31], axis=1)
    order = Grouped(np.arange(len(rows)), stream).rows  # each stream's in order of time
    rows, stream = rows[order], stream[order]
    start_ns, end_ns = events.start_ns[rows], events.end_ns[rows]
    correlated = _correlated_calls(events, calls, rows)
    call = correlated.copy()
    call[_start_early(calls, correlated, start_ns)] = MISSING
    first = np.append(True, stream[1:] != stream[:-1]) if len(rows) else np.empty(0, dtype=np.bool_)
    before_ns = np.where(first, LONG_AGO_NS, np.append(0, end_ns[:-1])[: len(rows)])
    launched_ns = of_calls(calls.end_ns, call, start_ns)

    lag_ns = _launch_lag(start_ns, before_ns, launched_ns, call, calls)
    # Only tasks launched long before show the gap of the hardware itself.
    queued = ~first & ((launched_ns + LATE_NS < before_ns) | (call < 0))
    stream_lag_ns = _stream_lags(start_ns - before_ns, queued, stream, len(streams))
    median_ns = _api_medians(calls, call)
    depth = _queue_depth(start_ns, stream, call, calls, median_ns, is_amd=is_amd)
    return GpuSide(
        event=rows, stream=stream, streams=[(int(d), int(s)) for d, s in streams], start_ns=start_ns, end_ns=end_ns,
        correlated=correlated, call=call, before_ns=before_ns, launch_lag_ns=lag_ns, stream_lag_ns=stream_lag_ns,
        queue_depth=depth, queued_ns=_queued_ns(start_ns, stream, call, calls, depth), usual_ns=median_ns,
    )  # fmt: skip


def launch_order(calls: Calls, gpu: GpuSide) -> Int64:
    """Return the launch time of each GPU task, ns, shape (n_gpu,); if it is unknown, that of the task before."""
    return running_maximum(of_calls(calls.start_ns, gpu.call, LONG_AGO_NS), gpu.stream)


def _correlated_calls(events: Events, calls: Calls, rows: Array) -> Int64:
    """The call of each GPU row by correlation id, -1 for none; one call may launch many tasks."""
    launching = events.of_category[EventCategory.RUNTIME]
    launching = launching[(calls.of_event[launching] >= 0) & (events.correlation[launching] > 0)]
    # Kineto gives synchronisations correlation ids of their own; a call without GPU work does no harm here.
    launching = launching[np.argsort(events.correlation[launching], kind="stable")]
    ids = events.correlation[launching]
    wanted = events.correlation[rows]
    at = places(ids, wanted)
    hit = np.flatnonzero((np.append(ids, 0)[at] == wanted) & (wanted > 0))
    call = np.full(len(rows), MISSING, dtype=np.int64)
    call[hit] = calls.of_event[launching[at[hit]]]
    return call


def _start_early(calls: Calls, correlated: Int64, start_ns: Int64) -> Bool:
    """Mask of the tasks that start before their call, so it did not launch them: the id counter began anew."""
    early: Bool = of_calls(calls.start_ns, correlated, start_ns) > start_ns + LATE_NS
    return early


def _launch_lag(start_ns: Int64, before_ns: Int64, launched_ns: Int64, call: Int64, calls: Calls) -> int:
    """The median time from a call's return to the start of what it launched on an idle stream; may be negative."""
    if not len(calls.event):
        return DEFAULT_LAUNCH_LAG_NS
    at = np.maximum(call, 0)
    idle = (call >= 0) & (before_ns <= calls.start_ns[at]) & (calls.kind[at] == CallKind.LAUNCH)
    lags = (start_ns - launched_ns)[idle]
    lags = lags[np.abs(lags) <= MAX_LAUNCH_LAG_NS]
    return int(np.median(lags)) if len(lags) >= MIN_SAMPLES else DEFAULT_LAUNCH_LAG_NS


def _stream_lags(gap_ns: Int64, queued: Bool, stream: Int32, n_streams: int) -> Int64:
    """The mean gap before a task that was already waiting, per stream; the mean keeps the sum of many gaps right."""
    sound = queued & (np.abs(gap_ns) <= LATE_NS)
    overall = int(gap_ns[sound].mean()) if sound.sum() >= MIN_SAMPLES else DEFAULT_STREAM_LAG_NS
    count = np.bincount(stream[sound], minlength=n_streams)
    total = np.bincount(stream[sound], weights=gap_ns[sound], minlength=n_streams)
    return np.where(count >= MIN_SAMPLES, total / np.maximum(count, 1), overall).astype(np.int64)


def _api_medians(calls: Calls, call: Int64) -> Int64:
    """The median duration of each call's API, shape (n_calls,); 0 if it launched no task (``call``: each task's)."""
    duration_ns = calls.end_ns - calls.start_ns
    medians = np.zeros(len(duration_ns), dtype=np.int64)
    for name in np.flatnonzero(np.bincount(calls.name[call[call >= 0]])):
        rows = np.flatnonzero(calls.name == name)
        medians[rows] = int(np.median(duration_ns[rows]))
    return medians


def _runs(stream: Int32) -> Iterator[tuple[int, int]]:
    """The begin and end of each stream among the tasks, which are sorted by stream."""
    bounds = np.searchsorted(stream, np.arange(int(stream.max(initial=-1)) + 2))
    return itertools.pairwise(bounds.tolist())


def _queue_depth(start_ns: Int64, stream: Int32, call: Int64, calls: Calls, median_ns: Int64, *, is_amd: bool) -> int:
    """The number of pending tasks at which a launch blocks; 0 if it never does."""
    depth, most_pending = 0, 0
    for begin, end in _runs(stream):
        launched = np.flatnonzero(call[begin:end] >= 0)
        if end - begin < BLOCKED_PENDING or not len(launched):
            continue
        at = call[begin:end][launched]
        # Tasks launched before the recording count as well: the position on the stream has them all.
        pending = launched + 1 - places(start_ns[begin:end], calls.end_ns[at], side="right")
        duration_ns = calls.end_ns[at] - calls.start_ns[at]
        slow = duration_ns > np.maximum(BLOCKED_NS, BLOCKED_FACTOR * median_ns[at])
        held = slow & (pending > BLOCKED_PENDING) & (calls.kind[at] == CallKind.LAUNCH)
        most_pending = max(most_pending, int(pending.max()))
        if held.any():
            depth = max(depth, int(pending[held].max()))
    if not depth and not is_amd and most_pending <= DEFAULT_QUEUE_DEPTH:
        return DEFAULT_QUEUE_DEPTH
    return depth


def _queued_ns(start_ns: Int64, stream: Int32, call: Int64, calls: Calls, depth: int) -> Int64:
    """When each call entered the queue: not before the task ``depth`` places before its own had started."""
    queued_ns = calls.start_ns.copy()
    if not depth:
        return queued_ns
    for begin, end in _runs(stream):
        waiting = np.flatnonzero(call[begin:end][depth:] >= 0)
        at = call[begin:end][depth + waiting]
        np.maximum.at(queued_ns, at, start_ns[begin:end][waiting] + 1)
    return np.minimum(queued_ns, calls.end_ns)
