"""Order and number the tasks and find their dependencies: the last step from a trace to its graph."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from whatif.graph.columns import compact, filled
from whatif.graph.info import GraphInfo
from whatif.graph.kernels import (
    KernelFamily,
    classify_kernel,
    classify_operator,
    collective_of,
    dtype_code,
)
from whatif.graph.order import each_once, order_by, places
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    BEFORE_NAME,
    HANDOFF_NAME,
    IDLE_NAME,
    SYNC_NAME,
    UNEXPLAINED_NAME,
    Array,
    Dependencies,
    DependencyKind,
    Int32,
    Int64,
    TaskKind,
    Waits,
    among,
)
from whatif.ingest import connect
from whatif.ingest.build import Parts, cpu_rows, finish_phases, gpu_rows
from whatif.ingest.called import called_operators, find_calls_of_tasks, with_convolutions
from whatif.ingest.collective_sizes import process_groups, with_collective_sizes
from whatif.ingest.costs import task_costs
from whatif.ingest.events import MISSING, Events
from whatif.ingest.gpu_side import of_calls
from whatif.ingest.measured import measured_rows
from whatif.ingest.rows import Role, Rows, joined, of_events, rows_of_calls, wait_rows
from whatif.ingest.waiting import ONE_TASK


def assemble(parts: Parts, info: GraphInfo) -> TaskGraph:
    """Return the task graph of a trace; ``info`` is completed with the origin, the operators and the groups."""
    events = parts.events
    tasks = _in_order(parts)
    columns = tasks.columns
    names, name = _with_collectives(events, columns, *_names(events.names, columns["name"]))
    family, dtype = _families(names, name, columns)
    family = with_convolutions(events, columns, family)
    calls = find_calls_of_tasks(events, columns, family)
    flops, size_bytes, op_dtype = task_costs(events, columns, family, calls)
    size_bytes = with_collective_sizes(events, parts.calls, columns, family, size_bytes)
    group, groups = process_groups(events, columns)
    called, operators = called_operators(events, calls, len(name))
    kind = columns["kind"].astype(np.int8)
    communicating = (family == KernelFamily.COMMUNICATION) & (kind == TaskKind.KERNEL)
    kind[np.flatnonzero(communicating)] = TaskKind.COMMUNICATION
    duration_ns = np.maximum(columns["duration_ns"].astype(np.int64, copy=False), 0)
    low_ns = duration_ns.copy()
    low_ns[np.flatnonzero((kind == TaskKind.WAIT) & ~among(columns["role"], [Role.LEAD_IN, Role.IDLE]))] = 0
    event = columns["event"].astype(np.int64)
    correlation, warps, registers = (
        of_events(column, event) for column in (events.correlation, events.warps, events.registers)
    )
    given = {
        **{key: columns[key] for key in ("thread", "layer", "phase", "operator", "in_optimizer", "recomputed")},
        **{key: columns[key] for key in ("profiler_events", "profiler_ns")},
        "name": name, "kind": kind, "duration_ns": duration_ns, "low_ns": low_ns,
        "high_ns": duration_ns, "start_ns": columns["start_ns"] - tasks.origin_ns, "step": tasks.step,
        "measured": measured_rows(events, columns["operator"], info.recorded), "called": called, "group": group,
        "correlation_id": correlation, "family": family, "dtype": dtype + op_dtype * (dtype == 0),
        "size_bytes": size_bytes, "flops": flops, "warps": warps, "registers": registers,
    }  # fmt: skip
    graph = TaskGraph(
        **compact(filled(len(name), given)), dependencies=tasks.dependencies, waits=tasks.waits, names=names,
        threads=tuple(parts.threads), layers=tuple(parts.labeller.layers),
        info=replace(info, origin_ns=tasks.origin_ns + events.base_ns, operators=operators, groups=groups),
    )  # fmt: skip
    return _forward_only(graph)


class _Tasks(NamedTuple):
    """The tasks in the order of their ids, and what they wait for."""

    columns: dict[str, Array]
    step: Array
    dependencies: Dependencies
    waits: Waits
    origin_ns: int  # the first start


def _in_order(parts: Parts) -> _Tasks:
    cpu = cpu_rows(parts) if parts.tracks else _no_rows()
    if len(cpu):
        finish_phases(cpu, parts)
    row_of_call = rows_of_calls(cpu.columns, len(parts.calls.event))
    gpu = gpu_rows(parts, cpu, row_of_call)
    origin_ns = min((int(rows.columns["start_ns"].min()) for rows in (cpu, gpu) if len(rows)), default=0)
    waits = connect.stream_waits(parts.events, parts.calls, parts.call_times, parts.gpu, origin_ns)
    delays = _stream_wait_rows(gpu, waits)
    lead_ins = _lead_in_rows(cpu, parts, origin_ns)
    blocks = [cpu, gpu, delays, lead_ins]
    blocks = [block for block in blocks if len(block) or block is cpu]
    order = order_by(*(np.concatenate([b.columns[key] for b in blocks]) for key in ("key_ns", "thread", "sequence")))
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    n_cpu, n_gpu = len(cpu), len(gpu)
    cpu_place, gpu_place = place[:n_cpu], place[n_cpu : n_cpu + n_gpu]
    held_place = place[n_cpu + n_gpu :][: np.count_nonzero(waits.unexplained_ns > 0)]
    dependencies, wait_table = _dependencies(parts, cpu, row_of_call, waits, cpu_place, gpu_place, held_place)
    launched_ns = of_calls(cpu.columns["start_ns"], gpu.columns["launch_row"], gpu.columns["start_ns"])
    # One at a time, and removed from the blocks: the columns of a long trace are large.
    for block in blocks:
        for ordering in ("key_ns", "sequence", "landmark"):
            del block.columns[ordering]
    columns = {name: np.concatenate([b.columns.pop(name) for b in blocks]).take(order) for name in list(cpu.columns)}
    # A task's step is that of its own start on the CPU, of its launch on the GPU.
    time_ns = columns["start_ns"].astype(np.int64)
    time_ns[gpu_place] = launched_ns
    return _Tasks(columns, parts.steps.of(time_ns), dependencies, wait_table, origin_ns)


def _no_rows() -> Rows:
    names = ("key_ns", "start_ns", "duration_ns", "thread", "name", "kind", "layer", "phase", "landmark", "call",
             "operator", "event", "role", "sequence", "in_optimizer", "recomputed", "profiler_events",
             "profiler_ns")  # fmt: skip
    return Rows({name: np.empty(0, dtype=np.int64) for name in names})


def _stream_wait_rows(gpu: Rows, waits: connect.StreamWaits) -> Rows:
    """Waits on streams: the unexplained ones, and the time before a stream's first task."""
    blocks = []
    for held_ns, role in ((waits.unexplained_ns, Role.UNEXPLAINED), (waits.lead_in_ns, Role.LEAD_IN)):
        at = np.flatnonzero(held_ns > 0)
        start_ns = gpu.columns["start_ns"][at] - held_ns[at]
        # Directly before the task that it delays.
        sequence = gpu.columns["sequence"][at] - 0.5
        blocks.append(wait_rows(gpu.columns, at, role, duration_ns=held_ns[at], start_ns=start_ns, sequence=sequence))
    return joined(blocks)


def _lead_in_rows(cpu: Rows, parts: Parts, origin_ns: int) -> Rows:
    """Waits for the time before the first task of each CPU thread that no hand-off starts."""
    rows: list[int] = []
    started = {h.track: h.start_ns for h in parts.handoffs}
    thread = cpu.columns["thread"]
    # Tasks come first, thread by thread and in order, then the waits after them.
    begins = np.append(0, np.flatnonzero(thread[1:] != thread[:-1]) + 1)[: len(thread)][::-1]
    for code, first in dict(zip(thread[begins].tolist(), begins.tolist(), strict=True)).items():
        begins_ns = started.get(parts.tracks[code], np.empty(0, dtype=np.int64))
        handed_over = len(begins_ns) and int(begins_ns[0]) <= int(cpu.columns["start_ns"][first]) + 1
        if not handed_over and cpu.columns["start_ns"][first] > origin_ns:
            rows.append(first)
    at = np.array(rows, dtype=np.int64)
    begin_ns = np.full(len(at), origin_ns)
    return wait_rows(
        cpu.columns, at, Role.LEAD_IN, duration_ns=cpu.columns["start_ns"][at] - origin_ns, start_ns=begin_ns,
        key_ns=begin_ns, profiler_events=np.zeros(len(at), dtype=np.int32),
        profiler_ns=np.zeros(len(at), dtype=np.int32), sequence=cpu.columns["sequence"][at] - 0.5,
    )  # fmt: skip


def _names(table: list[str], name: Array) -> tuple[tuple[str, ...], Array]:
    extra = ["", SYNC_NAME, HANDOFF_NAME, UNEXPLAINED_NAME, BEFORE_NAME, IDLE_NAME]
    name = name.astype(np.int32)
    rows = np.flatnonzero(name < 0)
    name[rows] = len(table) - name[rows]  # in the order of Role: these count from the end of the events' own table
    return (*table, *extra), name


def _with_collectives(
    events: Events, columns: dict[str, Array], names: tuple[str, ...], name: Array
) -> tuple[tuple[str, ...], Array]:
    """Add the collective to the name of a kernel that runs any of them (RCCL's), if the trace shows which."""
    event = columns["event"]
    if not (events.detail >= 0).any():
        return names, name
    known = np.flatnonzero((columns["kind"] == TaskKind.KERNEL) & (event >= 0))
    known = known[events.detail[event[known]] >= 0]
    if not len(known):
        return names, name
    detail = events.detail[event[known]].astype(np.int64)
    pair = name[known] * len(events.details) + detail
    pairs = each_once(pair)
    codes = pairs // len(events.details)
    added: dict[str, int] = {}
    for row, (code, which) in enumerate(zip(codes.tolist(), (pairs % len(events.details)).tolist(), strict=True)):
        kernel, collective = names[code], events.details[which]
        if not collective_of(kernel, "") and collective_of("", collective):
            codes[row] = len(names) + added.setdefault(f"{kernel.partition('(')[0]}({collective})", len(added))
    name = name.copy()
    name[known] = codes[places(pairs, pair)]
    return (*names, *added), name


def _families(names: tuple[str, ...], name: Array, columns: dict[str, Array]) -> tuple[Array, Array]:
    """Kernel family and dtype code of each GPU task and CPU operator (-1 and 0 elsewhere): a name is read once."""
    kernels = np.flatnonzero(among(columns["kind"], [TaskKind.KERNEL, TaskKind.CPU_OP]))
    operators = bool((columns["kind"] == TaskKind.CPU_OP).any())
    families = np.full(len(names), -1, dtype=np.int8)
    dtypes = np.zeros(len(names), dtype=np.int8)
    for code in np.flatnonzero(np.bincount(name[kernels])).tolist():
        kernel_family, kernel_dtype = (
            (classify_operator(names[code]), "") if operators else classify_kernel(names[code])
        )
        families[code] = kernel_family
        dtypes[code] = dtype_code(kernel_dtype)
    family, dtype = np.full(len(name), -1, dtype=np.int8), np.zeros(len(name), dtype=np.int8)
    family[kernels], dtype[kernels] = families.take(name[kernels]), dtypes.take(name[kernels])
    family[np.flatnonzero(columns["kind"] == TaskKind.MEMCPY)] = KernelFamily.COPY
    family[np.flatnonzero(columns["kind"] == TaskKind.MEMSET)] = KernelFamily.MEMSET
    return family, dtype


def _dependencies(
    parts: Parts,
    cpu: Rows,
    row_of_call: Int64,
    waits: connect.StreamWaits,
    cpu_place: Int32,
    gpu_place: Int32,
    held_place: Int32,
) -> tuple[Dependencies, Waits]:
    times = parts.call_times
    found = []
    launch_row = of_calls(row_of_call, parts.gpu.call, MISSING)
    launched = np.flatnonzero(launch_row >= 0)
    launches = cpu_place[launch_row[launched]]
    found.append(Dependencies.of(launches, gpu_place[launched], DependencyKind.LAUNCH, parts.gpu.launch_lag_ns))
    found.append(Dependencies.of(gpu_place[waits.source], gpu_place[waits.target], DependencyKind.EVENT))
    found.append(_held_dependencies(Dependencies.concatenate(found), gpu_place[waits.unexplained_ns > 0], held_place))
    found.append(_handoff_dependencies(parts, cpu, cpu_place))

    call_waits = np.flatnonzero(cpu.columns["role"] == Role.CALL_WAIT)
    call = cpu.columns["call"][call_waits].astype(np.int64)
    for_task = times.scope[call] == ONE_TASK if len(call) else np.empty(0, dtype=np.bool_)
    single = for_task & (times.target[call] >= 0) if len(call) else for_task
    found.append(
        Dependencies.of(
            gpu_place[times.target[call[single]]], cpu_place[call_waits[single]], DependencyKind.SYNC,
            times.lag_ns[call[single]],
        )
    )  # fmt: skip
    scope = times.scope[call[~for_task]]
    table = Waits(
        cpu_place[call_waits[~for_task]],
        np.where(scope >= 0, scope + len(parts.tracks), scope).astype(np.int32),
        times.lag_ns[call[~for_task]],
    )
    return Dependencies.concatenate(found), table


def _held_dependencies(dependencies: Dependencies, held: Int32, held_place: Int32) -> Dependencies:
    """Dependencies of the unexplained waits: those of the task after each, so that it begins when that could have."""
    order = np.argsort(held)
    into = dependencies.take(np.isin(dependencies.target, held))
    target = held_place[order][np.searchsorted(held[order], into.target)]
    kind = np.full(len(into), DependencyKind.EVENT, dtype=np.int8)
    return Dependencies(into.source, target, kind, into.lag_ns, into.anchor)


def _handoff_dependencies(parts: Parts, cpu: Rows, cpu_place: Int32) -> Dependencies:
    """Main thread -> first task of each burst, last task of the burst -> the main thread's wait."""
    sources, targets = [], []
    columns = cpu.columns
    if not len(cpu) or not parts.handoffs:
        return Dependencies.concatenate([])
    tasks = np.flatnonzero(columns["role"] == Role.TASK)
    # Thread by thread, those of each in order.
    bounds = np.searchsorted(columns["thread"][tasks], np.arange(len(parts.tracks) + 1)).tolist()
    main = tasks[: bounds[1]]
    main_start_ns = columns["start_ns"][main]
    wait = np.flatnonzero((columns["thread"] == 0) & (columns["role"] == Role.HANDOFF_WAIT))
    wait_ns = columns["start_ns"][wait]
    code_of = {track: code for code, track in enumerate(parts.tracks)}
    for handoffs in parts.handoffs:
        code = code_of[handoffs.track]
        worker_tasks = tasks[bounds[code] : bounds[code + 1]]
        start_ns = columns["start_ns"][worker_tasks]
        first = places(start_ns, handoffs.start_ns)
        last = places(start_ns, handoffs.end_ns) - 1
        before = places(main_start_ns, handoffs.start_ns) - 1
        wait_after = places(wait_ns, handoffs.end_ns)
        sound = (first < len(worker_tasks)) & (last >= first) & (before >= 0) & (wait_after < len(wait))
        sources += [main[before[sound]], worker_tasks[last[sound]]]
        targets += [worker_tasks[first[sound]], wait[wait_after[sound]]]
    # The wait of a call at the burst's end has the call's place on its thread; the call itself is the last task.
    return Dependencies.of(
        cpu_place[np.concatenate(sources)], cpu_place[np.concatenate(targets)], DependencyKind.HANDOFF
    )


def _forward_only(graph: TaskGraph) -> TaskGraph:
    """Drop dependencies that contradict the recorded times, and report their number as a quirk."""
    dependencies = graph.dependencies
    forward = dependencies.source < dependencies.target
    dropped = len(forward) - np.count_nonzero(forward)
    if dropped:
        dependencies = dependencies.take(forward)
    if not dependencies.anchor.any():  # Anchor.END, once for all
        anchor = np.broadcast_to(np.int8(0), dependencies.anchor.shape)
        dependencies = replace(dependencies, anchor=anchor)
    graph = graph.replace(dependencies=dependencies)
    derived = graph.derived
    backward = derived.source >= derived.target
    if backward.any():
        # A wait for work that ends later in the recording, or a queue deeper than measured.
        dropped += int(backward.sum())
        waits = np.isin(graph.waits.task, derived.target[backward])
        graph = graph.replace(
            waits=Waits(graph.waits.task[~waits], graph.waits.scope[~waits], graph.waits.lag_ns[~waits])
        )
        if np.any(graph.derived.source >= graph.derived.target):
            graph = graph.replace(info=replace(graph.info, queue_depth=0))
    if dropped:
        single = dropped == 1
        quirk = (
            f"{dropped} {'dependency' if single else 'dependencies'} contradicted the recorded times and "
            f"{'was' if single else 'were'} left out"
        )
        graph = graph.replace(info=replace(graph.info, quirks=(*graph.info.quirks, quirk)))
    return graph
