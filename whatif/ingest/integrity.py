"""Integrity checks of a recording: their findings decide how far answers can be trusted.

Shares and tolerances come from 180 recordings of torch 1.8 to 2.13 on ten kinds of GPUs and on CPUs. In these, no
kernel starts before its launch, no operators of a thread cross, operator ids have at most three holes, and tasks of
a stream overlap by at most 2 us.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Bool, Finding, Int64, Severity, TaskKind, ThreadKind, among
from whatif.ingest.build import Parts
from whatif.ingest.calls import CallKind
from whatif.ingest.events import CUT, NO_NAME, EventCategory, Events
from whatif.ingest.file_bytes import ends_early
from whatif.ingest.gpu_side import LATE_NS
from whatif.ingest.grouped import named
from whatif.ingest.rows import running_maximum

# Losing less than the first share of a kind of event changes answers by less than the width of their ranges; losing the
# second changes them by more than the accuracy targets (docs/accuracy.md).
DOUBT_SHARE, VOID_SHARE = 0.005, 0.05
# Of so few events a share says little.
FEW = 3
# Programmatic launches let kernels of H100s overlap by 1 to 2 us; older profilers round to 1 us.
OVERLAP_NS = 5_000
CROSSED_NS = 2_000
# Ids used by annotations or between two sessions leave holes: at most three were observed.
FEW_HOLES = 5
# Durations are plausible if the median is at least the first number and the first decile at most the second: the
# extremes observed were 2.9 and 48 us for launches, 0.5 and 16 us for operators (of few operators all may be slow).
LAUNCH_NS, OPERATOR_NS, FEW_OPERATORS = (100, 500_000), (100, 100_000), 100
# Clocks that differ by more than this reverse the order of events.
APART_NS = 1_000_000
# The first task on an idle GPU starts within 0.2 ms of its launch.
IDLE_LAG_NS = 5_000_000
# A hole is this share of the recording, and longer than a data loader or a sleeping host takes.
HOLE_SHARE, HOLE_NS = 0.25, 100_000_000
OUTLIER = 100
# Calls made only in a program's first steps, and the names of libraries' searches for the fastest kernel.
_COLD_CALL = re.compile(
    r"^(cuda|hip|cu)(Malloc|MemAlloc|HostAlloc|MemCreate|ModuleLoad|LibraryLoad|ExtMalloc)|ModuleGetFunction|FuncLoad"
)
_TUNING = ("autotun", "benchmark_all_configs", "do_bench", "cudnnfind", "algosearch", "algo_search")  # in lower case
COLD_SHARE = 0.05
# A collective that lasts this many times as long as the fastest of its kind and size waited for other ranks.
WAITED = 1.5
WAIT_SHARE = 0.1
_STEP_MARK = re.compile(r"ProfilerStep#([0-9]{1,15})$")
_NS_PER_US = 1000
RECORD_AGAIN = "record again; keep the profiler's buffers large enough, and do not filter or edit the file"


def find_damage(parts: Parts, graph: TaskGraph) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return the findings of all checks, a cut file first, and the names of the checks."""
    found = [
        Finding(name, *defect) for name, check in CHECKS.items() for defect in check(parts, graph)
    ]  # fmt: skip
    if any(finding.check == UNIT for finding in found):  # these follow from a wrong unit
        found = [finding for finding in found if finding.check not in (OVERLAP, CROSSED, CLOCKS, BEYOND)]
    return tuple(found), tuple(CHECKS)


# A step with less than this share of the fullest step's tasks is incomplete.
LEFT_SHARE = 0.5

Defect = tuple[Severity, int, str, str]


def by_share(count: int, total: int) -> Severity:
    """Return the severity of ``count`` lost or wrong events out of ``total``."""
    share = count / max(total, 1)
    if share >= VOID_SHARE and count > FEW:
        return Severity.VOIDS
    return Severity.DOUBT if share >= DOUBT_SHARE else Severity.NOTE


def _some(count: int, noun: str, verb: tuple[str, str]) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'} {verb[count != 1]}"


def _of(count: int, total: int, noun: tuple[str, str], verb: tuple[str, str]) -> str:
    return f"{count:,} of {total:,} {noun[total != 1]} {verb[count != 1]}"


def _cut(parts: Parts, graph: TaskGraph) -> Iterator[Defect]:
    size_bytes = parts.events.ends_early_at
    if size_bytes is None:
        return
    text, severity = f"{ends_early(size_bytes)}: these numbers include nothing after it", Severity.DOUBT
    # Events need not be written in order of time: steps before the last can lack work as well.
    on_step = graph.on_device & (graph.step >= 0)
    counts = np.bincount(graph.step[on_step], minlength=graph.info.n_steps)
    emptied = int((counts < LEFT_SHARE * counts.max(initial=0)).sum())
    if emptied:
        text, severity = f"{text}, and {_some(emptied, 'step', ('lacks', 'lack'))} most of the work", Severity.VOIDS
    elif not parts.steps.whole:
        text, severity = f"{text}, and no step in it is known to be whole", Severity.VOIDS
    yield severity, 1, text, "copy or record the file again"


def _unreadable(parts: Parts, _: TaskGraph) -> Iterator[Defect]:
    events = parts.events
    for reason, count in sorted(events.dropped.items()):
        if events.ends_early_at is None or reason != ends_early(events.ends_early_at):
            text = _some(count, "event", ("was", "were"))
            yield Severity.DOUBT, count, f"{text} not read: {reason}", "copy or record the file again"


def _no_gpu_events(parts: Parts, graph: TaskGraph) -> Iterator[Defect]:
    if graph.info.gpu and not len(parts.gpu.event):
        yield (
            Severity.VOIDS, 1,
            f"the recording names the GPU {graph.info.gpu} but has no GPU events: the GPU half is missing",
            "record again with ProfilerActivity.CUDA and permission for CUPTI, unless the program ran on the CPU alone",
        )  # fmt: skip


def _nameless(parts: Parts, _: TaskGraph) -> Iterator[Defect]:
    events, rows = parts.events, parts.gpu.event
    count, total = (
        len(named(events, rows, np.array([name == NO_NAME for name in events.names], dtype=np.bool_))),
        len(rows),
    )
    if count:
        text = f"{_of(count, total, ('GPU task', 'GPU tasks'), ('has', 'have'))} no name: their kind is unknown"
        yield by_share(count, total), count, text, RECORD_AGAIN


def _launches(parts: Parts, _: TaskGraph) -> Iterator[Defect]:
    calls, gpu, names = parts.calls, parts.gpu, parts.events.names
    if not len(gpu.event) or not len(calls.event):
        return
    launches = among(calls.kind, [CallKind.LAUNCH, CallKind.GRAPH_LAUNCH, CallKind.COPY])
    # Host functions have no GPU event, and many profilers record none for a memset.
    silent = np.array(["HostFunc" in name or "Memset" in name for name in names], dtype=np.bool_)
    launches &= ~silent.take(calls.name) & ~_while_capturing(parts)
    launches[gpu.correlated[gpu.correlated >= 0]] = False
    count = int(np.count_nonzero(launches))
    if count:
        total = count + int((np.bincount(gpu.call[gpu.call >= 0], minlength=1) > 0).sum())
        text = f"{_of(count, total, ('launch', 'launches'), ('has', 'have'))} no kernel"
        yield by_share(count, total), count, f"{text}: GPU work is missing from the recording", RECORD_AGAIN


def _while_capturing(parts: Parts) -> Bool:
    """Mask of the calls made while their thread captures a CUDA graph: they launch nothing."""
    calls, names = parts.calls, parts.events.names
    change = np.array([("BeginCapture" in n) - ("EndCapture" in n) for n in names], dtype=np.int64)
    if not change.any():
        return np.zeros(len(calls.event), dtype=np.bool_)
    # Sorted by (track, start): a thread's open captures carry over into the next.
    depth = np.cumsum(change.take(calls.name))
    before = np.append(0, depth[:-1])
    first = np.searchsorted(calls.track, calls.track)
    captured: Bool = depth - before[first] > 0
    return captured


def _kernels(parts: Parts, _: TaskGraph) -> Iterator[Defect]:
    gpu, calls = parts.gpu, parts.calls
    n = len(gpu.event)
    if not n:
        return
    early = _starts_early(parts)
    unknown = (gpu.call < 0) & ~early
    if not (gpu.call >= 0).any() and not early.any():
        launching = among(calls.kind, [CallKind.LAUNCH, CallKind.GRAPH_LAUNCH]).any()
        yield (
            Severity.VOIDS if launching else Severity.DOUBT, n,
            f"none of the {n:,} GPU tasks has a launch: host time and waits for the host are unknown",
            RECORD_AGAIN if launching else "record with ProfilerActivity.CPU as well",
        )  # fmt: skip
        return
    if not unknown.any():
        return
    # The first tasks of a stream may have been launched before the recording began.
    after_first_known = np.maximum.accumulate(np.where(gpu.call >= 0, gpu.stream + 1, 0)) == gpu.stream + 1
    count = int(np.count_nonzero(unknown & after_first_known))
    if count:
        text = _of(count, n, ("GPU task", "GPU tasks"), ("has", "have"))
        yield (
            by_share(count, n),
            count,
            f"{text} no launch: calls are missing from the recording",
            RECORD_AGAIN,
        )
    count = int(np.count_nonzero(unknown & ~after_first_known))
    if count:
        text = _some(count, "GPU task", ("was", "were"))
        yield Severity.NOTE, count, f"{text} launched before the recording began", "nothing to do"


def _starts_early(parts: Parts) -> Bool:
    """Mask of the GPU tasks that start before the call with their correlation id."""
    early: Bool = (parts.gpu.correlated >= 0) & (parts.gpu.call < 0)
    return early


def _clocks(parts: Parts, _: TaskGraph) -> Iterator[Defect]:
    gpu, calls = parts.gpu, parts.calls
    if not len(gpu.event) or not len(calls.event):
        return
    remedy = "record again; do not shift or merge events of the file"
    count = int(np.count_nonzero(_starts_early(parts)))
    if count:
        text = _some(count, "GPU task", ("starts before its launch", "start before their launches"))
        yield by_share(count, len(gpu.event)), count, f"{text}: the clocks of host and GPU differ", remedy
    late_ns = _ends_after_its_wait(parts)
    late_ns = late_ns[late_ns > LATE_NS]
    if len(late_ns):
        text = _some(len(late_ns), "wait", ("ends", "end"))
        text = f"{text} up to {late_ns.max() / 1e6:.1f} ms before the awaited GPU work: the clocks differ"
        yield Severity.VOIDS if late_ns.max() > APART_NS else Severity.DOUBT, len(late_ns), text, remedy
        return
    first = int(gpu.start_ns.argmin())
    if gpu.call[first] >= 0:
        lag_ns = int(gpu.start_ns[first] - calls.end_ns[gpu.call[first]])
        if lag_ns > IDLE_LAG_NS:
            text = f"the first GPU task starts {lag_ns / 1e6:.0f} ms after its launch, on an idle GPU"
            yield Severity.DOUBT, 1, f"{text}: the two clocks differ, or earlier GPU work is missing", remedy


def _ends_after_its_wait(parts: Parts) -> Int64:
    """Time from the return of each pageable copy or device synchronisation to the end of the awaited work, ns."""
    gpu, calls = parts.gpu, parts.calls
    known = np.flatnonzero(gpu.call >= 0)
    to_pages = np.array(["DtoH" in name and "Pageable" in name for name in parts.events.names], dtype=np.bool_)
    copies = known[to_pages.take(parts.events.name[gpu.event[known]])]
    late_ns = gpu.end_ns[copies] - calls.end_ns[gpu.call[copies]]
    waits = np.flatnonzero(calls.kind == CallKind.DEVICE_SYNC)
    if len({device for device, _ in gpu.streams}) == 1 and len(waits) and len(known):
        launched_ns = calls.start_ns[gpu.call[known]]
        order = np.argsort(launched_ns, kind="stable")
        ends_ns = np.maximum.accumulate(gpu.end_ns[known][order])
        last = np.searchsorted(launched_ns[order], calls.start_ns[waits]) - 1
        late_ns = np.concatenate([late_ns, ends_ns[last[last >= 0]] - calls.end_ns[waits[last >= 0]]])
    return late_ns


def _overlaps(parts: Parts, scale: int = 1) -> Int64:
    """Places of the GPU tasks that begin while an earlier one of their stream, of another call, still runs."""
    gpu = parts.gpu
    end_ns = gpu.end_ns if scale == 1 else gpu.start_ns + (gpu.end_ns - gpu.start_ns) // scale
    end_ns = running_maximum(end_ns, gpu.stream)
    same = (gpu.stream[1:] == gpu.stream[:-1]) & ((gpu.call[1:] != gpu.call[:-1]) | (gpu.call[1:] < 0))
    return np.flatnonzero(same & (end_ns[:-1] > gpu.start_ns[1:] + OVERLAP_NS)) + 1


def _overlapping(parts: Parts, _: TaskGraph) -> Iterator[Defect]:
    count, total = len(_overlaps(parts)), len(parts.gpu.event)
    if count:
        text = _of(count, total, ("GPU task", "GPU tasks"), ("begins", "begin"))
        yield (
            by_share(count, total), count,
            f"{text} while an earlier one of the same stream runs: a stream runs one task at a time",
            "record again; do not merge streams or files",
        )  # fmt: skip


def _crossings(parts: Parts, scale: int = 1) -> Int64:
    """Places of the operators that begin inside the one before them on their thread and end after it."""
    events, rows = parts.events, parts.operators.rows
    end_ns = events.end_ns if scale == 1 else events.start_ns + events.duration_ns // scale
    end_ns = end_ns[rows]
    after = np.flatnonzero(end_ns[1:] > end_ns[:-1] + CROSSED_NS) + 1
    after = after[events.start_ns[rows[after]] + CROSSED_NS < end_ns[after - 1]]
    return after[np.flatnonzero(events.track[rows[after]] == events.track[rows[after - 1]])]


def _crossed(parts: Parts, _: TaskGraph) -> Iterator[Defect]:
    count, total = len(_crossings(parts)), len(parts.operators.rows)
    if count:
        text = _of(count, total, ("operator", "operators"), ("ends", "end"))
        yield (
            by_share(count, total), count, f"{text} after the operator that contains it",
            "record again; do not merge threads or files",
        )  # fmt: skip


def _unit(parts: Parts, _: TaskGraph) -> Iterator[Defect]:
    calls, events = parts.calls, parts.events
    if not events.by_torch:
        return  # reports of Nsight Systems are in ns
    launch_ns = (calls.end_ns - calls.start_ns)[calls.kind == CallKind.LAUNCH]
    operator_ns = events.duration_ns[parts.operators.rows]
    # If only durations are in ns, starts keep their places, and launches are too long as well.
    of_launches = _other_unit(launch_ns, *LAUNCH_NS) if len(launch_ns) > FEW else ""
    usual = len(launch_ns) > FEW and not of_launches
    early = by_share(int(np.count_nonzero(_starts_early(parts))), len(parts.gpu.event)) == Severity.VOIDS
    for find, total, possible in (
        (_overlaps, len(parts.gpu.event), not (usual or early)),
        (_crossings, len(parts.operators.rows), not usual),
    ):
        # Of operators that are too long, only innermost ones cross the next: outer ones still contain their children.
        count = len(find(parts)) if possible else 0
        if count > 0.2 * total and len(find(parts, _NS_PER_US)) <= 0.01 * total:
            text = f"{count:,} of {total:,} events overlap the next one, but none if durations are divided by 1,000"
            yield Severity.VOIDS, count, f"{text}: durations are in ns, not in us", "write `dur` in us"
            return
    of_operators = _other_unit(operator_ns, *OPERATOR_NS) if len(operator_ns) > FEW_OPERATORS else ""
    for noun, duration_ns, unit in (("launch", launch_ns, of_launches), ("operator", operator_ns, of_operators)):
        if unit:
            median = f"the median {noun} takes {np.median(duration_ns) / 1e3:,.{3 if unit == 'ms' else 0}f} us"
            text = f"{median}: times are in {unit}, not in us"
            yield Severity.VOIDS, len(duration_ns), text, "write `ts` and `dur` in us"
            return


def _other_unit(duration_ns: Int64, least_ns: int, most_ns: int) -> str:
    """The unit of durations that are implausibly short ("ms") or long ("ns") as us; "" if they are plausible."""
    # A quantile lies between two of the values: counting, without a sort, shows that most recordings are sound.
    last = len(duration_ns) - 1
    few_short = np.count_nonzero(duration_ns < least_ns) <= last // 2
    if few_short and np.count_nonzero(duration_ns > most_ns) < last - math.ceil(last / 10):
        return ""
    tenth_ns, median_ns = np.quantile(duration_ns, [0.1, 0.5])
    return "ms" if 0 < median_ns < least_ns else "ns" if tenth_ns > most_ns else ""


def _beyond(parts: Parts, _: TaskGraph) -> Iterator[Defect]:
    events, gpu = parts.events, parts.gpu
    if not len(gpu.event):
        return
    duration_ns, calls = gpu.end_ns - gpu.start_ns, parts.calls
    if len(calls.event) and duration_ns.max() <= calls.end_ns.max() - calls.start_ns.min():
        return
    # A host that only launches finishes before its kernels, but then no kernel is an outlier.
    if duration_ns.max() <= OUTLIER * np.median(duration_ns):
        return
    host = among(events.category, [EventCategory.CPU_OP, EventCategory.RUNTIME, EventCategory.ANNOTATION])
    if not host.any():
        return
    begin_ns, end_ns = int(events.start_ns[host].min()), int(events.end_ns[host].max())
    longer = (duration_ns > max(end_ns - begin_ns, OUTLIER * np.median(duration_ns))) & (gpu.end_ns > end_ns)
    if longer.any():
        text = _some(int(longer.sum()), "GPU task", ("lasts", "last"))
        yield (
            Severity.VOIDS, int(longer.sum()),
            f"{text} up to {duration_ns.max() / 1e6:,.1f} ms, longer than the whole recording of the host "
            f"({(end_ns - begin_ns) / 1e6:,.1f} ms), and beyond its end",
            "record again",
        )  # fmt: skip


def _zero(parts: Parts, _: TaskGraph) -> Iterator[Defect]:
    events = parts.events
    for rows, noun, most in ((parts.gpu.event, "GPU tasks", 0.5), (parts.operators.rows, "operators", 0.95)):
        zero = int(np.count_nonzero(events.duration_ns[rows] == 0))
        if zero > most * len(rows):
            text = f"{zero:,} of {len(rows):,} {noun} have no duration"
            yield Severity.VOIDS, zero, text, "record again; keep `dur` of the events"
            return


def _doubled(parts: Parts, _: TaskGraph) -> Iterator[Defect]:
    events = parts.events
    # Events are sorted by (start, -duration): a copy and its original are among neighbours with equal times.
    alike = (events.start_ns[1:] == events.start_ns[:-1]) & (events.duration_ns[1:] == events.duration_ns[:-1])
    count = _shifted_copies(parts)
    count += _copies(events, np.flatnonzero(np.append(alike, False) | np.append(False, alike))) if alike.any() else 0
    if count:
        total = int(np.count_nonzero(among(events.category, _TIMED)))
        text = _of(count, total, ("event", "events"), ("is a copy", "are copies"))
        yield (
            by_share(count, total), count, f"{text} of another",
            "record again; do not join a file with itself",
        )  # fmt: skip


_TIMED = [
    EventCategory.CPU_OP, EventCategory.ANNOTATION, EventCategory.RUNTIME, EventCategory.KERNEL, EventCategory.MEMCPY,
    EventCategory.MEMSET,
]  # fmt: skip


def _copies(events: Events, rows: Int64) -> int:
    """Count the copies among ``rows``, which are all events that share their times with a neighbour."""
    rows = rows[among(events.category[rows], _TIMED)]
    host = among(events.category[rows], [EventCategory.CPU_OP, EventCategory.ANNOTATION])
    # Events that agree in their id as well are copies; without an id, operators of 0 us are equal by chance.
    event_id = np.where(host, events.external_id[rows], events.correlation[rows])
    count = _alike(events, rows[event_id > 0], event_id[event_id > 0])
    without_id = rows[(event_id <= 0) & (events.duration_ns[rows] > 0)]
    by_chance = _alike(events, without_id, events.track[without_id])
    return count + (by_chance if by_chance and by_chance > 0.2 * _without_id(events) else 0)


def _without_id(events: Events) -> int:
    """Count the events that have a duration and no id."""
    host = among(events.category, [EventCategory.CPU_OP, EventCategory.ANNOTATION])
    event_id = np.where(host, events.external_id, events.correlation)
    return int((among(events.category, _TIMED) & (event_id <= 0) & (events.duration_ns > 0)).sum())


def _shifted_copies(parts: Parts) -> int:
    """Count the kernels that begin while one of the same name and launch runs on their stream: a launch has one."""
    gpu, name = parts.gpu, parts.events.name
    at = np.flatnonzero((gpu.start_ns[:-1] < gpu.start_ns[1:]) & (gpu.start_ns[1:] < gpu.end_ns[:-1]))
    at = at[(gpu.call[at] == gpu.call[at + 1]) & (gpu.call[at] >= 0) & (gpu.stream[at] == gpu.stream[at + 1])]
    at = at[parts.calls.kind[gpu.call[at]] == CallKind.LAUNCH]
    return int(np.count_nonzero(name[gpu.event[at]] == name[gpu.event[at + 1]]))


def _alike(events: Events, rows: Int64, number: Array) -> int:
    compared: tuple[Array, ...] = (events.category, events.name, events.start_ns, events.duration_ns)
    columns = [*(column[rows] for column in compared), number]
    order = np.lexsort(columns)
    same = np.ones(max(len(rows) - 1, 0), dtype=np.bool_)
    for column in columns:
        same &= column[order][1:] == column[order][:-1]
    return int(np.count_nonzero(same))


def _lost(parts: Parts, _: TaskGraph) -> Iterator[Defect]:
    events = parts.events
    marks = {int(m[1]) for name in events.names if (m := _STEP_MARK.match(name))}
    gaps = max(marks) - min(marks) + 1 - len(marks) if marks else 0
    if gaps:
        text = f"{_some(gaps, 'step mark', ('is', 'are'))} missing between ProfilerStep#{min(marks)} and #{max(marks)}"
        yield Severity.DOUBT, gaps, f"{text}: unmarked steps are counted as part of the step before", RECORD_AGAIN
    ids = np.sort(events.external_id[events.on_host], kind="stable")  # nearly sorted already
    apart = np.diff(ids[np.searchsorted(ids, 1) :])
    holes, known = apart[apart > 1] - 1, int(np.count_nonzero(apart)) + 1
    if len(holes) > max(FEW_HOLES, DOUBT_SHARE * known):
        count = int(holes.sum())
        total = known + count
        text = (
            f"{_of(count, total, ('operator', 'operators'), ('is', 'are'))} missing, judging by the gaps in their ids"
        )
        yield by_share(count, total), count, text, RECORD_AGAIN


def _hole(parts: Parts, _: TaskGraph) -> Iterator[Defect]:
    events = parts.events
    if len(events) < 2:
        return
    if (events.start_ns[1:] - events.end_ns[:-1]).max() <= HOLE_NS:  # events that still run make holes only shorter
        return
    end_ns = np.maximum.accumulate(events.end_ns)
    span_ns = int(end_ns[-1] - events.start_ns[0])
    hole_ns = int((events.start_ns[1:] - end_ns[:-1]).max())
    if hole_ns > max(HOLE_SHARE * span_ns, HOLE_NS):
        text = f"nothing is recorded for {hole_ns / 1e6:,.0f} of the {span_ns / 1e6:,.0f} ms of the recording"
        yield Severity.DOUBT, 1, text, "record again, without a pause and without joining files"


def _cold(parts: Parts, graph: TaskGraph) -> Iterator[Defect]:
    calls, events, info = parts.calls, parts.events, graph.info
    first, last = info.steady
    edges_ns = parts.steps.edges_ns
    steady = len(edges_ns) > last > first
    begin_ns = int(edges_ns[first]) if steady else int(events.start_ns.min())
    end_ns = int(edges_ns[last]) if steady else int(events.end_ns.max())
    called = np.bincount(calls.name, minlength=len(events.names)) > 0
    cold = np.array(
        [
            of_call and _COLD_CALL.search(name) is not None
            for name, of_call in zip(events.names, called.tolist(), strict=True)
        ],
        dtype=np.bool_,
    )
    rows = np.flatnonzero(cold.take(calls.name))
    rows = rows[(calls.start_ns[rows] >= begin_ns) & (calls.start_ns[rows] < end_ns)]
    time_ns = int((calls.end_ns[rows] - calls.start_ns[rows]).sum())
    period = "the steady steps" if steady else "the recording"
    remedy = "record later: skip the first steps, which load code, grow the allocator's pool and search for kernels"
    share = time_ns / max(end_ns - begin_ns, 1)
    if len(rows) and share > DOUBT_SHARE:
        text = f"{_some(len(rows), 'call', ('that loads code or allocates takes', 'that load code or allocate take'))}"
        severity = Severity.DOUBT if share > COLD_SHARE else Severity.NOTE
        yield severity, len(rows), f"{text} {100 * share:.0f} % of {period}: the recording is cold", remedy
    names = [name.lower() for name in events.names]
    words = [word for word in _TUNING if word in "\n".join(names)]
    if not words:
        return
    tuning = np.array([any(word in name for word in words) for name in names], dtype=np.bool_)
    rows = named(events, events.on_host, tuning)
    rows = rows[(events.start_ns[rows] >= begin_ns) & (events.start_ns[rows] < end_ns)]
    if len(rows):
        text = f"libraries search for their fastest kernels {len(rows):,} times in {period}: the recording is cold"
        yield Severity.DOUBT, len(rows), text, remedy


def _transfers(graph: TaskGraph) -> Iterator[Defect]:
    """Check how long one rank's collectives last beyond the fastest of the same kind and size."""
    collectives = np.flatnonzero(graph.kind == TaskKind.COMMUNICATION)
    sized = collectives[graph.size_bytes[collectives] > 0]
    unsized = len(collectives) - len(sized)
    remedy = "give the recordings of all ranks"
    if unsized:
        text = _some(unsized, "collective", ("has", "have"))
        yield Severity.NOTE, unsized, f"{text} no recorded size: waiting for other ranks may count as transfer", remedy
    if not len(sized):
        return
    duration_ns = graph.duration_ns[sized].astype(np.float64)
    order = np.lexsort((graph.size_bytes[sized], graph.name[sized]))
    name, size_bytes = graph.name[sized][order], graph.size_bytes[sized][order]
    first = np.flatnonzero(np.append(True, (name[1:] != name[:-1]) | (size_bytes[1:] != size_bytes[:-1])))
    fastest = np.repeat(np.minimum.reduceat(duration_ns[order], first), np.diff(np.append(first, len(order))))
    waited = duration_ns[order] > WAITED * fastest
    excess_ns = float((duration_ns[order] - fastest)[waited].sum())
    streams = [t.kind == (ThreadKind.STREAM if graph.has_gpu else ThreadKind.CPU) for t in graph.threads]
    working = np.flatnonzero(np.array(streams, dtype=np.bool_).take(graph.thread))
    start_ns = graph.start_ns[working]
    span_ns = int((start_ns + graph.duration_ns[working]).max() - start_ns.min())
    share = excess_ns / max(span_ns, 1)
    if waited.any() and share > DOUBT_SHARE:
        n = int(waited.sum())
        yield (
            Severity.DOUBT if share > WAIT_SHARE else Severity.NOTE, n,
            f"{_some(n, 'collective', ('lasts', 'last'))} at least {WAITED} times as long as the fastest of the same "
            f"kind and size, {100 * share:.0f} % of the time: they wait for other ranks",
            remedy,
        )  # fmt: skip


def with_waits_in_collectives(graph: TaskGraph) -> TaskGraph:
    """Return the graph of one rank whose collectives were added as tasks, with the finding on those that wait."""
    found = tuple(Finding(TRANSFERS, *defect) for defect in _transfers(graph))
    return graph.replace(info=replace(graph.info, findings=(*graph.info.findings, *found)))


UNIT, OVERLAP, CROSSED = "unit of durations", "overlap on a stream", "nesting of operators"
CLOCKS, BEYOND, TRANSFERS = "clocks of host and GPU", "durations beyond the recording", "waits in collectives"
# By the name in the list of `whatif info`.
CHECKS: dict[str, Callable[[Parts, TaskGraph], Iterator[Defect]]] = {
    CUT: _cut,
    "unreadable events": _unreadable,
    "GPU events of the named GPU": _no_gpu_events,
    "lost names": _nameless,
    UNIT: _unit,
    "missing durations": _zero,
    "doubled events": _doubled,
    BEYOND: _beyond,
    "launches without kernels": _launches,
    "kernels without launches": _kernels,
    CLOCKS: _clocks,
    OVERLAP: _overlapping,
    CROSSED: _crossed,
    "lost operators and marks": _lost,
    "pauses in the recording": _hole,
    "cold start": _cold,
    TRANSFERS: lambda _, graph: _transfers(graph),
}
