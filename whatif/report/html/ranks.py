"""Several ranks of one run: which waits for which, and the causes of stragglers."""

from __future__ import annotations

from whatif.report.html.facts import Facts
from whatif.report.html.made import Made
from whatif.report.html.markup import Html, items, section
from whatif.report.html.tables import Cell, Column, Header, Row, table
from whatif.report.layout import CLOCK_SUBJECTS, ms_format, pct
from whatif.report.text_ranks import LAST, rank_values


def ranks(facts: Facts) -> Html | None:
    """Return the table of ranks; None if the recording has only one."""
    found = facts.ranks
    if found is None:
        return None
    ms, has_gpu = ms_format(found.step_ms), facts.baseline.graph.has_gpu

    values = [rank_values(row, has_gpu=has_gpu) for row in found.rows]
    rows: list[Row] = [
        [f"rank {row.rank}", *(Cell(pct(v or 0.0) if of == LAST else ms(v), v) for of, v in cells.items())]
        for row, cells in zip(found.rows, values, strict=True)
    ]
    headers = [f"{of}, %" if of == LAST else of for of in values[0]]
    caption = f"Ranks ({len(found.rows):,}), ms of {CLOCK_SUBJECTS[facts.baseline.clock]}"
    columns: list[Header] = [Column("rank", False), *headers]
    return section(
        "ranks",
        "Ranks",
        table("t-ranks", caption, columns, rows, made=Made.SIMULATED),
        items(found.sentences),
    )
