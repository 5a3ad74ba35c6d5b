"""``whatif transforms``: the available what-ifs; the options, source and model of one; or a template of a new one."""

from __future__ import annotations

import argparse
import shlex

from whatif.cli.options import add_json
from whatif.cli.reading import show
from whatif.cli.status import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif transforms``."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a transform's name or the path of a .py file")
    parser.add_argument("--new", metavar="FILE.py", help="write a commented transform to start from")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list, or the description of one transform, or write a new one."""
    if args.new is not None:
        if args.name is not None:
            raise UsageError(f"transforms: expected NAME or --new FILE.py, got both ({args.name!r} and {args.new!r}).")
        return _write_new(args)
    from whatif.report import transforms_text as report

    if args.name is not None:
        from whatif.prediction.transform import load_transform

        described = report.describe(load_transform(args.name))
        print_it = report.print_transform
    else:
        described = report.listing()
        print_it = report.print_listing
    return show(args, lambda: described, lambda: print_it(described))


def _write_new(args: argparse.Namespace) -> int:
    """Write a new script, and print the commands to try with it."""
    from whatif.prediction.new_transform import write_new
    from whatif.report.printable import printable

    script = str(write_new(args.new))
    # A name that begins with "-" would be parsed as an option.
    quoted = shlex.quote(script if not script.startswith("-") else f"./{script}")
    commands = (f"whatif transforms {quoted}", f"whatif apply {quoted} TRACE")

    def print_text() -> None:
        print(f"{printable(script)}: written; it works as it is. Change it, and try:")
        for command in commands:
            print(f"  {printable(command)}")

    return show(args, lambda: {"written": script, "next": list(commands)}, print_text)
