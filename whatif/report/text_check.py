"""The text report of ``whatif check``: one line that says it, then the parts that grew most."""

from __future__ import annotations

from whatif.questions.comparison.regression import Regression, Status
from whatif.report.layout import ms_format, plain, print_table, print_title, report
from whatif.report.text_compare import count_cell, part_label

STYLES = {Status.OK: "bold green", Status.REGRESSED: "bold red", Status.NOT_COMPARABLE: "bold red"}


def print_regression(found: Regression) -> None:
    """Print what ``whatif check`` reports."""
    ms = ms_format(found.two.measured[0].ms)
    with report() as out:
        # On one line however narrow the page is: logs are searched by line.
        out.print(plain(found.verdict, STYLES[found.status]), soft_wrap=True)
        if found.grown:
            print_title(out, f"{found.parts_are.capitalize()} that grew most: work, ms a step")
            rows = []
            for change in found.grown:
                before, after = (
                    None if part is None else part.gpu_ms + part.cpu_ms for part in (change.before, change.after)
                )
                rows.append(
                    (part_label(change), ms(before), ms(after), f"+{ms(change.work_change_ms)}", count_cell(change))
                )
            print_table(out, ["", "baseline", "now", "change", "count"], rows)
        changed = [str(item) for item in found.two.differences if not item.blocks]
        if changed:
            print_title(out, "The recordings differ in")
            print_table(out, [" "], [(text,) for text in changed])
