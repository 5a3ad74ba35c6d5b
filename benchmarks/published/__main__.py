"""Score predictions against published measurements, and write docs/published.md.

    WHATIF_EXTRA_DATA=FOLDER python -m benchmarks.published [TABLE ...] [--left-out FOLDER] [--write]

Each table is a module of this folder with ``score(data) -> Scores``; without names all of them run. ``--write`` writes
their summaries to the page, which has a section for each table. If timm and NeuSight's table are among
them, the constants of the ranges are refitted without the scored rows (``widths``). ``--left-out`` scores
NeuSight's table once more, each GPU with models that were fitted without it (``benchmarks.published.neusight``).
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
from pathlib import Path

import benchmarks.published
from benchmarks.extra_data import extra_data
from benchmarks.published import neusight, widths
from benchmarks.published.scores import Row, Scores, summary
from benchmarks.published.timm import family
from whatif.report.layout import markdown_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "published.md"
COLUMNS = ("group", "rows", "median error, %", "mean error, %", "bias, %", "inside the range, %", "high over low")


def tables() -> list[str]:
    """Return the names of the modules that score a table."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.published.__path__)]
    sources = {name: Path(benchmarks.published.__path__[0], f"{name}.py").read_text(encoding="utf-8") for name in names}
    return [name for name in names if re.search(r"^def score\(", sources[name], re.MULTILINE)]


def section(scores: Scores) -> str:
    """Return the page's section of a table: each group, and all rows together."""
    groups = scores.groups()
    rows = [
        (s.group, str(s.rows), f"{s.median_pct:.1f}", f"{s.mean_pct:.1f}", f"{s.bias_pct:+.1f}",
         f"{s.coverage_pct:.0f}", f"{s.width:.2f}")
        for s in (groups if len(groups) == 1 else [*groups, summary("all", scores.rows)])
    ]  # fmt: skip
    return f"## {scores.name}\n\n{markdown_table(COLUMNS, rows)}\n"


def put(page: str, name: str, text: str) -> str:
    """Return the page with ``text`` as the section of a table."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, found, rest = page.partition(begin)
    after = rest.partition(end)[2] if found else ""
    return f"{before}{begin}{text}{end}{after}"


def main() -> int:
    """Print the summaries, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"among {', '.join(tables())} (default: all)")
    parser.add_argument("--left-out", type=Path, metavar="FOLDER", help="one folder of models for each GPU")
    parser.add_argument("--write", action="store_true", help="write the page")
    args = parser.parse_args()
    if unknown := sorted({*args.tables} - {*tables()}):
        parser.error(f"expected tables among {', '.join(tables())}, got {', '.join(unknown)}")
    found = {}
    for name in args.tables or tables():
        found[name] = importlib.import_module(f"benchmarks.published.{name}").score(extra_data())
        show(name, section(found[name]), write=args.write)
    if args.left_out and "neusight" in found:
        left_out = neusight.score(extra_data(), args.left_out)
        show("neusight_left_out", section(left_out), write=args.write)
    if {"timm", "neusight"} <= set(found):
        show("widths", f"## Ranges, groups left out\n\n{widths.table(_folds(found))}", write=args.write)
    return 0


def show(name: str, text: str, *, write: bool) -> None:
    """Print a section, and with ``write`` put it into the page."""
    print(text)
    if write:
        PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), name, text), encoding="utf-8")


def _folds(found: dict[str, Scores]) -> dict[str, list[tuple[str, Row]]]:
    """Rows with their held-out group: the family of models for timm, the device for NeuSight."""
    of_timm = found["timm"].rows
    rows = {
        f"timm, {group}": [(family(row.what), row) for row in of_timm if row.group == group]
        for group in dict.fromkeys(row.group for row in of_timm)
    }
    return rows | {"NeuSight": [(row.group, row) for row in found["neusight"].rows]}


if __name__ == "__main__":
    raise SystemExit(main())
