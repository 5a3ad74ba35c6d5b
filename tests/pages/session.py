"""A page is run: a folder of its own, its files, its commands and its Python, in their order."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.instrumentation import warm
from tests.pages.blocks import ROOT, Block, blocks_of
from whatif.cli.main import main

# What a page of the site shows without scrolling (docs/assets/pages.css).
COLUMNS = "90"
# What a page may show of an output that is longer, as a shell would cut it.
_CUT = re.compile(r"(?P<command>.*?) \| (head -(?P<first>\d+)|grep -A (?P<behind>\d+) '(?P<found>[^']+)')")


class PageError(Exception):
    """A block of a page does not do what the page says; the message names its line."""


def filled(name: str) -> str:
    """Return a page's text with the outputs of today. Raises PageError where a block fails."""
    text = (ROOT / name).read_text(encoding="utf-8")
    parts, place = [], 0
    with tempfile.TemporaryDirectory() as folder, _inside(Path(folder)):
        blocks = blocks_of(text)
        for block in blocks:
            if block.file:
                Path(block.file).parent.mkdir(exist_ok=True)
                Path(block.file).write_text(block.text, encoding="utf-8")
        names: dict[str, Any] = {"__name__": "__main__"}
        for block in blocks:
            try:
                now = _run(block, names)
            except PageError as error:
                raise PageError(f"{name}:{block.line}: {error}") from None
            if now is not None:
                parts += [text[place : block.start], now]
                place = block.end
    return "".join([*parts, text[place:]])


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder that holds what a clone holds, with a home of its own; modules of it are forgotten behind."""
    for shipped in ("traces", "examples"):
        (folder / shipped).symlink_to(ROOT / shipped)
    changed = {
        "COLUMNS": COLUMNS, "NO_COLOR": "1", "WHATIF_OPDB": "", "XDG_DATA_HOME": str(folder / ".home"),
        "XDG_CACHE_HOME": str(folder / ".cache"), "PYTHONPATH": str(ROOT),
        # The programs of this very environment, whether it is activated or not.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }  # fmt: skip
    with mock.patch.dict(os.environ, changed), mock.patch.object(sys, "path", [str(folder), *sys.path]):
        known = set(sys.modules)
        with contextlib.chdir(folder):
            try:
                yield
            finally:
                for name in set(sys.modules) - known:
                    if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                        del sys.modules[name]


def _run(block: Block, names: dict[str, Any]) -> str | None:
    """Run one block; gives the text that it should hold where it shows output."""
    if block.not_run or block.part_of:
        return None
    if block.commands():
        return _run_commands(block)
    if block.language == "python" and not block.file:
        _run_python(block, names)
    if block.language == "pycon":
        _run_session(block, names)
    return None


def _run_commands(block: Block) -> str | None:
    shows = block.language == "console" and not all(line.startswith("$ ") for line in block.text.splitlines())
    lines = []
    commands = block.commands()
    for number, command in enumerate(commands):
        output = _run_command(command, block.exits if number == len(commands) - 1 else 0)
        lines += [f"$ {command}", *output]
    return "\n".join([*lines, ""]) if shows else None


def _run_command(command: str, exits: int) -> list[str]:
    cut = _CUT.fullmatch(command)
    program, *words = map(os.path.expandvars, shlex.split(cut["command"] if cut else command, comments=True))
    if program == "whatif" and words[0] != "collect":  # collecting is done once a process
        status, out, err = _here(lambda: main(words))
    elif program == "python" and words[0] == "-m" and words[1].startswith("whatif."):
        status, out, err = _here(lambda: _run_module(words[1:]))
    elif program == "whatif" or (program == "python" and words[:2] != ["-m", "pytest"]):  # both load torch
        words = ["-m", "whatif", *words] if program == "whatif" else words
        done = warm.python(words, Path.cwd(), {**os.environ, "OMP_NUM_THREADS": "1"})
        status, out, err = done.returncode, done.stdout, done.stderr
    else:
        done = subprocess.run([program, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        status, out, err = done.returncode, done.stdout, done.stderr
    if status != exits:
        raise PageError(f"`{command}` ended with {status} and not {exits}:\n{out}{err}")
    printed = [line.rstrip() for line in out.strip("\n").splitlines()]
    if cut and cut["first"]:
        return printed[: int(cut["first"])]
    if cut:
        at = next((number for number, line in enumerate(printed) if cut["found"] in line), None)
        if at is None:
            raise PageError(f"`{command}` finds no such line")
        return printed[at : at + int(cut["behind"]) + 1]
    return printed


def _here(run: Callable[[], int]) -> tuple[int, str, str]:
    """Run in this process: another one would load the same libraries again, for each of a hundred commands."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run()
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return status, texts[0], texts[1]


def _run_module(words: list[str]) -> int:
    with mock.patch.object(sys, "argv", words):
        try:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _run_python(block: Block, names: dict[str, Any]) -> None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            # So many lines down that a traceback names the page's.
            exec(compile("\n" * (block.line - 1) + block.text, "page", "exec"), names)
    except Exception as error:
        raise PageError(f"the snippet raised {type(error).__name__}: {error}") from error


def _run_session(block: Block, names: dict[str, Any]) -> None:
    session = doctest.DocTestParser().get_doctest(block.text, names, "session", None, 0)
    if not session.examples:
        raise PageError("a session needs lines that begin with >>>")
    session.globs = names  # of the whole page, where doctest would take a copy
    output = io.StringIO()
    if doctest.DocTestRunner(verbose=False).run(session, out=output.write, clear_globs=False).failed:
        raise PageError(output.getvalue())
