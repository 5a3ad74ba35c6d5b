"""``whatif recommend``: devices ranked by what the recorded step would take and cost on each."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_calibration, add_clock, add_json, add_plot, add_top, check_plots, trace_then_names
from whatif.cli.reading import print_plot, progress_bar, read_trace, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif recommend``."""
    parser.usage = "whatif recommend TRACE [NAME[:options] ...] [--prices FILE] [OPTIONS]"
    parser.add_argument(
        "words", nargs="+", metavar="TRACE [NAME ...]", help="the trace, then what-ifs that go with each device"
    )
    parser.add_argument(
        "--devices", metavar="GPU,GPU", help="which, as A100-SXM-80,L40S (default: those with a price, else all known)"
    )
    parser.add_argument("--prices", metavar="FILE", help="a TOML file: currency, and [per_hour] with a line a device")
    parser.add_argument("--by", choices=("time", "cost"), help="the order (default: cost where there are prices)")
    parser.add_argument(
        "--epoch-samples", type=int, metavar="N", help="how many samples an epoch has: its hours and its cost"
    )
    add_top(parser, "devices to list")
    add_plot(parser, "draw the step on each device")
    add_clock(parser)
    add_calibration(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the devices, the best first."""
    path, names = trace_then_names(args.words, "recommend")
    from whatif.errors import WhatifError
    from whatif.hardware import gpu_asked_for
    from whatif.recommend.prices import read_prices
    from whatif.transform import load_transform

    # Misspelled names and prices are told before a large trace is read.
    transforms = [load_transform(name) for name in names]
    devices = [gpu_asked_for(name.strip()).name for name in (args.devices or "").split(",") if name.strip()]
    if args.devices is not None and not devices:
        raise WhatifError("recommend: expected --devices A,B, as in A100-SXM-80,L40S, got no name.")
    prices = None if args.prices is None else read_prices(args.prices)
    if args.by == "cost" and prices is None:
        raise WhatifError("recommend: expected a file of prices to rank by cost; name it with --prices.")
    if args.epoch_samples is not None and args.epoch_samples < 1:
        raise WhatifError(f"recommend: expected --epoch-samples of 1 or more, got {args.epoch_samples}.")
    check_plots(args.plot, [path])
    from whatif.baseline import Baseline
    from whatif.recommend.ranking import recommend

    baseline = Baseline.of(read_trace(path), args.clock, calibrated=args.calibrated)
    with progress_bar("predicting") as progress:
        found = recommend(
            baseline, transforms, devices, prices=prices, by=args.by, epoch_samples=args.epoch_samples,
            progress=progress,
        )  # fmt: skip
    if args.plot is not None:
        from whatif.report.plot_recommend import plot_recommendation

        plot_recommendation(found, args.plot, args.top)
    if args.json:
        from whatif.report.as_json import print_json

        print_json({**found.to_dict(), **({"plot": args.plot} if args.plot else {})})
        return 0
    from whatif.report.text_recommend import print_ranking

    print_ranking(found, args.top)
    print_plot(args.plot)
    warn(baseline.graph.info.quirks)
    return 0
