"""One step before and after, in columns so compact that a page with a hundred thousand tasks stays small.

The tasks of a side are sorted by thread, then by start. Five columns follow one another, little-endian:
the start relative to the previous one on the thread and the duration (uint32, in units), the name, the layer (uint32)
and the properties of a task (uint32, bits below). Then deflate and base64.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from whatif.graph.kernels import FAMILY_NAMES
from whatif.graph.types import (
    PHASE_NAMES,
    Array,
    Int64,
    TaskKind,
)
from whatif.prediction.baseline import Baseline
from whatif.prediction.predict import Prediction
from whatif.report.layout import kind_label
from whatif.report.printable import drawn, printable
from whatif.report.task_changes import ADDED, CHANGED, REMOVED, SAME, task_changes
from whatif.report.text_explain import short_name
from whatif.simulation.timeline import Timeline

# The most tasks of each side; of longer steps the shortest tasks are omitted, and the page says how many.
MOST_TASKS = 60_000
MOST_THREADS = 40
NAME_LENGTH = 160
CHANGES = (SAME, CHANGED, ADDED, REMOVED)
# Bits of the last column: kind, family + 1, phase, change, on the critical path.
FAMILY_AT, PHASE_AT, CHANGE_AT, CRITICAL_AT = 4, 10, 13, 15
_LEVEL = 6


def timelines(baseline: Baseline, prediction: Prediction | None) -> dict[str, Any]:
    """Return the steps of the baseline and of the prediction as a JSON object with packed columns."""
    before, title = baseline.timeline, "baseline"
    if prediction is None:
        sides = [(title, before, [SAME] * len(before.graph))]
    else:
        was, became = task_changes(before.graph, prediction.timeline.graph)
        sides = [(title, before, was), ("predicted", prediction.timeline, became)]
    texts: dict[str, int] = {}
    windows = [side.window_ns(baseline.clock) for _, side, _ in sides]
    longest_ns = max((high - low for low, high in windows), default=1)
    # Starts are relative to the previous one, the first one to the window's start: both must fit.
    unit_ns = 1 + longest_ns // (2**32 - 1)
    return {
        "unit_ns": int(unit_ns),
        "kinds": [kind.name.lower() for kind in TaskKind],
        "calls": kind_label("runtime", sides[-1][1].graph),
        "families": FAMILY_NAMES,
        "phases": PHASE_NAMES,
        "changes": list(CHANGES),
        "sides": [
            {"title": name, **_packed(side, _codes(changes), low, high, int(unit_ns), texts)}
            for (name, side, changes), (low, high) in zip(sides, windows, strict=True)
        ],
        "texts": list(texts),
    }


def _codes(changes: list[str]) -> Int64:
    code = {change: place for place, change in enumerate(CHANGES)}
    return np.array([code[change] for change in changes], dtype=np.int64)


def _packed(
    timeline: Timeline, changes: Int64, low_ns: int, high_ns: int, unit_ns: int, texts: dict[str, int]
) -> dict[str, Any]:
    graph = timeline.graph
    start_ns, end_ns = timeline.start_ns, timeline.end_ns
    visible = (end_ns > low_ns) & (start_ns < high_ns) & (end_ns > start_ns)
    tasks = np.flatnonzero(visible)
    duration_ns = np.minimum(end_ns[tasks], high_ns) - np.maximum(start_ns[tasks], low_ns)
    busy_ns = np.bincount(graph.thread[tasks], weights=duration_ns, minlength=len(graph.threads))
    threads = [int(t) for t in np.argsort(-busy_ns, kind="stable")[:MOST_THREADS] if busy_ns[t] > 0]
    threads.sort()
    chosen = np.isin(graph.thread[tasks], threads)
    shortest_first = np.flatnonzero(chosen)[np.argsort(duration_ns[chosen], kind="stable")]
    chosen[shortest_first[: max(len(shortest_first) - MOST_TASKS, 0)]] = False
    left_out = int(len(tasks) - chosen.sum())
    hidden = int(np.count_nonzero(busy_ns)) - len(threads)
    tasks, duration_ns = tasks[chosen], duration_ns[chosen]
    begin_ns = np.maximum(start_ns[tasks], low_ns) - low_ns
    order = np.lexsort((begin_ns, graph.thread[tasks]))
    tasks, duration, begin = tasks[order], duration_ns[order] // unit_ns, begin_ns[order] // unit_ns
    thread = graph.thread[tasks]
    opens = np.append(True, thread[1:] != thread[:-1]) if len(tasks) else np.zeros(0, dtype=np.bool_)
    since = np.where(opens, begin, np.diff(begin, prepend=0))
    critical = np.zeros(len(graph), dtype=np.int64)
    critical[timeline.critical_path] = 1
    what = (
        graph.kind[tasks].astype(np.int64)
        | (graph.family[tasks].astype(np.int64) + 1) << FAMILY_AT
        | graph.phase[tasks].astype(np.int64) << PHASE_AT
        | changes[tasks] << CHANGE_AT
        | critical[tasks] << CRITICAL_AT
    )
    columns = (
        since,
        duration,
        _shown(graph.names, graph.name[tasks], texts),
        _shown(graph.layers, graph.layer[tasks], texts),
        what,
    )
    packed = zlib.compress(b"".join(np.asarray(c).astype("<u4").tobytes() for c in columns), _LEVEL)
    return {
        "length_ns": int(high_ns - low_ns),
        "n": len(tasks),
        "left_out": left_out,
        "hidden_threads": hidden,
        "threads": [{"name": printable(graph.threads[t].name), "n": int((thread == t).sum())} for t in threads],
        "columns": base64.b64encode(packed).decode("ascii"),
    }


def _shown(table: tuple[str, ...], codes: Array, texts: dict[str, int]) -> Int64:
    """Codes of the displayed texts, each stored once for both sides."""
    mapped = np.zeros(len(table), dtype=np.int64)
    for code in np.unique(codes).tolist():
        mapped[code] = texts.setdefault(drawn(short_name(table[code]), NAME_LENGTH), len(texts))
    return mapped[codes]
