"""``whatif anonymize``: a copy of a trace that can be shared."""

from __future__ import annotations

import argparse

from whatif.cli.reading import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif anonymize``."""
    parser.add_argument("trace", metavar="TRACE", help="a recording or Kineto trace, or a campaign's record (.json)")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        help="the file to write (compressed where its name ends in .gz), or a folder for one of the same name "
        "(default: TRACE's name with .anonymous before its ending); what is there is replaced only where its name has "
        ".anonymous in it",
    )
    parser.add_argument("--layers", action="store_true", help="replace the words of layer names by numbered ones too")


def run(args: argparse.Namespace) -> int:
    """Write the copy and say what was taken out."""
    from whatif.anonymize import anonymize
    from whatif.report.text_anonymize import print_anonymized

    with progress_bar("copying", file=args.trace) as progress:
        result = anonymize(args.trace, args.output, rename_layers=args.layers, progress=progress)
    print_anonymized(result)
    return 0
