"""``whatif scaling``: the step on growing numbers of workers, and up to how many it pays."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_analysis, add_jobs, add_plot, check_plots
from whatif.cli.rank_files import add_only, read_traces, traces_then_names
from whatif.cli.reading import progress_bar, show
from whatif.cli.trusted import baseline_of

DEFAULT = "distributed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif scaling``."""
    parser.usage = "whatif scaling TRACE ... [NAME[:options] ...] [--workers 1,2,4] [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="+",
        metavar="TRACE ... [NAME ...]",
        help="the trace, or those of the ranks of one run or their folder, then what-ifs, one of which has the option "
        f"workers (default: {DEFAULT})",
    )
    parser.add_argument(
        "--workers",
        default="1,2,4,8,16,32,64",
        metavar="NUMBERS",
        help="numbers of workers: 1,2,4,8, or 1..1024:11 for 11 numbers with equal ratios (default: 1 to 64)",
    )
    parser.add_argument(
        "--strong",
        action="store_true",
        help="strong scaling: split the recorded batch among the workers (default: one batch each)",
    )
    add_plot(parser, "plot throughput and step time over the number of workers")
    add_only(parser)
    add_jobs(parser, "read ranks and simulate what cannot be simulated together", "1")
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Print the scaling curve."""
    paths, names = traces_then_names(args.words, "scaling")
    from whatif.prediction.transform import load_transform
    from whatif.questions.sweep.scaling import parse_workers, scaling

    # Checks names and numbers before reading the trace, which may be large.
    transforms = [load_transform(name) for name in names or [DEFAULT]]
    workers = parse_workers(args.workers)
    check_plots(args.plot, paths)

    baseline = baseline_of(args, read_traces(paths, args)[0])
    with progress_bar("predicting") as progress:
        found = scaling(baseline, transforms, workers, strong=args.strong, jobs=args.jobs or 1, progress=progress)
    from whatif.report.plot_sweep import scaling_figure
    from whatif.report.text_sweep import print_scaling

    return show(
        args,
        found.to_dict,
        lambda: print_scaling(found),
        figure=lambda: scaling_figure(found),
        warnings=baseline.graph.info.remarks,
        notes=found.notes,
    )
