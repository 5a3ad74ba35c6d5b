"""``whatif sweep``: one composition of what-ifs at many values of its options."""

from __future__ import annotations

import argparse

from whatif.cli.main import UsageError
from whatif.cli.options import (
    add_calibration,
    add_clock,
    add_json,
    add_plot,
    add_spreading,
    check_plots,
    names_then_trace,
)
from whatif.cli.reading import print_plot, progress_bar, read_trace, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif sweep``."""
    parser.usage = "whatif sweep NAME[:options] ... TRACE --vary OPTION=a,b,c [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="+",
        metavar="NAME ... TRACE",
        help="what-ifs (see `whatif transforms`, or the path of a .py file), then the trace",
    )
    parser.add_argument(
        "--vary",
        action="append",
        metavar="OPTION=VALUES",
        help="the values of an option: bandwidth=10Gbps,25Gbps or bandwidth=1Gbps..400Gbps:100 (100 values, each the "
        "same multiple of the one before); NAME.OPTION for that of one what-if; again for every combination",
    )
    add_plot(parser, "draw the step over the values")
    add_spreading(parser)
    add_clock(parser)
    add_calibration(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table of a sweep."""
    names, path = names_then_trace(args.words, "sweep")
    if not args.vary:
        raise UsageError("sweep: expected --vary OPTION=a,b,c; `whatif transforms NAME` lists a what-if's options.")
    from whatif.sweep.values import parse_vary
    from whatif.transform import load_transform

    # Misspelled names and values are told before a large trace is read.
    transforms = [load_transform(name) for name in names]
    varied = [parse_vary(text, transforms) for text in args.vary]
    check_plots(args.plot, [path])
    from whatif.baseline import Baseline
    from whatif.sweep.sweep import sweep

    baseline = Baseline.of(read_trace(path), args.clock, calibrated=args.calibrated)
    with progress_bar("predicting") as progress:
        found = sweep(baseline, transforms, varied, jobs=args.jobs, backend=args.backend, progress=progress)
    if args.plot is not None:
        from whatif.report.plot_sweep import plot_sweep

        plot_sweep(found, args.plot)
    if args.json:
        from whatif.report.as_json import print_json

        print_json({**found.to_dict(), **({"plot": args.plot} if args.plot else {})})
        return 0
    from whatif.report.text_sweep import print_sweep

    print_sweep(found)
    print_plot(args.plot)
    warn([*baseline.graph.info.quirks, *found.notes])
    return 0
