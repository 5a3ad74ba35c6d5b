"""The text report of ``whatif explain --by step``: each recorded step, and the reasons of slow ones."""

from __future__ import annotations

from whatif.questions.uneven_steps import UnevenStep, UnevenSteps
from whatif.report.layout import CLOCK_LABELS, bar, ms_format, report
from whatif.units import counted


def print_steps(found: UnevenSteps) -> None:
    """Print every step compared with the median, slow ones with their reasons."""
    ms = ms_format(found.median_ms)
    longest_ms = max((step.ms for step in found.steps), default=0.0)
    with report() as out:
        out.say(found.headline, "bold")
        if not found.steps:
            return
        rows = [
            (str(step.step), ms(step.ms), f"{100 * (step.ms / found.median_ms - 1):+z.1f} %", bar(step.ms, longest_ms),
             reasons(step, ms))
            for step in found.steps
        ]  # fmt: skip
        out.table(f"Steps as recorded ({CLOCK_LABELS[found.clock]})", ["step", "ms", "", " ", " "], rows)
        names = list(found.steps[0].times_ms)
        times = [(str(step.step), *(ms(step.times_ms[name]) for name in names)) for step in found.steps]
        out.table("What each step holds, ms (what runs side by side counts twice)", ["step", *names], times)


def reasons(step: UnevenStep, ms: object) -> str:
    """Return the reasons of a slow step, in words."""
    if not step.slow:
        return ""
    assert callable(ms)
    listed = ", ".join(f"{name} +{ms(part)}" for name, part in step.more_of.items())
    if step.allocator_retries:
        retries = counted(step.allocator_retries, "retry", "retries")
        listed += f"{', ' if listed else ''}{retries} of the allocator"
    return listed or "slow, and the recording does not show why"
