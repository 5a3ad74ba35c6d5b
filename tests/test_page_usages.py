"""Every command line that a page shows can be typed: those in its text as well, and those that are not run."""

from __future__ import annotations

import importlib
import re
import shlex

from tests.helpers import need
from tests.pages.blocks import PAGES, ROOT, blocks_of
from whatif.cli.main import COMMANDS, parser_of
from whatif.cli.status import UsageError

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}


def _wrong(words: list[str]) -> str:
    """The parser's error for a command's arguments; empty if it accepts them."""
    command, *arguments = words
    if command.isupper() or command.startswith("-"):
        return ""
    if command not in COMMANDS:
        return "no such command"
    parser = parser_of(command, importlib.import_module(f"whatif.cli.{command}"))
    try:
        parse = parser.parse_args if command in ("collect", "opdb") else parser.parse_intermixed_args
        parse(arguments)
    except UsageError as error:
        return str(error)
    except SystemExit:  # --help
        pass
    return ""


def test_commands_in_blocks_can_be_typed() -> None:
    commands = [
        (page, shlex.split(command.split(" | ")[0].split(" && ")[-1], comments=True))
        for page, text in TEXTS.items()
        for block in blocks_of(text)
        for command in block.commands()
    ]
    usages = [(page, words[1:]) for page, words in commands if words[0] == "whatif"]
    assert len(usages) > 120
    assert [(page, words, wrong) for page, words in usages if (wrong := _wrong(words))] == []


def test_commands_in_the_text_can_be_typed() -> None:
    """Commands may be abbreviated: a name alone refers to its command, an ellipsis to what the reader knows."""
    wrong, seen = [], 0
    for page, text in TEXTS.items():
        plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for line in re.findall(r"(?<!`)`(whatif [^`]+)`(?!`)", plain):
            words = shlex.split(" ".join(line.split()))[1:]
            if len(words) == 1 or "…" in line or "..." in line:
                assert words[0] in COMMANDS or words[0].startswith("-") or "|" in words[0], f"{page}: {line}"
                continue
            seen += 1
            said = _wrong(words)
            if said and "are required" not in said:
                wrong.append((page, line, said))
    assert seen > 30
    assert wrong == []


def test_modules_that_are_not_run_know_their_options() -> None:
    need("torch")
    seen = 0
    for text in TEXTS.values():
        for block in blocks_of(text):
            for command in block.commands() if block.not_run else ():
                words = shlex.split(command, comments=True)
                if words[:2] == ["python", "-m"] and words[2].endswith((".campaign", ".lab")):
                    importlib.import_module(f"{words[2]}.__main__")._parse(words[3:])
                    seen += 1
    assert seen >= 6
