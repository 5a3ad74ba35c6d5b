"""``whatif info``: what is in a trace, the quirks met, and how well its replay meets the recording."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_calibration, add_clock, add_json
from whatif.cli.rank_files import add_traces, read_traces


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif info``."""
    add_traces(parser)
    add_clock(parser)
    add_calibration(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the summary of a trace."""
    graph, ranks = read_traces(args.traces)
    from whatif.predict import Baseline
    from whatif.summary import summarize

    baseline = Baseline.of(graph, args.clock, calibrated=args.calibrated)
    summary = summarize(baseline)
    found = None
    if ranks is not None:
        from whatif.ranks.stragglers import report

        found = report(ranks, baseline)
    if args.json:
        from whatif.report.as_json import print_json

        print_json({**summary.to_dict(), **({"ranks": found.to_dict()} if found else {})})
        return 0
    from whatif.report.text import print_summary

    print_summary(summary)
    if found is not None:
        from whatif.report.text_ranks import print_clocks

        print_clocks(found, top=10)
    return 0
