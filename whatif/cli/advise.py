"""``whatif advise``: every applicable what-if, ranked, with promising combinations."""

from __future__ import annotations

import argparse

from whatif.cli.options import POSITIVE, add_analysis, add_plot, check_plots
from whatif.cli.rank_files import add_ranks, read_traces, traces_then_names
from whatif.cli.reading import progress_bar, show
from whatif.cli.trusted import baseline_of

# Rows of the decision, so that it takes about 15 lines, and of each table of --all.
DECIDING, ALL = 3, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif advise``."""
    parser.usage = "whatif advise TRACE ... [NAME[:option=value,...] ...] [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="+",
        metavar="TRACE ... [NAME ...]",
        help="the trace, or those of the ranks of one run or their folder, then what-ifs to try beside those that are "
        "tried anyway: a .py file of yours, or a name with options",
    )
    parser.add_argument("--all", action="store_true", help="show every what-if and combination with its reason")
    parser.add_argument(
        "--top",
        type=POSITIVE,
        metavar="N",
        help=f"number of rows in each table (default: {DECIDING}; with --all {ALL})",
    )
    add_plot(parser, "plot the gains with their ranges")
    add_ranks(parser)
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Print the advice for a trace."""
    paths, names = traces_then_names(args.words, "advise")
    check_plots(args.plot, paths)
    from whatif.prediction.composition import spelled
    from whatif.prediction.transform import load_transform
    from whatif.questions.advice.candidates import installed

    requested = [load_transform(name) for name in names]
    candidates = installed(also=requested)
    graph, _ = read_traces(paths, args)
    from whatif.prediction.doubts import warnings_of
    from whatif.questions.advice.advise import advise

    baseline = baseline_of(args, graph)
    top = args.top or (ALL if args.all or args.json or args.plot else DECIDING)
    with progress_bar("trying") as progress:
        advice = advise(baseline, candidates, top=top, progress=progress)
    warnings = warnings_of(baseline)
    from whatif.report.plot_advise import advice_figure
    from whatif.report.text_advise import print_advice, print_decision

    return show(
        args,
        lambda: {**advice.to_dict(), "warnings": list(warnings)},
        lambda: (
            print_advice(advice, top)
            if args.all
            else print_decision(advice, args.top or DECIDING, [spelled(t) for t in requested])
        ),
        figure=lambda: advice_figure(advice, top),
        warnings=warnings,
    )
