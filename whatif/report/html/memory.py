"""Memory over a step."""

from __future__ import annotations

from whatif.memory_summary import MemorySummary, shown_moments
from whatif.report.html.charts import Chart, Charts, Series, figure
from whatif.report.html.facts import Facts
from whatif.report.html.made import Made
from whatif.report.html.markup import Html, command, paragraph, section, traced
from whatif.report.html.tables import Cell, Column, Row, table
from whatif.report.layout import pct
from whatif.report.text_memory import REST, SOURCES, size

MIB, GIB = 2**20, 2**30
PARTS = (
    ("parameters", "parameters"),
    ("optimizer_state", "optimizer state"),
    ("inputs", REST),
    ("gradients", "gradients"),
    ("activations", "activations"),
    ("workspace", "workspace"),
)


def memory(facts: Facts, charts: Charts) -> Html:
    """Give what a step keeps in memory, moment by moment."""
    found = facts.memory
    if isinstance(found, str):
        return section("memory", "Memory over the step", paragraph(found))
    labels = tuple(f"{m.phase.name.lower()} {m.layer}".strip() for m in found.moments)
    unit, unit_name = (GIB, "GiB") if found.peak.total >= GIB else (MIB, "MiB")
    charts["c-memory"] = Chart(
        "area",
        labels,
        tuple(
            Series(label, tuple(getattr(m, key) / unit for m in found.moments), color)
            for color, (key, label) in enumerate(PARTS)
        ),
        "the step's layers: forward, backward, update",
        unit_name,
    )
    most = found.peak
    made = Made.MEASURED if found.memory.source == "allocations" else Made.ESTIMATED
    rows: list[Row] = [
        [
            label,
            Cell(size(getattr(most, key)), getattr(most, key), getattr(most, key) / max(most.total, 1)),
            pct(getattr(most, key), most.total),
        ]
        for key, label in PARTS
    ]
    over: list[Row] = [
        [
            m.phase.name.lower(),
            (first or "(no layer)") + ("" if first == last else f" … {last or '(no layer)'}"),
            Cell(size(m.total), m.total, m.total / max(most.total, 1)),
        ]
        for first, last, m in shown_moments(found.moments)
    ]
    layers: list[Row] = [
        [
            part.name or "(no layer)",
            Cell(size(part.activations), part.activations),
            Cell(size(part.gradients), part.gradients),
            Cell(size(part.workspace), part.workspace),
        ]
        for part in found.layers
    ]
    says = f"A step needs {size(most.total)} at its peak: " + ", ".join(
        f"{label} {size(getattr(most, key))}" for key, label in PARTS
    )
    return section(
        "memory",
        "Memory over the step",
        paragraph(f"{says}; {SOURCES.get(found.memory.source, found.memory.source)}.", class_="lead"),
        *_memory_sentences(found),
        figure("c-memory", "Memory over the step", f"{says}."),
        table("t-peak", "At the peak", [Column("", False), Column("size"), Column("%")], rows, made=made),
        table(
            "t-moments",
            "Over the step",
            [Column("pass", False), Column("layers", False), Column("at most")],
            over,
            made=made,
        ),
        table(
            "t-memory-layers",
            "Memory of each layer",
            [Column("layer", False), Column("activations"), Column("gradients"), Column("workspace")],
            layers,
            made=made,
        ),
        command("whatif memory", traced(facts.summary.graph.info)),
    )


def _memory_sentences(found: MemorySummary) -> list[Html]:
    told = [paragraph(sentence) for sentence in found.caveats]
    if found.measured_bytes:
        error = 100 * (found.peak.total / found.measured_bytes - 1)
        told.append(paragraph(f"The GPU's allocator measured {size(found.measured_bytes)} ({error:+.1f} %)."))
    if found.capacity_bytes is not None and found.largest is not None:
        fits = "fits into" if found.peak.total <= found.capacity_bytes else "does not fit into"
        batch = (
            f"{found.largest.samples:,} samples"
            if found.largest.samples
            else f"{found.largest.factor:,.2f} times the recorded batch"
        )
        told.append(paragraph(f"The step {fits} {size(found.capacity_bytes)}; the largest batch that fits: {batch}."))
    return told
