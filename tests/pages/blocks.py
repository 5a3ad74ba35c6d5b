"""What stands in the fenced blocks of a page, and what its comments say of them.

A block's language says what becomes of it:

``console``   commands after ``$``, run; where output is shown it is the real one
``sh``        a command a line, with comments, run; its output is not shown
``python``    run, in one namespace a page
``pycon``     a session of the interpreter in the same namespace, which prints what it shows
``text``      not run: drawings, trees, formats
any other     data; it needs a file's name, or a file of the repository that it is part of

``title="NAME"`` behind the language: the block is that file, which is there before anything runs. What no reader sees:

``<!-- $ COMMAND -->``       a command that is run where it stands, such as what puts a page's ``train.json.gz`` there
``<!-- not run: REASON -->`` before a block: it cannot run wherever tests do; its commands are parsed all the same
``<!-- exits 1 -->``         before a block: the status with which its last command ends
``<!-- part of FILE -->``    before a block: its lines stand in that file of the repository
``<!-- needs: A, B -->``     packages without which nothing of the page can run
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))

_FENCED = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^<!-- (?P<said>[^\n]*?) -->$", re.MULTILINE)
_NEXT = re.compile(f"{_FENCED.pattern}|{_COMMENT.pattern}", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="(?P<name>[^"]+)"')
_SAID = re.compile(r"(?P<what>not run:|exits|part of) (?P<how>.+)")
_NEEDS = re.compile(r"^<!-- needs: ([\w, ]+) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of a page, or a command that a comment of it holds (``language`` is then ``hidden``)."""

    language: str
    text: str
    file: str = ""
    not_run: str = ""
    exits: int = 0
    part_of: str = ""
    # The line of the page on which its text begins, from 1; and its place in the page's text.
    line: int = 1
    start: int = 0
    end: int = 0

    def commands(self) -> list[str]:
        """Return the commands that it holds, without prompts."""
        if self.language == "hidden":
            return [self.text]
        if self.language == "console":
            return [line.removeprefix("$ ") for line in self.text.splitlines() if line.startswith("$ ")]
        if self.language == "sh":
            return [line for line in self.text.splitlines() if shlex.split(line, comments=True)]
        return []


def blocks_of(text: str) -> list[Block]:
    """Return the blocks and the hidden commands of a page, in their order."""
    found: list[Block] = []
    said: dict[str, str] = {}
    for match in _NEXT.finditer(text):
        if match["said"] is not None:
            if match["said"].startswith("$ "):
                line = text.count("\n", 0, match.start()) + 1
                found.append(Block("hidden", match["said"].removeprefix("$ "), line=line))
            elif statement := _SAID.fullmatch(match["said"]):
                said[statement["what"]] = statement["how"]
            continue
        language, _, rest = match["info"].partition(" ")
        title = _TITLE.fullmatch(rest)
        found.append(
            Block(
                language=language,
                text=match["text"],
                file=title["name"] if title else "",
                not_run=said.get("not run:", ""),
                exits=int(said.get("exits", 0)),
                part_of=said.get("part of", ""),
                line=text.count("\n", 0, match.start("text")) + 1,
                start=match.start("text"),
                end=match.end("text"),
            )
        )
        said = {}
    return found


def needs(text: str) -> list[str]:
    """Return the packages that a page says it needs."""
    return [word.strip() for words in _NEEDS.findall(text) for word in words.split(",")]


def unclosed(text: str) -> bool:
    """Return whether a fence of the page is none that is looked at here: indented, or never closed."""
    return sum(line.strip().startswith("```") for line in text.splitlines()) != 2 * len(_FENCED.findall(text))
