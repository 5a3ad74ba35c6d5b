"""A timeline file that Perfetto (ui.perfetto.dev) and chrome://tracing open: baseline beside predicted.

Chrome's trace event format: two process groups, one row an execution thread, an arrow from each launch to its kernel.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import whatif
from whatif.errors import WhatifError
from whatif.graph import TaskGraph
from whatif.kernels import KernelFamily
from whatif.output_file import output_file
from whatif.report.task_changes import ADDED, CHANGED, REMOVED, SAME, task_changes
from whatif.timeline import Timeline
from whatif.types import Bool, Int64, Phase, TaskKind

# chrome://tracing colors by these names; Perfetto colors by the task's name and shows `change` among its arguments.
COLORS = {CHANGED: "thread_state_runnable", ADDED: "terrible", REMOVED: "grey"}
# Written at a time, so that memory does not grow with the trace.
EVENTS_A_WRITE = 4096
# Compresses three times faster than the default and a tenth worse.
GZIP_LEVEL = 4


def write_perfetto(path: str | Path, baseline: Timeline, predicted: Timeline | None) -> None:
    """Write the timelines to ``path``, compressed where its name ends in .gz; a file is there whole or not at all.

    Times are microseconds with three decimals, so every nanosecond is kept. Raises WhatifError where ``path`` cannot be
    written.
    """
    with _replacing(Path(path)) as write:
        header = {"tool": "whatif", "version": whatif.__version__, "trace": Path(baseline.graph.info.path).name}
        write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(header)},"traceEvents":[\n')
        pending: list[str] = []
        separator = ""
        for event in _all_events(baseline, predicted):
            pending.append(event)
            if len(pending) == EVENTS_A_WRITE:
                write(separator + ",\n".join(pending))
                pending, separator = [], ",\n"
        write((separator if pending else "") + ",\n".join(pending) + "\n]}\n")


def check_output(path: str | Path, trace: str | Path) -> None:
    """Raise WhatifError where writing to ``path`` must fail or would destroy the trace itself."""
    target = output_file(path)
    if target.exists() and Path(trace).exists() and target.samefile(trace):
        raise WhatifError(f"{path}: expected another file than the trace itself, got the same; name another.")


def _all_events(baseline: Timeline, predicted: Timeline | None) -> Iterator[str]:
    if predicted is None:
        yield from _process_events(1, "baseline", baseline, [SAME] * len(baseline.graph))
        return
    was, became = task_changes(baseline.graph, predicted.graph)
    yield from _process_events(1, "baseline", baseline, was)
    yield from _process_events(2, "predicted", predicted, became)


def _process_events(pid: int, name: str, timeline: Timeline, changes: list[str]) -> Iterator[str]:
    graph = timeline.graph
    yield _metadata(pid, 0, "process_name", {"name": name})
    yield _metadata(pid, 0, "process_sort_index", {"sort_index": pid})
    for code, thread in enumerate(graph.threads):
        yield _metadata(pid, code + 1, "thread_name", {"name": thread.name})
        yield _metadata(pid, code + 1, "thread_sort_index", {"sort_index": code + 1})
    yield from _task_events(pid, timeline, changes)
    yield from _launch_arrows(pid, timeline)


def _metadata(pid: int, tid: int, name: str, args: dict[str, object]) -> str:
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}, separators=(",", ":"))


def _task_events(pid: int, timeline: Timeline, changes: list[str]) -> Iterator[str]:
    graph = timeline.graph
    names = [json.dumps(name) for name in graph.names]
    layers = [f',"layer":{json.dumps(name)}' if name else "" for name in graph.layers]
    phases = {phase.value: f',"phase":"{phase.name.lower()}"' if phase else "" for phase in Phase}
    kinds = {kind.value: kind.name.lower() for kind in TaskKind}
    unnamed = {kind.value: json.dumps(f"({kind.name.lower().replace('_', ' ')})") for kind in TaskKind}
    families = [f',"family":"{family.name.lower()}"' for family in KernelFamily] + [""]
    shown_ns = _drawn_ns(timeline)
    for task in np.flatnonzero(_visible(timeline)).tolist():
        kind, duration_ns, step = int(graph.kind[task]), int(shown_ns[task]), int(graph.step[task])
        whole_ns = int(timeline.end_ns[task] - timeline.start_ns[task])
        color = f',"cname":"{COLORS[changes[task]]}"' if changes[task] in COLORS else ""
        label = names[graph.name[task]] if graph.names[graph.name[task]] else unnamed[kind]
        yield (
            # "simulated": reading such a file as a recording would measure the simulation, so `read` refuses it.
            f'{{"ph":"X","pid":{pid},"tid":{graph.thread[task] + 1},"ts":{_us(int(timeline.start_ns[task]))},'
            f'"dur":{_us(duration_ns)},"name":{label},"cat":"simulated.{kinds[kind]}"{color},"args":{{"task":{task},'
            f'"change":"{changes[task]}"{_step(step)}{phases[int(graph.phase[task])]}{layers[graph.layer[task]]}'
            f"{families[graph.family[task]]}{_cut(whole_ns, duration_ns)}}}}}"
        )


def _step(step: int) -> str:
    return f',"step":{step}' if step >= 0 else ""


def _cut(whole_ns: int, shown_ns: int) -> str:
    return f',"duration_us":{_us(whole_ns)}' if whole_ns != shown_ns else ""


def _visible(timeline: Timeline) -> Bool:
    """All tasks but waits that took no time: the empty space before the next task shows what was waited for."""
    return np.asarray((timeline.graph.kind != TaskKind.WAIT) | (timeline.end_ns > timeline.start_ns), dtype=np.bool_)


def _drawn_ns(timeline: Timeline) -> Int64:
    """Durations as drawn: kernels of one stream may overlap by a few us, and slices of one row may not."""
    graph = timeline.graph
    duration_ns = timeline.end_ns - timeline.start_ns
    order = np.lexsort((timeline.start_ns, graph.thread))
    thread, start_ns = graph.thread[order], timeline.start_ns[order]
    room_ns = np.where(thread[1:] == thread[:-1], start_ns[1:] - start_ns[:-1], np.iinfo(np.int64).max)
    duration_ns[order[:-1]] = np.minimum(duration_ns[order[:-1]], room_ns)
    return duration_ns


def _launch_arrows(pid: int, timeline: Timeline) -> Iterator[str]:
    """From the start of each launch to the start of what it launched.

    Ids are numbers (Perfetto reads text as hexadecimal) and differ between the two groups.
    """
    graph: TaskGraph = timeline.graph
    launched = np.flatnonzero(graph.launch_of >= 0)
    for task, launch in zip(launched.tolist(), graph.launch_of[launched].tolist(), strict=True):
        common = f'"pid":{pid},"cat":"launch","name":"launch","id":{2 * task + pid}'
        yield f'{{"ph":"s","tid":{graph.thread[launch] + 1},"ts":{_us(int(timeline.start_ns[launch]))},{common}}}'
        yield f'{{"ph":"f","bp":"e","tid":{graph.thread[task] + 1},"ts":{_us(int(timeline.start_ns[task]))},{common}}}'


def _us(time_ns: int) -> str:
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


@contextmanager
def _replacing(path: Path) -> Iterator[Callable[[str], int]]:
    """Give a function that writes to what takes the place of ``path`` once all is written, and otherwise of nothing."""
    target = output_file(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as raw:
            if path.name.endswith(".gz"):
                # No name and no time inside: the same timelines give the same bytes.
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=GZIP_LEVEL, mtime=0) as packed:
                    yield lambda text: packed.write(text.encode("ascii"))
            else:
                yield lambda text: raw.write(text.encode("ascii"))
        os.replace(part, target)
    except OSError as error:
        raise WhatifError(f"{path}: expected to write the timeline, got '{error.strerror or error}'.") from error
    finally:
        part.unlink(missing_ok=True)
