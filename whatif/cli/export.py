"""``whatif export``: a timeline for Perfetto, the baseline next to the prediction."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_calibration, add_force, add_steps
from whatif.cli.rank_files import add_ranks, read_traces, traces_then_names
from whatif.cli.reading import patience, warn
from whatif.cli.trusted import baseline_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif export``."""
    parser.usage = "whatif export TRACE ... [NAME[:option=value,...] ...] -o OUT [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="+",
        metavar="TRACE [NAME ...]",
        help="the trace (or the traces of several ranks, or their folder), then the what-ifs to show next to it",
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help="file to write, compressed if its name ends in .gz; replaces an earlier export",
    )
    add_ranks(parser)
    add_steps(parser)
    add_calibration(parser)
    add_force(parser)


def run(args: argparse.Namespace) -> int:
    """Write the timelines and print the file's name."""
    paths, names = traces_then_names(args.words, "export")
    from whatif.ingest.exported import EXPORTED_BEGIN
    from whatif.prediction.composition import spelled_together
    from whatif.prediction.predict import apply
    from whatif.prediction.transform import load_transform
    from whatif.report.perfetto import write_perfetto
    from whatif.report.printable import printable
    from whatif.runtime.files import file_beside, replaceable_file

    for path in paths:
        file_beside(args.output, path)
    replaceable_file(args.output, "export", lambda start: start.startswith(EXPORTED_BEGIN))
    transforms = [load_transform(name) for name in names]
    graph, _ = read_traces(paths, args)
    baseline = baseline_of(args, graph, refuses=bool(names))
    corrected = baseline.is_without_profiler
    prediction = None
    with patience("writing"):
        if not transforms:
            write_perfetto(args.output, baseline.timeline, None, without_profiler=corrected)
        else:
            prediction = apply(baseline, *transforms)
            label = spelled_together(transforms)
            write_perfetto(args.output, baseline.timeline, prediction.timeline, label, without_profiler=corrected)
    if prediction is not None:
        warn(prediction.warnings)
    print(f"{printable(args.output)}: written; open it at https://ui.perfetto.dev")
    return 0
