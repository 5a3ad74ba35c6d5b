"""The command line: finds the command, runs it, and prints every error, in this one place.

Nothing heavy is imported here: ``whatif --help`` has to answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import NoReturn, TextIO

import whatif
from whatif.cli.interrupts import remembered
from whatif.errors import WhatifError

# Each command is a module of this package with add_arguments(parser) and run(args).
COMMANDS = {
    "collect": "record a run: trace, layers, untraced step time -> recording",
    "info": "what is in a trace, quirks met, replay error",
    "explain": "where the step goes, what it waits for, the layers that matter",
    "apply": "predict the step under one or several what-ifs",
    "advise": "every what-if that applies, ranked, and how they go together",
    "sweep": "a what-if at many values of its options: a table, a plot",
    "scaling": "the step on more and more workers, and up to how many it pays",
    "memory": "peak memory: its parts, what what-ifs make of it, what fits",
    "predict": "a step from a model alone: no GPU at hand, no recording",
    "recommend": "devices ranked by the step's time and cost on each, and what fits",
    "compare": "two recordings part by part, and which what-if lies between them",
    "check": "a gate for CI: fails where a step became longer than is allowed",
    "report": "one HTML page with everything: verdict, tables, charts, timeline",
    "export": "write a timeline that Perfetto opens, baseline beside predicted",
    "validate": "predictions beside what was measured, for pairs of runs",
    "anonymize": "a copy of a trace without paths, names of hosts and users, stacks",
    "opdb": "measured times of operators: import, look up, share, evaluate",
    "dts": "pipeline, federated and split learning ranked on your machines",
    "transforms": "list the what-ifs, or the options, source and model of one",
    "completion": "a script that lets your shell complete commands, what-ifs, files",
}

COULD_NOT, USAGE, INTERRUPTED = 1, 2, 130
# What stands before or behind any command.
FLAGS = ("--debug", "--quiet")


class UsageError(Exception):
    """The command line itself is wrong. The message is one sentence: expected, got, what to do."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that leaves the printing of errors to ``main``."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.removeprefix('whatif').strip()}: {message}; see `{self.prog} --help`.")


def main(argv: list[str] | None = None) -> int:
    """Run one command; gives 0, 1 (could not do it), 2 (usage) or 130 (interrupted)."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if sys.stderr is None:  # closed: without this, messages would end up in the output
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stdout is None:
        return _fail("expected a standard output to write to, got a closed one.", COULD_NOT)
    _never_fail_on_a_character()
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
            debug = debug or args.debug
            from whatif.cli import reading

            reading.be_quiet(args.quiet or "--quiet" in flags)
            status = int(module.run(args))
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _fail(str(error), USAGE)
    except WhatifError as error:
        if debug:
            raise
        return _fail(str(error), COULD_NOT)
    except KeyboardInterrupt:
        if debug:
            raise
        return _fail("interrupted.", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read the output has had enough; the interpreter's own flush at exit must not complain either.
        _drop_stdout()
        return COULD_NOT
    except OSError as error:
        if debug:
            raise
        if error.filename is not None:
            return _unexpected(error)
        # Without a file's name it is the output: a full disk behind `> file`.
        _drop_stdout()
        return _fail(f"expected to write the output, got '{error.strerror or error}'.", COULD_NOT)
    except MemoryError:
        if debug:
            raise
        return _fail("there is not enough memory for this trace; record fewer steps.", COULD_NOT)
    except Exception as error:
        if debug:
            raise
        return _fail("interrupted.", INTERRUPTED) if interrupted() else _unexpected(error)


def _split(arguments: Sequence[str]) -> tuple[str | None, set[str], list[str]]:
    """The command, which FLAGS stand before it, and what stands behind it; None where nothing is left to run."""
    flags: set[str] = set()
    for place, word in enumerate(arguments):
        if word in ("-h", "--help", "help"):
            print(_help())
            return None, flags, []
        if word in ("-V", "--version"):
            print(f"whatif {whatif.__version__}")
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
    import difflib

    close = difflib.get_close_matches(word, COMMANDS, 1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(COMMANDS)}."


def parser_of(command: str, module: ModuleType) -> argparse.ArgumentParser:
    """Give the parser of a command, with the flags that every command takes."""
    # Options are spelled out: an abbreviation that works today is ambiguous tomorrow.
    parser = _Parser(prog=f"whatif {command}", description=_sentence(COMMANDS[command]), allow_abbrev=False)
    module.add_arguments(parser)
    parser.add_argument("--quiet", action="store_true", help="no warnings and no progress on stderr")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _parse(command: str, module: ModuleType, rest: list[str]) -> argparse.Namespace | None:
    """The command's arguments; None where help was asked for."""
    parser = parser_of(command, module)
    # Options may stand between the names and the trace, except where the rest belongs to another program.
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
        "Says what a change would do to your DNN training before you make it.",
        "",
        *(f"  {name:<{width}}   {summary}" for name, summary in COMMANDS.items()),
        "",
        "  whatif COMMAND --help   the options of one command",
        "  whatif --version        the version",
        "",
        "For example:",
        "  whatif collect train.py",
        "  whatif explain train.json.gz",
        "  whatif apply scale:kind=gpu,factor=0.5 train.json.gz",
    ]
    return "\n".join(lines)


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."


def _unexpected(error: Exception) -> int:
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return _fail(f"unexpected error ({what}); please report it with the output of --debug.", COULD_NOT)


def _fail(sentence: str, status: int) -> int:
    from whatif.report.printable import printable

    # Neither stream need take writing; a message that nobody can get is no reason to fail in another way.
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


def _never_fail_on_a_character() -> None:
    """Let a terminal that lacks a character show a question mark instead of failing the command."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _drop_stdout() -> None:
    _drop(sys.stdout)


def _drop(stream: TextIO) -> None:
    """Send what the stream still holds nowhere, so that the interpreter's own flush at exit does not fail too."""
    with suppress(OSError, ValueError):  # no file descriptor: a notebook, a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
