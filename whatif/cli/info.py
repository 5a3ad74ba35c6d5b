"""``whatif info``: the contents of a trace, its quirks, and how well its replay matches the recording."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_analysis
from whatif.cli.rank_files import add_ranks, add_traces, read_traces
from whatif.cli.reading import show
from whatif.cli.trusted import baseline_of, weigh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif info``."""
    add_traces(parser)
    add_ranks(parser)
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Print the summary of a trace, also of one that other commands refuse; then refuse it as they do."""
    graph, ranks = read_traces(args.traces, args)
    from whatif.questions.summary import summarize

    baseline = baseline_of(args, graph, refuses=False)
    summary = summarize(baseline)
    found = None
    if ranks:
        from whatif.questions.stragglers import report

        found = report(ranks, baseline)

    def print_text() -> None:
        from whatif.report.text_info import print_summary

        print_summary(summary)
        if found is not None:
            from whatif.report.text_ranks import print_clocks

            print_clocks(found, top=10)

    show(args, lambda: {**summary.to_dict(), **({"ranks": found.to_dict()} if found else {})}, print_text)
    weigh(args, baseline)
    return 0
