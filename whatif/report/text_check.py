"""The text report of ``whatif check``: the verdict in one line, then causes and the parts that grew most."""

from __future__ import annotations

from whatif.questions.comparison.part_changes import PartChange, work_ms
from whatif.questions.comparison.regression import Regression, Status
from whatif.report.layout import ms_format, report
from whatif.report.text_compare import change_row, markdown_report, print_causes, say_whose

STYLES = {Status.OK: "bold green", Status.REGRESSED: "bold red", Status.NOT_COMPARABLE: "bold red"}
SIDES = ("baseline", "now")
HEADERS = ("", *SIDES, "change")


def print_regression(found: Regression) -> None:
    """Print the report of ``whatif check``."""
    ms = ms_format(found.two.measured[0].ms)
    with report() as out:
        # On one line at any page width: logs are searched by line.
        out.say(found.verdict, STYLES[found.status], soft_wrap=True)
        print_causes(out, found.causes, ms, HEADERS)
        for noun, parts in _grown(found):
            rows = [change_row(change, work_ms, ms) for change in parts]
            out.table(f"{noun.capitalize()} that grew most: work, ms a step", [*HEADERS, "tasks"], rows)
        if found.grown:
            say_whose(out, found.two)
        changed = [str(item) for item in found.two.differences if not item.blocks]
        out.table("The recordings differ in", [" "], [(text,) for text in changed])


def markdown(found: Regression) -> str:
    """Return the verdict for a pull request: the sentence, the critical paths and the parts that grew most."""
    verdict, _, cause = found.verdict.partition("; cause: ")
    grown = [(f"{noun} that grew most", parts, work_ms) for noun, parts in _grown(found)]
    differs = [str(item) for item in found.two.differences if not item.blocks]
    return markdown_report(verdict, cause, found.causes, grown, differs, found.warnings, found.two, SIDES)


def _grown(found: Regression) -> list[tuple[str, tuple[PartChange, ...]]]:
    """The parts that grew, the most useful first: layers, or lines if there are none, then kernels or operators."""
    parts, lines = (found.parts_are, found.grown), ("lines", found.lines)
    return [parts, lines] if found.parts_are == "layers" else [lines, parts]
