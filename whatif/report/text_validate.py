"""The text report of ``whatif validate``: every pair, the score of each what-if, and what could not be compared."""

from __future__ import annotations

from whatif.questions.validate.validate import (
    MEDIAN_BOUND_PCT,
    Outcome,
    Score,
    Validation,
)
from whatif.report.layout import ms_format, number, report
from whatif.units import counted


def print_validation(validation: Validation) -> None:
    """Print the report of ``whatif validate``."""
    with report() as out:
        out.say(headline(validation), "bold")
        if validation.outcomes:
            out.say(origin(validation), "dim")
        for hardware in dict.fromkeys(outcome.pair.hardware for outcome in validation.outcomes):
            shown = [outcome for outcome in validation.outcomes if outcome.pair.hardware == hardware]
            bound = f"ok: an error of at most {shown[0].bound_pct:.0f} %; –: not scored"
            headers = ["", " ", "predicted", "range", " ", "measured", "error"]
            rows = [_row(outcome) for outcome in shown]
            out.table(f"{hardware}: a step, ms ({bound})", headers, rows, gives_way=1)
        remarked = [outcome.pair for outcome in validation.outcomes if outcome.pair.remark]
        out.points("Remarks", [f"{pair.question}: {pair.remark}" for pair in remarked])
        doubted = [(outcome.pair.question, doubt) for outcome in validation.outcomes for doubt in outcome.doubts]
        out.points("Doubts", [f"{question}: {doubt}" for question, doubt in doubted])
        if validation.outcomes:
            headers = ["", "scored", "median error", "largest", "inside range", "range's width"]
            scores = [*validation.by_kind.items(), ("all", validation.score)]
            rows = [(kind, *score_cells(score)) for kind, score in scores]
            out.table("By what-if (scored pairs)", headers, rows)
        rows = [(item.name, item.reason) for item in validation.unpaired]
        out.table(f"Not compared ({len(rows)})", ["", " "], rows, gives_way=1)


def headline(validation: Validation) -> str:
    """Return the result in one sentence."""
    score = validation.score
    if score.median_error_pct is None or score.largest_error_pct is None:
        return f"{counted(score.pairs, 'pair')}, none of them scored"
    uncertain, remarked = score.uncertain, score.pairs - score.scored - score.uncertain
    reasons = ((uncertain, "because the measured steps vary too much"), (remarked, "for the reason in their remark"))
    unscored = ", ".join(f"{count} {why}" for count, why in reasons if count)
    return (
        f"{score.scored} of {counted(score.pairs, 'pair')} scored: median error {score.median_error_pct:.1f} % "
        f"(target {MEDIAN_BOUND_PCT:.0f}), largest {score.largest_error_pct:.1f} %, "
        f"{score.within_bound} within bounds, {score.inside} inside their range"
        + (f". Not scored: {unscored}" if unscored else "")
    )


def origin(validation: Validation) -> str:
    """Return a sentence on what is compared."""
    recorded = {outcome.pair.changed_untraced is None for outcome in validation.outcomes}
    start = "corrected to its step without the profiler" if validation.calibrated else "as it was recorded"
    parts = {
        False: f"runs of a campaign: the baseline {start}, against the changed run's step without the profiler",
        True: "named pairs: the steps of both without the profiler, or as recorded if one lacks it",
    }
    return "; ".join(text for key, text in parts.items() if key in recorded)


def score_cells(score: Score) -> tuple[str, ...]:
    """Return the cells of a score: scored pairs, median and largest error, coverage of ranges, their full width."""
    values = (score.median_error_pct, score.largest_error_pct, score.median_width_pct)
    median, largest, width = (number(value, ".1f", " %") for value in values)
    inside = f"{score.inside} of {score.scored}" if score.scored else "–"
    return f"{score.scored} of {score.pairs}", median, largest, inside, width


def _row(outcome: Outcome) -> tuple[str, ...]:
    ms = ms_format(outcome.measured_ms)
    mark = "ok" if outcome.within_bound else "over"
    return (
        mark if outcome.scored else "–",
        outcome.pair.question,
        ms(outcome.predicted_ms),
        f"{ms(outcome.low_ms)} … {ms(outcome.high_ms)}",
        "in" if outcome.inside else "out",
        ms(outcome.measured_ms),
        f"{outcome.error_pct:+z.1f} %",
    )
