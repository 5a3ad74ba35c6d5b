"""The text report of ``whatif explain --efficiency``."""

from __future__ import annotations

from collections.abc import Sequence

from whatif.prediction.utilization import CONVENTION
from whatif.questions.efficiency import Efficiency, Use
from whatif.report.layout import Report, count, ms_format, number, report
from whatif.simulation.steps import CLOCK_NOUNS

HEADERS = ("", "count", "ms", "TFLOP/s", "of peak", "GB/s", "of peak", "FLOP/B", "bound", "saves")


def print_efficiency(found: Efficiency) -> None:
    """Print the share of the GPU's peaks that each part of a step reaches; "–": unknown."""
    with report() as out:
        out.say(found.headline, "bold")
        out.step(found.baseline)
        if not found.has_rates:
            return
        for title, rows in (
            ("Families of kernels", found.families),
            ("Layers", found.layers),
            ("Phases", found.phases),
        ):
            out.table(f"{title}, a {CLOCK_NOUNS[found.baseline.clock]}", HEADERS, use_rows(found, rows))
        print_savings(out, found.savings, CLOCK_NOUNS[found.baseline.clock])
        out.say()
        for note in (f"FLOPs: {CONVENTION}", *found.notes):
            out.say(note, "dim")


def print_savings(out: Report, savings: Sequence[Use], noun: str) -> None:
    """Print the gain of the step if families of kernels had the usual speed of this GPU."""
    basis = {"shapes": "the op database calls usual for these shapes", "rates": "the rates of large kernels allow"}
    points = [
        f"{use.name}: {use.usual_gain_ms:,.2f} ms of the {noun} ({use.usual_saves_ms:,.2f} ms of GPU time) if as fast "
        f"as {basis[use.usual_by]}"
        for use in savings
    ]
    out.points("What kernels at usual speed would save", points)


def use_rows(found: Efficiency, uses: Sequence[Use]) -> list[tuple[str, ...]]:
    """Return the cells of a table of rows."""
    ms = ms_format(found.baseline.step_ms)
    return [
        (
            use.name, count(use.kernels), ms(use.ms), number(use.tflops), number(use.compute_pct, ".1f", " %"),
            number(use.gbyte_s), number(use.memory_pct, ".1f", " %"), number(use.intensity), use.bound or "–",
            ms(use.usual_saves_ms),
        )
        for use in uses
    ]  # fmt: skip
