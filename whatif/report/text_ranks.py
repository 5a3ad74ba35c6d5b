"""The part of the text reports that compares ranks: clocks, waiting, transfer, stragglers."""

from __future__ import annotations

from pathlib import Path

from whatif.questions.stragglers import RankReport, RankRow
from whatif.report.layout import ms_format, pct, report

# The one column that is a share, percent; the others are times.
LAST = "comes last"


def rank_values(row: RankRow, *, has_gpu: bool) -> dict[str, float | None]:
    """Return the reported values of a rank by column header; None if its breakdown is unknown."""
    parts = row.breakdown
    return {
        **({"GPU busy": parts.gpu_busy_ms if parts else None} if has_gpu else {}),
        "CPU busy": parts.cpu_busy_ms if parts else None,
        "transfer": row.transfer_ms,
        "exposed": parts.communication_ms if parts else None,
        "waits for peers": row.waiting_ms,
        LAST: row.last_pct,
        "holds up": row.late_ms,
    }


def print_ranks(found: RankReport, *, top: int, has_gpu: bool) -> None:
    """Print which ranks wait for which; of more than ``top`` those that delay the others most."""
    ms = ms_format(found.step_ms)
    rows, shown = _shown(found, top)
    with report() as out:
        columns = [rank_values(row, has_gpu=has_gpu) for row in rows]
        cells = [
            [f"rank {row.rank}", *(f"{pct(value or 0.0)} %" if of == LAST else ms(value) for of, value in data.items())]
            for row, data in zip(rows, columns, strict=True)
        ]
        out.table(f"Ranks{shown}, ms a {found.noun}", ["", *columns[0]], cells)
        for sentence in found.sentences[:3]:
            out.say(f"  {sentence}")


def print_clocks(found: RankReport, *, top: int) -> None:
    """Print the ranks of the files, and their clock differences; of more than ``top`` the worst matched ones."""
    rows, shown = _shown(found, top)
    with report() as out:
        title = f"Ranks{shown} of {found.world_size}, {found.collectives:,} collectives matched"
        cells = [
            [f"rank {row.rank}", Path(row.path).name, f"{row.clock_offset_us:+z,.1f}", f"{row.clock_drift_ppm:+z.1f}",
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
