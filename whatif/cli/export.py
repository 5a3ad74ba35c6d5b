"""``whatif export``: a timeline that Perfetto opens, baseline beside predicted."""

from __future__ import annotations

import argparse
import sys

from whatif.cli.options import add_calibration, trace_then_names
from whatif.cli.reading import read_trace, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif export``."""
    parser.usage = "whatif export TRACE [NAME[:option=value,...] ...] -o OUT [OPTIONS]"
    parser.add_argument(
        "words", nargs="+", metavar="TRACE [NAME ...]", help="the trace, then the what-ifs to show beside it"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="OUT", help="the file to write; compressed where its name ends in .gz"
    )
    add_calibration(parser)


def run(args: argparse.Namespace) -> int:
    """Write the timelines and say where they are."""
    path, names = trace_then_names(args.words)
    from whatif.predict import Baseline, apply
    from whatif.report.perfetto import check_output, write_perfetto
    from whatif.report.printable import printable
    from whatif.transform import load_transform

    check_output(args.output, path)
    transforms = [load_transform(name) for name in names]
    baseline = Baseline.of(read_trace(path), calibrated=args.calibrated)
    if not transforms:
        write_perfetto(args.output, baseline.timeline, None)
    else:
        prediction = apply(baseline, *transforms)
        write_perfetto(args.output, baseline.timeline, prediction.timeline)
        warn(prediction.warnings)
    print(f"{printable(args.output)}: written; open it at https://ui.perfetto.dev", file=sys.stdout)
    return 0
