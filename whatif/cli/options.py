"""Options and arguments that several commands share, so that they are the same everywhere."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from whatif.cli.status import UsageError
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import is_address


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")


def add_top(parser: argparse.ArgumentParser, label: str = "number of rows in each table") -> None:
    """Add --top, with ``label`` as its help."""
    parser.add_argument("--top", type=POSITIVE, default=10, metavar="N", help=f"{label} (default: 10)")


def whole_number(least: int, most: int = 10**18 - 1, expected: str = "") -> Callable[[str], int]:
    """Return an argparse type: whole numbers from ``least`` to ``most``, which ``expected`` describes in errors."""

    def read(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or len(text) > 18 or not least <= int(text) <= most:
            wanted = expected or f"a whole number from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text[:40]!r}")
        return int(text)

    return read


def number(fits: Callable[[float], bool], expected: str, suffix: str = "") -> Callable[[str], float]:
    """Return an argparse type: numbers with or without a ``suffix``, which ``expected`` describes in errors."""

    def read(text: str) -> float:
        try:
            value = float(text.strip().removesuffix(suffix))
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text[:40]!r}")
        return value

    return read


# A number of rows, devices or processes.
POSITIVE = whole_number(1, expected="a whole number of 1 or more")


def with_torch(module: str, command: str, extras: str = "record") -> Any:
    """Return a module of ``whatif.instrumentation``, loaded by name at run time: the library never depends on torch."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise WhatifError(
            f"{command}: expected PyTorch in this Python environment, got none; install it with "
            f'`pip install "whatif-profiler[{extras}]"`, or run whatif where your training runs.'
        ) from None


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Add --step-count and --step-mark, for traces whose steps are not found, and --no-cache: options of reading."""
    rule = parser.add_mutually_exclusive_group()
    rule.add_argument(
        "--step-count", type=POSITIVE, metavar="N", help="number of steps of equal work in the trace (default: found)"
    )
    rule.add_argument("--step-mark", metavar="REGEX", help="annotations or operators whose names match begin the steps")
    parser.add_argument(
        "--no-cache",
        dest="cache",
        action="store_false",
        help="neither use nor fill the cache (see `whatif cache`)",
    )


def read_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return --step-count, --step-mark and --no-cache as arguments of ``whatif.read``."""
    return {"step_count": args.step_count, "step_mark": args.step_mark, "cache": args.cache}


def add_clock(parser: argparse.ArgumentParser) -> None:
    """Add --clock, and the options of reading a trace."""
    add_steps(parser)
    parser.add_argument(
        "--clock",
        choices=("gpu", "mark", "span"),
        help="end of a step: gpu: its last GPU work; mark: the profiler's mark; span: take the whole trace as one step "
        "(default: depends on the trace)",
    )


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """Add --as-recorded, once called --no-calibration, as ``calibrated``."""
    parser.add_argument(
        "--as-recorded",
        "--no-calibration",
        dest="calibrated",
        action="store_false",
        help="keep the profiler's cost: use all times as recorded",
    )


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add --force."""
    help_text = "answer even if the recording is too damaged for a valid answer"
    parser.add_argument("--force", action="store_true", help=help_text)


def add_analysis(parser: argparse.ArgumentParser) -> None:
    """Add --clock, --as-recorded, --force and --json, which every command that simulates a recording takes."""
    add_clock(parser)
    add_calibration(parser)
    add_force(parser)
    add_json(parser)


def add_plot(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add --plot; ``purpose`` begins its help."""
    parser.add_argument("--plot", metavar="FILE", help=f"{purpose} into a .png, .svg or .pdf file")


def add_markdown(parser: argparse.ArgumentParser) -> None:
    """Add --markdown, for what a pull request shows."""
    parser.add_argument("--markdown", action="store_true", help="print the report in Markdown, for a pull request")


def check_plots(plot: str | None, paths: Sequence[str]) -> None:
    """Raise an error if --plot names a file that cannot be written, or one that is an input."""
    if plot is None:
        return
    if not plot:
        raise UsageError("--plot: expected the name of a file that ends in .png, .svg or .pdf, got an empty name.")
    from whatif.report.plots import check_plot

    for path in paths:
        check_plot(plot, path)


def add_jobs(parser: argparse.ArgumentParser, purpose: str, default: str) -> None:
    """Add --jobs; ``purpose``, the work that it distributes, begins its help."""
    parser.add_argument(
        "--jobs",
        type=_jobs,
        metavar="N",
        help=f"{purpose} in N processes, or on a cluster: dask:ADDRESS or ray:ADDRESS (default: {default})",
    )


def _jobs(text: str) -> str:
    from whatif.runtime.jobs import Jobs

    try:
        Jobs.of(text)
    except WhatifError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--jobs: ").rstrip(".")) from None
    return text


def names_then_trace(words: list[str], command: str = "apply") -> tuple[list[str], str]:
    """Split ``NAME [NAME ...] TRACE`` of a command. Raises UsageError if the order is wrong or one is missing."""
    *names, last = words
    early = [word for word in names if is_trace(word)]
    if early and not is_trace(last):
        order = shlex.join([*(word for word in words if word != early[0]), early[0]])
        raise UsageError(f"{command}: the trace comes last; try `whatif {command} {order}`.")
    if early:
        raise UsageError(
            f"{command}: expected one trace, as the last argument, got another file {early[0]!r} before it; "
            "for several ranks name their folder; a transform script's name ends in .py."
        )
    if not names and is_trace(last):
        raise UsageError(
            f"{command}: expected NAME and TRACE, got only the trace {last!r}; `whatif transforms` lists names."
        )
    if _is_transform(last):
        raise UsageError(
            f"{command}: expected a trace as the last argument, got the transform {last!r}; name the trace too."
        )
    if not names:
        raise UsageError(f"{command}: expected NAME and TRACE, got only {last!r}; `whatif transforms` lists names.")
    return names, last


def trace_then_names(words: list[str], command: str) -> tuple[str, list[str]]:
    """Split ``TRACE [NAME ...]`` of a command. Raises UsageError if the order is wrong."""
    first, *names = words
    late = [word for word in names if is_trace(word)]
    if late and not is_trace(first):
        output = {"export": " -o out.json", "report": " -o report.html"}.get(command, "")
        order = shlex.join([late[0], *(word for word in words if word != late[0])])
        raise UsageError(f"{command}: the trace comes first; try `whatif {command} {order}{output}`.")
    if late:
        raise UsageError(
            f"{command}: expected one trace, as the first argument, got another file {late[0]!r} after it; "
            "for several ranks name their folder; a transform script's name ends in .py."
        )
    if _is_transform(first):
        raise UsageError(f"{command}: expected a trace as the first argument, got the transform {first!r}.")
    return first, names


def is_trace(word: str) -> bool:
    """Return whether a word of a command line is the file or address of a trace, and no script."""
    return is_address(word) or (os.path.isfile(word) and not word.endswith(".py"))


def _is_transform(word: str) -> bool:
    if os.path.exists(word):
        return word.endswith(".py")
    from whatif.prediction.transform import built_in_names, plug_in_names

    name = word.partition(":")[0]
    return name.endswith(".py") or name in built_in_names() or name in plug_in_names()
