"""``whatif explain``: where the step goes, what it waits for, the layers that matter; what a faster part gains."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from whatif.cli.main import UsageError
from whatif.cli.options import add_analysis, add_top, check_plots
from whatif.cli.rank_files import add_traces, read_traces
from whatif.cli.reading import show

if TYPE_CHECKING:
    from whatif.questions.explain import Explanation
from whatif.cli.trusted import baseline_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif explain``."""
    add_traces(parser)
    add_top(parser)
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="show the gain if a layer, operator family, phase or thread took 10, 50 or 100 %% less time",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="with --sensitivity: plot the gains into a .png, .svg or .pdf file"
    )
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Print the explanation of a trace."""
    if args.plot is not None:
        if not args.sensitivity:
            raise UsageError("explain: expected --sensitivity with --plot, which draws its gains; add --sensitivity.")
        check_plots(args.plot, args.traces)
    graph, ranks = read_traces(args.traces, args)
    from whatif.questions.explain import explain
    from whatif.questions.stragglers import report

    explanation = explain(baseline_of(args, graph), top=args.top)
    found = report(ranks, explanation.baseline) if ranks else None
    if args.sensitivity:
        return _sensitivity(explanation, args)

    def print_text() -> None:
        from whatif.report.text_explain import print_explanation

        print_explanation(explanation)
        if found is not None:
            from whatif.report.text_ranks import print_ranks

            print_ranks(found, top=args.top, has_gpu=bool(graph.on_gpu.any()))

    ranks_too = {"ranks": found.to_dict()} if found else {}
    return show(args, lambda: {**explanation.to_dict(), **ranks_too}, print_text, warnings=explanation.warnings)


def _sensitivity(explanation: Explanation, args: argparse.Namespace) -> int:
    """Print what the step gains where a part of it is faster, and draw it where that is asked for."""
    from whatif.questions.sensitivity import sensitivity
    from whatif.report import text_sensitivity
    from whatif.report.plot_sensitivity import sensitivity_figure

    found = sensitivity(explanation.baseline, top=args.top)
    return show(
        args,
        lambda: text_sensitivity.as_dict(found, explanation),
        lambda: text_sensitivity.print_sensitivity(found, explanation),
        figure=lambda: sensitivity_figure(found),
        warnings=explanation.warnings,
    )
