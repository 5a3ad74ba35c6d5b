"""``whatif compare``: two recordings part by part, and which what-if describes the change between them."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_calibration, add_clock, add_json, add_plot, add_top, check_plots
from whatif.cli.reading import print_plot, progress_bar, read_trace, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif compare``."""
    parser.add_argument("before", metavar="A", help="the recording before the change")
    parser.add_argument("after", metavar="B", help="the recording after it")
    add_top(parser)
    add_plot(parser, "draw both steps and the parts that changed most")
    add_clock(parser)
    add_calibration(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the comparison of two recordings."""
    check_plots(args.plot, [args.before, args.after])
    before, after = read_trace(args.before), read_trace(args.after)
    from whatif.comparison.compare import compare
    from whatif.comparison.two_recordings import TwoRecordings

    two = TwoRecordings.of(before, after, args.clock, calibrated=args.calibrated)
    with progress_bar("trying what-ifs") as progress:
        found = compare(two, progress=progress)
    if args.plot is not None:
        from whatif.report.plot_compare import plot_comparison

        plot_comparison(found, args.plot, args.top)
    if args.json:
        from whatif.report.as_json import print_json

        print_json({**found.to_dict(), **({"plot": args.plot} if args.plot else {})})
        return 0
    from whatif.report.text_compare import print_comparison

    print_comparison(found, args.top)
    print_plot(args.plot)
    warn(found.warnings)
    return 0
