"""The text report of ``whatif dts``: architectures ranked, the roles of the fastest."""

from __future__ import annotations

from typing import Any

from whatif.models.dts.ranking import (
    Ranked,
    Ranking,
    cut_layers,
    network_bytes,
)
from whatif.report.layout import ms_format, report


def print_ranking(ranking: Ranking) -> None:
    """Print the report of ``whatif dts``."""
    with report() as out:
        rows = ranking.possible
        if rows:
            best = rows[0]
            out.say(f"{best.name} trains an epoch fastest here: {_seconds(best)}.", "bold")
            out.say(_question(ranking), "dim")
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
            out.table("", ["", "batch, ms", "5 … 95 %", "epoch, s", "5 … 95 %", "MB a batch"], table)
            assert best.found is not None
            tried = f"the best of {best.found.paths:,} tried" if best.found.paths > 1 else "as the ranking has it"
            out.title(f"Roles of {best.name}, {tried}")
            if best.found.training.cuts:
                out.say(f"  cut after {', '.join(cut_layers(best.found))}")
            out.table(None, ["", "processor"], list(best.found.assignment.items()))
        refused = [row for row in ranking.rows if not row.found]
        if refused:
            out.title("Not possible here")
            for row in refused:
                out.say(f"  {row.name}: {row.reason}")


def print_facts(facts: Any, power: Any) -> None:
    """Print the results of `whatif dts --measure`: `NetworkFacts` and `Power` of `whatif.instrumentation.dts_facts`."""
    with report() as out:
        out.say(
            f"{facts.parameters:,} weights, {facts.flops / 1e6:,.2f} MFLOP forward a sample "
            f"({facts.macs / 1e6:,.2f} million multiply-adds)", "bold"
        )  # fmt: skip
        rows = [
            (
                layer.name, layer.type, f"{layer.flops / 1e6:,.3f}", f"{layer.parameters:,}",
                f"{layer.input_bytes / 1e3:,.1f}", f"{layer.output_bytes / 1e3:,.1f}",
            )
            for layer in facts.layers
        ]  # fmt: skip
        out.table("", ["layer", "", "MFLOP a sample", "weights", "kB in", "kB out"], rows)
        out.title("This machine, in a second of training, as a table of CLUSTER.toml")
        out.say("")
        for line in power.toml("NAME").splitlines():
            out.say(line)


def _question(ranking: Ranking) -> str:
    size = f" of {ranking.dnn.batch_size}" if ranking.dnn.batch_size else ""
    return (
        f"an epoch is {ranking.epoch_batches:,} batches{size}, shared by {ranking.training.clients} clients; "
        "a batch is one of each client"
    )


def _seconds(row: Ranked) -> str:
    return f"{row.epoch.median_ns / 1e9:,.2f} s" if row.epoch else "?"
