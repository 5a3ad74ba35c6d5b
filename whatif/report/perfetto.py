"""Timeline files for Perfetto (ui.perfetto.dev) and chrome://tracing: baseline beside predicted.

Chrome's trace event format: two groups of processes (one process per rank), one row per execution thread, arrows,
counters. The graph itself follows the events, so that the file can be read again.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from whatif.graph.kernels import KernelFamily
from whatif.graph.types import (
    Bool,
    Int64,
    Phase,
    TaskKind,
)
from whatif.ingest.saved_graph import GRAPH_FIELD, graph_text
from whatif.report.perfetto_counters import memory_counter, rate_counters
from whatif.report.perfetto_flows import flows
from whatif.report.task_changes import ADDED, CHANGED, REMOVED, SAME, task_changes
from whatif.runtime.files import VERSION, replacing
from whatif.simulation.timeline import Timeline

# chrome://tracing colors by these names; Perfetto colors by the task's name and shows `change` among its arguments.
COLORS = {CHANGED: "thread_state_runnable", ADDED: "terrible", REMOVED: "grey"}
# Events per write, so that memory does not grow with the trace.
EVENTS_A_WRITE = 4096
# Rows of columns that are converted to Python numbers at a time.
TASKS_AT_ONCE = 1 << 16
# Compresses three times faster than the default and a tenth worse; isal ten times faster, at its level 2.
GZIP_LEVEL, FAST_GZIP_LEVEL = 4, 2


def write_perfetto(
    path: str | Path, baseline: Timeline, predicted: Timeline | None, what: str = "", *, without_profiler: bool = False
) -> None:
    """Write the timelines to ``path`` atomically, compressed if its name ends in .gz.

    Times are microseconds with three decimals, so every nanosecond is kept. The events are followed by the graph of the
    last timeline, which ``whatif.read`` returns; ``what`` names the what-ifs of the prediction for the reader, and
    ``without_profiler`` says that the times exclude the profiler's overhead.
    Raises WhatifError if ``path`` cannot be written.
    """
    trace = Path(baseline.graph.info.path).name
    with _replacing(Path(path)) as write:
        header = {"tool": "whatif", "version": VERSION, "trace": trace}
        write(f'{{"displayTimeUnit":"ms","otherData":{_json(header)},"traceEvents":[\n')
        pending: list[str] = []
        separator = ""
        for event in _all_events(baseline, predicted):
            pending.append(event)
            if len(pending) == EVENTS_A_WRITE:
                write(separator + ",\n".join(pending))
                pending, separator = [], ",\n"
        write((separator if pending else "") + ",\n".join(pending))
        # After the events, because a reader that does not know a field may stop at it.
        write(GRAPH_FIELD)
        shown = "baseline" if predicted is None else f"prediction of {what or 'a what-if'}"
        remark = (
            f"no recording: the {shown} from {trace or 'a graph'}, which whatif export wrote; its times are simulated"
        )
        for piece in graph_text(predicted or baseline, remark, what, without_profiler=without_profiler):
            write(piece)
        write("}\n")


def _all_events(baseline: Timeline, predicted: Timeline | None) -> Iterator[str]:
    info = baseline.graph.info
    before = "baseline" if info.is_recorded else f"baseline ({info.made}, not recorded)"
    if predicted is None:
        yield from _group_events(0, before, baseline, [SAME] * len(baseline.graph))
        return
    was, became = task_changes(baseline.graph, predicted.graph)
    yield from _group_events(0, before, baseline, was)
    yield from _group_events(1, "predicted", predicted, became)


def _group_events(group: int, name: str, timeline: Timeline, changes: list[str]) -> Iterator[str]:
    """The events of one timeline: a process per rank, with numbers distinct from the other group's."""
    graph = timeline.graph
    drawn, drawn_ns = _slices(timeline)
    has_tasks = np.bincount(graph.thread[drawn], minlength=len(graph.threads)) > 0
    ranks = sorted({thread.rank for code, thread in enumerate(graph.threads) if has_tasks[code]})
    pid = {rank: 1 + group + 2 * place for place, rank in enumerate(ranks)}
    pids = np.array([pid.get(thread.rank, 0) for thread in graph.threads], dtype=np.int64)
    # Above the processes' numbers: a row with its process's number would be its main thread, and come first.
    tids = np.arange(len(graph.threads)) + 1 + 2 * len(ranks)
    for place, rank in enumerate(ranks):
        called = name if len(ranks) == 1 else f"{name}, {f'rank {rank}' if rank >= 0 else 'between ranks'}"
        yield _metadata(pid[rank], 0, "process_name", {"name": called})
        yield _metadata(pid[rank], 0, "process_sort_index", {"sort_index": group * len(ranks) + place})
    for code, thread in enumerate(graph.threads):
        if has_tasks[code]:
            tid = int(tids[code])
            yield _metadata(pid[thread.rank], tid, "thread_name", {"name": thread.name})
            yield _metadata(pid[thread.rank], tid, "thread_sort_index", {"sort_index": tid})
    yield from _task_events(pids, tids, timeline, drawn, drawn_ns, changes)
    yield from _arrows(group, pids, tids, timeline, drawn, drawn_ns)
    yield from _counters(pids, timeline)


def _metadata(pid: int, tid: int, name: str, args: dict[str, object]) -> str:
    return _json({"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args})


def _task_events(
    pids: Int64, tids: Int64, timeline: Timeline, drawn: Bool, drawn_ns: Int64, changes: list[str]
) -> Iterator[str]:
    graph = timeline.graph
    named = [_json(name) if name else "" for name in graph.names]
    layers = [f',"layer":{_json(name)}' if name else "" for name in graph.layers]
    phases = [f',"phase":"{phase.name.lower()}"' if phase else "" for phase in Phase]
    # "simulated", so that no such event is mistaken for a measured one.
    kinds = [f"simulated.{kind.name.lower()}" for kind in TaskKind]
    unnamed = [_json(f"({kind.name.lower().replace('_', ' ')})") for kind in TaskKind]
    families = [f',"family":"{family.name.lower()}"' for family in KernelFamily] + [""]
    colors = {change: f',"cname":"{color}"' for change, color in COLORS.items()}
    length_ns = timeline.end_ns - timeline.start_ns
    places = [f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":' for pid, tid in zip(pids, tids, strict=True)]
    tasks = np.flatnonzero(drawn)
    # Text shared by many tasks is formatted once: the part before a task's number, and the part after its change.
    heads: dict[tuple[int, int, str], str] = {}
    tails: dict[tuple[int, int, int, int], str] = {}
    for first in range(0, len(tasks), TASKS_AT_ONCE):
        some = tasks[first : first + TASKS_AT_ONCE]
        rows = zip(
            some.tolist(), graph.thread[some].tolist(), _us(timeline.start_ns[some]), _us(drawn_ns[some]),
            graph.name[some].tolist(), graph.kind[some].tolist(), graph.phase[some].tolist(),
            graph.layer[some].tolist(), graph.family[some].tolist(), graph.step[some].tolist(),
            strict=True,
        )  # fmt: skip
        cut = {
            int(task): f',"duration_us":{us}'
            for task, us in zip(
                some[length_ns[some] != drawn_ns[some]],
                _us(length_ns[some[length_ns[some] != drawn_ns[some]]]),
                strict=True,
            )
        }
        for task, thread, start_us, shown_us, name, kind, phase, layer, family, step in rows:
            change = changes[task]
            head = heads.get((name, kind, change))
            if head is None:
                head = heads[name, kind, change] = (
                    f',"name":{named[name] or unnamed[kind]},"cat":"{kinds[kind]}"{colors.get(change, "")},'
                    '"args":{"task":'
                )
            tail = tails.get((step, phase, layer, family))
            if tail is None:
                tail = tails[step, phase, layer, family] = (
                    f'"{_step(step)}{phases[phase]}{layers[layer]}{families[family]}'
                )
            yield (
                f'{places[thread]}{start_us},"dur":{shown_us}{head}{task},"change":"{change}{tail}'
                f"{cut.get(task, '')}}}}}"
            )


def _step(step: int) -> str:
    return f',"step":{step}' if step >= 0 else ""


def _slices(timeline: Timeline) -> tuple[Bool, Int64]:
    """The tasks to draw, and their lengths, so that the slices of a row do not overlap.

    Waits of zero length are not drawn: the gap before the next task shows the wait. Neither are tasks of zero length at
    whose start another one begins: Perfetto would draw them as a part of that one. Of kernels of one
    stream that overlap by a few us, the first is shortened.
    """
    graph = timeline.graph
    drawn_ns = timeline.end_ns - timeline.start_ns
    drawn = np.asarray((graph.kind != TaskKind.WAIT) | (drawn_ns > 0), dtype=np.bool_)
    tasks = np.flatnonzero(drawn)
    # Of tasks that start at the same instant the longest comes last, in any recorded order.
    tasks = tasks[np.lexsort((drawn_ns[tasks], timeline.start_ns[tasks], graph.thread[tasks]))]
    before, after = tasks[:-1], tasks[1:]
    same_row = graph.thread[before] == graph.thread[after]
    room_ns = np.where(same_row, timeline.start_ns[after] - timeline.start_ns[before], np.iinfo(np.int64).max)
    drawn[before[(room_ns == 0) & (drawn_ns[before] == 0)]] = False
    drawn_ns[before] = np.minimum(drawn_ns[before], room_ns)
    return drawn, drawn_ns


def _arrows(group: int, pids: Int64, tids: Int64, timeline: Timeline, drawn: Bool, drawn_ns: Int64) -> Iterator[str]:
    """The arrows: their ids are numbers (Perfetto reads text as hexadecimal) and differ between the two groups."""
    thread = timeline.graph.thread
    rows_of = list(zip(pids, tids, strict=True))
    begins = [f'{{"ph":"s","pid":{pid},"tid":{tid},"ts":' for pid, tid in rows_of]
    ends = [f'{{"ph":"f","bp":"e","pid":{pid},"tid":{tid},"ts":' for pid, tid in rows_of]
    number = group
    for kind, *columns in flows(timeline, drawn, drawn_ns):
        for first in range(0, len(columns[0]), TASKS_AT_ONCE):
            source, target, begin_ns, end_ns = (column[first : first + TASKS_AT_ONCE] for column in columns)
            rows = (thread[source].tolist(), _us(begin_ns), thread[target].tolist(), _us(end_ns))
            for sender, from_us, receiver, to_us in zip(*rows, strict=True):
                number += 2
                common = f'"cat":"{kind}","name":"{kind}","id":{number}'
                yield f"{begins[sender]}{from_us},{common}}}"
                yield f"{ends[receiver]}{to_us},{common}}}"


def _counters(pids: Int64, timeline: Timeline) -> Iterator[str]:
    graph = timeline.graph
    for time_ns, parts in memory_counter(timeline):
        values = ",".join(f'"{part}":{value:.3f}' for part, value in parts.items())
        yield f'{{"ph":"C","pid":{pids[0]},"tid":0,"ts":{_one_us(time_ns)},"name":"memory (MiB)","args":{{{values}}}}}'
    for thread, title, unit, time_ns, value in rate_counters(timeline):
        name = _json(f"{title}: {graph.threads[thread].name}")
        yield (
            f'{{"ph":"C","pid":{pids[thread]},"tid":0,"ts":{_one_us(time_ns)},"name":{name},'
            f'"args":{{"{unit}":{value:.6g}}}}}'
        )


def _json(value: object) -> str:
    """Encode JSON without escaping non-ASCII letters: Perfetto shows escapes literally."""
    return json.dumps(value, ensure_ascii=False)


def _one_us(time_ns: int) -> str:
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


# The digits after the point.
_THOUSANDTHS = [f".{n:03d}" for n in range(1000)]


def _us(times_ns: Int64) -> list[str]:
    """Times in us with three decimals."""
    us, ns = np.divmod(times_ns, 1000)
    return [f"{integer}{_THOUSANDTHS[part]}" for integer, part in zip(us.tolist(), ns.tolist(), strict=True)]


@contextmanager
def _replacing(path: Path) -> Iterator[Callable[[str], int]]:
    """Yield a function that writes to a file that replaces ``path`` only if everything is written."""
    with replacing(path) as part, part.open("wb") as raw:
        if path.name.endswith(".gz"):
            # No name and no time in the header: equal timelines give equal bytes.
            with _gzip_file(raw) as packed:
                yield lambda text: packed.write(text.encode("utf-8", "replace"))
        else:
            yield lambda text: raw.write(text.encode("utf-8", "replace"))


def _gzip_file(raw: IO[bytes]) -> gzip.GzipFile:
    """A file that compresses into another one, with isal if it is installed."""
    try:
        from isal import igzip
    except ImportError:
        return gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=GZIP_LEVEL, mtime=0)
    make: type[gzip.GzipFile] = igzip.IGzipFile
    return make(filename="", mode="wb", fileobj=raw, compresslevel=FAST_GZIP_LEVEL, mtime=0)
