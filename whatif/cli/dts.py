"""``whatif dts``: five distributed architectures ranked for a cluster, with the roles of its processors."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_calibration, add_json
from whatif.cli.reading import print_plot, progress_bar, read_trace, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif dts``."""
    parser.add_argument("cluster", metavar="CLUSTER.toml", help="a file with [[processor]] and [[link]] tables")
    parser.add_argument("trace", metavar="TRACE", help="a recording of one worker")
    parser.add_argument("--clients", type=int, default=3, metavar="N", help="those with data of their own (default: 3)")
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="of pipeline learning (default: as few as hold the network)"
    )
    parser.add_argument(
        "--cut", default="", metavar="LAYER", help="a client's last layer, or a number of layers (default: the best)"
    )
    parser.add_argument(
        "--batches", type=int, default=100, metavar="N", help="of an epoch, shared by the clients (default: 100)"
    )
    parser.add_argument(
        "--max-paths", type=int, default=100, metavar="N",
        help="ways to give out the roles that are tried for each architecture; 0: all (default: 100)",
    )  # fmt: skip
    parser.add_argument(
        "--architecture", action="append", default=[], metavar="NAME|FILE.py",
        help="only this one; again for more; a file is a script of your own, which is run",
    )  # fmt: skip
    parser.add_argument("--samples", type=int, default=1000, metavar="N", help="draws of fluctuations (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of these draws (default: 0)")
    parser.add_argument("--plot", metavar="FILE", help="draw epochs and roles into a .png, .svg or .pdf")
    parser.add_argument("--export", metavar="FILE", help="write the fastest one's roles as .dot, .png, .svg or .pdf")
    add_calibration(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Rank the architectures."""
    from whatif.cluster.cluster_file import load_cluster
    from whatif.dts.architecture import BUILT_IN, load_architecture
    from whatif.dts.network_graph import check_export, export
    from whatif.dts.options import cuts_of, machines_of
    from whatif.dts.plan import Training
    from whatif.dts.ranking import rank
    from whatif.errors import WhatifError

    # What is misspelled is told before a large trace is read.
    cluster = load_cluster(args.cluster)
    machines_of(cluster, tcp=False)
    architectures = [load_architecture(name) for name in args.architecture or BUILT_IN]
    Training(args.clients, workers=args.workers)
    if args.max_paths < 0:
        raise WhatifError(f"dts: expected --max-paths from 1 on, or 0 for all, got {args.max_paths}.")
    if args.seed < 0:
        raise WhatifError(f"dts: expected --seed from 0 on, got {args.seed}.")
    if args.export:
        check_export(args.export)
    pictures = [path for path in (args.plot, args.export) if path and not str(path).lower().endswith(".dot")]
    for path in pictures:
        from whatif.report.plots import check_plot

        check_plot(path, args.trace)
    from whatif.baseline import Baseline
    from whatif.dts.dnn import dnn_of

    graph = read_trace(args.trace)
    dnn = dnn_of(Baseline.of(graph, calibrated=args.calibrated).graph)
    training = Training(args.clients, workers=args.workers, cuts=cuts_of(dnn, args.cut, "dts"))
    with progress_bar("trying architectures") as progress:
        ranking = rank(
            architectures, dnn, machines_of(cluster, tcp=not graph.on_gpu.any()), training, epoch_batches=args.batches,
            max_paths=args.max_paths or None, samples=args.samples, seed=args.seed, progress=progress,
        )  # fmt: skip
    if not ranking.possible:
        raise WhatifError(ranking.rows[0].reason)
    best = ranking.possible[0].found
    assert best is not None
    if args.plot:
        from whatif.report.plot_dts import plot_ranking

        plot_ranking(ranking, args.plot)
    if args.export:
        export(best, args.export)
    if args.json:
        from whatif.report.as_json import print_json

        print_json(
            {
                "trace": args.trace,
                "cluster": args.cluster,
                **ranking.to_dict(),
                **({"plot": args.plot} if args.plot else {}),
            }
        )
        return 0
    from whatif.report.text_dts import print_ranking

    print_ranking(ranking)
    print_plot(args.plot)
    print_plot(args.export)
    warn(graph.info.quirks)
    return 0
