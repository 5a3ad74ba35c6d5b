"""``whatif scaling``: the step on more and more workers, and up to how many it pays."""

from __future__ import annotations

import argparse

from whatif.cli.options import (
    add_calibration,
    add_clock,
    add_json,
    add_plot,
    add_spreading,
    check_plots,
    trace_then_names,
)
from whatif.cli.reading import print_plot, progress_bar, read_trace, warn

DEFAULT = "distributed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif scaling``."""
    parser.usage = "whatif scaling TRACE [NAME[:options] ...] [--workers 1,2,4] [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="+",
        metavar="TRACE [NAME ...]",
        help=f"the trace, then what-ifs, one of them with the option workers (default: {DEFAULT})",
    )
    parser.add_argument(
        "--workers",
        default="1,2,4,8,16,32,64",
        metavar="NUMBERS",
        help="how many, as 1,2,4,8 or 1..1024:11 (11 numbers, each the same multiple of the one before; "
        "default: 1 to 64)",
    )
    parser.add_argument(
        "--strong", action="store_true", help="the recorded batch is shared by all workers (default: each trains one)"
    )
    add_plot(parser, "draw throughput and step over the workers")
    add_spreading(parser)
    add_clock(parser)
    add_calibration(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the scaling curve."""
    path, names = trace_then_names(args.words, "scaling")
    from whatif.sweep.scaling import parse_workers, scaling
    from whatif.transform import load_transform

    # Misspelled names and numbers are told before a large trace is read.
    transforms = [load_transform(name) for name in names or [DEFAULT]]
    workers = parse_workers(args.workers)
    check_plots(args.plot, [path])
    from whatif.baseline import Baseline

    baseline = Baseline.of(read_trace(path), args.clock, calibrated=args.calibrated)
    with progress_bar("predicting") as progress:
        found = scaling(
            baseline, transforms, workers, strong=args.strong, jobs=args.jobs, backend=args.backend, progress=progress
        )
    if args.plot is not None:
        from whatif.report.plot_sweep import plot_scaling

        plot_scaling(found, args.plot)
    if args.json:
        from whatif.report.as_json import print_json

        print_json({**found.to_dict(), **({"plot": args.plot} if args.plot else {})})
        return 0
    from whatif.report.text_sweep import print_scaling

    print_scaling(found)
    print_plot(args.plot)
    warn([*baseline.graph.info.quirks, *found.notes])
    return 0
