"""``whatif explain``: where the step goes, what it waits for, and the layers that matter."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_calibration, add_clock, add_json, add_trace
from whatif.cli.reading import read_trace, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif explain``."""
    add_trace(parser)
    parser.add_argument("--top", type=_positive, default=10, metavar="N", help="rows of each table (default: 10)")
    add_clock(parser)
    add_calibration(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the explanation of a trace."""
    graph = read_trace(args.trace)
    from whatif.explain import explain
    from whatif.predict import Baseline

    explanation = explain(Baseline.of(graph, args.clock, calibrated=args.calibrated), top=args.top)
    if args.json:
        from whatif.report.as_json import print_json

        print_json(explanation.to_dict())
        return 0
    from whatif.report.text import print_explanation

    print_explanation(explanation)
    warn(explanation.warnings)
    return 0


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return number
