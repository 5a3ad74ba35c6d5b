"""``whatif validate``: predictions next to measurements, for every pair of runs in a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from whatif.cli.options import add_calibration, add_force, add_json, add_plot, check_plots
from whatif.cli.reading import progress_bar, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif validate``."""
    parser.add_argument(
        "paths",
        nargs="*",
        default=["."],
        metavar="FOLDER|FILE",
        help="folders of recorded pairs, searched recursively, or a file that lists pairs (default: this folder); .py "
        "files: your own what-ifs, which such a list names",
    )
    add_json(parser)
    parser.add_argument(
        "--markdown", metavar="FILE", help="write the tables into a Markdown file instead; replaces an earlier one"
    )
    add_plot(parser, "plot predictions next to measurements")
    add_calibration(parser)
    add_force(parser)


def run(args: argparse.Namespace) -> int:
    """Print or write the comparison."""
    from whatif.questions.validate.validate import validate
    from whatif.runtime.errors import WhatifError
    from whatif.runtime.files import replaceable_file, replacing

    if args.markdown:
        # Checks the output's name before the work.
        replaceable_file(args.markdown, "page of whatif validate", lambda start: start.startswith(b"# Validation\n"))
    check_plots(args.plot, args.paths)
    with progress_bar("validating") as progress:
        paths = [Path(p) for p in args.paths]
        validation = validate(paths, calibrated=args.calibrated, force=args.force, progress=progress)
    if args.markdown:
        from whatif.report.markdown_validate import page

        with replacing(args.markdown) as part:
            part.write_text(page(validation), encoding="utf-8")
    from whatif.report.plot_validate import validation_figure
    from whatif.report.printable import printable
    from whatif.report.text_validate import headline, print_validation

    def print_text() -> None:
        if args.markdown:
            print(f"{printable(args.markdown)}: written; {headline(validation)}")
        else:
            print_validation(validation)

    show(args, validation.to_dict, print_text, figure=lambda: validation_figure(validation))
    if not validation.outcomes:
        where = ", ".join(args.paths)
        raise WhatifError(
            f"{where}: expected a pair of runs to compare, got {len(validation.unpaired)} that "
            "cannot be compared; the list above gives the reasons."
        )
    return 0
