"""The what-ifs: those that gain, ranked with their ranges, combinations, and those that do not help."""

from __future__ import annotations

from collections.abc import Sequence

from whatif.prediction.composition import spelled, spelled_together
from whatif.questions.advice.advise import Advice, Ranked
from whatif.questions.advice.reasons import peak_cell
from whatif.report.html.charts import Chart, Series, bars_height, figure
from whatif.report.html.commands import TRACE, command, typed
from whatif.report.html.facts import Facts
from whatif.report.html.made import Made, answered_by
from whatif.report.html.markup import Html, items, paragraph, prose, section, tag
from whatif.report.html.tables import Cell, Column, Header, Row, joined, table
from whatif.report.layout import CLOCK_SUBJECTS, ms_format, sentence_case
from whatif.report.text import add_up
from whatif.report.text_advise import MAKE_FIT, REFUSED, effort, gain_range, other_batch

DRAWN = 12


def what_ifs(facts: Facts, charts: dict[str, Chart]) -> Html:
    """Return the ranked what-ifs of ``whatif advise``."""
    advice = facts.advice
    parts: list[Html] = []
    drawn = [*advice.gaining, *advice.together]
    drawn = [entry for entry in sorted(drawn, key=lambda e: -e.trial.gain_pct) if entry.gain_range_pct][:DRAWN]
    if drawn:
        labels = tuple(entry.trial.label for entry in drawn)
        gains = tuple(entry.trial.gain_pct for entry in drawn)
        low, high = zip(*(entry.gain_range_pct or (0.0, 0.0) for entry in drawn), strict=True)
        x_title = f"gain, % of {CLOCK_SUBJECTS[facts.baseline.clock]}; lines: nominal 90 % range"
        charts["c-gains"] = Chart("bars", labels, (Series("gain", gains, 0, low, high),), x_title)
        listed = "; ".join(f"{label} {entry.trial.gain_pct:.0f} %" for label, entry in zip(labels, drawn, strict=True))
        parts.append(figure("c-gains", "What gains most", f"Gain in time: {listed}.", height=bars_height(labels)))
    if advice.alone:
        parts.append(_ranked("t-alone", "What-ifs alone" if advice.fits else MAKE_FIT, advice.alone, facts))
    if advice.together:
        parts.append(_ranked("t-together", "What-ifs together, and what each gains alone", advice.together, facts))
    parts += _rest(advice)
    batches = any(not entry.trial.same_training for entry in (*advice.alone, *advice.together))
    if batches:
        parts.append(paragraph(f"{other_batch(facts.baseline)}.", class_="note"))
    parts += [paragraph(f"{e.doubt}.", class_="note") for e in (*advice.alone, *advice.together) if e.doubt]
    alone, together = (sum(1 for e in entries if e.range_ms) for entries in (advice.alone, advice.together))
    if alone + together < len(advice.alone) + len(advice.together):
        note = f"Ranges are given for the first {alone} alone and the first {together} together; each costs two more"
        parts.append(paragraph(f"{note} simulations.", class_="note"))
    return section("what-ifs", "What would help", *parts, command(advice.baseline, "advise", TRACE))


def _ranked(ident: str, caption: str, entries: Sequence[Ranked], facts: Facts) -> Html:
    ms = ms_format(facts.baseline.step_ms)
    with_memory = facts.advice.peak_bytes is not None
    columns: list[Header] = [
        Column("what-if", False),
        "gain %",
        "range, %",
        "ms",
        *([Column("peak memory", False)] if with_memory else []),
        Column("effort", False),
        Column("why", False),
        Column("source of durations", False, made=Made.ESTIMATED),
    ]
    rows: list[Row] = []
    for entry in entries:
        trial, gains = entry.trial, entry.gain_range_pct
        work = "" if entry.alone_pct else trial.effort.how
        star = "" if trial.same_training else "*"
        rows.append(
            [
                entry.trial.label,
                Cell(f"{trial.gain_pct:.1f}", trial.gain_pct, trial.gain_pct / 100),
                Cell(gain_range(entry) or "–", gains[0] if gains else None),
                Cell(ms(trial.recorded_samples_ms) + star, trial.recorded_samples_ms),
                *([Cell(peak_cell(trial, facts.advice.peak_bytes), trial.peak_bytes)] if with_memory else []),
                Cell(effort(entry), float(trial.effort.size)),
                Cell([prose(entry.reason), *([paragraph(prose(f"How: {work}"), class_="note")] if work else [])]),
                answered_by(trial.estimates),
            ]
        )
    return table(ident, caption, columns, rows, made=Made.PREDICTED)


def _rest(advice: Advice) -> list[Html]:
    """The what-ifs that do not help, fit or apply, each with its reason."""
    columns: list[Header] = [Column("what-if", False), "gain %", Column("why", False)]
    found: list[Html] = []
    for ident, title, entries in (
        ("t-none", "No gain", advice.not_gaining),
        ("t-large", "Too large for the device's memory", advice.too_large),
    ):
        if entries:
            others: list[Row] = [
                [e.trial.label, Cell(f"{e.trial.gain_pct:+z.1f}", e.trial.gain_pct), e.reason] for e in entries
            ]
            found.append(table(ident, title, columns, joined(others), made=Made.PREDICTED))
    refused: list[Html] = []
    for title, _, why in REFUSED:
        rows: list[Row] = [[r.label, r.reason] for r in advice.refused if r.why == why]
        if rows:
            ident = f"t-{why.name.lower().replace('_', '-')}"
            refused.append(table(ident, title, [Column("what-if", False), Column("why", False)], joined(rows)))
    if advice.hypothetical:
        names = ", ".join(advice.hypothetical)
        refused.append(paragraph(f"Not tried, because these are hypothetical or need several GPUs: {names}."))
    if refused:
        summary = tag("summary", f"What does not apply here, and why ({len(advice.refused):,})")
        found.append(tag("details", summary, *refused))
    return found


def prediction(facts: Facts) -> Html | None:
    """Return the prediction beside the recording; None if there is none."""
    shown = facts.prediction
    if shown is None:
        return None
    ms = ms_format(shown.baseline_ms)
    names = spelled_together(shown.transforms)
    origin = "as asked for" if facts.asked else "what advise names first"
    parts: list[Html] = [
        paragraph(
            f"{names}: {ms(shown.baseline_ms)} → {ms(shown.predicted_ms)} ms, nominal 90 % range {ms(shown.low_ms)} … "
            f"{ms(shown.high_ms)} ms; {facts.as_fast}{facts.for_whom}.",
            class_="lead",
        ),
        paragraph(f"Sources of durations: {answered_by(shown.to_dict()['estimates'])}."),
    ]
    if len(shown.transforms) > 1:
        composition = shown.composition
        rows: list[Row] = [
            [spelled(t), Cell(ms(part.alone_ms), part.alone_ms), Cell(ms(part.added_ms), part.added_ms)]
            for t, part in zip(shown.transforms, composition.contributions, strict=True)
        ]
        columns: list[Header] = [Column("what-if", False), "alone, ms", "added to those above, ms"]
        parts.append(table("t-contributions", "Gain of each what-if", columns, rows, made=Made.PREDICTED))
        shared_ms = composition.interaction_ms
        if shared_ms is not None:
            parts.append(paragraph(f"{sentence_case(add_up(shared_ms, ms))}.", class_="note"))
    if shown.warnings:
        parts += [tag("h3", "Warnings and notes"), items(shown.warnings)]
    parts.append(command(shown.baseline, "apply", *map(typed, shown.transforms), TRACE))
    return section("prediction", f"The prediction: {origin}", *parts)
