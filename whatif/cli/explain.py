"""``whatif explain``: where the step goes, what it waits for, the layers that matter; what a faster part gains."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from whatif.cli.main import UsageError
from whatif.cli.options import add_calibration, add_clock, add_json, add_top, check_plots
from whatif.cli.rank_files import add_traces, read_traces
from whatif.cli.reading import print_plot, warn

if TYPE_CHECKING:
    from whatif.explain import Explanation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif explain``."""
    add_traces(parser)
    add_top(parser)
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="what the step gains if a layer, kernel family, phase or thread were 10, 50, 100 %% faster",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="with --sensitivity: draw the gains into a .png, .svg or .pdf file"
    )
    add_clock(parser)
    add_calibration(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the explanation of a trace."""
    if args.plot is not None:
        if not args.sensitivity:
            raise UsageError("explain: --plot draws what --sensitivity finds; give both.")
        check_plots(args.plot, args.traces)
    graph, ranks = read_traces(args.traces)
    from whatif.explain import explain
    from whatif.predict import Baseline

    explanation = explain(Baseline.of(graph, args.clock, calibrated=args.calibrated), top=args.top)
    found = None
    if ranks is not None:
        from whatif.ranks.stragglers import report

        found = report(ranks, explanation.baseline)
    if args.sensitivity:
        return _sensitivity(explanation, args)
    if args.json:
        from whatif.report.as_json import print_json

        print_json({**explanation.to_dict(), **({"ranks": found.to_dict()} if found else {})})
        return 0
    from whatif.report.text import print_explanation

    print_explanation(explanation)
    if found is not None:
        from whatif.report.text_ranks import print_ranks

        print_ranks(found, top=args.top, has_gpu=bool(graph.on_gpu.any()))
    warn(explanation.warnings)
    return 0


def _sensitivity(explanation: Explanation, args: argparse.Namespace) -> int:
    """Print what the step gains where a part of it is faster, and draw it where that is asked for."""
    from whatif.report import text_sensitivity
    from whatif.sensitivity import sensitivity

    found = sensitivity(explanation.baseline, top=args.top)
    if args.plot is not None:
        from whatif.report.plots import plot_sensitivity

        plot_sensitivity(found, args.plot)
    if args.json:
        from whatif.report.as_json import print_json

        print_json({**text_sensitivity.as_dict(found, explanation), **({"plot": args.plot} if args.plot else {})})
        return 0
    text_sensitivity.print_sensitivity(found, explanation)
    print_plot(args.plot)
    warn(explanation.warnings)
    return 0
