"""From event columns to a task graph: find threads, steps and labels, make the tasks, connect them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from whatif.graph.types import (
    Array,
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
from whatif.ingest.find_steps import Launched, StepRule, Steps, find_steps
from whatif.ingest.gpu_side import LATE_NS, Calls, GpuSide, find_calls, find_gpu_side, of_calls
from whatif.ingest.handoff import Handoffs
from whatif.ingest.labels import Labeller, Labels, complete_phases
from whatif.ingest.marks import NameMarks, name_marks
from whatif.ingest.profiler_cost import ProfilerCost, find_profiler_cost
from whatif.ingest.rows import Role, Rows, joined, rows_of_calls, running_maximum, wait_rows
from whatif.ingest.waiting import CallTimes, call_times
from whatif.simulation.intervals import interval_of


@dataclass
class Parts:
    """Everything found in a trace on the way to its graph; filled from top to bottom."""

    events: Events
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
    """Look at a trace from every side that the graph needs; ``rule`` is what its user says of the steps."""
    marks = name_marks(events.names)
    calls = find_calls(events)
    gpu = find_gpu_side(events, calls, is_amd=is_amd)
    tracks = find_cpu_tracks(events, calls, marks, has_gpu=bool(len(gpu.event)))
    handoffs = find_all_handoffs(events, calls, tracks, marks) if len(gpu.event) else []
    launched_ns = of_calls(calls.start_ns, gpu.call, gpu.start_ns)
    order = np.argsort(launched_ns, kind="stable")
    launched = Launched(launched_ns[order], gpu.call[order], events.name[gpu.event[order]].astype(np.int64))
    by_graph = calls.kind == CallKind.GRAPH_LAUNCH
    steps = find_steps(events, marks, tracks[0] if tracks else -1, launched, by_graph, rule)
    threads = [Thread(f"CPU thread {events.tracks[t][1]}", ThreadKind.CPU) for t in tracks]
    threads += [
        Thread(f"GPU {device} stream {stream}", ThreadKind.STREAM, device, stream, int(gpu.stream_lag_ns[code]))
        for code, (device, stream) in enumerate(gpu.streams)
    ]
    return Parts(
        events, marks, calls, gpu, tracks, handoffs, steps, Labeller(events, marks),
        call_times(events, calls, gpu), _profiler_cost(events, calls, tracks), threads,
    )  # fmt: skip


def _profiler_cost(events: Events, calls: Calls, tracks: list[int]) -> ProfilerCost | None:
    """What torch's profiler cost in a trace of others; our recorder measures it, and a predicted step has none."""
    known = "whatif" in events.header or not events.by_torch
    return None if known else find_profiler_cost(events, tracks, len(calls.event))


def cpu_rows(parts: Parts) -> Rows:
    """Return the tasks of all CPU threads, each thread's in its order: pieces, calls, and the waits behind calls."""
    blocks = []
    cutter = Cutter(parts.events, parts.calls, parts.marks, by_operator=not len(parts.gpu.event))
    handoff_of = {h.track: h for h in parts.handoffs}
    for code, track in enumerate(parts.tracks):
        if code == 0:
            edges = np.concatenate([parts.steps.edges_ns, *[h.start_ns for h in parts.handoffs],
                                    *[h.end_ns for h in parts.handoffs]])  # fmt: skip
            left_out = _merged([(h.start_ns, h.end_ns) for h in parts.handoffs])
            extent = (
                (int(parts.steps.edges_ns[0]), int(parts.steps.edges_ns[-1])) if len(parts.steps.edges_ns) else None
            )
            worker = False
        else:
            handoffs = handoff_of.get(track)
            edges = np.empty(0, dtype=np.int64)
            left_out = idle_between(handoffs) if handoffs else (edges, edges)
            extent = None
            worker = bool(handoffs and len(handoffs.start_ns))
            edges = np.concatenate([handoffs.start_ns, handoffs.end_ns]) if handoffs else edges
        pieces = cutter.cut(track, edges_ns=edges, extent_ns=extent, left_out=left_out)
        labels = parts.labeller.label(track, pieces.start_ns, worker=worker)
        held = {"profiler_events": cutter.profiler_events(track, pieces)}
        cost_ns = parts.profiler.of_pieces(track, pieces) if parts.profiler else np.zeros(len(pieces.start_ns))
        held["profiler_ns"] = np.rint(np.minimum(cost_ns, np.iinfo(np.int32).max)).astype(np.int64)
        rows = _thread_rows(parts, code, pieces, labels, held, left_out if code == 0 else None)
        if code:
            _mark_idle(rows.columns, handoff_of.get(track))
        blocks.append(rows)
    return joined(blocks)


def _mark_idle(columns: dict[str, Array], handoffs: Handoffs | None) -> None:
    """On a thread beside the main one, a long time without operator or call is no work, in place.

    Inside a hand-off it is: there the thread works for the main one, in Python or in a library without marks.
    """
    idle = (columns["kind"] == TaskKind.GAP) & (columns["operator"] < 0) & (columns["duration_ns"] > LATE_NS)
    if handoffs is not None and len(handoffs.start_ns):
        idle &= interval_of(columns["start_ns"], handoffs.start_ns, handoffs.end_ns) < 0
    columns["kind"][idle] = TaskKind.WAIT
    columns["role"][idle] = Role.IDLE
    columns["name"][idle] = -Role.IDLE


def _merged(intervals: list[tuple[Int64, Int64]]) -> tuple[Int64, Int64]:
    starts = np.concatenate([np.empty(0, np.int64), *[i[0] for i in intervals]])
    ends = np.concatenate([np.empty(0, np.int64), *[i[1] for i in intervals]])
    order = np.argsort(starts, kind="stable")
    return starts[order], ends[order]


def _thread_rows(
    parts: Parts,
    code: int,
    pieces: CpuTasks,
    labels: Labels,
    held: dict[str, Int64],
    handoffs: tuple[Int64, Int64] | None,
) -> Rows:
    """One thread's tasks: its pieces, a wait behind every call that can wait, a wait for every hand-off."""
    events, calls, times = parts.events, parts.calls, parts.call_times
    n = len(pieces.start_ns)
    is_call = pieces.call >= 0
    call = np.maximum(pieces.call, 0)
    has_calls = bool(len(calls.event))
    duration_ns = pieces.end_ns - pieces.start_ns
    key_ns = pieces.start_ns.copy()
    if has_calls:
        duration_ns = np.where(is_call, times.work_ns[call], duration_ns)
        key_ns = np.where(is_call, times.key_ns[call], key_ns)
    operator = labels.operator
    name = np.where(operator >= 0, events.name[np.maximum(operator, 0)], len(events.names))
    kind = np.full(n, TaskKind.GAP, dtype=np.int8)
    if not len(parts.gpu.event):
        kind[operator >= 0] = TaskKind.CPU_OP
    kind[labels.loading] = TaskKind.DATA_LOADING
    if has_calls:
        name = np.where(is_call, calls.name[call], name)
        kind[is_call] = TaskKind.RUNTIME
    columns: dict[str, Array] = {
        "key_ns": key_ns,
        "start_ns": pieces.start_ns,
        "duration_ns": duration_ns,
        "thread": np.full(n, code),
        "name": name,
        "kind": kind,
        "layer": labels.layer,
        "phase": labels.phase,
        "landmark": labels.landmark,
        "in_optimizer": labels.in_optimizer,
        **held,
        "call": pieces.call,
        "operator": operator,
        "event": np.where(is_call, calls.event[call], MISSING) if has_calls else np.full(n, MISSING),
        "role": np.zeros(n, dtype=np.int8),
        "sequence": np.arange(n, dtype=np.float64),
    }
    blocks = [Rows(columns)]
    if has_calls and is_call.any():
        waiting = np.flatnonzero(is_call & times.can_wait[call])
        blocks.append(
            _wait_rows(columns, waiting, pieces.end_ns[waiting], times.excess_ns[call[waiting]], Role.CALL_WAIT)
        )
    if handoffs is not None and len(handoffs[0]):
        behind = np.searchsorted(pieces.start_ns, handoffs[1], side="left") - 1
        blocks.append(
            _wait_rows(columns, np.maximum(behind, 0), handoffs[1], np.zeros(len(behind), np.int64), Role.HANDOFF_WAIT)
        )
    return joined(blocks)


def _wait_rows(columns: dict[str, Array], at: Array, time_ns: Int64, duration_ns: Int64, role: Role) -> Rows:
    """Waits behind the tasks ``at``, of a call or of a hand-off."""
    n = len(at)
    return wait_rows(
        columns, at, role, key_ns=time_ns, start_ns=time_ns, duration_ns=duration_ns,
        landmark=np.zeros(n, dtype=np.bool_), profiler_events=np.zeros(n, dtype=np.int64),
        profiler_ns=np.zeros(n, dtype=np.int64),
        sequence=columns["sequence"][at] + 0.5,
    )  # fmt: skip


def gpu_rows(parts: Parts, cpu: Rows) -> Rows:
    """Return the GPU tasks with the labels of the calls that launched them."""
    gpu, events = parts.gpu, parts.events
    n = len(gpu.event)
    row_of_call = rows_of_calls(cpu.columns, len(parts.calls.event))
    launch_row = _inherited(of_calls(row_of_call, gpu.call, -1), gpu.stream)
    known = launch_row >= 0
    at = np.maximum(launch_row, 0)

    def inherit(name: str, default: int) -> Array:
        return np.where(known, cpu.columns[name][at], default) if len(cpu) else np.full(n, default)

    category = events.category[gpu.event]
    kind = np.select(
        [category == EventCategory.MEMCPY, category == EventCategory.MEMSET],
        [TaskKind.MEMCPY, TaskKind.MEMSET],
        TaskKind.KERNEL,
    )
    # A stream runs in order: a task never sorts before its launch or before the task ahead of it.
    key_ns = np.maximum(gpu.start_ns, of_calls(parts.call_times.key_ns, gpu.call, gpu.start_ns))
    key_ns = running_maximum(key_ns, gpu.stream)
    return Rows({
        "key_ns": key_ns,
        "start_ns": gpu.start_ns,
        "duration_ns": gpu.end_ns - gpu.start_ns,
        "thread": gpu.stream.astype(np.int64) + len(parts.tracks),
        "name": events.name[gpu.event].astype(np.int64),
        "kind": kind.astype(np.int8),
        "layer": inherit("layer", 0),
        "phase": _guessed_phases(inherit("phase", int(Phase.UNKNOWN)).astype(np.int8), events.name[gpu.event]),
        "landmark": np.zeros(n, dtype=np.bool_),
        "in_optimizer": inherit("in_optimizer", 0).astype(np.bool_),
        "profiler_events": np.zeros(n, dtype=np.int64),
        "profiler_ns": np.zeros(n, dtype=np.int64),
        "call": gpu.call,
        "operator": inherit("operator", -1),
        "event": gpu.event,
        "role": np.zeros(n, dtype=np.int8),
        "sequence": np.arange(n, dtype=np.float64),
        "launch_row": launch_row,
    })  # fmt: skip


def _guessed_phases(phase: Array, name: Array) -> Array:
    """Where the launch was not recorded, take the phase in which kernels of that name usually run; else forward."""
    unknown = phase == Phase.UNKNOWN
    if not unknown.any():
        return phase
    distinct, code = np.unique(name, return_inverse=True)
    seen = np.zeros((len(distinct), len(Phase)), dtype=np.int64)
    np.add.at(seen, (np.asarray(code).reshape(-1)[~unknown], phase[~unknown]), 1)
    usual = np.where(seen.any(axis=1), seen.argmax(axis=1), Phase.FORWARD)
    return np.where(unknown, usual[np.asarray(code).reshape(-1)], phase).astype(np.int8)


def _inherited(launch_row: Array, stream: Array) -> Array:
    """An unmatched task counts as launched with the task before it on its stream."""
    position = np.arange(len(launch_row))
    known = np.maximum.accumulate(np.where(launch_row >= 0, position, -1))
    usable = (known >= 0) & (stream[np.maximum(known, 0)] == stream)
    return np.where(usable, launch_row[np.maximum(known, 0)], -1)


def finish_phases(rows: Rows, parts: Parts) -> None:
    """Return every CPU row a phase, in place."""
    columns = rows.columns
    trains = (
        parts.labeller.has_backward
        or bool((columns["phase"] == Phase.UPDATE).any())
        or any(len(h.start_ns) for h in parts.handoffs)
    )
    columns["phase"] = complete_phases(
        columns["phase"].astype(np.int8), columns["landmark"], columns["key_ns"], trains=trains
    )
