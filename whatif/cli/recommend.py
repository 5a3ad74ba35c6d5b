"""``whatif recommend``: devices ranked by time and cost of the recorded step on each."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_analysis, add_plot, add_top, check_plots, trace_then_names
from whatif.cli.reading import progress_bar, read_trace, show
from whatif.cli.trusted import baseline_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif recommend``."""
    parser.usage = "whatif recommend TRACE [NAME[:options] ...] [--prices FILE] [OPTIONS]"
    parser.add_argument(
        "words", nargs="+", metavar="TRACE [NAME ...]", help="the trace, then what-ifs to apply on each device"
    )
    parser.add_argument(
        "--devices",
        metavar="GPU,GPU",
        help="devices to rank, such as A100-SXM-80,L40S (default: those with a price, or all)",
    )
    parser.add_argument("--prices", metavar="FILE", help="TOML file with currency and [per_hour], one line per device")
    parser.add_argument("--by", choices=("time", "cost"), help="sort order (default: cost if prices are given)")
    parser.add_argument(
        "--epoch-samples", type=int, metavar="N", help="samples per epoch, to report hours and cost of an epoch"
    )
    add_top(parser, "number of devices to list")
    add_plot(parser, "plot the step time on each device")
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Print the devices, the best first."""
    path, names = trace_then_names(args.words, "recommend")
    from whatif.hardware.gpu import gpu_asked_for
    from whatif.prediction.transform import load_transform
    from whatif.questions.recommend.prices import read_prices
    from whatif.runtime.errors import WhatifError

    # Checks names and prices before reading the trace, which may be large.
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
    from whatif.questions.recommend.ranking import recommend

    baseline = baseline_of(args, read_trace(path, args))
    with progress_bar("predicting") as progress:
        found = recommend(
            baseline, transforms, devices, prices=prices, by=args.by, epoch_samples=args.epoch_samples,
            progress=progress,
        )  # fmt: skip
    from whatif.report.plot_recommend import recommendation_figure
    from whatif.report.text_recommend import print_ranking

    return show(
        args,
        found.to_dict,
        lambda: print_ranking(found, args.top),
        figure=lambda: recommendation_figure(found, args.top),
        warnings=baseline.graph.info.remarks,
    )
