"""Runs every block of the README and of docs/, and fills in what commands print (tests/pages/blocks.py has the rules).

python -m tests.pages [PAGE ...]           writes the outputs that the pages show
python -m tests.pages --check [PAGE ...]   exits 1 where a page shows something else than its command prints
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys

from tests.pages.blocks import PAGES, ROOT
from tests.pages.session import PageError, filled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("pages", nargs="*", default=PAGES)
    args = parser.parse_args()
    wrong = False
    for name in args.pages:
        shown, began = (ROOT / name).read_text(encoding="utf-8"), sum(os.times()[:4])
        try:
            today = filled(name)
        except PageError as error:
            wrong = True
            print(error)
            continue
        print(f"{name}: {sum(os.times()[:4]) - began:.1f} s of CPU", file=sys.stderr)
        if shown != today and args.check:
            wrong = True
            print("\n".join(difflib.unified_diff(shown.splitlines(), today.splitlines(), name, "today", lineterm="")))
        elif shown != today:
            (ROOT / name).write_text(today, encoding="utf-8")
            print(f"{name} written")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
