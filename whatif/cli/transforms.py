"""``whatif transforms``: the what-ifs at hand, or the options, source and model of one."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif transforms``."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a transform's name or the path of a .py file")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list, or what is known of one transform."""
    from whatif.report import transforms_text as report

    if args.name is not None:
        from whatif.transform import load_transform

        described = report.describe(load_transform(args.name))
        show = report.print_transform
    else:
        described = report.listing()
        show = report.print_listing
    if args.json:
        from whatif.report.as_json import print_json

        print_json(described)
    else:
        show(described)
    return 0
