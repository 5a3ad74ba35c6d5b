"""``whatif collect``: record a run of an unmodified script."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

from whatif.cli import reading
from whatif.cli.as_python import as_python, interrupt_at_exit
from whatif.cli.options import with_torch
from whatif.cli.status import COULD_NOT
from whatif.runtime.errors import WhatifError
from whatif.units import counted

# Words after the script's name belong to the script.
REST_IS_FOREIGN = True
# Imported by name at run time: the library never depends on torch.
RECORDER = "whatif.instrumentation.collect"
LAUNCHERS = "whatif.instrumentation.launchers"
COLLECTOR = "whatif.instrumentation.collector"
MESSAGES = "whatif.instrumentation.messages"
OPERATOR_TIMES = "whatif.instrumentation.operators.times"

NOTEBOOK = (
    "expected a Python script, got a notebook; in the notebook run `%load_ext whatif`, then begin the cell that trains "
    "with `%%whatif collect`."
)


def add_recording_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options of a recording, for a script and for a notebook's cell; ``name``: where it is written."""
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps to record (default: 5)")
    parser.add_argument(
        "--untraced-steps",
        type=int,
        default=20,
        metavar="N",
        help="steps to time before the profiler starts (default: 20)",
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
        "--inference", action="store_true", help="a step is a forward call of the model, not an optimizer's step"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"the recording to write (default: {name}); replaces an existing recording, but no other file",
    )


def recording_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of ``add_recording_options`` as arguments of the recorder."""
    names = ("steps", "untraced_steps", "backend", "memory", "lines", "inference")
    return {name: getattr(args, name) for name in names}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif collect``."""
    parser.usage = "whatif collect [OPTIONS] [-m] SCRIPT.py [ARGS ...]"
    add_recording_options(parser, "the script's name with .json.gz")
    parser.add_argument("--stop", action="store_true", help="end the script as soon as the recording is written")
    parser.add_argument(
        "--measure-operators",
        action="store_true",
        help="after the run, time each operator alone, also in bf16, channels-last, ..., for better predictions",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as `python -m MODULE ARGS` does")
    parser.add_argument(
        "script",
        metavar="SCRIPT.py",
        help="a script, run as with `python SCRIPT.py ARGS`; or torchrun or accelerate launch with what follows them",
    )
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    rest.required = False  # some versions of argparse report it as missing


def run(args: argparse.Namespace) -> int:
    """Run the script to its end and record it; return its exit status, or 1 if only the recording failed."""
    if args.script.endswith(".ipynb") and Path(args.script).is_file():
        raise WhatifError(f"{args.script}: {NOTEBOOK}")
    if not args.module and not Path(args.script).is_file() and args.script in ("python", "python3"):
        raise WhatifError(f"{args.script}: expected a script, got Python itself; drop `{args.script}`.")
    if args.module or not Path(args.script).is_file():
        with_torch("torch", "collect")  # Launchers need it too.
        launchers = importlib.import_module(LAUNCHERS)
        command = launchers.launched(args.script, args.args, _own_options(args))
        if command is not None:
            os.execv(command[0], command)
    return _record(args)


def _record(args: argparse.Namespace) -> int:
    stem = args.script.rpartition(".")[2] if args.module else Path(args.script).stem
    recorder, messages = with_torch(RECORDER, "collect"), with_torch(MESSAGES, "collect")
    say = messages.tell
    with as_python():
        ended = recorder.collect(
            args.script,
            args.args,
            Path(args.output or f"{stem}.json.gz"),
            module=args.module,
            stop=args.stop,
            say=None if reading.quiet() else say,
            **recording_options(args),
        )
    if ended.interrupted:
        interrupt_at_exit()
    if ended.recording is None:
        say(f"no recording of {args.script}: {ended.failure}")
        return int(ended.status) or COULD_NOT
    from whatif.report.printable import printable

    name = printable(str(ended.recording))
    if args.measure_operators and not ended.interrupted:
        try:
            importlib.import_module(OPERATOR_TIMES).add_operator_times(ended.recording)
        except (KeyboardInterrupt, WhatifError):
            say(f"{name}: recorded, but its operators were not measured.")
            raise
    if reading.quiet():
        return int(ended.status)
    # One of the ranks that train together reports all files.
    if not ended.together or messages.this_rank() in (None, 0):
        files = name.replace(".rank0.", ".rank*.") if ended.together else name
        say(messages.recorded(name, files))
    after = f"after {counted(ended.steps, 'step')}"
    if ended.stopped:
        say(f"stopped {args.script} {after}: it did not run to its end, so use none of its results.")
    if ended.caught:
        say(f"{args.script} caught the stop {after} and ended by itself: it may have left out work.")
    return int(ended.status)


def _own_options(args: argparse.Namespace) -> list[str]:
    """Return the options as words, for the processes that a launcher starts."""
    flags = ("memory", "lines", "inference", "stop", "measure_operators", "debug")
    values = {"--steps": args.steps, "--untraced-steps": args.untraced_steps, "--backend": args.backend}
    if args.output:
        values["--output"] = args.output
    words = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag)]
    if reading.quiet():  # also if --quiet was given before the command
        words.append("--quiet")
    return [*words, *(word for name, value in values.items() for word in (name, str(value)))]
