"""The first screen: five questions, each with one number, its range and a link to its part of the page; one picture."""

from __future__ import annotations

from whatif.prediction.composition import spelled
from whatif.questions.memory_summary import MemorySummary
from whatif.questions.sensitivity import CPU_SIDE, GPU_SIDE, RANKED_AT_PCT
from whatif.questions.sweep.scaling import Scaling
from whatif.report.html.facts import Facts
from whatif.report.html.markup import Html, name, paragraph, prose, tag
from whatif.report.layout import CLOCK_SUBJECTS, KIND_LABELS, ms_format, pct, sentence_case
from whatif.report.text_memory import capacity_sentences, size

# The number of workers that the fifth tile is about: one machine of the usual kind.
WORKERS = 8
WHY_BELOW = "this recording does not show it; the reason is below"
# Units of the picture's width.
WIDE = 1000.0


def tiles(facts: Facts) -> Html:
    """Return the five tiles, as links to the parts of the page that answer at length."""
    return tag("div", _why_slow(facts), _what_helps(facts), _fits(facts), _faster(facts), _more(facts), class_="tiles")


def _tile(question: str, shown: str, under: str, part: str, **number: str | float) -> Html:
    """A tile; ``number`` is the data behind what is shown, where a command answers with it."""
    return tag(
        "a",
        tag("span", question, class_="label"),
        tag("span", shown, class_="value", **number),
        tag("span", name(under), class_="under"),
        href=f"#{part}",
        class_="tile",
    )


def _why_slow(facts: Facts) -> Html:
    word, _, reason = facts.explanation.verdict.partition(": ")
    ms = ms_format(facts.explanation.baseline_ms)
    shown = f"{ms(facts.explanation.baseline_ms)} ms"
    estimated = facts.baseline.estimated_ms
    spread = f"; estimated {ms(estimated['low'])} … {ms(estimated['high'])} ms" if estimated else ""
    # The sentence up to its details and its remedy: those have their own places on the page.
    return _tile(
        "Why is it slow?",
        shown,
        f"{sentence_case(word)}: {reason.partition('; ')[0].partition(', ')[0].rstrip('.')}{spread}",
        "step",
        data_value=repr(float(facts.explanation.baseline_ms)),
        data_key="baseline_ms",
    )


def _what_helps(facts: Facts) -> Html:
    found = facts.prediction
    if found is None:
        return _tile("What helps?", "nothing found", "no what-if makes this step clearly shorter", "what-ifs")
    names = " + ".join(spelled(transform) for transform in found.transforms)
    ms = ms_format(found.baseline_ms)
    under = f"{names}{facts.for_whom}: {ms(found.low_ms)} … {ms(found.high_ms)} ms"
    number = repr(float(found.predicted_ms))
    return _tile("What helps?", facts.as_fast, under, "what-ifs", data_value=number, data_key="predicted_ms")


def _fits(facts: Facts) -> Html:
    found = facts.memory
    if not isinstance(found, MemorySummary):
        return _tile("Does it fit?", "unknown", WHY_BELOW, "memory")
    said = capacity_sentences(found)
    return _tile("Does it fit?", size(found.peak.total), said[0] if said else "at the peak of a step", "memory")


def _faster(facts: Facts) -> Html:
    found, side = facts.sensitivity, GPU_SIDE if facts.baseline.graph.on_gpu.any() else CPU_SIDE
    parts = [part for part in found.of_kind("side") if part.name == side] or found.of_kind("thread")[:1]
    device = "GPU" if side == GPU_SIDE else "CPU"
    if not parts or not found.step_ms:
        return _tile("Faster hardware?", "unknown", f"the recording holds no work of a {device}", "sensitivity")
    gains = [parts[0].gain_ms[found.speedups_pct.index(speedup)] for speedup in (RANKED_AT_PCT, 100.0)]
    twice, at_most = (found.step_ms / left if (left := found.step_ms - gain) > 0 else float("inf") for gain in gains)
    limit = f"; with one that takes no time {at_most:.2f}×" if at_most < 100 else ""
    return _tile("Faster hardware?", f"{twice:.2f}×", f"with a {device} twice as fast{limit}", "sensitivity")


def _more(facts: Facts) -> Html:
    found = facts.scaling
    question = "More GPUs?" if facts.baseline.graph.on_gpu.any() else "More workers?"
    rows = (
        [row for row in found.rows if row.step_ms and row.high_ms and row.low_ms] if isinstance(found, Scaling) else []
    )
    if not isinstance(found, Scaling) or len(rows) < 2:
        return _tile(question, "unknown", WHY_BELOW, "network")
    row = min(rows[1:], key=lambda row: abs(row.count - WORKERS))
    low, high = (row.count * found.single_ms / end for end in (row.high_ms, row.low_ms) if end)
    under = f"throughput with {row.count:,} workers, {low:.2f} … {high:.2f}×"
    return _tile(question, f"{found.throughput(row) or 0.0:.2f}×", under, "network")


def where_it_goes(facts: Facts) -> Html:
    """Return one bar: the critical path of a step by kind of task."""
    path = {kind: part for kind, part in facts.explanation.critical_path_ms.items() if part > 0}
    whole, begin = sum(path.values()), 0.0
    ms, bars, legend = ms_format(facts.explanation.baseline_ms), [], []
    for place, (kind, part) in enumerate(path.items()):
        label, color = KIND_LABELS[kind], min(place, 7)
        wide = WIDE * part / whole
        said = f"{label}: {ms(part)} ms, {pct(part, whole)} %"
        rect = tag("rect", x=f"{begin:.2f}", y=0, width=f"{wide:.2f}", height=28, class_=f"f{color}")
        bars.append(tag("g", tag("title", said), rect))
        legend.append(tag("li", tag("span", class_=f"swatch b{color}"), said))
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
