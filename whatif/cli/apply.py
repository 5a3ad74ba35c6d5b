"""``whatif apply``: one prediction; several names compose left to right."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_calibration, add_clock, add_json, add_plot, check_plots
from whatif.cli.rank_files import names_then_traces, read_traces
from whatif.cli.reading import patience, print_plot, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif apply``."""
    parser.usage = "whatif apply NAME[:option=value,...] [NAME ...] TRACE ... [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="+",
        metavar="NAME ... TRACE",
        help="what-ifs (see `whatif transforms`, or the path of a .py file), then the trace, "
        "or those of several ranks of a run, or their folder",
    )
    add_plot(parser, "draw the parts of the step before and after")
    add_clock(parser)
    add_calibration(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the prediction."""
    names, paths = names_then_traces(args.words)
    from whatif.predict import apply
    from whatif.transform import load_transform

    # A misspelled name is told before a large trace is read.
    transforms = [load_transform(name) for name in names]
    check_plots(args.plot, paths)
    graph, _ = read_traces(paths)
    with patience("predicting"):
        prediction = apply(graph, *transforms, clock=args.clock, calibrated=args.calibrated)
    if args.plot is not None:
        from whatif.report.plot_breakdown import plot_prediction

        plot_prediction(prediction, args.plot)
    if args.json:
        from whatif.report.as_json import print_json

        print_json({**prediction.to_dict(), **({"plot": args.plot} if args.plot else {})})
        return 0
    from whatif.report.text import print_prediction

    print_prediction(prediction)
    print_plot(args.plot)
    said = [sentence for sentence in prediction.warnings if sentence != prediction.verdict]
    notes = set(prediction.graph.notes)  # what a what-if says of itself
    warn(sentence for sentence in said if sentence not in notes)
    warn((sentence for sentence in said if sentence in notes), "note")
    return 0
