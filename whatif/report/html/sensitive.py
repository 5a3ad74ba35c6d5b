"""The gain of a step if one of its parts gets faster."""

from __future__ import annotations

from whatif.questions.sensitivity import KINDS
from whatif.report.html.charts import Chart, Charts, Series, bars_height, figure
from whatif.report.html.commands import TRACE, command
from whatif.report.html.facts import Facts
from whatif.report.html.made import Made
from whatif.report.html.markup import Html, paragraph, section
from whatif.report.html.tables import Cell, Column, Header, Row, table
from whatif.report.layout import CLOCK_SUBJECTS, ms_format, sentence_case
from whatif.report.text_explain import short_name
from whatif.report.text_sensitivity import gain_cell, headline, kind_titles

# More lines of a chart cannot be distinguished.
DRAWN_PARTS = 8


def sensitivity(facts: Facts, charts: Charts) -> Html:
    """Return the gains of the step for each part that could get faster."""
    found = facts.sensitivity
    titles = kind_titles(facts.baseline.graph.has_gpu)
    ms = ms_format(found.step_ms)
    at = found.speedups_pct.index(50.0)
    drawn = sorted(
        (part for part in found.parts if part.kind in ("layer", "family", "phase")), key=lambda part: -part.gain_ms[at]
    )[:DRAWN_PARTS]
    drawn = [part for part in drawn if found.pct(part.gain_ms[at]) > 0]
    parts = []
    if drawn:
        labels = tuple(f"{part.kind} {short_name(part.name)}" for part in drawn)
        series = tuple(
            Series(f"{speedup:g} % faster", tuple(found.pct(part.gain_ms[place]) for part in drawn), place)
            for place, speedup in enumerate(found.speedups_pct)
        )
        charts["c-sensitivity"] = Chart("bars", labels, series, f"gain, % of {CLOCK_SUBJECTS[facts.baseline.clock]}")
        parts.append(
            figure(
                "c-sensitivity",
                "What a faster part gains",
                headline(found),
                height=bars_height(labels) + 20 * len(labels),
            )
        )
    for kind in KINDS:
        rows: list[Row] = [
            [
                short_name(part.name) or "(no name)",
                Cell(ms(part.work_ms), part.work_ms),
                Cell(gain_cell(found.pct(part.work_ms)), found.pct(part.work_ms)),
                *(Cell(gain_cell(found.pct(gain)), found.pct(gain)) for gain in part.gain_ms),
                found.note(part),
            ]
            for part in found.of_kind(kind)
        ]
        if rows:
            columns: list[Header] = [
                Column("name", False),
                "work, ms",
                "work, %",
                *(f"{speedup:g} % faster gains, %" for speedup in found.speedups_pct),
                Column("remark", False),
            ]
            parts.append(table(f"t-sensitivity-{kind}", titles[kind], columns, rows, made=Made.PREDICTED))
    sentence = headline(found)
    return section(
        "sensitivity",
        "What a faster part gains",
        paragraph(sentence_case(sentence), class_="lead"),
        *parts,
        command(facts.baseline, "explain", TRACE, "--sensitivity"),
    )
