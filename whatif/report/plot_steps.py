"""A plot of ``whatif explain --by step``: one dot per step, with the reasons of slow ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whatif.questions.uneven_steps import UnevenSteps
from whatif.report.layout import CLOCK_LABELS, ms_format
from whatif.report.plots import COLORS, new_figure, title, unboxed
from whatif.units import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The most reasons; more would overlap.
NAMED_STEPS = 8


def steps_figure(found: UnevenSteps) -> Figure:
    """Return the steps in order: a dot each, and a line at the median."""
    figure = new_figure(9, 3.6)
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    ms = ms_format(found.median_ms)
    for slow, color in ((False, COLORS[0]), (True, COLORS[1])):
        steps = [step for step in found.steps if step.slow == slow]
        if not steps:
            continue
        label = "slow" if slow else "others"
        axes.plot([s.step for s in steps], [s.ms for s in steps], "o", color=color, markersize=5, label=label)
    axes.axhline(found.median_ms, color="0.5", linewidth=1, label="median")
    named = sorted((step for step in found.steps if step.more_of), key=lambda step: -step.ms)[:NAMED_STEPS]
    for step in named:
        reason = next(iter(step.more_of))
        axes.annotate(
            reason, (step.step, step.ms), xytext=(5, 3), textcoords="offset points", fontsize=7, parse_math=False
        )
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("ms", fontsize=8)
    axes.set_ylim(bottom=0, top=1.1 * max((step.ms for step in found.steps), default=1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    unboxed(axes, "y")
    subtitle = f"{counted(len(found.steps), 'step')}, median {ms(found.median_ms)} ms, {CLOCK_LABELS[found.clock]}"
    title(figure, found.baseline.graph.info.path, subtitle)
    return figure
