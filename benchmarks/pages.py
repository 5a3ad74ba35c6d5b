"""Runs every command of the tutorial and the how-to guides, in their order, and fills in what they print.

python benchmarks/pages.py [PAGE ...]           writes the outputs that the pages show
python benchmarks/pages.py --check [PAGE ...]   exits 1 where a page shows something else than its command prints

A ``console`` block holds commands after ``$``. One that shows output keeps showing it, the others only have to succeed;
``| head -N`` behind a command is done here. A block with ``file=NAME`` is written before anything runs. Each page has a
folder of its own, with the repository's `traces` and `examples` in it. ``sh`` blocks are not run.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/tutorial.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs" / "how-to").glob("*.md")))
_FILE = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEAD = re.compile(r"(.*?) \| head -(\d+)")
_COLUMNS = "100"


def filled(page: Path) -> str:
    """Give the page's text with the outputs of today. Raises SystemExit where a command fails."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shipped in ("traces", "examples"):
            (folder / shipped).symlink_to(ROOT / shipped)
        for file, content in _FILE.findall(text):
            (folder / file).write_text(content, encoding="utf-8")
        return _CONSOLE.sub(lambda block: _run_block(block[1], folder, page), text)


def _run_block(block: str, folder: Path, page: Path) -> str:
    lines = []
    shows = any(not line.startswith("$ ") for line in block.splitlines())
    for line in block.splitlines():
        if line.startswith("$ "):
            output = _run(line.removeprefix("$ "), folder, page)
            lines += [line, *(output if shows else [])]
    return "```console\n" + "\n".join(lines) + "\n```"


def _run(command: str, folder: Path, page: Path) -> list[str]:
    cut = _HEAD.fullmatch(command)
    words = shlex.split(cut[1] if cut else command)
    # The programs of this very environment, whether it is activated or not.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PATH": path, "COLUMNS": _COLUMNS, "NO_COLOR": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{page.name}: `{command}` failed with {done.returncode}:\n{done.stderr[-2000:]}")
    printed = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
    return printed[: int(cut[2])] if cut else printed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("pages", nargs="*", default=PAGES)
    args = parser.parse_args()
    stale = False
    for name in args.pages:
        page = ROOT / name
        shown, today = page.read_text(encoding="utf-8"), filled(page)
        if shown == today:
            continue
        stale = True
        if args.check:
            print("\n".join(difflib.unified_diff(shown.splitlines(), today.splitlines(), name, "today", lineterm="")))
        else:
            page.write_text(today, encoding="utf-8")
            print(f"{name} written")
    return int(args.check and stale)


if __name__ == "__main__":
    sys.exit(main())
