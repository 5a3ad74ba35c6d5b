"""The reports of ``whatif opdb``, as text or as one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whatif.opdb.asking import Reply
from whatif.opdb.checking import Check
from whatif.opdb.evaluate import Evaluation, Score
from whatif.opdb.merging import Difference, Merged
from whatif.opdb.provenance import Basis, Provenance
from whatif.report.layout import report
from whatif.units import counted

# Labels of the sources of an answer.
_SOURCES = {
    "exact": "measured",
    "interpolated": "interpolated between measured sizes",
    "learned": "learned from what was measured there",
    "same_chip": "learned from what was measured on another board of the same chip",
    "same_shape": "the same operator on other devices",
    "learned_across": "learned from what was measured on other devices",
    "analytic": "from the device's data sheet alone",
}


def print_merged(done: Merged, folder: Path | str) -> None:
    """Print the result of an import, merge or export."""
    with report() as out:
        already = f", {len(done.present)} known" if done.present else ""
        refused = f", {len(done.refused)} refused" if done.refused else ""
        added = f"{counted(len(done.added), 'contribution')} added"
        out.say(f"{folder}: {added} ({counted(done.rows, 'row')}){already}{refused}")


def print_reply(reply: Reply) -> None:
    """Print the database's answer for one operator."""
    time = _time_format(reply.t_s or 0.0)
    with report() as out:
        attributes = {k: v for k, v in reply.operator.items() if k not in ("family", "name") and v != ""}
        name = f"{reply.operator['name']}: {', '.join(f'{k}={v}' for k, v in attributes.items())}"
        out.say(f"{time(reply.t_s)} on {reply.device}", "bold")
        rows = [
            ("operator", name),
            ("range (90 %)", f"{time(reply.low_s)} … {time(reply.high_s)}"),
            ("source", _source(reply)),
        ]
        if reply.basis or reply.operator["family"] != "collective":
            computed = f"computed, {'with' if reply.includes_launch else 'without'} launch"
            rows.append(("times", _method(reply.basis) if reply.basis else computed))
        out.table(None, ["", " "], rows, gives_way=1)
        measured = [
            (str(m.contribution["contribution"]), time(m.t_s), _where(m.contribution), m.aside)
            for m in reply.measurements
        ]
        out.table(f"Measurements ({len(measured)})", ["contribution", "time", " ", " "], measured, gives_way=2)


def print_contributions(contributions: Sequence[Provenance], folder: Path) -> None:
    """Print the contributions of a database."""
    with report() as out:
        devices = {c.origin.device.name for c in contributions}
        total = sum(c.rows for c in contributions)
        out.say(f"{folder}: {_held(total, len(contributions))}, {counted(len(devices), 'device')}", "bold")
        rows = [
            (
                c.origin.device.name, c.family, f"{c.rows:,}", _method(c.origin.basis),
                " ".join(filter(None, (c.origin.source.tool, c.origin.source.licence))), c.contribution[:12],
            )
            for c in sorted(contributions, key=lambda c: (c.origin.device.name, c.family, c.contribution))
        ]  # fmt: skip
        out.table(None, ["device", " ", "rows", " ", " ", " "], rows, gives_way=3)


def print_difference(difference: Difference, first: Path, second: Path) -> None:
    """Print the differences between two databases."""
    with report() as out:
        out.say(
            f"{difference.both} contributions in both, {len(difference.only_first)} only in {first}, "
            f"{len(difference.only_second)} only in {second}",
            "bold",
        )
        rows = [
            (
                side,
                c.provenance.origin.device.name,
                c.provenance.family,
                f"{c.provenance.rows:,}",
                c.provenance.contribution[:12],
            )
            for side, part in (("first", difference.only_first), ("second", difference.only_second))
            for c in part
        ]
        out.table(None, ["only in", "device", "family", "rows", " "], rows, text_columns=3)
        compared = [
            (c.device, c.family, f"{c.operators:,}", *map("{:.3f}".format, (c.ratio_p5, c.ratio_median, c.ratio_p95)))
            for c in difference.compared
        ]
        headers = ["device", "family", "operators", "5 %", "median", "95 %"]
        out.table("Measured by both: the second's time / the first's", headers, compared, text_columns=2)


def _held(rows: int, contributions: int) -> str:
    return f"{counted(rows, 'row')} in {counted(contributions, 'contribution')}"


def print_check(check: Check, folder: Path) -> None:
    """Print the state of a database."""
    with report() as out:
        state = counted(len(check.problems), "problem") if check.problems else "sound"
        out.say(f"{folder}: {state}; {_held(check.rows, check.contributions)}", "bold")
        for sentence in check.problems:
            out.say(sentence)
        rows = [(a.device, a.operator, f"{a.rows:,}", f"{a.impossible:,}", f"{a.stray:,}") for a in check.set_aside]
        out.table("Set aside: kept but not used", ["device", " ", "rows", "impossible", "stray"], rows)


def print_evaluation(found: Evaluation) -> None:
    """Print the errors of the estimators."""
    with report() as out:
        how = (
            "device by device"
            if found.seed is None or found.share is None
            else f"{found.share:.0%} of the operators, seed {found.seed}"
        )
        sources = ", ".join(f"{count:,} {name}" for name, count in found.sources.items())
        out.say(
            f"{found.held_out:,} of {found.rows:,} rows held out ({how}): "
            f"mean error {found.total.mape_pct:.1f} %, median {found.total.median_pct:.1f} %; "
            f"90 % ranges hold {found.total.coverage_pct:.1f} %",
            "bold",
        )
        out.say(f"answered by: {sources}", "dim")
        headers = ["", "rows", "mean", "median", "90 %", "bias", "in range", "half-width"]
        printed = [f"{v:.2f}" if (v := found.published.mape_pct.get(s.name)) else "" for s in found.by_operator]
        rows = [(s.name, *_score(s), p) for s, p in zip((*found.by_operator, found.total), [*printed, ""], strict=True)]
        columns = len(headers) + any(printed)
        title = "By operator, percent of the measured time (90 %: 90th percentile)"
        out.table(title, [*headers, "printed"][:columns], [row[:columns] for row in rows])
        if any(printed):
            out.say(f"printed: {found.published.source}", "dim")
        if found.by_model:
            kinds = sorted(found.by_model[0].mape_pct)
            table = [
                (
                    m.name, m.device, f"{m.rows:,}", *(f"{m.mape_pct[kind]:.2f}" for kind in kinds),
                    f"{m.chain_pct:.2f}",
                    f"{p:.2f}" if (p := found.published.mape_pct.get(m.name)) else "",
                )
                for m in found.by_model
            ]  # fmt: skip
            title = "Models side by side: mean error on the rows that all of them answer, percent"
            out.table(title, ["", "device", "rows", *kinds, "answer", "printed"], table, text_columns=2)
        by_source = [(s.source, s) for s in found.by_source] if len(found.sources) > 1 else []
        for heading, scores in (("source", by_source), ("device", [(s.device, s) for s in found.by_device])):
            cells = [(s.name, of, *_score(s)) for of, s in scores]
            out.table(f"By operator and {heading}", ["", " ", *headers[1:]], cells, text_columns=2, gives_way=1)
        if found.errors:
            asked = [
                (f"{e.name} {e.dtype}", e.device, e.source, f"{e.rows:,}", f"{e.bias_log:+z.2f}", f"{e.rms_log:.2f}")
                for e in sorted(found.errors, key=lambda e: (e.family, e.name, e.dtype, e.device))
            ]
            title = "Each source asked alone: error on the device left out, log"
            out.table(title, ["", "device", "source", "rows", "bias", "rms"], asked, text_columns=3, gives_way=1)


def _score(score: Score) -> tuple[str, ...]:
    if not score.answered:
        return (f"{score.rows:,}", *["–"] * 6)
    missing = f" ({score.rows - score.answered:,} unanswered)" if score.answered < score.rows else ""
    return (
        f"{score.rows:,}{missing}", f"{score.mape_pct:.1f}", f"{score.median_pct:.1f}", f"{score.p90_pct:.1f}",
        f"{score.bias_pct:+z.1f}", f"{score.coverage_pct:.1f}", f"{score.half_width_pct:.1f}",
    )  # fmt: skip


def _source(reply: Reply) -> str:
    source = _SOURCES[reply.answered_by]
    if reply.answered_by == "analytic" and reply.basis:
        source = "mostly from the device's data sheet, and what was measured on other devices"
    if reply.evidence:
        noun = "device" if reply.answered_by == "same_shape" else "row"
        source += f" ({counted(reply.evidence, noun)})"
    if reply.outside_doublings > 0:
        source += f"; {reply.outside_doublings:.1f} doublings beyond what was measured: the range is wider"
    return source


def _where(contribution: dict[str, Any]) -> str:
    return " ".join(
        str(contribution[k]) for k in ("framework", "framework_version", "tool", "author") if contribution[k]
    )


def _method(basis: Basis) -> str:
    parts = [
        basis.framework if basis.framework != "unknown" else "",
        basis.method.replace("_", " "),
        basis.launch if basis.launch != "unknown" else "",
        f"{basis.cache} cache" if basis.cache != "unknown" else "",
    ]
    return ", ".join(filter(None, parts))


def _time_format(t_s: float) -> Callable[[float | None], str]:
    """Return a formatter for the times of a report, in the largest unit that is not above ``t_s``."""
    unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if t_s * s >= 1), ("us", 1e6))

    def write(value: float | None) -> str:
        return "–" if value is None else f"{value * scale:.4g} {unit}"

    return write
