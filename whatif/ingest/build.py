"""From event columns to a task graph: find threads, steps and labels, make the tasks, connect them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct, field

from whatif.graph.columns import concatenated
from whatif.graph.order import places
from whatif.graph.types import (
    Array,
    Bool,
    Int64,
    Phase,
    TaskKind,
    Thread,
    ThreadKind,
)
from whatif.ingest.calls import CallKind
from whatif.ingest.cpu_side import (
    CpuTasks,
    Cutter,
    find_all_handoffs,
    find_cpu_tracks,
    idle_between,
)
from whatif.ingest.events import MISSING, EventCategory, Events
from whatif.ingest.find_steps import Launched, StepRule, Steps, find_steps, without_cut_step, work_times_ns
from whatif.ingest.gpu_side import LATE_NS, Calls, GpuSide, find_calls, find_gpu_side, of_calls
from whatif.ingest.grouped import Grouped, by_track, named
from whatif.ingest.handoff import Handoffs
from whatif.ingest.labels import Labeller, Labels, complete_phases
from whatif.ingest.marks import NameMarks, name_marks
from whatif.ingest.profiler_cost import ProfilerCost, find_profiler_cost
from whatif.ingest.rows import Role, Rows, joined, running_maximum, wait_rows
from whatif.ingest.waiting import CallTimes, call_times
from whatif.simulation.intervals import interval_of


class Parts(Struct):
    """Everything found in a trace on the way to its graph; filled from top to bottom."""

    events: Events
    operators: Grouped  # rows of events, by track
    autograd: Int64  # those of them that autograd runs
    marks: NameMarks
    calls: Calls
    gpu: GpuSide
    tracks: list[int]
    handoffs: list[Handoffs]
    steps: Steps
    labeller: Labeller
    call_times: CallTimes
    profiler: ProfilerCost | None
    threads: list[Thread] = field(default_factory=list)


def find_parts(events: Events, *, is_amd: bool, rule: StepRule) -> Parts:
    """Find all parts of a trace that its graph needs; ``rule`` is the user's rule for the steps."""
    marks = name_marks(events.names)
    operators = by_track(events, events.of_category[EventCategory.CPU_OP])
    autograd = named(events, operators.rows, marks.autograd)
    calls = find_calls(events)
    gpu = find_gpu_side(events, calls, is_amd=is_amd)
    tracks = find_cpu_tracks(events, operators, calls, marks, has_gpu=bool(len(gpu.event)))
    handoffs = find_all_handoffs(events, operators, autograd, calls, tracks, marks) if len(gpu.event) else []
    launched_ns = of_calls(calls.start_ns, gpu.call, gpu.start_ns)
    order = np.argsort(launched_ns, kind="stable")
    launched = Launched(launched_ns[order], gpu.call[order], events.name[gpu.event[order]].astype(np.int64))
    by_graph = calls.kind == CallKind.GRAPH_LAUNCH
    main = tracks[0] if tracks else -1
    steps = find_steps(events, marks, main, launched, by_graph, rule)
    if events.ends_early_at is not None:
        steps = without_cut_step(steps, work_times_ns(events, main, launched))
    workers = [h.track for h in handoffs if len(h.start_ns)]
    threads = [Thread(f"CPU thread {events.tracks[t][1]}", ThreadKind.CPU) for t in tracks]
    threads += [
        Thread(f"GPU {device} stream {stream}", ThreadKind.STREAM, device, stream, int(gpu.stream_lag_ns[code]))
        for code, (device, stream) in enumerate(gpu.streams)
    ]
    return Parts(
        events, operators, autograd, marks, calls, gpu, tracks, handoffs, steps,
        Labeller(events, operators, marks, workers), call_times(events, calls, gpu),
        _profiler_cost(events, operators, calls, tracks), threads,
    )  # fmt: skip


def _profiler_cost(events: Events, operators: Grouped, calls: Calls, tracks: list[int]) -> ProfilerCost | None:
    """The profiler's cost in a trace of torch alone: our recorder measures it, and a predicted step has none."""
    known = "whatif" in events.header or not events.by_torch
    return None if known else find_profiler_cost(events, operators, tracks, len(calls.event))


def cpu_rows(parts: Parts) -> Rows:
    """Return the tasks of all CPU threads: pieces and calls in order, thread by thread, then the waits after them."""
    cutter = Cutter(
        parts.events, parts.operators, parts.autograd, parts.calls, parts.marks, by_operator=not len(parts.gpu.event)
    )
    handoff_of = {h.track: h for h in parts.handoffs if len(h.start_ns)}
    bursts = _merged([(h.start_ns, h.end_ns) for h in parts.handoffs])
    none = np.empty(0, dtype=np.int64)
    all_pieces, all_labels, profiler_events, profiler_ns, works_for = [], [], [], [], []
    for code, track in enumerate(parts.tracks):
        handoffs = handoff_of.get(track) if code else None
        extent, edges, left_out = None, none, (none, none)
        if code == 0:
            extent = (
                (int(parts.steps.edges_ns[0]), int(parts.steps.edges_ns[-1])) if len(parts.steps.edges_ns) else None
            )
            edges, left_out = np.concatenate([parts.steps.edges_ns, *bursts]), bursts
        elif handoffs:
            edges, left_out = np.concatenate([handoffs.start_ns, handoffs.end_ns]), idle_between(handoffs)
        pieces = cutter.cut(track, edges_ns=edges, extent_ns=extent, left_out=left_out)
        all_pieces.append(pieces)
        all_labels.append(parts.labeller.label(track, pieces.start_ns))
        profiler_events.append(cutter.profiler_events(track, pieces))
        if parts.profiler:
            profiler_ns.append(parts.profiler.of_pieces(track, pieces))
        works_for.append(
            interval_of(pieces.start_ns, handoffs.start_ns, handoffs.end_ns) >= 0
            if handoffs
            else np.zeros(len(pieces.start_ns), dtype=np.bool_)
        )
    # From here on all threads at once: there may be tens of thousands.
    thread = np.repeat(np.arange(len(all_pieces), dtype=np.int32), [len(pieces.start_ns) for pieces in all_pieces])
    cost_ns = np.concatenate(profiler_ns) if profiler_ns else np.zeros(len(thread))
    thread_columns = {
        "thread": thread,
        "profiler_events": np.concatenate(profiler_events).astype(np.int32),
        "profiler_ns": np.rint(np.minimum(cost_ns, np.iinfo(np.int32).max)).astype(np.int32),
    }
    pieces, labels = concatenated(all_pieces), concatenated(all_labels)
    for lists in (all_pieces, all_labels, profiler_events, profiler_ns):  # large, and copied
        lists.clear()
    rows = _piece_rows(parts, pieces, labels, thread_columns)
    del pieces, labels, thread_columns, thread, cost_ns
    _mark_idle(rows.columns, np.concatenate(works_for))
    return joined([rows, *_waits_after(parts, rows.columns, bursts)])


def _mark_idle(columns: dict[str, Array], works_for_main: Bool) -> None:
    """Turn long gaps without operator or call, on threads other than the main one, into idle waits, in place.

    Inside a hand-off they are work: there the thread works for the main one, in Python or in a library without marks.
    """
    long = (columns["kind"] == TaskKind.GAP) & (columns["operator"] < 0) & (columns["duration_ns"] > LATE_NS)
    idle = long & (columns["thread"] > 0) & ~works_for_main
    columns["kind"][idle] = TaskKind.WAIT
    columns["role"][idle] = Role.IDLE
    columns["name"][idle] = -Role.IDLE


def _merged(intervals: list[tuple[Int64, Int64]]) -> tuple[Int64, Int64]:
    starts = np.concatenate([np.empty(0, np.int64), *[i[0] for i in intervals]])
    ends = np.concatenate([np.empty(0, np.int64), *[i[1] for i in intervals]])
    order = np.argsort(starts, kind="stable")
    return starts[order], ends[order]


def _piece_rows(parts: Parts, pieces: CpuTasks, labels: Labels, thread_columns: dict[str, Array]) -> Rows:
    """The pieces of all threads as tasks."""
    events, calls, times = parts.events, parts.calls, parts.call_times
    n = len(pieces.start_ns)
    duration_ns = pieces.end_ns - pieces.start_ns
    key_ns = pieces.start_ns.copy()
    event = np.full(n, MISSING, dtype=np.int32)
    operator = labels.operator
    name = np.append(events.name, np.int32(len(events.names)))[operator]
    kind = np.full(n, TaskKind.GAP, dtype=np.int8)
    if not len(parts.gpu.event):
        kind[operator >= 0] = TaskKind.CPU_OP
    kind[labels.loading] = TaskKind.DATA_LOADING
    pausing = labels.pause >= 0
    kind[pausing] = TaskKind.GAP
    name = np.where(pausing, events.name[np.maximum(labels.pause, 0)], name) if pausing.any() else name
    calling = np.flatnonzero(pieces.call >= 0)
    call = pieces.call[calling]
    duration_ns[calling], key_ns[calling] = times.work_ns[call], times.key_ns[call]
    name[calling], event[calling], kind[calling] = calls.name[call], calls.event[call], TaskKind.RUNTIME
    columns: dict[str, Array] = {
        "key_ns": key_ns,
        "start_ns": pieces.start_ns,
        "duration_ns": duration_ns,
        "name": name,
        "kind": kind,
        "layer": labels.layer,
        "phase": labels.phase,
        "landmark": labels.landmark,
        "in_optimizer": labels.in_optimizer,
        "recomputed": labels.recomputed,
        **thread_columns,
        "call": pieces.call.astype(np.int32),
        "operator": operator.astype(np.int32),
        "event": event,
        "role": np.zeros(n, dtype=np.int8),
        "sequence": np.arange(n, dtype=np.float64),
    }
    return Rows(columns)


def _waits_after(parts: Parts, columns: dict[str, Array], bursts: tuple[Int64, Int64]) -> Iterator[Rows]:
    """Yield a wait after every call that can wait, and on the main thread after every burst that it handed over."""
    times = parts.call_times
    calling = np.flatnonzero(columns["call"] >= 0)
    waiting = calling[np.flatnonzero(times.can_wait.take(columns["call"][calling]))]
    call = columns["call"][waiting]
    yield _wait_rows(columns, waiting, parts.calls.end_ns[call], times.excess_ns[call], Role.CALL_WAIT)
    main_start_ns = columns["start_ns"][: np.searchsorted(columns["thread"], 1)]
    before_end = np.maximum(places(main_start_ns, bursts[1]) - 1, 0)
    yield _wait_rows(columns, before_end, bursts[1], np.zeros(len(before_end), np.int64), Role.HANDOFF_WAIT)


def _wait_rows(columns: dict[str, Array], at: Array, time_ns: Int64, duration_ns: Int64, role: Role) -> Rows:
    """Waits after the tasks ``at``, for a call or for a hand-off."""
    n = len(at)
    return wait_rows(
        columns, at, role, key_ns=time_ns, start_ns=time_ns, duration_ns=duration_ns,
        landmark=np.zeros(n, dtype=np.bool_), profiler_events=np.zeros(n, dtype=np.int32),
        profiler_ns=np.zeros(n, dtype=np.int32),
        sequence=columns["sequence"][at] + 0.5,
    )  # fmt: skip


def gpu_rows(parts: Parts, cpu: Rows, row_of_call: Int64) -> Rows:
    """Return the GPU tasks with the labels of the calls that launched them; ``row_of_call``: see ``rows_of_calls``."""
    gpu, events = parts.gpu, parts.events
    n = len(gpu.event)
    launch_row = _inherited(of_calls(row_of_call, gpu.call, -1), gpu.stream)

    def inherit(name: str, default: int) -> Array:
        column = cpu.columns[name]
        return np.append(column, column.dtype.type(default))[launch_row]

    category = events.category[gpu.event]
    kind = np.select(
        [category == EventCategory.MEMCPY, category == EventCategory.MEMSET],
        [TaskKind.MEMCPY, TaskKind.MEMSET],
        TaskKind.KERNEL,
    )
    # A stream runs in order: a task never sorts before its launch or before the previous task.
    key_ns = np.maximum(gpu.start_ns, of_calls(parts.call_times.key_ns, gpu.call, gpu.start_ns))
    key_ns = running_maximum(key_ns, gpu.stream)
    return Rows({
        "key_ns": key_ns,
        "start_ns": gpu.start_ns,
        "duration_ns": gpu.end_ns - gpu.start_ns,
        "thread": gpu.stream + np.int32(len(parts.tracks)),
        "name": events.name[gpu.event],
        "kind": kind.astype(np.int8),
        "layer": inherit("layer", 0),
        "phase": _guessed_phases(inherit("phase", int(Phase.UNKNOWN)).astype(np.int8), events.name[gpu.event]),
        "landmark": np.zeros(n, dtype=np.bool_),
        "in_optimizer": inherit("in_optimizer", 0).astype(np.bool_),
        "recomputed": inherit("recomputed", 0).astype(np.bool_),
        "profiler_events": np.zeros(n, dtype=np.int32),
        "profiler_ns": np.zeros(n, dtype=np.int32),
        "call": gpu.call.astype(np.int32),
        "operator": inherit("operator", -1),
        "event": gpu.event.astype(np.int32),
        "role": np.zeros(n, dtype=np.int8),
        "sequence": np.arange(n, dtype=np.float64),
        "launch_row": launch_row,
    })  # fmt: skip


def _guessed_phases(phase: Array, name: Array) -> Array:
    """Fill unknown phases (no recorded launch) with the one in which kernels of that name usually run; else forward."""
    unknown = phase == Phase.UNKNOWN
    if not unknown.any():
        return phase
    known = name[~unknown].astype(np.int64) * len(Phase) + phase[~unknown]
    counts = np.bincount(known, minlength=(int(name.max()) + 1) * len(Phase)).reshape(-1, len(Phase))
    usual = np.where(counts.any(axis=1), counts.argmax(axis=1), Phase.FORWARD)
    return np.where(unknown, usual[name], phase).astype(np.int8)


def _inherited(launch_row: Array, stream: Array) -> Array:
    """Fill in the launch of an unmatched task: that of the task before it on its stream."""
    position = np.arange(len(launch_row))
    known = np.maximum.accumulate(np.where(launch_row >= 0, position, -1))
    usable = (known >= 0) & (stream[np.maximum(known, 0)] == stream)
    return np.where(usable, launch_row[np.maximum(known, 0)], -1)


def finish_phases(rows: Rows, parts: Parts) -> None:
    """Give every CPU row a phase, in place."""
    columns = rows.columns
    trains = (
        parts.labeller.has_backward
        or bool((columns["phase"] == Phase.UPDATE).any())
        or any(len(h.start_ns) for h in parts.handoffs)
    )
    columns["phase"] = complete_phases(
        columns["phase"].astype(np.int8), columns["landmark"], columns["key_ns"], trains=trains
    )
