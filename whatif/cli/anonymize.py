"""``whatif anonymize``: a copy of a trace that can be shared."""

from __future__ import annotations

import argparse

from whatif.cli.reading import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif anonymize``."""
    parser.add_argument("trace", metavar="TRACE", help="a recording, a Kineto trace, or a record of a campaign (.json)")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        help="file to write (compressed if its name ends in .gz), or a folder "
        "(default: TRACE's name with .anonymous before its suffix); replaces only files with .anonymous in their name",
    )
    parser.add_argument("--layers", action="store_true", help="also replace the words in layer names by numbers")


def run(args: argparse.Namespace) -> int:
    """Write the copy and report what was removed."""
    from whatif.ingest.anonymize.anonymize import anonymize
    from whatif.report.text_anonymize import print_anonymized

    with progress_bar("copying", file=args.trace) as progress:
        result = anonymize(args.trace, args.output, rename_layers=args.layers, progress=progress)
    print_anonymized(result)
    return 0
