"""The report of ``whatif explain --sensitivity``: the gain of a step if one of its parts gets faster."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from whatif.questions.explain import Explanation, step_facts
from whatif.questions.sensitivity import (
    CHANGES_NOTHING,
    HIDDEN,
    HIDDEN_BELOW,
    KINDS,
    Sensitivity,
)
from whatif.report.layout import CLOCK_SUBJECTS, Report, ms_format, plain, report, some_of
from whatif.report.text_explain import print_no_layers, short_name

# The kinds of parts that a headline can recommend: nobody can optimize a thread or a side of the machine as such.
WORKED_ON = ("layer", "family")
# The least gain for a headline, percent of the step.
HEADLINE_PCT = 0.5


def as_dict(found: Sensitivity, explanation: Explanation) -> dict[str, Any]:
    """Return the report as a JSON object with the keys that scripts rely on."""
    known = explanation.to_dict()
    return {
        **step_facts(found.baseline),
        **{key: known[key] for key in ("calibration", "verdict") if key in known},
        "speedups_pct": list(found.speedups_pct),
        "parts": dict(found.n_parts),
        "sensitivity": found.to_dict(),
        "warnings": list(explanation.warnings),
    }


def kind_titles(has_gpu: bool) -> dict[str, str]:
    """Return the heading of each kind of part."""
    return {
        "side": "GPU and CPU",
        "phase": "Phases",
        "thread": "Execution threads",
        "family": "Kernel families" if has_gpu else "Operator families",
        "layer": "Layers",
    }


def print_sensitivity(found: Sensitivity, explanation: Explanation) -> None:
    """Print a table for each kind of part."""
    baseline, subject = found.baseline, CLOCK_SUBJECTS[found.baseline.clock]
    titles = kind_titles(baseline.graph.has_gpu)
    with report() as out:
        out.say(headline(found), "bold")
        out.say(explanation.verdict)
        out.step(baseline)
        out.say()
        faster = ", ".join(f"{speedup:g} %" for speedup in found.speedups_pct)
        out.say(f"  {faster}: gain, in percent of {subject}, if the part takes that much less time", "dim")
        out.say(f"  work %: of {subject}; it adds up over threads, so it can be above 100", "dim")
        for kind in KINDS:
            _print_kind(out, found, kind, titles[kind])
        if not found.n_parts.get("layer"):
            print_no_layers(out)
        notes = {found.note(part) for part in found.parts} - {""}
        if notes:
            out.say()
        if HIDDEN in notes:
            share = f"{100 * HIDDEN_BELOW:.0f} %"
            out.say(f"  {HIDDEN}: overlaps with other work; less than {share} of its time counts", "dim")
        if CHANGES_NOTHING in notes:
            out.say(f"  {CHANGES_NOTHING}: {subject} takes as long even if the part takes no time", "dim")


def headline(found: Sensitivity) -> str:
    """Return a sentence on the part that is most worth optimizing."""
    at = found.speedups_pct.index(50.0)
    best = [part for kind in WORKED_ON for part in found.of_kind(kind)[:1]]
    worth = [part for part in best if found.pct(part.gain_ms[at]) >= HEADLINE_PCT]
    worth.sort(key=lambda part: -part.gain_ms[at])
    subject = CLOCK_SUBJECTS[found.baseline.clock]
    family = f"{'kernel' if found.baseline.graph.has_gpu else 'operator'} family"
    if not worth:
        kinds = "layer and no " if found.n_parts.get("layer") else ""
        return f"no {kinds}{family} shortens {subject} by {HEADLINE_PCT} % if it takes 50 % less time."
    of = {"layer": "layer", "family": family}
    named = [f"best {of[part.kind]}: {part.name}, {found.pct(part.gain_ms[at]):.1f} % of {subject}" for part in worth]
    return f"gain if one part takes half its time: {'; '.join(named)}."


def _print_kind(out: Report, found: Sensitivity, kind: str, heading: str) -> None:
    parts = found.of_kind(kind)
    ms = ms_format(found.step_ms)
    headers = ["", "work ms", "work %", *(f"{speedup:g} %" for speedup in found.speedups_pct), " "]
    rows: list[tuple[str | Text, ...]] = [
        (
            short_name(part.name),
            ms(part.work_ms),
            gain_cell(found.pct(part.work_ms)),
            *(gain_cell(found.pct(gain_ms)) for gain_ms in part.gain_ms),
            plain(found.note(part), "dim"),
        )
        for part in parts
    ]
    out.table(some_of(heading, len(parts), found.n_parts.get(kind, 0)), headers, rows)


def gain_cell(value: float) -> str:
    """Format a gain in percent, without the sign."""
    # Adding zero turns -0.0, which would be printed with its sign, into 0.0.
    return f"{round(value, 1) + 0.0:.1f}"
