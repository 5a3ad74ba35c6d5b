"""``whatif completion``: a script that completes commands, options, what-ifs and files in a shell."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif completion``."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    parser.epilog = (
        'Put eval "$(whatif completion bash)" into ~/.bashrc, the same with zsh into ~/.zshrc behind compinit, '
        "or whatif completion fish | source into ~/.config/fish/config.fish."
    )


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from whatif.cli.completion_scripts import script

    print(script(args.shell))
    return 0
