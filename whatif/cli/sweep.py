"""``whatif sweep``: one composition of what-ifs at many values of its options."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_analysis, add_jobs, add_plot, check_plots, names_then_trace
from whatif.cli.reading import progress_bar, read_trace, show
from whatif.cli.status import UsageError
from whatif.cli.trusted import baseline_of


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
        help="values of an option: bandwidth=10Gbps,25Gbps, or bandwidth=1Gbps..400Gbps:100 for 100 values with equal "
        "ratios; NAME.OPTION selects one what-if; repeat --vary to try every combination",
    )
    add_plot(parser, "plot the step time over the values")
    add_jobs(parser, "simulate what cannot be simulated together", "1")
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table of a sweep."""
    names, path = names_then_trace(args.words, "sweep")
    if not args.vary:
        raise UsageError("sweep: expected --vary OPTION=a,b,c; `whatif transforms NAME` lists a what-if's options.")
    from whatif.prediction.transform import load_transform
    from whatif.questions.sweep.values import parse_vary

    # Checks names and values before reading the trace, which may be large.
    transforms = [load_transform(name) for name in names]
    varied = [parse_vary(text, transforms) for text in args.vary]
    check_plots(args.plot, [path])
    from whatif.questions.sweep.sweep import sweep

    baseline = baseline_of(args, read_trace(path, args))
    with progress_bar("predicting") as progress:
        found = sweep(baseline, transforms, varied, jobs=args.jobs or 1, progress=progress)
    from whatif.report.plot_sweep import sweep_figure
    from whatif.report.text_sweep import print_sweep

    return show(
        args,
        found.to_dict,
        lambda: print_sweep(found),
        figure=lambda: sweep_figure(found),
        warnings=baseline.graph.info.remarks,
        notes=found.notes,
    )
