"""The tables of ``whatif validate`` in Markdown, for pages that are shared."""

from __future__ import annotations

from whatif.questions.validate.validate import Outcome, Validation
from whatif.report.layout import markdown_table, ms_format, sentence_case
from whatif.report.printable import printable
from whatif.report.text_validate import headline, origin, score_cells

SCORE_HEADERS = ("what-if", "scored", "median error", "largest", "inside the range", "width of the range")


def page(validation: Validation) -> str:
    """Return the validation as a whole page."""
    sections = [f"# Validation\n\n{_sentence(headline(validation))}"]
    if validation.outcomes:
        sections.append(_sentence(origin(validation)))
        sections.append(f"## Pairs\n\n{pairs_table(validation)}")
        sections.append(f"## By what-if\n\n{scores_table(validation)}")
    if validation.unpaired:
        sections.append(f"## Not compared\n\n{not_compared_table(validation)}")
    return "\n\n".join(sections) + "\n"


def pairs_table(validation: Validation) -> str:
    """Return every pair: times in ms, the error, and remarks."""
    headers = ("pair", "on", "baseline", "predicted", "range", "measured", "error", "raw", "remarks")
    return markdown_table(headers, [_row(outcome) for outcome in validation.outcomes])


def scores_table(validation: Validation) -> str:
    """Return the score of each kind of what-if, and of all."""
    scores = [*validation.by_kind.items(), ("all", validation.score)]
    return markdown_table(SCORE_HEADERS, [(kind, *score_cells(score)) for kind, score in scores])


def not_compared_table(validation: Validation) -> str:
    """Return the runs without a prediction to compare, and the reasons."""
    return markdown_table(("run", "why"), [(item.name, item.reason) for item in validation.unpaired])


def _row(outcome: Outcome) -> tuple[str, ...]:
    pair, ms, spread = outcome.pair, ms_format(outcome.measured_ms), outcome.truth_spread_pct
    remarks = [] if outcome.within_bound else [f"**over {outcome.bound_pct:.0f} %**"]
    remarks += [] if outcome.inside else ["**outside the range**"]
    remarks += [] if outcome.scored else ["not scored"]
    remarks += ["measured too uncertainly"] if outcome.uncertain else []
    remarks += [pair.remark] if pair.remark else []
    remarks += outcome.doubts
    return (
        pair.question,
        pair.hardware,
        f"{ms(outcome.baseline_ms)} ms",
        f"{ms(outcome.predicted_ms)} ms",
        f"{ms(outcome.low_ms)} … {ms(outcome.high_ms)}",
        f"{ms(outcome.measured_ms)} ms" + ("" if spread is None else f" ± {spread:.1f} %"),
        f"{outcome.error_pct:+z.1f} %",
        "–" if outcome.raw_ms is None else f"{ms(outcome.raw_ms)} ms ({outcome.raw_error_pct:+z.1f} %)",
        "; ".join(remarks),
    )


def _sentence(text: str) -> str:
    return printable(f"{sentence_case(text)}.")
