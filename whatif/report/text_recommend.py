"""The table of ``whatif recommend``."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from whatif.prediction.composition import spelled
from whatif.questions.recommend.ranking import Ranking
from whatif.report.layout import CLOCK_LABELS, CLOCK_SUBJECTS, ms_format, plain, print_table, report


def print_ranking(found: Ranking, top: int) -> None:
    """Print the first ``top`` devices, and why others are left out."""
    info, clock = found.baseline.graph.info, found.baseline.clock
    baseline_ms = found.baseline.step_ns / 1e6
    ms = ms_format(baseline_ms)
    with report() as out:
        out.print(plain(found.verdict, "bold"))
        with_them = "".join(f" + {spelled(transform)}" for transform in found.transforms)
        on = f" on {info.gpu}" if info.gpu else ""
        told = f"{Path(info.path).name}{on}: {CLOCK_SUBJECTS[clock]} takes {ms(baseline_ms)} ms ({CLOCK_LABELS[clock]})"
        out.print(plain(told + (f"; on each device{with_them}" if with_them else ""), "dim"))
        out.print()
        shown = found.candidates[:top]
        costs = any(candidate.cost is not None for candidate in shown)
        epochs = any(candidate.epoch_hours is not None for candidate in shown)
        samples = any(candidate.samples_per_s is not None for candidate in shown)
        memory = any(candidate.peak_bytes is not None for candidate in shown)
        headers = ["device", "step (ms)", "range"] + ["samples/s"] * samples + ["GiB"] * memory
        headers += [f"{found.currency or 'cost'}/1000 steps"] * costs + ["epoch (h)"] * epochs
        headers += [f"{found.currency or 'cost'}/epoch"] * (epochs and costs)
        rows: list[list[str | Text]] = []
        for one in shown:
            row: list[str | Text] = [
                plain(one.device + (" *" if one.recorded else ""), "bold" if one.recorded else ""),
                ms(one.step_ms), f"{ms(one.low_ms)}–{ms(one.high_ms)}",
            ]  # fmt: skip
            row += ["–" if one.samples_per_s is None else f"{one.samples_per_s:,.0f}"] * samples
            row += ["–" if one.peak_bytes is None else f"{one.peak_bytes / 2**30:.1f}"] * memory
            row += [_money(None if one.cost is None else one.cost * 1e3)] * costs
            row += ["–" if one.epoch_hours is None else f"{one.epoch_hours:,.2f}"] * epochs
            row += [_money(one.epoch_cost)] * (epochs and costs)
            rows.append(row)
        if rows:
            print_table(out, headers, rows)
            out.print()
        if any(one.recorded for one in shown):
            out.print(plain("  * the recorded device", "dim"))
        if len(found.candidates) > len(shown):
            out.print(plain(f"  {len(found.candidates) - len(shown)} more devices; --top and --json have them", "dim"))
        if shown and shown[0].peak_bytes is None:
            out.print(
                plain("  the recording does not show what a step keeps in memory: whether it fits is unknown", "dim")
            )
        if shown and found.epoch_samples and not epochs:
            out.print(plain("  the recording lacks its batch size: the time of an epoch is unknown", "dim"))
        for reason, names in _by_reason(found.left_out).items():
            out.print(plain(f"  left out {', '.join(names)}: {reason}"))


def _money(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}" if value < 100 else f"{value:,.0f}"


def _by_reason(left_out: dict[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        reasons.setdefault(reason, []).append(name)
    return reasons
