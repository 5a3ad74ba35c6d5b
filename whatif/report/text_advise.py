"""The text report of ``whatif advise``: three sentences, then what gains, why, and what does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from whatif.questions.advice.advise import Advice, Ranked
from whatif.questions.advice.reasons import peak_told
from whatif.questions.advice.trial import Refusal
from whatif.report.layout import CLOCK_LABELS, CLOCK_SUBJECTS, ms_format, plain, print_table, print_title, report
from whatif.simulation.steps import RECORDED


def print_advice(advice: Advice, top: int = 10) -> None:
    """Print what ``whatif advise`` reports, ``top`` rows of each ranked table."""
    baseline = advice.baseline
    step_ms = baseline.step_ns / 1e6
    what = CLOCK_SUBJECTS[baseline.clock]
    with report() as out:
        for sentence in advice.verdict:
            out.print(plain(sentence, "bold"))
        ms = ms_format(step_ms)
        name = Path(baseline.graph.info.path).name
        out.print(plain(f"{name}: {what} takes {ms(step_ms)} ms ({CLOCK_LABELS[baseline.clock]})", "dim"))
        _print_ranked(out, advice, "Alone", advice.gaining[:top])
        _print_ranked(out, advice, "Together", advice.together[:top])
        _print_reasons(out, "Too large for the device's memory", advice.too_large)
        _print_reasons(out, "No gain", advice.not_gaining)
        for title, why in (
            ("Does not apply", Refusal.NOT_APPLICABLE),
            ("Partly done already", Refusal.IN_PART),
            ("Not judged", Refusal.ELSEWHERE),
            ("Failed", Refusal.FAILED),
        ):
            path = baseline.graph.info.path
            refused = [r for r in advice.refused if r.why == why]
            rows = [(" + ".join(r.spelled), r.reason.replace(path, name) if path else r.reason) for r in refused]
            if rows:
                print_title(out, title)
                print_table(out, ["", " "], rows, gives_way=1)
        if advice.hypothetical:
            out.print()
            names = ", ".join(advice.hypothetical)
            out.print(
                plain(f"Not tried, because these are questions, not optimizations: {names}; see whatif apply.", "dim")
            )


def _print_ranked(out: Console, advice: Advice, title: str, entries: Sequence[Ranked]) -> None:
    """The numbers of some entries, and behind them why each gains."""
    if not entries:
        return
    step_ms = advice.baseline.step_ns / 1e6
    ms = ms_format(step_ms)
    batches = any(not entry.trial.same_training for entry in entries)
    remark = f" (*: for the samples of {RECORDED[advice.baseline.clock]}, whose batch changes)" if batches else ""
    headers = ["", " ", "gain", "range", "ms", "effort"]
    with_memory = advice.peak_bytes is not None
    if with_memory:
        headers.insert(5, "peak memory")
    rows = []
    for place, entry in enumerate(entries, 1):
        trial, gains = entry.trial, entry.gain_range_pct
        row = [
            str(place),
            _name(entry),
            f"{trial.gain_pct:.1f} %",
            f"{round(gains[0])} … {round(gains[1])} %" if gains else "–",
            ms(trial.recorded_samples_ms) + ("" if trial.same_training else "*"),
            _effort(entry),
        ]
        if with_memory:
            row.insert(5, peak_told(trial, advice.peak_bytes))
        rows.append(row)
    print_title(out, f"{title}: gain in time{remark}")
    print_table(out, headers, rows, gives_way=1)
    out.print()
    print_table(out, ["", " "], [(str(place), entry.reason) for place, entry in enumerate(entries, 1)], gives_way=1)


def _print_reasons(out: Console, title: str, entries: Sequence[Ranked]) -> None:
    if entries:
        print_title(out, title)
        rows = [(_name(entry), f"{entry.trial.gain_pct:+.1f} %", entry.reason) for entry in entries]
        print_table(out, ["", "gain", " "], rows, gives_way=2)


def _name(entry: Ranked) -> str:
    return " + ".join(entry.trial.spelled)


def _effort(entry: Ranked) -> str:
    name = entry.trial.effort.size.name.lower()
    return "–" if name == "unknown" else name
