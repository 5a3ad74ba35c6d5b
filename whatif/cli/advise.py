"""``whatif advise``: every applicable what-if, ranked, with promising combinations."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_calibration, add_clock, add_json, add_plot, add_top, add_trace, check_plots
from whatif.cli.reading import print_plot, progress_bar, read_trace, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif advise``."""
    add_trace(parser)
    add_top(parser)
    add_plot(parser, "draw the gains with their ranges")
    add_clock(parser)
    add_calibration(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the advice for a trace."""
    check_plots(args.plot, [args.trace])
    graph = read_trace(args.trace)
    from whatif.advice.advise import advise
    from whatif.predict import Baseline, apply

    baseline = Baseline.of(graph, args.clock, calibrated=args.calibrated)
    with progress_bar("trying") as progress:
        advice = advise(baseline, top=args.top, progress=progress)
    warnings = apply(baseline).warnings
    if args.plot is not None:
        from whatif.report.plot_advise import plot_advice

        plot_advice(advice, args.plot, args.top)
    if args.json:
        from whatif.report.as_json import print_json

        print_json({**advice.to_dict(), "warnings": list(warnings), **({"plot": args.plot} if args.plot else {})})
        return 0
    from whatif.report.text_advise import print_advice

    print_advice(advice, args.top)
    print_plot(args.plot)
    warn(warnings)
    return 0
