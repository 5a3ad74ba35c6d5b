"""Memory over a step."""

from __future__ import annotations

from whatif.questions.memory_summary import MemorySummary, shown_moments
from whatif.report.html.charts import Chart, Charts, Series, figure
from whatif.report.html.commands import TRACE, command
from whatif.report.html.facts import Facts
from whatif.report.html.made import Made, read_off
from whatif.report.html.markup import Html, paragraph, prose, section
from whatif.report.html.tables import Cell, Column, Row, table
from whatif.report.layout import pct
from whatif.report.text_memory import PARTS, capacity_sentences, source_words
from whatif.units import size

MIB, GIB = 2**20, 2**30
# From the bottom of the chart; parts that stay for the whole step come first.
STACKED = ("parameters", "optimizer_state", "inputs", "gradients", "activations", "workspace")


def memory(facts: Facts, charts: Charts) -> Html:
    """Return the memory of a step over its moments."""
    found = facts.memory
    if isinstance(found, str):
        return section("memory", "Memory over the step", paragraph(prose(found)))
    labels = tuple(f"{m.phase.name.lower()} {m.layer}".strip() for m in found.moments)
    part = "layer" if facts.explanation.n_layers else "operator"
    none = f"(no {part})"
    unit, unit_name = (GIB, "GiB") if found.peak.total >= GIB else (MIB, "MiB")
    charts["c-memory"] = Chart(
        "area",
        labels,
        tuple(
            Series(PARTS[key], tuple(getattr(m, key) / unit for m in found.moments), color)
            for color, key in enumerate(STACKED)
        ),
        f"the step's {part}s: forward, backward, update",
        unit_name,
    )
    most = found.peak
    # Recorded allocations do not include what existed before them: parameters and optimizer state.
    complete = found.memory.source == "allocations" and not found.caveats
    made = read_off(facts.baseline.graph) if complete else Made.ESTIMATED

    def sized(size_bytes: int) -> Cell:
        return Cell(size(size_bytes), size_bytes, size_bytes / max(most.total, 1))

    rows: list[Row] = [[PARTS[key], sized(getattr(most, key)), pct(getattr(most, key), most.total)] for key in STACKED]
    over: list[Row] = [
        [m.phase.name.lower(), (first or none) + ("" if first == last else f" … {last or none}"), sized(m.total)]
        for first, last, m in shown_moments(found.moments)
    ]
    layers: list[Row] = [
        [row.name or none, *(Cell(size(part), part) for part in (row.activations, row.gradients, row.workspace))]
        for row in found.layers
    ]
    alternative = f"A step needs {size(most.total)} at its peak: " + ", ".join(
        f"{PARTS[key]} {size(getattr(most, key))}" for key in STACKED
    )
    return section(
        "memory",
        "Memory over the step",
        paragraph(f"{alternative}; {source_words(found)}.", class_="lead"),
        *_memory_sentences(found),
        figure("c-memory", "Memory over the step", f"{alternative}."),
        table("t-peak", "At the peak", [Column("part", False), "size", "%"], rows, made=made),
        table(
            "t-moments",
            "Over the step",
            [Column("pass", False), Column(f"{part}s", False), "at most"],
            over,
            made=made,
        ),
        table(
            "t-memory-layers",
            f"Memory of each {part}",
            [Column(part, False), "activations", "gradients", "workspace"],
            layers,
            made=made,
        ),
        command(facts.baseline, "memory", TRACE, *(["--top", str(len(layers))] if layers else [])),
    )


def _memory_sentences(found: MemorySummary) -> list[Html]:
    paragraphs = [paragraph(prose(sentence)) for sentence in found.caveats]
    if found.measured_bytes:
        error = 100 * (found.peak.total / found.measured_bytes - 1)
        paragraphs.append(paragraph(f"The GPU's allocator measured {size(found.measured_bytes)} ({error:+z.1f} %)."))
    fits = capacity_sentences(found)
    return [*paragraphs, paragraph(" ".join(fits))] if fits else paragraphs
