"""``whatif report``: all results for a recording as one HTML page that opens from disk."""

from __future__ import annotations

import argparse
from pathlib import Path

from whatif.cli.options import add_calibration, add_clock, add_force
from whatif.cli.rank_files import add_ranks, read_traces, traces_then_names
from whatif.cli.reading import progress_bar, warn
from whatif.cli.trusted import baseline_of
from whatif.runtime.errors import WhatifError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif report``."""
    parser.usage = "whatif report TRACE ... [NAME[:option=value,...] ...] -o OUT [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="+",
        metavar="TRACE [NAME ...]",
        help="the trace (or the traces of several ranks, or their folder), then the what-ifs to show next to it "
        "(default: the one that advise names first)",
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="OUT", help="the .html file to write; replaces an earlier report"
    )
    add_ranks(parser)
    add_clock(parser)
    add_calibration(parser)
    add_force(parser)


def run(args: argparse.Namespace) -> int:
    """Write the page, and print the verdict and the file's name."""
    paths, names = traces_then_names(args.words, "report")
    from whatif.prediction.transform import load_transform
    from whatif.report.printable import printable
    from whatif.runtime.files import file_beside, replaceable_file

    # Checks the output file and the names before reading the trace, which may be large.
    for path in paths:
        file_beside(args.output, path)
    if Path(args.output).suffix.lower() not in ("", ".html", ".htm"):
        raise WhatifError(f"{args.output}: expected the name of an .html file to write, got another ending.")
    replaceable_file(args.output, "report", lambda start: b"<title>What-if report: " in start)
    requested = [load_transform(name) for name in names]
    from whatif.report.html.facts import gather, without_folders
    from whatif.report.html.page import write_page

    graph, ranks = read_traces(paths, args)
    recording, graph = Path(graph.info.path), without_folders(graph)
    baseline = baseline_of(args, graph)
    with progress_bar("trying") as progress:
        facts = gather(baseline, requested, recorded=graph, path=recording, ranks=ranks, progress=progress)
    write_page(args.output, facts)
    for sentence in facts.advice.verdict:
        print(printable(sentence))
    print(f"\n{printable(args.output)}: written; open it in a browser")
    warn(facts.summary.warnings)
    return 0
