"""The table of ``whatif recommend``."""

from __future__ import annotations

from collections.abc import Callable

from whatif.prediction.composition import spelled
from whatif.questions.recommend.ranking import Ranking
from whatif.report.columns import Cell
from whatif.report.layout import ms_format, plain, report


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
        several = any(one.devices > 1 for one in shown)
        currency = found.currency or "cost"
        # Columns without any values are omitted.
        optional: list[tuple[str, list[float | None], Callable[[float], str]]] = [
            ("devices", [one.devices if several else None for one in shown], "{:,.0f}".format),
            ("samples/s", [one.samples_per_s for one in shown], "{:,.0f}".format),
            ("kJ/step", [one.energy_j and one.energy_j / 1e3 if several else None for one in shown], "{:,.2f}".format),
            ("GiB", [one.peak_bytes and one.peak_bytes / 2**30 for one in shown], "{:.1f}".format),
            (f"{currency}/1000 steps", [one.cost and one.cost * 1e3 for one in shown], _money),
            ("epoch (h)", [one.epoch_hours for one in shown], "{:,.2f}".format),
            (f"{currency}/epoch", [one.epoch_cost for one in shown], _money),
        ]
        columns = [column for column in optional if any(value is not None for value in column[1])]
        rows: list[tuple[Cell, ...]] = [
            (
                plain(one.device + (" *" if one.recorded else ""), "bold" if one.recorded else ""),
                ms(one.step_ms),
                f"{ms(one.low_ms)}–{ms(one.high_ms)}",
                *("–" if value is None else show(value) for _, values, show in columns for value in [values[place]]),
            )
            for place, one in enumerate(shown)
        ]
        out.table("", ["device", "step (ms)", "range", *(header for header, _, _ in columns)], rows)
        out.say()
        if any(one.recorded for one in shown):
            out.say("  * the recorded device", "dim")
        if several:
            out.say("  each over its usual node and network, unless a what-if names another; --json has them", "dim")
        if len(found.candidates) > len(shown):
            out.say(f"  {len(found.candidates) - len(shown)} more devices; --top and --json have them", "dim")
        if shown and shown[0].peak_bytes is None:
            out.say("  the recording does not show what a step keeps in memory: whether it fits is unknown", "dim")
        if shown and found.epoch_samples and shown[0].epoch_hours is None:
            out.say("  the recording lacks its batch size: the time of an epoch is unknown", "dim")
        for reason in dict.fromkeys(found.left_out.values()):
            names = [name for name, why in found.left_out.items() if why == reason]
            out.say(f"  left out {', '.join(names)}: {reason}")


def _money(value: float) -> str:
    return f"{value:,.4g}" if value < 100 else f"{value:,.0f}"
