"""``whatif memory``: the memory of a step, the effect of what-ifs on peak and time, the largest batch that fits."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_analysis, add_plot, add_top, check_plots
from whatif.cli.rank_files import add_ranks, read_traces, traces_then_names
from whatif.cli.reading import patience, show
from whatif.cli.trusted import baseline_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif memory``."""
    parser.usage = "whatif memory TRACE ... [NAME[:option=value,...] ...] [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="+",
        metavar="TRACE ... [NAME ...]",
        help="the trace, or those of the ranks of one run or their folder, then what-ifs (default: those that change "
        "memory)",
    )
    parser.add_argument(
        "--capacity",
        metavar="SIZE",
        help="memory that the step must fit into, such as 16GiB (default: the recorded GPU's memory)",
    )
    parser.add_argument(
        "--solve",
        choices=("batch", "workers"),
        help="print the largest batch, or the fewest workers, whose step under the what-ifs fits into the capacity",
    )
    add_plot(parser, "plot the memory of the step")
    add_top(parser, "number of layers to list")
    add_ranks(parser)
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Print what a step keeps in memory."""
    paths, names = traces_then_names(args.words, "memory")
    from whatif.prediction.transform import load_transform

    # Checks names and sizes before reading the trace, which may be large.
    for name in names:
        load_transform(name)
    capacity_bytes = None if args.capacity is None else _capacity(args.capacity)
    check_plots(args.plot, paths)
    from whatif.questions.memory_summary import memory_of, memory_summary

    graph, _ = read_traces(paths, args)
    baseline = baseline_of(args, graph)
    memory_of(graph)  # before what-ifs are tried
    with patience("trying what-ifs"):
        summary = memory_summary(baseline, names, capacity_bytes=capacity_bytes, solve=args.solve)
    from whatif.report.plot_memory import memory_figure
    from whatif.report.text_memory import print_memory, print_solved

    return show(
        args,
        summary.to_dict,
        lambda: print_solved(summary) if args.solve else print_memory(summary, args.top),
        figure=lambda: memory_figure(summary),
        warnings=graph.info.remarks,
    )


def _capacity(text: str) -> int:
    from whatif.runtime.errors import WhatifError
    from whatif.units import Size

    try:
        return Size(text).size_bytes
    except WhatifError as error:
        raise WhatifError(f"memory: --capacity: {error}") from error
