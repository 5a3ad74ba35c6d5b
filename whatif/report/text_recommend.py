"""The table of ``whatif recommend``."""

from __future__ import annotations

from collections.abc import Callable

from whatif.prediction.composition import spelled
from whatif.questions.recommend.ranking import Ranking
from whatif.report.columns import Cell
from whatif.report.layout import ms_format, plain, rate, report, significant


def print_ranking(found: Ranking, top: int) -> None:
    """Print the first ``top`` devices, and the reasons for omitting others."""
    info = found.baseline.graph.info
    ms = ms_format(found.baseline.step_ms)
    with report() as out:
        out.say(found.verdict, "bold")
        with_them = "".join(f" + {spelled(transform)}" for transform in found.transforms)
        on = f" on {info.gpu}" if info.gpu else ""
        out.step(found.baseline, f"; on each device{with_them}" if with_them else "", on=on)
        shown = found.candidates[:top]
        several = any(row.devices > 1 for row in shown)
        currency = found.currency or "cost"
        # Columns without any values are omitted.
        optional: list[tuple[str, list[float | None], Callable[[float], str]]] = [
            ("devices", [row.devices if several else None for row in shown], "{:,.0f}".format),
            ("samples/s", [row.samples_per_s for row in shown], rate),
            ("kJ/step", [row.energy_j and row.energy_j / 1e3 if several else None for row in shown], "{:,.2f}".format),
            ("GiB", [row.peak_bytes and row.peak_bytes / 2**30 for row in shown], "{:.1f}".format),
            (f"{currency}/1000 steps", [row.cost and row.cost * 1e3 for row in shown], significant),
            ("epoch (h)", [row.epoch_hours for row in shown], "{:,.2f}".format),
            (f"{currency}/epoch", [row.epoch_cost for row in shown], significant),
        ]
        columns = [column for column in optional if any(value is not None for value in column[1])]
        rows: list[tuple[Cell, ...]] = [
            (
                plain(row.device + (" *" if row.recorded else ""), "bold" if row.recorded else ""),
                ms(row.step_ms),
                f"{ms(row.low_ms)}–{ms(row.high_ms)}",
                *("–" if value is None else show(value) for _, values, show in columns for value in [values[place]]),
            )
            for place, row in enumerate(shown)
        ]
        out.table("", ["device", "step (ms)", "range", *(header for header, _, _ in columns)], rows)
        out.say()
        if any(row.recorded for row in shown):
            out.say("  * the recorded device", "dim")
        if several:
            out.say("  each over its usual node and network, unless a what-if names another; --json has them", "dim")
        if len(found.candidates) > len(shown):
            out.say(f"  {len(found.candidates) - len(shown)} more devices; --top and --json have them", "dim")
        if shown and shown[0].peak_bytes is None:
            out.say("  the recording does not show what a step keeps in memory: whether it fits is unknown", "dim")
        if shown and found.epoch_samples and shown[0].epoch_hours is None:
            out.say("  the recording lacks its batch size: the time of an epoch is unknown", "dim")
        for sentence in filter(None, (row.doubt for row in shown)):
            out.say(f"  {sentence}", "dim")
        for reason in dict.fromkeys(found.left_out.values()):
            names = [name for name, why in found.left_out.items() if why == reason]
            out.say(f"  left out {', '.join(names)}: {reason}")
