"""``whatif collect``: record a run of a script that knows nothing of whatif."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from whatif.cli.options import with_torch
from whatif.cli.reading import warn
from whatif.errors import WhatifError

# What stands behind the script's name belongs to the script.
REST_IS_FOREIGN = True
# Imported by name at run time: the library never depends on torch.
RECORDER = "whatif.instrumentation.collect"
OPERATOR_TIMES = "whatif.instrumentation.operators.times"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif collect``."""
    parser.usage = "whatif collect [OPTIONS] SCRIPT.py [ARGS ...]"
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="training steps to record (default: 5)")
    parser.add_argument(
        "--untraced-steps",
        type=int,
        default=20,
        metavar="N",
        help="training steps to time before the profiler starts (default: 20)",
    )
    parser.add_argument(
        "--backend",
        choices=["kineto", "cupti"],
        default="kineto",
        help="profiler to use: torch's own (default), or CUPTI through cupti-python on an NVIDIA GPU",
    )
    parser.add_argument("--memory", action="store_true", help="also record every allocation (larger file, slower run)")
    parser.add_argument(
        "--lines", action="store_true", help="also note which line of your code runs (`whatif explain --by line`)"
    )
    parser.add_argument(
        "--measure-operators",
        action="store_true",
        help="after the run, time each operator alone, also in bf16, channels-last, ..., for better predictions",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the recording to write (default: the script's name with .json.gz); replaces an existing recording, "
        "but no other file",
    )
    parser.add_argument("script", metavar="SCRIPT.py", help="a training script, run as with `python SCRIPT.py ARGS`")
    own = parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    own.required = False  # some versions of argparse report it as missing


def run(args: argparse.Namespace) -> int:
    """Run the script, record it and say where the recording is."""
    if not Path(args.script).is_file():
        raise WhatifError(f"{args.script}: expected a Python script, got no such file; check the path.")
    output = Path(args.output or f"{Path(args.script).stem}.json.gz")
    recorder = with_torch(RECORDER, "collect")
    written = recorder.collect(
        args.script,
        args.args,
        output,
        steps=args.steps,
        untraced_steps=args.untraced_steps,
        backend=args.backend,
        memory=args.memory,
        lines=args.lines,
    )
    from whatif.report.printable import printable

    name = printable(str(written))
    if args.measure_operators:
        try:
            importlib.import_module(OPERATOR_TIMES).add_operator_times(written)
        except (KeyboardInterrupt, WhatifError):
            warn([f"{name}: recorded, but its operators were not measured"])
            raise
    print(f"{name}: recorded; next: whatif explain {name}")
    return 0
