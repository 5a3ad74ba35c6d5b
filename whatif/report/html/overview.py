"""The top of the page: three sentences, the numbers behind them, and the quality of the recording."""

from __future__ import annotations

from collections.abc import Mapping

from whatif.prediction.composition import spelled_together
from whatif.report.html.commands import TRACE, command
from whatif.report.html.facts import Facts
from whatif.report.html.made import Made, badge, read_off
from whatif.report.html.markup import Html, items, name, paragraph, prose, section, tag
from whatif.report.html.tables import Cell, Column, Header, Row, table
from whatif.report.html.tiles import tiles, where_it_goes
from whatif.report.layout import CLOCK_LABELS, CLOCK_SUBJECTS, UNTRACED_LABELS, ms_format, pct, rate, sentence_case
from whatif.simulation.steps import CLOCK_NOUNS, least_steps
from whatif.units import counted


def verdict(facts: Facts) -> Html:
    """Return the three sentences (bottleneck, first recommendation, its gain) and the numbers behind them."""
    sentences = [tag("li", prose(sentence)) for sentence in facts.advice.verdict]
    beside = [*_what_a_step_is(facts), *(facts.ranks.sentences if facts.ranks else ())]
    return section(
        "verdict",
        "The answer",
        tiles(facts),
        where_it_goes(facts),
        tag("ol", sentences, class_="verdict"),
        [paragraph(prose(sentence_case(sentence)), class_="lead") for sentence in beside],
        tag("div", _cards(facts), class_="cards"),
    )


def _what_a_step_is(facts: Facts) -> list[str]:
    """The subject of the times, if it is not a step."""
    baseline = facts.baseline
    n_steps = baseline.graph.info.n_steps
    if baseline.clock != "span":
        return []
    least = least_steps(baseline.graph)
    if n_steps >= least:
        together = f"its {counted(n_steps, 'step')} together"
        return [f"All times are of the whole recording, {together}, as `--clock span` asks for."]
    holds = f"holds {counted(n_steps, 'step')}" if n_steps else "marks no steps"
    return [
        f"All times are of the whole recording, from the first to the last task: it {holds}, and step times need "
        f"at least {least}."
    ]


def _cards(facts: Facts) -> list[Html]:
    baseline, prediction = facts.baseline, facts.prediction
    step_ms = baseline.step_ms
    ms = ms_format(step_ms)
    subject = CLOCK_SUBJECTS[baseline.clock]
    found = []
    if baseline.graph.has_gpu:
        busy_ms, of_step = facts.explanation.breakdown.gpu_busy_ms, f"ms of {subject}"
        busy = f"{pct(busy_ms, step_ms)} %"
        found.append(_card("the GPU is busy", busy, f"{ms(busy_ms)} {of_step}", Made.SIMULATED, busy_ms, "gpu_busy_ms"))
    if prediction is not None:
        names = spelled_together(prediction.transforms)
        rates = prediction.to_dict().get("samples_per_s")
        if isinstance(rates, dict):
            shown = f"{rate(rates['baseline'])} → {rate(rates['predicted'])}"
            found.append(_card("samples a second", shown, f"with {names}", Made.PREDICTED, rates["predicted"], "rate"))
    if not baseline.graph.info.is_recorded:
        return found
    error_pct, against = baseline.replay_error_pct, f"replayed against recorded {CLOCK_NOUNS[baseline.clock]}"
    found.append(_card("replay error", _signed(error_pct), against, Made.SIMULATED, error_pct, "replay_error_pct"))
    return found


def _card(label: str, shown: str, under: str, made: Made, value: float, key: str) -> Html:
    return tag(
        "div",
        paragraph(name(label), class_="label"),
        tag("p", shown, class_="value", data_value=repr(float(value)), data_key=key),
        paragraph(under, " ", badge(made), class_="under"),
        class_="card",
    )


def quality(facts: Facts) -> Html:
    """Return the quality of the recording: replay error, waiting, the profiler's overhead, quirks."""
    summary, baseline, info = facts.summary, facts.baseline, facts.summary.graph.info
    ms, noun = ms_format(baseline.step_ms), CLOCK_NOUNS[baseline.clock]
    rows: list[Row] = []

    def add(label: str, shown: str, explanation: str, made: Made, value: float | None = None) -> None:
        rows.append([label, Cell(shown, value), Cell([prose(explanation), " ", badge(made)])])

    def add_ms(label: str, value_ms: float, explanation: str, made: Made) -> None:
        add(label, f"{ms(value_ms)} ms", explanation, made, value_ms)

    if info.untraced_step_ns:
        add_ms("step without the profiler", info.untraced_step_ns / 1e6, "timed before the recording", Made.MEASURED)
    steady = f", median of {summary.steady_steps:,} steady steps" if summary.steady_steps > 1 else ""
    read = read_off(summary.graph)
    add_ms(f"{info.made} {noun}", baseline.measured_ns / 1e6, f"{CLOCK_LABELS[baseline.clock]}{steady}", read)
    if info.is_recorded:
        add_ms(f"replayed {noun}", baseline.replayed_ns / 1e6, "the same tasks, simulated", Made.SIMULATED)
        error_pct, wait_pct = baseline.replay_error_pct, baseline.unexplained_wait_pct
        add("replay error", _signed(error_pct), "replayed against recorded", Made.SIMULATED, error_pct)
        unexplained = "of the recording: waiting that nothing in it explains"
        add("unexplained wait", f"{wait_pct:.1f} %", unexplained, Made.MEASURED, wait_pct)
    calibration = baseline.calibration
    if calibration and calibration.untraced:
        meets = f"meets {UNTRACED_LABELS[calibration.untraced.clock]} within {calibration.missed_pct:.2f} %"
        add_ms("calibrated step", calibration.corrected_ns / 1e6, meets, Made.SIMULATED)
    if estimated := baseline.estimated_ms:
        spread = f"estimated from the trace: {ms(estimated['low'])} … {ms(estimated['high'])} ms"
        add_ms("step without the profiler", estimated["estimate"], spread, Made.SIMULATED)
    steps = f"{info.n_steps:,}" if info.n_steps else "none found"
    whole = "all times are of the whole span" if baseline.clock == "span" else ""
    source = f"from {info.step_source}" if info.n_steps else ""
    add("steps", steps, "; ".join(part for part in (source, whole) if part), read)
    device = info.gpu or ("not named" if summary.time_share_of == "gpu" else "none: a CPU recording")
    known = summary.gpu_known_as
    known_as = f"known as {known}" if known else "not in whatif's tables" if info.gpu else "by the recording"
    add("GPU", device, known_as, read)
    n_tasks, on = len(summary.graph), f"on {counted(len(summary.graph.threads), 'execution thread')}"
    add("tasks", f"{n_tasks:,}", on, read, n_tasks)
    overhead = (
        f"The profiler's own cost: {calibration.sentence}"
        if calibration
        else "The profiler's own cost stays in the numbers, as requested."
        if info.untraced_step_ns
        else "The profiler's own cost is not known and stays in the numbers: the recording lacks the step time "
        "without it (`whatif collect` measures it)."
        if info.is_recorded
        else ""
    )
    columns: list[Header] = [Column("what", numbers=False), "value", Column("how it was made", numbers=False)]
    quirks = items(facts.summary.warnings) if facts.summary.warnings else paragraph("None.")
    return section(
        "quality",
        "Can the recording be trusted?",
        paragraph(prose(str(summary.trust)), class_="lead"),
        table("t-quality", "Facts about the recording", columns, rows, sortable=False),
        *([paragraph(prose(overhead))] if overhead else []),
        tag("h3", "Quirks and doubts"),
        quirks,
        command(baseline, "info", TRACE),
    )


def _signed(value_pct: float) -> str:
    return f"{value_pct:+z.2f} %"


def legend(terms: Mapping[str, str]) -> Html:
    """Return the meaning of the labels, and of the ``terms`` with hover text, which paper lacks."""
    rows = [tag("div", tag("dt", badge(made)), tag("dd", made.value)) for made in Made]
    words = [tag("div", tag("dt", term), tag("dd", meaning)) for term, meaning in sorted(terms.items())]
    return section(
        "made",
        "How the numbers were made",
        tag("dl", rows),
        paragraph(
            "This page computes nothing: every number comes from the command shown under its table. "
            "Durations that the recording lacks come, in this order, from a measurement of the operator alone, the "
            "database of operators, the device's roofline, a constant from a paper, or our own estimate; each "
            "prediction shows how many durations came from each of them."
        ),
        tag("details", tag("summary", "Terms on this page"), tag("dl", words, class_="words")),
    )
