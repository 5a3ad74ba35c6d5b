"""The text reports of ``whatif advise``: the decision, and with ``--all`` all gains, reasons, and refusals."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from whatif.prediction.baseline import Baseline
from whatif.questions.advice.advise import Advice, Ranked
from whatif.questions.advice.reasons import peak_cell
from whatif.questions.advice.trial import Refusal, Refused
from whatif.questions.lines import OUTSIDE
from whatif.report.layout import Report, ms_format, report
from whatif.report.text_efficiency import print_savings
from whatif.simulation.steps import CLOCK_NOUNS, RECORDED

# The heading of what makes a step fit that is too large for its device.
MAKE_FIT = "What makes it fit"
# The heading of the list, and the noun for the count.
REFUSED = (
    ("Does not apply", "that do not apply", Refusal.NOT_APPLICABLE),
    ("Partly done already", "partly done already", Refusal.IN_PART),
    ("Not judged", "not judged", Refusal.ELSEWHERE),
    ("Failed", "that failed", Refusal.FAILED),
)


def print_decision(advice: Advice, top: int = 3, named: Collection[str] = ()) -> None:
    """Print what to do first and the ``top`` single what-ifs; three of them take about 15 lines.

    What-ifs ``named`` by the user are shown at any rank, with the reason if they do not gain.
    """
    ranks = {place: entry for place, entry in enumerate(advice.alone, 1) if place <= top or _is_of(named, entry)}
    shown = list(ranks.values())
    further = () if advice.fits else advice.together[:top]  # what makes it fast, once it fits
    others = len(advice.together) - len(further)
    rest = [
        f"{count} {noun}"
        for noun, count in (
            ("that gain" if advice.fits else "that make it fit", len(advice.alone) - len(shown)),
            ("combination" if others == 1 else "combinations", others),
            ("without gain", len(advice.not_gaining)),
            ("too large", len(advice.too_large)),
            *((counted, sum(refused.why == why for refused in advice.refused)) for _, counted, why in REFUSED),
        )
        if count
    ]
    with report() as out:
        _print_verdict(out, advice)
        if shown:
            headers, rows = _ranked_rows(advice, shown, list(ranks))
            title = "" if advice.fits else MAKE_FIT
            out.table(title, [headers[0], "what-if", *headers[2:]], rows, text_columns=2, gives_way=1)
        if further:
            headers, rows = _ranked_rows(advice, further, range(1, len(further) + 1))
            out.table("Together", [headers[0], "what-ifs", *headers[2:]], rows, text_columns=2, gives_way=1)
        _print_lines(out, advice)
        for title, entries in (
            ("Too large for the device's memory", advice.too_large),
            ("No gain", advice.not_gaining),
        ):
            _print_reasons(out, title, [entry for entry in entries if _is_of(named, entry)])
        print_refused(out, "Does not apply", [r for r in advice.refused if {*r.spelled} <= {*named}], advice.baseline)
        if not all(entry.trial.same_training for entry in (*shown, *further)):
            out.say(f"{other_batch(advice.baseline)}.", "dim")
        _print_doubts(out, [*shown, *further])
        if rest:
            out.say(f"Not shown without --all: {', '.join(rest)}.", "dim")


def print_advice(advice: Advice, top: int = 10) -> None:
    """Print the report of ``whatif advise --all``, ``top`` rows of each ranked table."""
    baseline = advice.baseline
    with report() as out:
        _print_verdict(out, advice)
        _print_ranked(out, advice, "Alone" if advice.fits else MAKE_FIT, advice.alone[:top])
        _print_ranked(out, advice, "Together", advice.together[:top])
        _print_doubts(out, [*advice.alone[:top], *advice.together[:top]])
        _print_reasons(out, "Too large for the device's memory", advice.too_large)
        _print_reasons(out, "No gain", advice.not_gaining)
        for title, _, why in REFUSED:
            print_refused(out, title, [r for r in advice.refused if r.why == why], baseline)
        _print_lines(out, advice)
        print_savings(out, advice.savings, CLOCK_NOUNS[baseline.clock])
        if advice.hypothetical:
            out.say()
            names = ", ".join(advice.hypothetical)
            out.say(
                f"Not tried, because these are hypothetical or need several GPUs: {names}; see whatif apply.", "dim"
            )


def _print_doubts(out: Report, entries: Sequence[Ranked]) -> None:
    """Print which of the entries shown fit by their predicted peak, but not by the end of its range."""
    for sentence in filter(None, (entry.doubt for entry in entries)):
        out.say(f"{sentence}.", "dim")


def other_batch(baseline: Baseline) -> str:
    """Return the footnote of starred times, whose what-if changes the batch."""
    return f"*: another batch size; time scaled to the samples of {RECORDED[baseline.clock]}"


def _print_lines(out: Report, advice: Advice) -> None:
    """Print the lines that cost much, and those whose waits remove_syncs removes, each with its gain alone."""
    ms = ms_format(advice.baseline.step_ms)
    rows = [(line.line, f"{line.waits:,.3g}", ms(line.blocked_ms), ms(line.gain_ms)) for line in advice.waiting]
    costly = [(line.line, ms(line.mean_ms), ms(line.gain_ms), f"{line.gain_pct:.1f} %") for line in advice.costly]
    out.table(
        f"Lines of your code {OUTSIDE}, per mean {CLOCK_NOUNS[advice.baseline.clock]}",
        ["", "mean CPU ms", "gain ms without it", "gain"],
        costly,
        gives_way=0,
    )
    out.table(
        "Lines of your code that wait for the GPU (remove_syncs removes these waits), per step",
        ["", "waits", "blocked ms", "gain ms"],
        rows,
        gives_way=0,
    )


def print_refused(out: Report, title: str, refused: Sequence[Refused], baseline: Baseline) -> None:
    """Print refused what-ifs with the reasons, naming the recording without its folders."""
    path = baseline.graph.info.path
    short = [r.reason.replace(path, Path(path).name) if path else r.reason for r in refused]
    rows = [(r.label, reason) for r, reason in zip(refused, short, strict=True)]
    out.table(title, ["", " "], rows, gives_way=1)


def _print_verdict(out: Report, advice: Advice) -> None:
    for sentence in advice.verdict:
        out.say(sentence, "bold")
    out.step(advice.baseline)


def _print_ranked(out: Report, advice: Advice, title: str, entries: Sequence[Ranked]) -> None:
    """Print the numbers of some entries, followed by the reasons of their gains."""
    batches = any(not entry.trial.same_training for entry in entries)
    remark = f" ({other_batch(advice.baseline)})" if batches else ""
    headers, rows = _ranked_rows(advice, entries, range(1, len(entries) + 1))
    out.table(f"{title}: gain in time{remark}", headers, rows, gives_way=1)
    out.table("", ["", " "], [(str(place), entry.reason) for place, entry in enumerate(entries, 1)], gives_way=1)


def _is_of(named: Collection[str], entry: Ranked) -> bool:
    return {*entry.trial.spelled} <= {*named}


def _ranked_rows(advice: Advice, entries: Sequence[Ranked], places: Sequence[int]) -> tuple[list[str], list[list[str]]]:
    """Return the headers and rows of a table of entries at given places of the ranking."""
    ms = ms_format(advice.baseline.step_ms)
    headers = ["", " ", "gain", "range", "ms", "effort"]
    with_memory = advice.peak_bytes is not None
    if with_memory:
        headers.insert(5, "peak memory")
    rows = []
    for place, entry in zip(places, entries, strict=True):
        trial = entry.trial
        row = [
            str(place),
            entry.trial.label,
            f"{trial.gain_pct:.1f} %",
            f"{gain_range(entry)} %" if entry.range_ms else "–",
            ms(trial.recorded_samples_ms) + ("" if trial.same_training else "*"),
            effort(entry),
        ]
        if with_memory:
            row.insert(5, peak_cell(trial, advice.peak_bytes))
        rows.append(row)
    return headers, rows


def _print_reasons(out: Report, title: str, entries: Sequence[Ranked]) -> None:
    rows = [(entry.trial.label, f"{entry.trial.gain_pct:+z.1f} %", entry.reason) for entry in entries]
    out.table(title, ["", "gain", " "], rows, gives_way=2)


def gain_range(entry: Ranked) -> str:
    """Return the ends of the range of a gain, percent."""
    # Rounded to whole numbers first: a format would write -0.
    return " … ".join(str(round(end)) for end in entry.gain_range_pct or ())


def effort(entry: Ranked) -> str:
    """Return the effort of a what-if, in a word."""
    name = entry.trial.effort.size.name.lower()
    return "–" if name == "unknown" else name
