"""What can stand where on the command line, read from the parsers of the commands."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from whatif.cli.main import COMMANDS, parser_of
from whatif.hardware import gpu_names

# What the parsers call values that are files, and positional ones that are what-ifs.
_FILE = re.compile(r"TRACE|FILE|FOLDER|PATH|OUT|\.py|^[AB]$")
_TRANSFORM = "NAME"
# And values that name a GPU, or several behind one another.
_GPU = re.compile(r"GPU|DEVICE")


@dataclass(frozen=True, slots=True)
class Option:
    """An option: how it is spelled, whether a value follows it, and what that may be."""

    flags: tuple[str, ...]
    summary: str
    takes_value: bool
    choices: tuple[str, ...] = ()
    takes_file: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or a command of a command (``words`` has both); what its arguments may be, beside its options."""

    words: tuple[str, ...]
    summary: str
    options: tuple[Option, ...]
    choices: tuple[str, ...] = ()  # the commands of this command among them
    takes_transform: bool = False
    takes_file: bool = False


def commands() -> list[Command]:
    """Give every command, and behind it the commands of its own."""
    found: list[Command] = []
    for name, summary in COMMANDS.items():
        parser = parser_of(name, importlib.import_module(f"whatif.cli.{name}"))
        found += _described((name,), summary, parser)
    return found


def _described(words: tuple[str, ...], summary: str, parser: argparse.ArgumentParser) -> Iterable[Command]:
    options = [Option(("-h", "--help"), "show the options", takes_value=False)]
    choices: list[str] = []
    takes_transform = takes_file = False
    inner: list[Command] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            choices += action.choices
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                inner += _described((*words, name), helps.get(name, ""), sub)
        elif action.option_strings and not isinstance(action, argparse._HelpAction):
            takes_value = action.nargs != 0
            listed = tuple(map(str, action.choices or ()))
            if takes_value and not listed and _GPU.search(_metavar(action).upper()):
                listed = gpu_names()
            options.append(
                Option(
                    tuple(action.option_strings),
                    (action.help or "").replace("%%", "%"),
                    takes_value,
                    listed,
                    takes_value and not listed and bool(_FILE.search(_metavar(action))),
                )
            )
        elif not action.option_strings:
            choices += map(str, action.choices or ())
            if _TRANSFORM in _metavar(action):  # a what-if is also a file of one's own
                takes_transform = takes_file = True
            takes_file |= not action.choices and bool(_FILE.search(_metavar(action)))
    return [Command(words, summary, tuple(options), tuple(choices), takes_transform, takes_file), *inner]


def _metavar(action: argparse.Action) -> str:
    return str(action.metavar or action.dest)
