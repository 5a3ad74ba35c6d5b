"""Dependencies of a recorded graph, and the waits that no dependency explains."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from whatif.graph.order import each_once, places
from whatif.graph.types import Int64
from whatif.ingest.calls import CallKind
from whatif.ingest.events import MISSING, Events
from whatif.ingest.gpu_side import LATE_NS, LONG_AGO_NS, Calls, GpuSide, launch_order, of_calls
from whatif.ingest.nest import loops
from whatif.ingest.sync_records import recorded_sources
from whatif.ingest.waiting import CallTimes

# A stream that waits for another one starts at most this much before the recorded end of what it waited for.
EVENT_EARLY_NS = 3_000
STRUCTURAL_EARLY_NS = 500
# The task launched last is searched among this many that ended last: few streams are ever in flight.
IN_FLIGHT = 64


class StreamWaits(Struct, frozen=True):
    """Causes of GPU tasks' starts: tasks of other streams (pairs), and unexplained time, ns (n_gpu,)."""

    source: Int64
    target: Int64
    unexplained_ns: Int64
    lead_in_ns: Int64  # before the first task of a stream that nothing in the recording launched


def stream_waits(events: Events, calls: Calls, times: CallTimes, gpu: GpuSide, origin_ns: int) -> StreamWaits:
    """Find cross-stream dependencies, by the calls that ask for them and by evidence, and what remains unexplained.

    Evidence: a task that starts more than 20 us after everything known that it needs, just when a task on another
    stream ends, waited for that one.
    """
    n = len(gpu.event)
    first = np.append(True, gpu.stream[1:] != gpu.stream[:-1]) if n else np.empty(0, dtype=np.bool_)
    # Of a call that waits, the work before its wait: a copy starts inside the call that waits for it.
    ready_ns = of_calls(times.key_ns + times.work_ns + gpu.launch_lag_ns, gpu.call, LONG_AGO_NS)
    follows = np.flatnonzero(~first)
    ready_ns[follows] = np.maximum(ready_ns[follows], gpu.end_ns[follows - 1] + gpu.stream_lag_ns[gpu.stream[follows]])
    ends = np.argsort(gpu.end_ns, kind="stable")
    sources, targets = [], []
    if len(gpu.streams) > 1:
        exact = _recorded_waits(events, calls, gpu)
        structural = _structural_waits(calls, gpu, ends)
        for source, target in (exact, structural):
            sources.append(source)
            targets.append(target)
            np.maximum.at(ready_ns, target, gpu.end_ns[source])
        source, target = _evidence(gpu, ready_ns, ends, of_calls(calls.start_ns, gpu.call, LONG_AGO_NS))
        sources.append(source)
        targets.append(target)
        np.maximum.at(ready_ns, target, gpu.end_ns[source])
    unknown = ready_ns == LONG_AGO_NS
    late_ns = np.where(unknown, 0, gpu.start_ns - np.maximum(ready_ns, origin_ns))
    # The stream's lag comes between a wait and the task after it.
    lag_ns = gpu.stream_lag_ns[gpu.stream] if n else late_ns
    return StreamWaits(
        np.concatenate([np.empty(0, np.int64), *sources]),
        np.concatenate([np.empty(0, np.int64), *targets]),
        np.where(late_ns > LATE_NS, late_ns - lag_ns, 0),
        np.where(unknown, np.maximum(gpu.start_ns - origin_ns - lag_ns, 0), 0),
    )


def _evidence(gpu: GpuSide, ready_ns: Int64, ends: Int64, launched_ns: Int64) -> tuple[Int64, Int64]:
    """Late tasks, each with the latest task of another stream that ends in the 20 us before its start.

    A stream can wait only for what was launched before.
    """
    late = np.flatnonzero(gpu.start_ns - ready_ns > LATE_NS)
    sources, targets = [], []
    end_ns = gpu.end_ns[ends]
    low = np.searchsorted(end_ns, gpu.start_ns[late] - LATE_NS, side="left")
    high = np.searchsorted(end_ns, gpu.start_ns[late] + EVENT_EARLY_NS, side="right")
    for task, first, last in zip(late.tolist(), low.tolist(), high.tolist(), strict=True):
        for candidate in ends[first:last][::-1].tolist():
            earlier = launched_ns[candidate] <= launched_ns[task] and gpu.start_ns[candidate] < gpu.start_ns[task]
            if earlier and gpu.stream[candidate] != gpu.stream[task]:
                sources.append(candidate)
                targets.append(task)
                break
    return np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64)


def _structural_waits(calls: Calls, gpu: GpuSide, ends: Int64) -> tuple[Int64, Int64]:
    """Waits by cudaStreamWaitEvent: a stream's task waits for the newest task of another stream that ended before.

    A Kineto trace does not record the call's stream: it is that of the thread's next launch.
    """
    wait_calls = np.flatnonzero(calls.kind == CallKind.STREAM_WAIT_EVENT)
    launched = np.flatnonzero(gpu.call >= 0)
    by_call = launched[np.argsort(gpu.call[launched], kind="stable")]
    called = gpu.call[by_call]
    at = places(called, wait_calls, side="right")
    found = at < len(called)
    wait_calls, at = wait_calls[found], at[found]
    same_thread = calls.track[called[at]] == calls.track[wait_calls]
    wait_calls, target = wait_calls[same_thread], by_call[at[same_thread]]
    launch_ns = of_calls(calls.start_ns, gpu.call, LONG_AGO_NS)
    done = places(gpu.end_ns[ends], gpu.start_ns[target] + STRUCTURAL_EARLY_NS, side="right")
    sources = np.full(len(target), MISSING, dtype=np.int64)
    loops.newest_of_others(ends, launch_ns, gpu.stream, target, done, calls.start_ns[wait_calls], IN_FLIGHT, sources)
    sound = (sources >= 0) & (gpu.start_ns[sources] < gpu.start_ns[target])
    # One number per pair: np.unique sorts rows of a table ten times slower.
    pairs = each_once(sources[sound] * len(gpu.event) + target[sound])
    return np.divmod(pairs, max(len(gpu.event), 1))


def _recorded_waits(events: Events, calls: Calls, gpu: GpuSide) -> tuple[Int64, Int64]:
    """Waits of a stream by synchronisation records: its next task waits for the last task before the event."""
    code_of = {stream: code for code, (_, stream) in enumerate(gpu.streams)}
    on_stream = [np.flatnonzero(gpu.stream == code) for code in range(len(gpu.streams))]
    launched_ns = launch_order(calls, gpu)
    sources, targets = [], []
    for call, stream, source in recorded_sources(events, calls, gpu):
        waiting = code_of.get(stream)
        if source < 0 or waiting is None or gpu.stream[source] == waiting:
            continue
        if calls.kind[call] != CallKind.STREAM_WAIT_EVENT:
            continue
        after = int(np.searchsorted(launched_ns[on_stream[waiting]], calls.start_ns[call], side="right"))
        if after >= len(on_stream[waiting]):
            continue
        target = int(on_stream[waiting][after])
        if gpu.end_ns[source] <= gpu.start_ns[target] + EVENT_EARLY_NS and gpu.start_ns[source] < gpu.start_ns[target]:
            sources.append(source)
            targets.append(target)
    return np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64)
