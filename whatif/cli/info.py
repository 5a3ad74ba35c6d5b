"""``whatif info``: what is in a trace, the quirks met, and how well its replay meets the recording."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_calibration, add_clock, add_json, add_trace
from whatif.cli.reading import read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif info``."""
    add_trace(parser)
    add_clock(parser)
    add_calibration(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the summary of a trace."""
    graph = read_trace(args.trace)
    from whatif.predict import Baseline
    from whatif.summary import summarize

    summary = summarize(Baseline.of(graph, args.clock, calibrated=args.calibrated))
    if args.json:
        from whatif.report.as_json import print_json

        print_json(summary.to_dict())
        return 0
    from whatif.report.text import print_summary

    print_summary(summary)
    return 0
