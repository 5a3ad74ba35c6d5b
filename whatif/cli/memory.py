"""``whatif memory``: what a step keeps, the effect of what-ifs on peak and time, the largest batch that fits."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_calibration, add_clock, add_json, add_plot, add_top, check_plots, trace_then_names
from whatif.cli.reading import patience, print_plot, read_trace, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif memory``."""
    parser.usage = "whatif memory TRACE [NAME[:option=value,...] ...] [OPTIONS]"
    parser.add_argument(
        "words", nargs="+", metavar="TRACE [NAME ...]", help="the trace, then what-ifs (default: those about memory)"
    )
    parser.add_argument(
        "--capacity", metavar="SIZE", help="does it fit into so much, as 16GiB (default: the recorded GPU's memory)"
    )
    add_plot(parser, "draw the step's memory")
    add_top(parser, "layers to list")
    add_clock(parser)
    add_calibration(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print what a step keeps in memory."""
    path, names = trace_then_names(args.words, "memory")
    from whatif.transform import load_transform

    # Misspelled names and sizes are told before a large trace is read.
    for name in names:
        load_transform(name)
    capacity_bytes = None if args.capacity is None else _capacity(args.capacity)
    check_plots(args.plot, [path])
    from whatif.baseline import Baseline
    from whatif.memory_summary import memory_of, memory_summary

    graph = read_trace(path)
    memory_of(graph)  # before anything is simulated
    baseline = Baseline.of(graph, args.clock, calibrated=args.calibrated)
    with patience("trying what-ifs"):
        summary = memory_summary(baseline, names, capacity_bytes=capacity_bytes)
    if args.plot:
        from whatif.report.plot_memory import plot_memory

        plot_memory(summary, args.plot)
    if args.json:
        from whatif.report.as_json import print_json

        print_json({**summary.to_dict(), **({"plot": args.plot} if args.plot else {})})
        return 0
    from whatif.report.text_memory import print_memory

    print_memory(summary, args.top)
    print_plot(args.plot)
    warn(graph.info.quirks)
    return 0


def _capacity(text: str) -> int:
    from whatif.errors import WhatifError
    from whatif.units import Size

    try:
        return Size(text).size_bytes
    except WhatifError as error:
        raise WhatifError(f"memory: --capacity: {error}") from error
