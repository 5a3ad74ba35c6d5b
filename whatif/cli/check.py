"""``whatif check``: a CI gate that fails if a step grew by more than is allowed and more than noise."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_analysis, add_markdown, number
from whatif.cli.reading import patience, read_trace, show
from whatif.cli.trusted import weigh

# Larger percentages allow everything, and are mistyped.
MOST_PCT = 1000.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif check``."""
    parser.add_argument("trace", metavar="B", help="the recording to check")
    parser.add_argument("--baseline", required=True, metavar="A", help="the recording to compare it with")
    parser.add_argument(
        "--max-regress",
        type=number(lambda pct: 0 <= pct <= MOST_PCT, f"a percentage from 0 to {MOST_PCT:.0f}, as 3% or 3", suffix="%"),
        default=3.0,
        metavar="PCT",
        help="allowed increase of the step time, in percent: 3%% or 3 (default: 3%%)",
    )
    add_markdown(parser)
    add_analysis(parser)
    parser.epilog = (
        "exit status: 0 passed; 1 slower, or not comparable (different work, unreadable file); 2 usage error"
    )


def run(args: argparse.Namespace) -> int:
    """Print the verdict; return 0 if the recording passes, else 1."""
    baseline, changed = read_trace(args.baseline, args), read_trace(args.trace, args)
    from whatif.questions.comparison.regression import Status, check_regression
    from whatif.questions.comparison.two_recordings import TwoRecordings

    with patience("comparing"):
        two = TwoRecordings.of(baseline, changed, args.clock, calibrated=args.calibrated)
        weigh(args, two.before, two.after)
        found = check_regression(two, args.max_regress)
    from whatif.report.text_check import markdown, print_regression

    if args.markdown:
        show(args, found.to_dict, lambda: print(markdown(found)))
    else:
        show(args, found.to_dict, lambda: print_regression(found), warnings=found.warnings)
    return 0 if found.status is Status.OK else 1
