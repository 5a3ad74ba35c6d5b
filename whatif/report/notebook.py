"""Display of graphs, timelines, predictions and sweeps in Jupyter: a small table and, with matplotlib, a plot.

The numbers are those of the terminal reports, in the same format; names of a trace are escaped.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whatif.graph.types import TaskKind
from whatif.report.layout import CLOCK_LABELS, CLOCK_SUBJECTS, kind_label, ms_format
from whatif.report.plot_breakdown import prediction_figure
from whatif.report.plot_sweep import sweep_figure
from whatif.report.plot_timeline import timeline_figure
from whatif.report.printable import printable
from whatif.report.text import compared, headline
from whatif.report.text_sweep import headline as sweep_headline
from whatif.report.text_sweep import times_cell, times_header
from whatif.runtime.errors import WhatifError
from whatif.simulation.steps import CLOCK_NOUNS, default_clock, step_ns
from whatif.units import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whatif.graph.task_graph import TaskGraph
    from whatif.prediction.predict import Prediction
    from whatif.questions.sweep.sweep import Sweep
    from whatif.simulation.timeline import Timeline

LONGEST_NAME = 80
# Rows of a table; the others are counted.
MOST_ROWS = 12
_CELL = 'style="text-align:left"'


def graph_html(graph: TaskGraph) -> str:
    """Return a graph's recording, tasks and measured step; nothing is simulated."""
    info = graph.info
    clock = default_clock(graph)
    counts = np.bincount(graph.kind, minlength=len(TaskKind))
    rows = [
        ("GPU", info.gpu or ("not named" if graph.has_gpu else "none: a CPU recording")),
        ("steps", f"{info.n_steps}, from {info.step_source}" if info.n_steps else "none found"),
    ]
    if info.measured_step_ns.get(clock):
        step_ms = step_ns(info.measured_step_ns[clock], graph, clock) / 1e6
        rows.append((f"recorded, {CLOCK_SUBJECTS[clock]}", f"{ms_format(step_ms)(step_ms)} ms ({CLOCK_LABELS[clock]})"))
    rows += [(kind_label(kind.name.lower(), graph), f"{counts[kind]:,}") for kind in TaskKind if counts[kind]]
    rows += [
        ("execution threads", f"{len(graph.threads):,}"),
        ("layers", f"{len(graph.layers) - 1:,}"),
        ("dependencies", f"{len(graph.dependencies):,}"),
    ]
    head = f"{Path(info.path).name or 'a task graph'}: {len(graph):,} tasks"
    return _shown(head, ("", ""), rows, info.remarks)


def timeline_html(timeline: Timeline) -> str:
    """Return the busiest threads of a timeline and a picture of one step."""
    graph = timeline.graph
    makespan_ms = timeline.makespan_ns / 1e6
    ms = ms_format(makespan_ms)
    order = np.argsort(-timeline.busy_ns, kind="stable").tolist()
    rows = [(graph.threads[code].name, ms(timeline.busy_ns[code] / 1e6)) for code in order]
    head = f"{Path(graph.info.path).name or 'a timeline'}: {len(graph):,} tasks in {ms(makespan_ms)} ms"

    return _shown(
        head, ("execution thread", "busy ms"), rows, (), (lambda: timeline_figure(timeline)) if len(graph) else None
    )


def prediction_html(prediction: Prediction) -> str:
    """Return the step before and after, its range, and warnings."""
    ms = ms_format(prediction.baseline_ms)
    rows = [tuple(str(cell) for cell in row) for row in compared(prediction, ms)]
    rows.append(("nominal 90 % range", "", f"{ms(prediction.low_ms)} … {ms(prediction.high_ms)}", ""))

    columns = (CLOCK_LABELS[prediction.baseline.clock] + ", ms", "baseline", "predicted", "change")
    return _shown(headline(prediction), columns, rows, prediction.warnings, lambda: prediction_figure(prediction))


def sweep_html(found: Sweep) -> str:
    """Return the points of a sweep and their curve."""
    baseline_ms = found.baseline.step_ms
    ms = ms_format(baseline_ms)
    rows = [
        (*point.values, *(
            ("does not apply", "", "") if point.step_ms is None else
            (ms(point.step_ms), f"{ms(point.low_ms)} … {ms(point.high_ms)}",
             times_cell(found, point))
        ))
        for point in found.points
    ]  # fmt: skip

    columns = (*found.options, f"{CLOCK_NOUNS[found.baseline.clock]} (ms)", "nominal 90 % range", times_header(found))
    return _shown(sweep_headline(found), columns, rows, found.notes, lambda: sweep_figure(found))


def figure_svg(figure: Figure) -> str:
    """Return a figure as SVG for embedding in a page: equal figures give equal text."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "whatif", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    found = text.getvalue()
    return found[found.index("<svg") :]


def _shown(
    head: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    remarks: Sequence[str],
    picture: Callable[[], Any] | None = None,
) -> str:
    parts = [f"<div><strong>{_text(head)}</strong>"]
    parts.append("<table>")
    if any(columns):
        parts.append("<tr>" + "".join(f"<th {_CELL}>{_text(column)}</th>" for column in columns) + "</tr>")
    parts += ["<tr>" + "".join(f"<td {_CELL}>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows[:MOST_ROWS]]
    parts.append("</table>")
    if len(rows) > MOST_ROWS:
        parts.append(f"<p>{counted(len(rows) - MOST_ROWS, 'more row')}</p>")
    parts += [f"<p><em>{_text(remark)}</em></p>" for remark in dict.fromkeys(remarks)]
    if picture is not None:
        try:
            parts.append(figure_svg(picture()))
        except WhatifError as error:
            parts.append(f"<p>{html.escape(str(error), quote=False)}</p>")
    return "\n".join([*parts, "</div>"])


def _text(text: str) -> str:
    shown = printable(text)
    return html.escape(shown if len(shown) <= 8 * LONGEST_NAME else shown[: 8 * LONGEST_NAME] + "…")
