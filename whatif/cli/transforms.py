"""``whatif transforms``: the what-ifs at hand, the options, source and model of one, or a new one to begin with."""

from __future__ import annotations

import argparse
import shlex

from whatif.cli.main import UsageError
from whatif.cli.options import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif transforms``."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a transform's name or the path of a .py file")
    parser.add_argument("--new", metavar="FILE.py", help="write a working, commented transform to begin with")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list, or what is known of one transform, or write a new one."""
    if args.new is not None:
        if args.name is not None:
            raise UsageError(f"transforms: expected NAME or --new FILE.py, got both ({args.name!r} and {args.new!r}).")
        return _write_new(args.new, as_json=args.json)
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


def _write_new(path: str, *, as_json: bool) -> int:
    """Write a new script and say what to do with it."""
    from whatif.new_transform import write_new
    from whatif.report.printable import printable

    script = str(write_new(path))
    # A name that looks like an option has to be told from one.
    quoted = shlex.quote(script if not script.startswith("-") else f"./{script}")
    commands = (f"whatif transforms {quoted}", f"whatif apply {quoted} TRACE")
    if as_json:
        from whatif.report.as_json import print_json

        print_json({"written": script, "next": list(commands)})
        return 0
    print(f"{printable(script)}: written; it works as it is. Change it, and try:")
    for command in commands:
        print(f"  {printable(command)}")
    return 0
