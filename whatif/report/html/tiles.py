"""The first screen: five questions, each with a number, its range and a link to its section; and one picture."""

from __future__ import annotations

from whatif.models.exchange.collective_tasks import recorded_workers
from whatif.prediction.composition import spelled_together
from whatif.prediction.predict import Prediction
from whatif.questions.memory_summary import MemorySummary
from whatif.questions.sweep.scaling import Scaling
from whatif.report.html.facts import Facts
from whatif.report.html.markup import Html, name, paragraph, prose, tag
from whatif.report.layout import CLOCK_SUBJECTS, kind_label, ms_format, pct, sentence_case
from whatif.report.text_memory import capacity_sentences
from whatif.units import counted, size

# The factor on the number of workers in the fifth tile: one worker becomes a typical machine of this many.
WORKERS = 8
WHY_BELOW = "this recording does not show it; the reason is below"
# The width of the picture, in its own units.
WIDE = 1000.0


def tiles(facts: Facts) -> Html:
    """Return the five tiles, as links to the sections with the details."""
    return tag("div", _why_slow(facts), _what_helps(facts), _fits(facts), _faster(facts), _more(facts), class_="tiles")


def _tile(question: str, shown: str, spread: str, under: str, part: str, **number: str | float) -> Html:
    """Return a tile; ``number`` has the data attributes of the value, if a command outputs it."""
    return tag(
        "a",
        tag("span", question, class_="label"),
        tag("span", shown, class_="value", **number),
        tag("span", spread, class_="range", title="nominal 90 % range") if spread else "",
        tag("span", name(under), class_="under"),
        href=f"#{part}",
        class_="tile",
    )


def _range_ms(found: Prediction, ends_ms: tuple[float, float] | None = None) -> str:
    """The range of a prediction, or other ends in its format."""
    ms, (low_ms, high_ms) = ms_format(found.baseline_ms), ends_ms or (found.low_ms, found.high_ms)
    return f"{ms(low_ms)} … {ms(high_ms)} ms"


def _why_slow(facts: Facts) -> Html:
    word, _, reason = facts.explanation.verdict.partition(": ")
    baseline_ms = facts.explanation.baseline_ms
    # The sentence without its details and remedy, which the page shows elsewhere.
    return _tile(
        "Why is it slow?",
        f"{ms_format(baseline_ms)(baseline_ms)} ms",
        _range_ms(facts.unchanged),
        f"{sentence_case(word)}: {reason.partition('; ')[0].partition(', ')[0].rstrip('.')}",
        "step",
        data_value=repr(float(baseline_ms)),
        data_key="baseline_ms",
    )


def _what_helps(facts: Facts) -> Html:
    found = facts.prediction
    fit = facts.advice.fits
    if found is None:
        why = "no what-if makes this step clearly shorter" if fit else "no what-if that was tried makes this step fit"
        return _tile("What helps?", "nothing found", "", why, "what-ifs")
    names = ("" if fit or facts.asked else "fits with ") + spelled_together(found.transforms)
    under, number = f"{names}{facts.for_whom}", repr(float(found.predicted_ms))
    spread = _range_ms(found, facts.as_fast_ms)
    return _tile("What helps?", facts.as_fast, spread, under, "what-ifs", data_value=number, data_key="predicted_ms")


def _fits(facts: Facts) -> Html:
    found = facts.memory
    if not isinstance(found, MemorySummary):
        return _tile("Does it fit?", "unknown", "", WHY_BELOW, "memory")
    low, high = size(found.peak.total), size(found.high_bytes)
    texts = capacity_sentences(found)[:1] or ["At the peak of a step."]
    spread = f"{low} … {high}" if high != low else f"as {facts.baseline.graph.info.made}"
    number = repr(float(found.peak.total))
    return _tile("Does it fit?", low, spread, texts[0].rstrip("."), "memory", data_value=number, data_key="peak_bytes")


def _faster(facts: Facts) -> Html:
    found, device = facts.faster, "GPU" if facts.baseline.graph.has_gpu else "CPU"
    if found is None:
        return _tile("Faster hardware?", "unknown", "", f"the recording holds no work of a {device}", "sensitivity")
    shown, number = f"{found.speedup:.2f}× as fast", repr(float(found.predicted_ms))
    under = f"with a {device} twice as fast"
    return _tile(
        "Faster hardware?", shown, _range_ms(found), under, "sensitivity", data_value=number, data_key="faster_ms"
    )


def _more(facts: Facts) -> Html:
    found, graph = facts.scaling, facts.baseline.graph
    question = "More GPUs?" if graph.has_gpu else "More workers?"
    rows = [row for row in found.rows if row.range_ms] if isinstance(found, Scaling) else []
    recorded = recorded_workers(graph) or 1
    if isinstance(found, Scaling) and len(rows) > 1:
        now = next((row for row in rows if row.count == recorded), rows[0])
        more = [row for row in rows if row.count > now.count] or rows[1:]
        row = min(more, key=lambda row: abs(row.count - WORKERS * now.count))
        if throughput := found.more_throughput(row, now):
            times, low, high = throughput
            instead = f" instead of {now.count:,}" if now.count > 1 else ""
            under = f"throughput with {counted(row.count, 'worker')}{instead}"
            return _tile(question, f"{times:.2f}×", f"{low:.2f} … {high:.2f}×", under, "network")
    return _tile(question, "unknown", "", WHY_BELOW, "network")


def where_it_goes(facts: Facts) -> Html:
    """Return one bar: the critical path of a step by kind of task."""
    path = {kind: part for kind, part in facts.explanation.critical_path_ms.items() if part > 0}
    total, begin = sum(path.values()), 0.0
    ms, bars, legend = ms_format(facts.explanation.baseline_ms), [], []
    for place, (kind, part) in enumerate(path.items()):
        label, color = kind_label(kind, facts.baseline.graph), min(place, 7)
        wide = WIDE * part / total
        label_text = f"{label}: {ms(part)} ms, {pct(part, total)} %"
        rect = tag("rect", x=f"{begin:.2f}", y=0, width=f"{wide:.2f}", height=28, class_=f"f{color}")
        bars.append(tag("g", tag("title", label_text), rect))
        legend.append(tag("li", tag("span", class_=f"swatch b{color}"), label_text))
        begin += wide
    subject = CLOCK_SUBJECTS[facts.baseline.clock]
    if not bars:
        return paragraph(prose(facts.explanation.verdict))
    return tag(
        "figure",
        tag("figcaption", f"Where {subject} goes"),
        tag("svg", *bars, viewBox=f"0 0 {WIDE:g} 28", preserveAspectRatio="none", role="img", class_="where",
            aria_label=f"Where {subject} goes"),
        tag("ul", *legend, class_="legend"),
        aria_label=f"Where {subject} goes",
    )  # fmt: skip
