"""The part of the text reports that compares ranks: clocks, waiting, transfer, stragglers."""

from __future__ import annotations

from pathlib import Path

from whatif.questions.stragglers import RankReport, RankRow
from whatif.report.layout import ms_format, pct, report


def print_ranks(found: RankReport, *, top: int, has_gpu: bool) -> None:
    """Print who waits for whom; of more than ``top`` ranks those that hold the others up most."""
    ms = ms_format(found.step_ms)
    rows, shown = _shown(found, top)
    with report() as out:
        headers = ["", *(["GPU busy"] if has_gpu else []), "CPU busy", "transfer", "exposed", "waits for peers",
                   "comes last", "holds up"]  # fmt: skip
        cells = []
        for row in rows:
            parts = row.breakdown
            busy = parts.cpu_only_ms + parts.cpu_gpu_ms if parts else None
            on_gpu = [ms(parts.gpu_only_ms + parts.cpu_gpu_ms if parts else None)] if has_gpu else []
            exposed = ms(parts.communication_ms if parts else None)
            cells.append([f"rank {row.rank}", *on_gpu, ms(busy), ms(row.transfer_ms), exposed, ms(row.waiting_ms),
                          f"{pct(row.last_pct)} %", ms(row.late_ms)])  # fmt: skip
        out.table(f"Ranks{shown}, ms a step", headers, cells)
        for sentence in found.sentences[:3]:
            out.say(f"  {sentence}")


def print_clocks(found: RankReport, *, top: int) -> None:
    """Print which files are which ranks, and how their clocks differ; of more than ``top`` the worst matched ones."""
    rows, shown = _shown(found, top)
    with report() as out:
        title = f"Ranks{shown} of {found.world_size}, {found.collectives:,} collectives matched"
        cells = [
            [f"rank {row.rank}", Path(row.path).name, f"{row.clock_offset_us:+,.1f}", f"{row.clock_drift_ppm:+.1f}",
             f"{row.clock_spread_us:,.1f}", f"{row.unmatched:,} of {row.collectives:,}"]
            for row in rows
        ]  # fmt: skip
        headers = ["", " ", "clock ahead µs", "drift ppm", "spread µs", "unmatched"]
        out.table(title, headers, cells, text_columns=2, gives_way=1)


def _shown(found: RankReport, top: int) -> tuple[list[RankRow], str]:
    if len(found.rows) <= max(top, 16):
        return list(found.rows), f" ({len(found.rows)})"
    worst = sorted(found.rows, key=lambda row: (-row.late_ms, -row.unmatched, row.rank))[:top]
    return worst, f" ({top} of {len(found.rows)})"
