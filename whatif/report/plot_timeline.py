"""A picture of one step of a timeline, one row per thread: an overview, not for reading single tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Bool,
    Int64,
    TaskKind,
)
from whatif.report.layout import CLOCK_SUBJECTS
from whatif.report.plots import COLORS, legend_on_top, name_rows, new_figure, title, unboxed
from whatif.report.printable import drawn
from whatif.simulation.intervals import union
from whatif.simulation.steps import default_clock
from whatif.simulation.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 8
# Tasks with gaps below this share of the step become one bar: such gaps are invisible.
CLOSE = 1 / 1200
ROW_NAME_LENGTH = 26
# Categories with their own colours, in drawing order.
LOOKS = {"CPU": COLORS[0], "GPU": COLORS[2], "copies": COLORS[4], "communication": COLORS[1]}


def timeline_figure(timeline: Timeline) -> Figure:
    """Return the steady step closest to the median: the work of the busiest execution threads over time."""
    graph = timeline.graph
    clock = default_clock(graph)
    low_ns, high_ns = timeline.window_ns(clock)
    working = _working(graph)
    inside_ns = timeline.within_ns(low_ns, high_ns)
    inside_ns[~np.logical_or.reduce(list(working.values()))] = 0
    busy_ns = np.bincount(graph.thread, weights=inside_ns, minlength=len(graph.threads))
    chosen = np.argsort(-busy_ns, kind="stable")[:MOST_ROWS]
    rows = sorted(int(code) for code in chosen if busy_ns[code] > 0)
    figure = new_figure(9, 1.3 + 0.34 * max(len(rows), 1))
    axes = figure.subplots()
    shown: set[str] = set()
    for place, code in enumerate(rows):
        for name, color in LOOKS.items():
            begins, lengths = _bars(timeline, working[name] & (graph.thread == code), low_ns, high_ns)
            if len(begins):
                label = None if name in shown else name
                spans = list(zip((begins / 1e6).tolist(), (lengths / 1e6).tolist(), strict=True))
                axes.broken_barh(spans, (place - 0.36, 0.72), facecolor=color, linewidth=0, label=label)
                shown.add(name)
    names = [
        f"{drawn(graph.threads[code].name, ROW_NAME_LENGTH)}  {_pct(busy_ns[code], high_ns - low_ns)} %"
        for code in rows
    ]
    name_rows(axes, names, tight=True)
    axes.set_xlim(0, max((high_ns - low_ns) / 1e6, 1e-6))
    axes.set_xlabel(f"{CLOCK_SUBJECTS[clock]}, ms (after each name: busy)")
    unboxed(axes, "x")
    if shown:
        legend_on_top(axes, 4)
    title(figure, graph.info.path)
    return figure


def _pct(part_ns: float, whole_ns: int) -> str:
    return f"{100 * part_ns / whole_ns:.0f}" if whole_ns else "–"


def _working(graph: TaskGraph) -> dict[str, Bool]:
    """Return the mask of each colour's tasks; waits are not work."""
    communication, copies = (graph.kind == kind for kind in (TaskKind.COMMUNICATION, TaskKind.MEMCPY))
    kernels = np.asarray(graph.on_gpu & ~communication & ~copies)
    return {"CPU": graph.on_cpu.mask, "GPU": kernels, "copies": copies, "communication": communication}


def _bars(timeline: Timeline, tasks: Bool, low_ns: int, high_ns: int) -> tuple[Int64, Int64]:
    """Starts, relative to the window, and lengths of the bars, ns: tasks that are close together are one bar."""
    tasks = tasks & (timeline.end_ns > low_ns) & (timeline.start_ns < high_ns) & (timeline.end_ns > timeline.start_ns)
    start_ns = np.clip(timeline.start_ns[tasks], low_ns, high_ns) - low_ns
    end_ns = np.clip(timeline.end_ns[tasks], low_ns, high_ns) - low_ns
    order = np.argsort(start_ns, kind="stable")
    close_ns = int(CLOSE * (high_ns - low_ns))
    begins, ends = union(start_ns[order], end_ns[order] + close_ns)
    return begins, ends - close_ns - begins
