"""The completion scripts of three shells, written from one table of the commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from whatif.cli.completion_table import Command, commands
from whatif.cli.main import FLAGS
from whatif.transform import built_in_names, plug_in_names

_ANY = (*FLAGS, "--help", "--version")


def script(shell: str) -> str:
    """Give the script for ``bash``, ``zsh`` or ``fish``: the commands and what-ifs of this installation."""
    known = commands()
    transforms = [*built_in_names(), *plug_in_names()]
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](known, transforms)


# bash and zsh walk the words in the same way; they differ in how they offer what they found.
_WALK = """\
    local command= word i
    for ((i = {first}; i < {current}; i++)); do
        word={words}
        case "$command $word" in
{nested}
        *) case $word in -*) ;; *) [ -n "$command" ] || command=$word ;; esac ;;
        esac
    done
    local options= words= files=
    case $command in
    '') words={top} options={flags} ;;
{commands}
    esac
    case "$command $previous" in
{values}
    esac"""

_BASH = """\
# Completion of whatif in bash: eval "$(whatif completion bash)"
_whatif() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
{walk}
    case $current in -*) words=$options files= ;; esac
    local IFS=$'\\n'
    COMPREPLY=($(IFS=' '; compgen -W "$words" -- "$current"))
    [ -z "$files" ] || COMPREPLY+=($(compgen -f -- "$current"))
}}
complete -o filenames -F _whatif whatif"""

_ZSH = """\
#compdef whatif
# Completion of whatif in zsh, behind compinit: eval "$(whatif completion zsh)"
_whatif() {{
    local current="${{words[CURRENT]}}" previous="${{words[CURRENT-1]}}"
    local -a typed=("${{words[@]}}")
{walk}
    case $current in -*) words=$options files= ;; esac
    [ -z "$words" ] || compadd -- ${{=words}}
    [ -z "$files" ] || _files
}}
compdef _whatif whatif"""


def _bash(known: list[Command], transforms: list[str]) -> str:
    return _BASH.format(walk=_walk(known, transforms, "1", "COMP_CWORD", '"${COMP_WORDS[i]}"'))


def _zsh(known: list[Command], transforms: list[str]) -> str:
    return _ZSH.format(walk=_walk(known, transforms, "2", "CURRENT", '"${typed[i]}"'))


def _walk(known: list[Command], transforms: list[str], first: str, current: str, words: str) -> str:
    nested = [
        f"        {_words(command.words)}) command={_words(command.words)} ;;"
        for command in known
        if len(command.words) > 1
    ]
    return _WALK.format(
        first=first,
        current=current,
        words=words,
        nested="\n".join(nested) or "        'no such command') ;;",
        top=_words([*(command.words[0] for command in known if len(command.words) == 1), *_ANY]),
        flags=_words(_ANY),
        commands="\n".join(_of_command(command, transforms) for command in known),
        values="\n".join(_of_values(command) for command in known if any(o.takes_value for o in command.options)),
    )


def _of_command(command: Command, transforms: list[str]) -> str:
    """What may stand behind a command."""
    flags = [flag for option in command.options for flag in option.flags]
    offered = [*command.choices, *(transforms if command.takes_transform else ())]
    files = "1" if command.takes_file else ""
    return f"    {_words(command.words)}) options={_words(flags)} words={_words(offered)} files={files} ;;"


def _of_values(command: Command) -> str:
    """What may stand behind those of its options that take a value: nothing else then."""
    lines = []
    for option in command.options:
        if option.takes_value:
            spelled = "|".join(_words([*command.words, flag]) for flag in option.flags)
            files = "1" if option.takes_file else ""
            lines.append(f"    {spelled}) options= words={_words(option.choices)} files={files} ;;")
    return "\n".join(lines)


def _fish(known: list[Command], transforms: list[str]) -> str:
    lines = ["# Completion of whatif in fish: whatif completion fish | source", "complete -c whatif -f"]
    lines += [f"complete -c whatif -n __fish_use_subcommand -l {flag.removeprefix('--')}" for flag in _ANY]
    outer = [command for command in known if len(command.words) == 1]
    for command in outer:
        lines.append(
            f"complete -c whatif -n __fish_use_subcommand -a {command.words[0]} -d {shlex.quote(command.summary)}"
        )
    for command in known:
        inner = [other.words[-1] for other in known if other.words[:-1] == command.words]
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.words)
        # A command of a command may be called as another command is.
        others = inner or [other.words[0] for other in known if len(other.words) > 1 and len(command.words) == 1]
        if others:
            seen += f"; and not __fish_seen_subcommand_from {' '.join(dict.fromkeys(others))}"
        begin = f"complete -c whatif -n {shlex.quote(seen)}"
        offered = [*command.choices, *(transforms if command.takes_transform else ())]
        if offered:
            lines.append(f"{begin} -a {_words(offered)}")
        if command.takes_file:
            lines.append(f"{begin} -F")
        for option in command.options:
            names = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            value = ""
            if option.takes_value:
                value = " -r -F" if option.takes_file else " -x"
                value += f" -a {_words(option.choices)}" if option.choices else ""
            lines.append(f"{begin} {names}{value} -d {shlex.quote(option.summary)}")
    return "\n".join(lines)


def _words(words: Iterable[str]) -> str:
    """Words as one word of a shell."""
    return shlex.quote(" ".join(words)) or "''"
