"""Several ranks of one run: who waits for whom, and what makes one come last."""

from __future__ import annotations

from whatif.report.html.facts import Facts
from whatif.report.html.made import Made
from whatif.report.html.markup import Html, items, section
from whatif.report.html.tables import Cell, Column, Header, Row, table
from whatif.report.layout import CLOCK_SUBJECTS, ms_format, pct


def ranks(facts: Facts) -> Html | None:
    """Return the table of ranks; None where the recording is of one alone."""
    found = facts.ranks
    if found is None:
        return None
    ms, has_gpu = ms_format(found.step_ms), bool(facts.baseline.graph.on_gpu.any())

    def time(value: float | None) -> Cell:
        return Cell(ms(value), value)

    rows: list[Row] = []
    for row in found.rows:
        parts = row.breakdown
        rows.append(
            [
                f"rank {row.rank}",
                *([time(parts.gpu_only_ms + parts.cpu_gpu_ms if parts else None)] if has_gpu else []),
                time(parts.cpu_only_ms + parts.cpu_gpu_ms if parts else None),
                time(row.transfer_ms),
                time(parts.communication_ms if parts else None),
                time(row.waiting_ms),
                Cell(pct(row.last_pct), row.last_pct),
                time(row.late_ms),
            ]
        )
    headers = ["CPU busy", "transfer", "exposed", "waits for peers", "comes last, %", "holds up"]
    headers = ["GPU busy", *headers] if has_gpu else headers
    caption = f"Ranks ({len(found.rows):,}), ms of {CLOCK_SUBJECTS[facts.baseline.clock]}"
    columns: list[Header] = [Column("rank", False), *headers]
    return section(
        "ranks",
        "Ranks",
        table("t-ranks", caption, columns, rows, made=Made.SIMULATED),
        items(found.sentences),
    )
