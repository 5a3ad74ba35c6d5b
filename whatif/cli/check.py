"""``whatif check``: a gate for CI, which fails where a step became longer than is allowed and than noise explains."""

from __future__ import annotations

import argparse
import math

from whatif.cli.options import add_calibration, add_clock, add_json
from whatif.cli.reading import read_trace, warn

# Larger percentages allow everything, and are mistyped.
MOST_PCT = 1000.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif check``."""
    parser.add_argument("trace", metavar="B", help="the recording to judge")
    parser.add_argument("--baseline", required=True, metavar="A", help="the recording to judge it by")
    parser.add_argument(
        "--max-regress",
        type=_percent,
        default=3.0,
        metavar="PCT",
        help="how much longer a step may become, in percent of the baseline's: 3%% or 3 (default: 3%%)",
    )
    add_clock(parser)
    add_calibration(parser)
    add_json(parser)
    parser.epilog = (
        "exit status: 0 passed, 1 regressed or not judged (recordings of other work, unreadable), 2 misspelled"
    )


def run(args: argparse.Namespace) -> int:
    """Print the verdict; gives 0 where the recording passes, else 1."""
    baseline, changed = read_trace(args.baseline), read_trace(args.trace)
    from whatif.comparison.regression import Status, check_regression
    from whatif.comparison.two_recordings import TwoRecordings

    two = TwoRecordings.of(baseline, changed, args.clock, calibrated=args.calibrated)
    found = check_regression(two, args.max_regress)
    if args.json:
        from whatif.report.as_json import print_json

        print_json(found.to_dict())
    else:
        from whatif.report.text_check import print_regression

        print_regression(found)
        warn(found.warnings)
    return 0 if found.status is Status.OK else 1


def _percent(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value <= MOST_PCT:
        raise argparse.ArgumentTypeError(f"expected a percentage from 0 to {MOST_PCT:.0f}, as 3% or 3, got {text!r}")
    return value
