"""``whatif compare``: two recordings part by part, and which what-if describes the change between them."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_analysis, add_markdown, add_plot, add_top, check_plots
from whatif.cli.reading import progress_bar, read_trace, show
from whatif.cli.trusted import weigh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif compare``."""
    parser.add_argument("before", metavar="A", help="the recording before the change")
    parser.add_argument("after", metavar="B", help="the recording after it")
    add_top(parser)
    add_plot(parser, "plot both steps and the parts that changed most")
    add_markdown(parser)
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Print the comparison of two recordings."""
    check_plots(args.plot, [args.before, args.after])
    before, after = read_trace(args.before, args), read_trace(args.after, args)
    from whatif.questions.comparison.compare import compare
    from whatif.questions.comparison.two_recordings import TwoRecordings

    two = TwoRecordings.of(before, after, args.clock, calibrated=args.calibrated)
    weigh(args, two.before, two.after)
    with progress_bar("trying what-ifs") as progress:
        found = compare(two, progress=progress)
    from whatif.report.plot_compare import comparison_figure
    from whatif.report.text_compare import markdown, print_comparison

    return show(
        args,
        found.to_dict,
        lambda: print(markdown(found, args.top)) if args.markdown else print_comparison(found, args.top),
        figure=lambda: comparison_figure(found, args.top),
        # A pull request shows what is on stdout: the warnings are in it.
        warnings=() if args.markdown else found.warnings,
    )
