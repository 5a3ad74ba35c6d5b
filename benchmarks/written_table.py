"""Tables that a script writes between two marks of a documentation page."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
END = "<!-- end -->"


def write_or_check(page: str, script: str, description: str, tables: Callable[[], str]) -> int:
    """Put ``tables()`` into a page, or with --check compare them; return the exit status.

    The shipped models answer, not the user's own database.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page differs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as nothing:
        os.environ["WHATIF_OPDB"] = str(Path(nothing) / "no database")
        text = tables()
    path, begin = DOCS / page, f"<!-- written by benchmarks/{Path(script).name} -->"
    before = path.read_text(encoding="utf-8")
    head, _, rest = before.partition(begin)
    _, _, tail = rest.partition(END)
    after = f"{head}{begin}\n\n{text}\n\n{END}{tail}"
    if args.check:
        if after != before:
            print(f"{page} differs from what benchmarks/{Path(script).name} would write", file=sys.stderr)
        return int(after != before)
    path.write_text(after, encoding="utf-8")
    print(text)
    return 0
