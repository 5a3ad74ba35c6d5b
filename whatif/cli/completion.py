"""``whatif completion``: a script that completes commands, options, what-ifs and files in a shell."""

from __future__ import annotations

import argparse
import importlib
import re

SHELLS = ("bash", "zsh", "fish")

# Metavars of the parsers for values that are files, that name a GPU (or several in turn), and that are what-ifs.
_FILE = re.compile(r"TRACE|FILE|FOLDER|PATH|OUT|\.py|\.toml|^[AB]$")
_GPU = re.compile(r"GPU|DEVICE")
_TRANSFORM = "NAME"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif completion``."""
    parser.add_argument("shell", choices=SHELLS, help="the shell to print the script for")
    parser.epilog = (
        'Add one line. bash, in ~/.bashrc: eval "$(whatif completion bash)". zsh, in ~/.zshrc after compinit: '
        'eval "$(whatif completion zsh)". fish, in ~/.config/fish/config.fish: whatif completion fish | source'
    )


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    script = shtab.complete(whole_parser(), args.shell)
    if args.shell == "zsh":
        # shtab completes the first of several positional arguments only; in zsh's syntax this means all of them.
        script = script.replace('"(*):', '"*:')
    print(script)
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser of all commands, whose actions declare their completion."""
    from whatif.cli.main import COMMANDS, add_flags

    parser = argparse.ArgumentParser(prog="whatif")
    add_flags(parser)
    parser.add_argument("--version", action="version", version="", help="show the version")
    commands = parser.add_subparsers()
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        importlib.import_module(f"whatif.cli.{name}").add_arguments(command)
        add_flags(command)
    _complete(parser, _names_or_files())
    return parser


def _complete(parser: argparse.ArgumentParser, names_or_files: dict[str, object]) -> None:
    """Declare to shtab which arguments of a parser and its subcommands are files, GPUs and what-ifs."""
    import shtab

    from whatif.hardware.gpu import gpu_names

    for action in parser._actions:
        metavar = str(action.metavar or action.dest)
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _complete(inner, names_or_files)
        elif action.choices or action.nargs == 0:
            continue
        elif action.option_strings and _GPU.search(metavar.upper()):
            action.choices = gpu_names()
        elif not action.option_strings and _TRANSFORM in metavar:
            action.complete = names_or_files  # type: ignore[attr-defined]
        elif _FILE.search(metavar):
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def _names_or_files() -> dict[str, object]:
    """Return how each shell completes a what-if: with the name of an installed one, or a file."""
    from whatif.prediction.transform import built_in_names, plug_in_names

    names = " ".join([*built_in_names(), *plug_in_names()])
    function = "_whatif_name_or_file"
    return {
        "bash": function,
        "zsh": function,
        "fish": f"(string split ' ' '{names}'; __fish_complete_path (commandline -ct))",
        "preamble": {
            "bash": f'{function}() {{\n  compgen -W \'{names}\' -- "$1"\n  compgen -f -- "$1"\n}}',
            "zsh": f"{function}() {{\n  compadd -- {names}\n  _files\n}}",
        },
    }
