"""The report as one self-contained file: markup, styles, scripts and data, without network access."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from whatif.report.as_json import finite
from whatif.report.html import memory, network, overview, ranks, sensitive, step, what_ifs
from whatif.report.html.charts import Chart
from whatif.report.html.facts import Facts
from whatif.report.html.markup import Html, paragraph, section, tag, text
from whatif.report.html.timeline import timelines
from whatif.report.html.words import Words
from whatif.report.layout import CLOCK_SUBJECTS, ms_format, sentence_case
from whatif.report.text_sensitivity import as_dict
from whatif.runtime.files import VERSION, replacing
from whatif.units import counted

SCRIPTS = ("theme.js", "tables.js", "charts.js", "timeline_data.js", "timeline_view.js", "timeline.js")
# The parts that name what-ifs; the others show names of a trace, which may look like one.
NAMING = ("verdict", "what-ifs", "prediction", "network")
CHART_LIBRARY = "chart.umd.min.js"


def write_page(path: str | Path, facts: Facts) -> None:
    """Write the page to ``path`` atomically. Raises WhatifError if it cannot be written."""
    content = page(facts)
    with replacing(path) as part:
        part.write_text(content, encoding="utf-8")


def page(facts: Facts) -> str:
    """Return the whole page; equal facts give equal text."""
    charts: dict[str, Chart] = {}
    shown = timelines(facts.baseline, facts.prediction)
    sections = [
        overview.verdict(facts),
        overview.quality(facts),
        step.breakdown(facts, charts),
        step.flame(facts),
        step.layers(facts),
        step.kernels(facts),
        step.efficiency(facts, charts),
        step.steps(facts, charts),
        ranks.ranks(facts),
        what_ifs.what_ifs(facts, charts),
        what_ifs.prediction(facts),
        _timeline(shown, facts),
        memory.memory(facts, charts),
        network.network(facts, charts),
        sensitive.sensitivity(facts, charts),
    ]
    contents = _contents([*sections, overview.legend({})])
    words = Words.of(facts)
    sections = [part and words.explain(part, what_ifs=_ident(part) in NAMING) for part in sections]
    sections.append(overview.legend(words.used))
    name = facts.summary.graph.info.path or "a recording"
    body = [
        tag("a", "Skip to the answer", href="#verdict", class_="skip"),
        tag(
            "header",
            tag("h1", f"What-if report: {name}"),
            tag("button", "Dark", type="button", id="theme", hidden=True),
        ),
        contents,
        tag("main", *[part for part in sections if part is not None]),
        tag("footer", paragraph(f"Written by whatif {VERSION}. Charts: Chart.js (MIT licence).")),
        _data("charts", {ident: chart.to_dict() for ident, chart in charts.items()}),
        _data("timeline-data", shown),
        _data("facts", _facts(facts)),
    ]
    library, scripts = _script(_library()), _script("".join(_asset(f"assets/{script}") for script in SCRIPTS))
    style = Html(f"<style>{_asset('assets/style.css')}</style>")
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy([library, scripts], style)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"What-if report: {name}"),
        style,
    ]
    return f'<!doctype html>\n<html lang="en">{tag("head", *head)}\n{tag("body", *body, library, scripts)}\n</html>\n'


def _ident(part: Html) -> str:
    return part.split('id="', 1)[1].split('"', 1)[0]


def _contents(sections: Sequence[Html | None]) -> Html:
    """Links to the parts of the page."""
    links = []
    for part in sections:
        if part is None:
            continue
        ident = _ident(part)
        title = part.split(f'id="{ident}-title">', 1)[1].split("</h2>", 1)[0]
        links.append(tag("li", tag("a", Html(title), href=f"#{ident}")))
    return tag("nav", tag("ul", links), aria_label="Contents")


def _left_out(tasks: int, threads: int) -> str:
    """Return a sentence on what the timeline omits: the least busy threads with their tasks, and the shortest tasks."""
    if not tasks:
        return ""
    omitted = f"those of {counted(threads, 'more thread')}" if threads else "the shortest ones"
    return f" (left out: {counted(tasks, 'task')}, {omitted})"


def _timeline(shown: dict[str, Any], facts: Facts) -> Html:
    """The container of the timelines, and their text alternative."""
    sides, subject = shown["sides"], CLOCK_SUBJECTS[facts.baseline.clock]
    ms = ms_format(facts.baseline.step_ms)
    reported_ms = [facts.baseline.step_ms, *([facts.prediction.predicted_ms] if facts.prediction else [])]
    others = [ms(side["length_ns"] / 1e6) != ms(step_ms) for side, step_ms in zip(sides, reported_ms, strict=True)]
    sentences = [
        f"{side['title']}: {ms(side['length_ns'] / 1e6)} ms, {counted(side['n'], 'task')} on "
        f"{counted(len(side['threads']), 'execution thread')}" + _left_out(side["left_out"], side["hidden_threads"])
        for side in sides
    ]
    canvas = tag(
        "canvas",
        "; ".join(sentences),
        id="timeline-canvas",
        tabindex=0,
        role="application",
        aria_label=f"Timeline of {subject}. "
        + "; ".join(sentences)
        + ". Arrow keys go from task to task, plus and minus zoom.",
        aria_describedby="timeline-help",
    )
    return section(
        "timeline",
        f"{sentence_case(subject)}, task by task",
        paragraph("; ".join(sentences) + ".", class_="lead"),
        *([paragraph("The steps shown are those closest to the median step.", class_="note")] if any(others) else []),
        tag("div", id="timeline-tools", class_="tools"),
        tag("div", canvas, tag("div", id="timeline-tip", class_="tip", hidden=True), class_="timeline"),
        tag("p", id="timeline-task", class_="note", aria_live="polite"),
        tag("ul", id="timeline-legend", class_="legend"),
        paragraph(
            "Drag to move, Ctrl and the wheel or + and − to zoom, a double click zooms in, 0 shows all. "
            "Arrow keys go from task to task and from thread to thread.",
            class_="note",
        ),
        tag(
            "p",
            "Dark line below: on the critical path. Red line above: changed, added or removed by the what-if.",
            id="timeline-help",
            class_="note",
        ),
    )


def _facts(facts: Facts) -> dict[str, Any]:
    """The --json output of the commands, for programs that read the page."""

    def answer(found: Any) -> Any:
        return {"reason": found} if isinstance(found, str) else found.to_dict()

    ranks = {"ranks": facts.ranks.to_dict()} if facts.ranks else {}
    return {
        "info": {**facts.summary.to_dict(), **ranks},
        "explain": {**facts.explanation.to_dict(), **ranks},
        "efficiency": facts.efficiency.to_dict(),
        "flame": facts.flame.to_dict(),
        "steps": facts.steps.to_dict() if facts.steps else None,
        "advise": facts.advice.to_dict(),
        "apply": facts.prediction.to_dict() if facts.prediction else None,
        "sensitivity": as_dict(facts.sensitivity, facts.explanation),
        "memory": answer(facts.memory),
        "scaling": answer(facts.scaling),
        "sweep": answer(facts.bandwidth),
    }


def _data(ident: str, value: Any) -> Html:
    """A JSON object in the page, escaped so that it cannot close its element."""
    written = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        written = written.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{text(ident)}">{written}</script>\n')


def _script(source: str) -> Html:
    return Html(f"<script>{source}</script>\n")


def _asset(name: str) -> str:
    return files("whatif.report.html").joinpath(name).read_text(encoding="utf-8")


def _library() -> str:
    """The chart library without the line that makes developer tools fetch its source map."""
    lines = _asset(f"vendor/{CHART_LIBRARY}").splitlines()
    return "\n".join(line for line in lines if not line.startswith("//# sourceMappingURL="))


def _policy(scripts: Sequence[Html], style: Html) -> str:
    """A content security policy: nothing is fetched, and only these scripts and styles are allowed."""
    allowed = " ".join(_hash(script) for script in scripts)
    return f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"


def _hash(element: Html) -> str:
    """The hash of an element's content for the policy."""
    inner = element.split(">", 1)[1].rsplit("</", 1)[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'"
