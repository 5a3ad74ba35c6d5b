"""Plots of sweeps and of scaling. matplotlib is imported only for drawing."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from whatif.questions.sweep.scaling import Scaling
from whatif.questions.sweep.sweep import Point, Sweep
from whatif.report.plots import COLORS, DASHES, MARKERS, NAME_LENGTH, legend, new_figure, title, unboxed
from whatif.report.printable import drawn
from whatif.report.text_sweep import exposed
from whatif.simulation.steps import CLOCK_NOUNS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# More lines than colours cannot be distinguished.
MOST_LINES = len(COLORS)
# Values that grow by more than this are drawn on a logarithmic scale.
LOGARITHMIC_FROM = 20.0
# Width of a letter of a label, as a share of the axis.
LETTER_WIDTH = 0.0115
_DECIMALS = re.compile(r"\d+\.\d{3,}")
RANGE_LABEL = "nominal 90 % range"
# The most labelled numbers of workers.
MOST_LABELS = 8


def sweep_figure(found: Sweep) -> Figure:
    """Return the step over the last option's values, with its range: one line per value of the options before it."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    last = found.varied[-1]
    numbers = [last.number(found.transforms, value) for value in last.values]
    is_number = all(number is not None and number > 0 for number in numbers)
    x = [float(number or 0) for number in numbers] if is_number else [float(n) for n in range(len(numbers))]
    length = len(last.values)
    lines = [found.points[first : first + length] for first in range(0, len(found.points), length)][:MOST_LINES]
    for place, points in enumerate(lines):  # the ranges of several lines would hide one another
        label = ", ".join(
            f"{option}={value}" for option, value in zip(found.options[:-1], points[0].values[:-1], strict=True)
        )
        _line(axes, x, points, place, label, with_range=len(lines) <= 2)
    info, noun = found.baseline.graph.info, CLOCK_NOUNS[found.baseline.clock]
    unchanged = f"{info.made} {noun}" + (", simulated" if info.is_recorded else "")
    axes.axhline(found.baseline.step_ms, color="0.4", linewidth=0.8, linestyle="--", label=unchanged)
    if is_number and max(x) > LOGARITHMIC_FROM * min(x):
        axes.set_xscale("log")
    labels = [drawn(_DECIMALS.sub(lambda found: f"{float(found[0]):.3g}", value), NAME_LENGTH) for value in last.values]
    chosen = _spaced_labels(x, labels, logarithmic=axes.get_xscale() == "log")
    axes.set_xticks([x[k] for k in chosen], [labels[k] for k in chosen], fontsize=8, parse_math=False)
    axes.minorticks_off()
    names = drawn(" ".join(transform.name for transform in found.transforms), NAME_LENGTH)
    axes.set_xlabel(f"{last.option} of {names}").set_parse_math(False)
    axes.set_ylabel(f"{noun}, ms")
    axes.set_ylim(bottom=0)
    _finish(figure, axes, info.path)
    return figure


def _spaced_labels(x: list[float], labels: list[str], *, logarithmic: bool) -> list[int]:
    """The positions, chosen from the left, whose labels do not overlap."""
    at = [math.log(value) if logarithmic else value for value in x]
    width = max(at) - min(at) or 1.0
    chosen: list[int] = []
    end = -math.inf
    for place in sorted(range(len(at)), key=at.__getitem__):
        middle, half = (at[place] - min(at)) / width, LETTER_WIDTH * (len(labels[place]) + 2) / 2
        if middle - half >= end:
            chosen.append(place)
            end = middle + half
    return chosen


def _line(axes: Axes, x: list[float], points: tuple[Point, ...], place: int, label: str, *, with_range: bool) -> None:
    # From left to right, whatever the order of the values.
    drawn = sorted((k for k, point in enumerate(points) if point.step_ms is not None), key=x.__getitem__)
    at, look = [x[k] for k in drawn], COLORS[place % len(COLORS)]
    step, low, high = ([getattr(points[k], name) for k in drawn] for name in ("step_ms", "low_ms", "high_ms"))
    marker = MARKERS[place % len(MARKERS)] if len(drawn) <= 40 else None
    axes.plot(
        at, step, color=look, linestyle=DASHES[place % len(DASHES)], marker=marker,
        markersize=4, linewidth=1.4, label=label or "predicted",
    )  # fmt: skip
    if with_range:
        axes.fill_between(at, low, high, color=look, alpha=0.15, linewidth=0, label=None if place else RANGE_LABEL)


def scaling_figure(found: Scaling) -> Figure:
    """Return throughput over workers beside the ideal one, and the step with its exposed communication."""
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    rows = [row for row in found.rows if row.step_ms]
    counts = [row.count for row in rows]
    left.plot(counts, counts, color="0.5", linestyle="--", linewidth=0.9, label="ideal")
    look: dict[str, Any] = {"color": COLORS[0], "marker": "o", "markersize": 4}
    left.plot(counts, [found.throughput(row) or 0 for row in rows], **look, label="predicted")
    ends = {row.count: ends for row in rows if (ends := found.more_throughput(row, found.single))}
    least, most = ([throughput[end] for throughput in ends.values()] for end in (1, 2))
    left.fill_between(list(ends), least, most, color=COLORS[0], alpha=0.15, linewidth=0, label=RANGE_LABEL)
    step, low, high, exposed_ms = (
        [getattr(row, name) or 0 for row in rows] for name in ("step_ms", "low_ms", "high_ms", "communication_ms")
    )
    right.plot(counts, step, **look, label=CLOCK_NOUNS[found.baseline.clock])
    right.fill_between(counts, low, high, color=COLORS[0], alpha=0.15, linewidth=0, label=RANGE_LABEL)
    exposed_look = look | {"color": COLORS[1], "linestyle": "--", "marker": "s"}
    right.plot(counts, exposed_ms, **exposed_look, label="exposed communication")
    left.set_ylabel("throughput (times one worker)")
    right.set_ylabel(f"{CLOCK_NOUNS[found.baseline.clock]}, ms")
    right.set_ylim(bottom=0)
    labelled = counts[:: -(-len(counts) // MOST_LABELS)]  # more would overlap
    for axes in (left, right):
        if len(counts) > 1 and counts[-1] > LOGARITHMIC_FROM * counts[0]:
            axes.set_xscale("log", base=2)
        axes.set_xticks(labelled, [f"{count:,}" for count in labelled], fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("workers")
    if left.get_xscale() == "log":
        left.set_yscale("log", base=2)
        left.set_yticks(labelled, [f"{count:,}" for count in labelled], fontsize=8)
        left.minorticks_off()
    for axes in (left, right):
        _finish(figure, axes, found.baseline.graph.info.path)
    figure.supxlabel(exposed(found), fontsize=8)
    return figure


def _finish(figure: Figure, axes: Axes, path: str) -> None:
    unboxed(axes, "both")
    legend(axes)
    title(figure, path)
