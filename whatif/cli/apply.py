"""``whatif apply``: predict the step time; several what-ifs compose left to right."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_analysis, add_plot, check_plots
from whatif.cli.rank_files import names_then_traces, read_traces
from whatif.cli.reading import patience, show, warn
from whatif.cli.trusted import baseline_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif apply``."""
    parser.usage = "whatif apply NAME[:option=value,...] [NAME ...] TRACE ... [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="+",
        metavar="NAME ... TRACE",
        help="what-ifs (see `whatif transforms`, or the path of a .py file), then the trace, "
        "or the traces of several ranks of one run, or their folder",
    )
    add_plot(parser, "plot the parts of the step before and after")
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Print the prediction."""
    names, paths = names_then_traces(args.words)
    from whatif.prediction.predict import apply
    from whatif.prediction.transform import load_transform

    # Checks names before reading the trace, which may be large.
    transforms = [load_transform(name) for name in names]
    check_plots(args.plot, paths)
    graph, _ = read_traces(paths, args)
    with patience("predicting"):
        prediction = apply(baseline_of(args, graph), *transforms)
    from whatif.report.plot_breakdown import prediction_figure
    from whatif.report.text import print_prediction

    show(
        args,
        prediction.to_dict,
        lambda: print_prediction(prediction),
        figure=lambda: prediction_figure(prediction),
        warnings=prediction.doubts,
    )
    if not args.json:
        warn(prediction.notes, "note")  # what a what-if says of itself
    return 0
