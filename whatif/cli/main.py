"""The command line: finds the command, runs it, and prints every error, in this one place.

Nothing heavy is imported here: ``whatif --help`` has to answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn, TextIO

from whatif.cli.as_python import never_fail_on_a_character
from whatif.cli.interrupts import remembered
from whatif.cli.status import COULD_NOT, INTERRUPTED, UNREAD, USAGE, UsageError
from whatif.runtime.errors import WhatifError, closest
from whatif.runtime.files import VERSION

# Each command is a module of this package with add_arguments(parser) and run(args).
COMMANDS = {
    "demo": "write a recording that ships with whatif, and its report",
    "collect": "record a run: trace, layers, step time without the profiler",
    "info": "show what a trace contains, its quirks and its replay error",
    "explain": "show where the step time goes, by critical path, phase and layer",
    "apply": "predict the step time under one or more what-ifs",
    "advise": "rank all what-ifs that apply, alone and in combination",
    "sweep": "predict a what-if at many values of its options",
    "scaling": "predict step time and throughput for growing numbers of workers",
    "memory": "show peak memory, its parts, and the effect of what-ifs on it",
    "predict": "predict a step from model code alone, without GPU or recording",
    "plan": "find the fastest or cheapest parallelism on the GPUs you have",
    "recommend": "rank devices by predicted step time, cost and memory",
    "compare": "compare two recordings, and find what-ifs that explain the change",
    "check": "fail in CI if a step became slower than allowed",
    "report": "write an HTML page: verdict, tables, charts, timeline",
    "export": "write a timeline for Perfetto, baseline next to prediction",
    "validate": "compare predictions with measurements, for pairs of runs",
    "anonymize": "copy a trace without paths, host names, user names and stacks",
    "opdb": "manage the op database: import, query, share, evaluate",
    "dts": "rank pipeline, federated and split learning on your machines",
    "transforms": "list the what-ifs, or show the options and model of one",
    "cache": "show or clear the cache of traces read before",
    "completion": "print a script that adds completion to your shell",
}

# Characters of an error that are shown: a long one ends in what to do.
MOST_SHOWN = 1000
# Flags allowed before and after any command.
FLAGS = ("--debug", "--quiet")


class Parser(argparse.ArgumentParser):
    """An argument parser that leaves the printing of errors to ``main``, and takes -1GB for a value, as it does -1."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)")

    def error(self, message: str) -> NoReturn:
        found = re.match(r"unrecognized arguments: (--[a-z-]+)", message)
        hint = closest(found[1], self._option_string_actions, "") if found else ""
        tail = hint or f"see `{self.prog} --help`."
        raise UsageError(f"{self.prog.removeprefix('whatif').strip()}: {message}; {tail}")


def main(argv: list[str] | None = None) -> int:
    """Run one command; return 0, 1 (failed), 2 (usage error), 130 (interrupted) or 141 (output unread)."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if sys.stderr is None:  # closed: without this, messages would end up in the output
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stdout is None:
        return _fail("expected an open standard output, got a closed one.", COULD_NOT)
    never_fail_on_a_character()
    with remembered() as interrupted:
        return _run(arguments, interrupted)


def _run(arguments: Sequence[str], interrupted: Callable[[], bool]) -> int:
    debug = False
    try:
        command, flags, rest = _split(arguments)
        debug = "--debug" in flags
        module = importlib.import_module(f"whatif.cli.{command}") if command else None
        args = _parse(str(command), module, rest) if module else None
        status = 0  # help was asked for
        if module and args:
            args.debug = debug = debug or args.debug
            from whatif.cli import reading

            reading.be_quiet(args.quiet or "--quiet" in flags)
            status = int(module.run(args))
            _note_plain_loops()
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _fail(str(error), USAGE)
    except BrokenPipeError:
        # The reader closed the pipe; the interpreter's own flush at exit must not fail either.
        _drop_stdout()
        return UNREAD
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            raise
        return _failed(error, interrupted=isinstance(error, KeyboardInterrupt) or interrupted())


# CPU time of a long command: one on a small trace takes less.
_LONG_S = 5


def _note_plain_loops() -> None:
    """Note at the end of a long command that compiled loops would save time, if they are not compiled."""
    from whatif.cli.reading import warn
    from whatif.runtime.loops import all_plain

    if time.process_time() > _LONG_S and all_plain():
        warn(["the hot loops run as plain Python; to save time, install a C compiler and reinstall whatif"], "note")


def _failed(error: BaseException, *, interrupted: bool) -> int:
    """Print why a command failed; return its exit status."""
    if isinstance(error, WhatifError):
        from whatif.cli.reading import first_reason

        return _fail(first_reason(str(error)), COULD_NOT)
    if isinstance(error, OSError) and error.filename is None:
        # Without a file's name it is the output: a full disk behind `> file`.
        _drop_stdout()
        return _fail(f"expected to write the output, got '{error.strerror or error}'.", COULD_NOT)
    if isinstance(error, OSError):
        return _fail(
            f"{str(error.filename)[:200]!r}: expected a file that can be read or written, got "
            f"'{error.strerror or error}'; check the path.",
            COULD_NOT,
        )
    if isinstance(error, MemoryError):
        return _fail("there is not enough memory for this trace; record fewer steps.", COULD_NOT)
    if interrupted:
        return _fail("interrupted.", INTERRUPTED)
    description = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return _fail(f"unexpected error ({description}); please report it with the output of --debug.", COULD_NOT)


def _split(arguments: Sequence[str]) -> tuple[str | None, set[str], list[str]]:
    """Split into the command, the FLAGS before it and the words after it; the command is None if nothing is to run."""
    flags: set[str] = set()
    for place, word in enumerate(arguments):
        if word in ("-h", "--help", "help"):
            print(_help())
            return None, flags, []
        if word in ("-V", "--version"):
            from whatif.runtime.loops import all_plain

            print(f"whatif {VERSION}{' (plain: the hot loops are not compiled)' if all_plain() else ''}")
            return None, flags, []
        if word in FLAGS:
            flags.add(word)
        elif word in COMMANDS:
            return word, flags, list(arguments[place + 1 :])
        elif word.startswith("-"):
            raise UsageError(f"there is no option {word!r} before the command; see `whatif --help`.")
        else:
            raise UsageError(f"expected a command, got {word!r}; {_closest(word)}")
    from whatif.cli.questions import page

    print(page())
    return None, flags, []


def _closest(word: str) -> str:
    if os.path.exists(word):
        return f"to look at a trace: `whatif explain {word}`."
    return closest(word, COMMANDS, f"there are: {', '.join(COMMANDS)}.")


def parser_of(command: str, module: ModuleType) -> argparse.ArgumentParser:
    """Return the parser of a command, with the flags that every command takes."""
    # Options are spelled out: an abbreviation that works today is ambiguous tomorrow.
    parser = Parser(prog=f"whatif {command}", description=_sentence(COMMANDS[command]), allow_abbrev=False)
    module.add_arguments(parser)
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the FLAGS."""
    parser.add_argument("--quiet", action="store_true", help="print no warnings or progress to stderr")
    parser.add_argument("--debug", action="store_true", help="show the traceback if an error occurs")


def _parse(command: str, module: ModuleType, rest: list[str]) -> argparse.Namespace | None:
    """The command's arguments; None if help was requested."""
    parser = parser_of(command, module)
    # Options may come between the names and the trace, unless the rest belongs to another program.
    parse = parser.parse_args if getattr(module, "REST_IS_FOREIGN", False) else parser.parse_intermixed_args
    try:
        return parse(rest)
    except SystemExit:  # --help has printed
        return None


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        "usage: whatif COMMAND ... [--json] [--quiet] [--debug]",
        "",
        "Predicts what a change would do to your DNN training, before you make it.",
        "",
        *(f"  {name:<{width}}   {summary}" for name, summary in COMMANDS.items()),
        "",
        "  whatif COMMAND --help   show the options of a command",
        "  whatif --version        show the version",
        "",
        "Examples:",
        "  whatif demo",
        "  whatif collect train.py",
        "  whatif explain train.json.gz",
        "  whatif apply scale:kind=gpu,factor=0.5 train.json.gz",
    ]
    return "\n".join(lines)


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."


def _fail(sentence: str, status: int) -> int:
    from whatif.report.printable import printable

    if len(sentence) > MOST_SHOWN:  # a path of thousands of characters
        sentence = f"{sentence[: MOST_SHOWN // 2]} … {sentence[-MOST_SHOWN // 2 :]}"
    # Either stream may be closed; a message that cannot be written is no reason for another failure.
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _drop_stdout()
    try:
        print(f"whatif: {printable(sentence)}", file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)
    return status


def _drop_stdout() -> None:
    _drop(sys.stdout)


def _drop(stream: TextIO) -> None:
    """Discard what the stream still buffers, so that the interpreter's flush at exit does not fail too."""
    with suppress(OSError, ValueError):  # no file descriptor: a notebook, a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
