"""``whatif plan``: the fastest or cheapest plan of parallelism on given GPUs."""

from __future__ import annotations

import argparse

from whatif.cli.options import POSITIVE, add_analysis, add_jobs, add_plot, add_top, check_plots, trace_then_names
from whatif.cli.reading import progress_bar, read_trace, show
from whatif.cli.status import UsageError
from whatif.cli.trusted import baseline_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif plan``."""
    parser.usage = "whatif plan TRACE [NAME[:options] ...] --gpus N [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="+",
        metavar="TRACE [NAME ...]",
        help="the trace of one GPU, or a step saved by `whatif predict`, then what-ifs that go with every plan",
    )
    parser.add_argument("--gpus", metavar="N[,N]", help="number of GPUs; several numbers are compared")
    parser.add_argument(
        "--cluster", metavar="NAME[,NAME]", help="cluster presets or TOML files (default: the recorded GPU's usual one)"
    )
    parser.add_argument(
        "--global-batch", type=POSITIVE, metavar="N", help="samples per step (default: the recorded batch on each GPU)"
    )
    parser.add_argument("--memory", metavar="SIZE", help="memory of a GPU, such as 80GB (default: its data sheet's)")
    parser.add_argument("--prices", metavar="FILE", help="TOML file with currency and [per_hour], one line per device")
    parser.add_argument("--by", choices=("throughput", "cost"), help="order of the plans (default: throughput)")
    add_top(parser, "number of plans to list")
    add_plot(parser, "plot throughput over memory, with the Pareto front,")
    add_jobs(parser, "try ways of cutting the model", "1")
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plans, the best first."""
    path, names = trace_then_names(args.words, "plan")
    if not args.gpus:
        raise UsageError("plan: expected --gpus N, as in --gpus 64 --cluster dgx-h100.")
    from whatif.hardware.cluster.cluster_file import load_cluster
    from whatif.prediction.transform import load_transform
    from whatif.questions.recommend.prices import read_prices
    from whatif.runtime.errors import WhatifError
    from whatif.units import Size

    # Checks names and numbers before reading the trace, which may be large.
    what_ifs = [load_transform(name) for name in names]
    numbers = list(dict.fromkeys(_count(text) for text in args.gpus.split(",")))
    clusters = list(dict.fromkeys(name.strip() for name in (args.cluster or "").split(",") if name.strip()))
    for name in clusters:
        load_cluster(name)
    prices = None if args.prices is None else read_prices(args.prices)
    if args.by == "cost" and prices is None:
        raise WhatifError("plan: expected a file of prices to rank by cost; name it with --prices.")
    try:
        memory_bytes = None if args.memory is None else Size(args.memory).size_bytes
    except WhatifError as error:
        raise WhatifError(f"plan: --memory: {error}") from error
    check_plots(args.plot, [path])
    from whatif.questions.plan.search import asked_of, plan, unpriced

    baseline = baseline_of(args, read_trace(path, args))
    asked = [
        asked_of(baseline, number, name, global_batch=args.global_batch, memory_bytes=memory_bytes, prices=prices,
                 what_ifs=what_ifs)
        for name in clusters or [""] for number in numbers
    ]  # fmt: skip
    without = unpriced(asked) if prices else ""
    costs = (f"plan: --prices has no price for the GPUs of {without}; their cost is unknown.",) if without else ()
    with progress_bar("planning") as progress:
        found = plan(
            baseline, asked, by=args.by or "throughput", currency=prices.currency if prices else "",
            jobs=args.jobs or 1, progress=progress,
        )  # fmt: skip
    from whatif.report.plot_plan import plan_figure
    from whatif.report.text_plan import print_plan

    return show(
        args,
        found.to_dict,
        lambda: print_plan(found, args.top),
        figure=lambda: plan_figure(found),
        warnings=(*baseline.graph.info.remarks, *costs),
        notes=found.notes,
    )


def _count(text: str) -> int:
    if not (text.strip().isascii() and text.strip().isdecimal() and 1 <= int(text.strip()[:7]) <= 100_000):
        raise UsageError(f"plan: expected --gpus from 1 to 100,000, as in 64 or 32,64, got {text[:20]!r}.")
    return int(text)
