"""The text report of ``whatif dts``: architectures ranked, the roles of the fastest."""

from __future__ import annotations

from whatif.models.dts.ranking import (
    Ranked,
    Ranking,
    cut_layers,
    network_bytes,
)
from whatif.report.layout import ms_format, plain, print_table, print_title, report


def print_ranking(ranking: Ranking) -> None:
    """Print what ``whatif dts`` found."""
    with report() as out:
        rows = ranking.possible
        if rows:
            best = rows[0]
            out.print(plain(f"{best.name} trains an epoch fastest here: {_seconds(best)}.", "bold"))
            out.print(plain(_question(ranking), "dim"))
            out.print()
            ms = ms_format(max(row.batch.median_ns for row in rows if row.batch) / 1e6)
            table = [
                (
                    row.name,
                    ms(row.batch.median_ns / 1e6),
                    f"{ms(row.batch.low_ns / 1e6)} … {ms(row.batch.high_ns / 1e6)}",
                    f"{row.epoch.median_ns / 1e9:,.2f}",
                    f"{row.epoch.low_ns / 1e9:,.2f} … {row.epoch.high_ns / 1e9:,.2f}",
                    f"{network_bytes(row.found) / 1e6:,.1f}",
                )
                for row in rows
                if row.found and row.batch and row.epoch
            ]
            print_table(out, ["", "batch, ms", "5 … 95 %", "epoch, s", "5 … 95 %", "MB a batch"], table)
            print_title(out, f"Roles of {best.name}")
            assert best.found is not None
            if best.found.training.cuts:
                out.print(plain(f"  cut behind {', '.join(cut_layers(best.found))}"))
            print_table(out, ["", "processor"], list(best.found.assignment.items()))
        refused = [row for row in ranking.rows if not row.found]
        if refused:
            print_title(out, "Not possible here")
            for row in refused:
                out.print(plain(f"  {row.name}: {row.reason}"))


def _question(ranking: Ranking) -> str:
    size = f" of {ranking.dnn.batch_size}" if ranking.dnn.batch_size else ""
    return (
        f"an epoch is {ranking.epoch_batches:,} batches{size}, shared by {ranking.training.clients} clients; "
        "a batch is one of each client"
    )


def _seconds(row: Ranked) -> str:
    return f"{row.epoch.median_ns / 1e9:,.2f} s" if row.epoch else "?"
