"""``whatif dts``: five distributed architectures ranked for a cluster, with the roles of its processors."""

from __future__ import annotations

import argparse
from typing import Any

from whatif.cli.options import add_calibration, add_force, add_json, add_steps, with_torch
from whatif.cli.predict import input_of, keywords_of
from whatif.cli.reading import patience, print_plot, read_trace, show, warn
from whatif.cli.status import UsageError
from whatif.cli.trusted import baseline_of

# Imported by name at run time: the library never depends on torch.
FACTS = "whatif.instrumentation.dts_facts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif dts``."""
    parser.usage = "whatif dts CLUSTER.toml TRACE [OPTIONS]\n       whatif dts --measure FILE.py:MODEL --input SHAPE"
    parser.add_argument(
        "cluster", metavar="CLUSTER.toml", nargs="?", help="TOML file with [[processor]] and [[link]] tables"
    )
    parser.add_argument("trace", metavar="TRACE", nargs="?", help="a recording of one worker")
    parser.add_argument(
        "--measure", metavar="FILE.py:MODEL", help="instead: measure a model, and what this machine computes in a "
        "second of training it; prints a [[processor]] table"
    )  # fmt: skip
    parser.add_argument(
        "--input", metavar="SHAPE", help="a batch of the model to measure, such as 64,3,32,32 or 8,128:int64"
    )
    parser.add_argument("--kwargs", metavar="JSON", help="arguments of the model to measure, as a JSON object")
    parser.add_argument(
        "--clients", type=int, default=3, metavar="N", help="number of clients, each with its own data (default: 3)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="workers of pipeline learning (default: the fewest whose memory holds the network)",
    )
    parser.add_argument(
        "--cut",
        default="",
        metavar="LAYER",
        help="last layer on the client, or the number of its layers (default: the best)",
    )
    parser.add_argument(
        "--batches", type=int, default=100, metavar="N", help="batches per epoch, shared by the clients (default: 100)"
    )
    parser.add_argument(
        "--max-paths", type=int, default=100, metavar="N",
        help="assignments of roles to try for each architecture; 1: that of the ranking alone; 0: all (default: 100)",
    )  # fmt: skip
    parser.add_argument(
        "--architecture", action="append", default=[], metavar="NAME|FILE.py",
        help="architecture to rank (repeatable, default: all); FILE.py is a script of your own",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=int, default=1000, metavar="N", help="random samples of the fluctuations (default: 1000)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of these samples (default: 0)")
    parser.add_argument("--plot", metavar="FILE", help="plot epochs and roles into a .png, .svg or .pdf file")
    parser.add_argument(
        "--export", metavar="FILE", help="write the fastest assignment of roles as .dot, .png, .svg or .pdf"
    )
    add_steps(parser)
    add_calibration(parser)
    add_force(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Rank the architectures, or measure a model and this machine."""
    if args.measure is not None:
        return _measure(args)
    if args.trace is None or args.input is not None:
        given = "CLUSTER.toml alone" if args.cluster else "neither"
        got = "--input without --measure" if args.input is not None else given
        raise UsageError(f"dts: expected CLUSTER.toml and TRACE, or --measure FILE.py:MODEL --input SHAPE, got {got}.")
    return _rank(args)


def _measure(args: argparse.Namespace) -> int:
    if args.cluster is not None or args.input is None:
        got = f"{args.cluster!r} as well" if args.cluster is not None else "no --input"
        raise UsageError(f"dts: expected --measure FILE.py:MODEL --input SHAPE, got {got}.")
    _, shape, dtype = input_of(args.input, None, "dts")
    keywords = keywords_of(args.kwargs, "dts")
    tools: Any = with_torch(FACTS, "dts")
    with patience("measuring some steps"):
        facts, power = tools.measure_model(args.measure, shape, dtype, keywords)
    from whatif.report.text_dts import print_facts

    show(args, lambda: {"model": args.measure, **facts.to_dict(), **power.to_dict()}, lambda: print_facts(facts, power))
    return 0


def _rank(args: argparse.Namespace) -> int:
    from whatif.hardware.cluster.cluster_file import load_cluster
    from whatif.models.dts.architecture import load_architecture
    from whatif.models.dts.built_in import BUILT_IN
    from whatif.models.dts.options import cuts_of, machines_of
    from whatif.models.dts.plan import Training
    from whatif.models.dts.ranking import rank
    from whatif.report.plot_network import check_export, export
    from whatif.runtime.errors import WhatifError

    # Checks the options before reading the trace, which may be large.
    cluster = load_cluster(args.cluster)
    machines_of(cluster, tcp=False)
    architectures = [load_architecture(name) for name in args.architecture or BUILT_IN]
    Training(args.clients, workers=args.workers)
    if args.max_paths < 0:
        raise WhatifError(f"dts: expected --max-paths of 1 or more, or 0 for all, got {args.max_paths}.")
    if args.seed < 0:
        raise WhatifError(f"dts: expected --seed of 0 or more, got {args.seed}.")
    if args.export:
        check_export(args.export)
    pictures = [path for path in (args.plot, args.export) if path and not str(path).lower().endswith(".dot")]
    for path in pictures:
        from whatif.report.plots import check_plot

        check_plot(path, args.trace)
    from whatif.models.dts.dnn import dnn_of

    graph = read_trace(args.trace, args)
    dnn = dnn_of(baseline_of(args, graph).graph)
    training = Training(args.clients, workers=args.workers, cuts=cuts_of(dnn, args.cut))
    with patience("trying assignments of roles"):
        ranking = rank(
            architectures, dnn, machines_of(cluster, tcp=not graph.has_gpu), training, epoch_batches=args.batches,
            max_paths=args.max_paths or None, samples=args.samples, seed=args.seed,
        )  # fmt: skip
    if not ranking.possible:
        raise WhatifError(ranking.rows[0].reason)
    best = ranking.possible[0].found
    assert best is not None
    if args.export:
        export(best, args.export)
    from whatif.report.plot_dts import ranking_figure
    from whatif.report.text_dts import print_ranking

    show(
        args,
        lambda: {"trace": args.trace, "cluster": args.cluster, **ranking.to_dict()},
        lambda: print_ranking(ranking),
        figure=lambda: ranking_figure(ranking),
    )
    if not args.json:
        print_plot(args.export)
        warn(graph.info.remarks)
    return 0
