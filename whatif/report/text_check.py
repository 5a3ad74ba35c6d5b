"""The text report of ``whatif check``: one line that says it, then causes and the parts that grew most."""

from __future__ import annotations

from whatif.questions.comparison.part_changes import work_ms
from whatif.questions.comparison.regression import Regression, Status
from whatif.report.layout import markdown_table, ms_format, report, sentence_case
from whatif.report.printable import printable
from whatif.report.text_compare import change_row, print_causes

STYLES = {Status.OK: "bold green", Status.REGRESSED: "bold red", Status.NOT_COMPARABLE: "bold red"}


def print_regression(found: Regression) -> None:
    """Print what ``whatif check`` reports."""
    ms = ms_format(found.two.measured[0].ms)
    with report() as out:
        # On one line however narrow the page is: logs are searched by line.
        out.say(found.verdict, STYLES[found.status], soft_wrap=True)
        print_causes(out, found.causes, ms)
        title = f"{found.parts_are.capitalize()} that grew most: work, ms a step"
        rows = [change_row(change, work_ms, ms) for change in found.grown]
        out.table(title, ["", "baseline", "now", "change", "count"], rows)
        changed = [str(item) for item in found.two.differences if not item.blocks]
        out.table("The recordings differ in", [" "], [(text,) for text in changed])


def markdown(found: Regression) -> str:
    """Return the verdict for a pull request: the sentence, the critical paths and the parts that grew most."""
    ms = ms_format(found.two.measured[0].ms)
    verdict, _, cause = found.verdict.partition("; cause: ")
    sections = [f"**{printable(sentence_case(verdict))}**"]
    if cause:
        sections.append(f"Cause: {printable(cause)}.")
    if found.causes:
        rows = [
            (each.name, ms(each.before_ms), ms(each.after_ms), f"{each.change_ms:+,.2f}", each.where)
            for each in found.causes
        ]
        sections.append(markdown_table(("critical path, ms a step", "baseline", "now", "change", "most in"), rows))
    if found.grown:
        grown = [change_row(change, work_ms, ms) for change in found.grown]
        headers = (f"{found.parts_are} that grew most, ms", "baseline", "now", "change", "count")
        sections.append(markdown_table(headers, grown))
    sections += [f"- differs in {printable(str(item))}" for item in found.two.differences if not item.blocks]
    sections += [f"> {printable(sentence_case(warning))}." for warning in found.warnings]
    return "\n\n".join(sections)
