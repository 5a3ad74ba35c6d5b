"""Measure the figures of ``docs/performance.md``: ``python benchmarks/run.py [--quick] [--large] [--only NAME]``.

Prints a table and writes ``results.json`` beside this file; ``--page`` copies that to the page. Needs Linux and the
package installed. A rival that cannot be installed counts as not measured.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from command_line import command_line
from measure import HERE, Row
from predicting import what_if
from reading import build, ingest
from rich.console import Console
from rich.table import Table
from simulating import default_order, free_choices, python_schedule, scenarios

AREAS: dict[str, Callable[[int, bool, bool], Iterator[Row]]] = {
    "command": command_line,
    "ingest": ingest,
    "graph": build,
    "simulate": default_order,
    "choices": free_choices,
    "schedule": python_schedule,
    "what-if": what_if,
    "sweep": scenarios,
}
RESULTS = HERE / "results.json"
PAGE = HERE.parent / "docs" / "performance.md"
# The first line of the table in the page, and the blank line after it.
_HEAD = "| area | what | budget | stretch | reached | verdict |\n|---|---|---|---|---|---|\n"
PACKAGES = ("numpy", "msgspec", "networkx", "isal")


def main() -> None:
    """Run the chosen areas, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="three rounds and the smaller sizes")
    parser.add_argument("--large", action="store_true", help="also read a trace of 1 GB, once")
    parser.add_argument("--only", choices=AREAS, action="append", help="an area; may be given several times")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the last results into the page")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(with_figures(PAGE.read_text()))
        return
    console = Console(stderr=True)
    rows: list[Row] = []
    for name in args.only or AREAS:
        with console.status(f"measuring: {name}"):
            rows += AREAS[name](3 if args.quick else 5, args.quick, args.large)
    Console().print(_table(rows))
    RESULTS.write_text(json.dumps({"machine": _machine(), "rows": [_plain(row) for row in rows]}, indent=1) + "\n")


def with_figures(page: str) -> str:
    """Return the page with the rows of ``results.json`` as its table of figures."""
    before, _, rest = page.partition(_HEAD)
    cells = [
        Row(**{key: row[key] for key in row.keys() - {"verdict"}}) for row in json.loads(RESULTS.read_text())["rows"]
    ]
    lines = (
        f"| {row.area} | {row.what} | {_limit(row, row.budget)} | {_limit(row, row.stretch)} | "
        f"{f'{_text(row.value)} {row.unit}'.rstrip()} | {_VERDICTS.get(row.verdict, row.verdict)}"
        f"{row.note and ': '}{row.note} |\n"
        for row in cells
    )
    return f"{before}{_HEAD}{''.join(lines)}\n{rest.partition(chr(10) * 2)[2]}"


_VERDICTS = {"stretch": "met, stretch too", "missed": "**missed**"}


def _table(rows: list[Row]) -> Table:
    table = Table("area", "what", "reached", "unit", "budget", "stretch", "verdict")
    for column in (2, 4, 5):
        table.columns[column].justify = "right"
    for row in rows:
        verdict = f"{row.verdict}: {row.note}" if row.note else row.verdict
        style = "red" if row.verdict == "missed" else ""
        table.add_row(
            row.area, row.what, _text(row.value), row.unit, _limit(row, row.budget), _limit(row, row.stretch), verdict,
            style=style,
        )  # fmt: skip
    return table


def _limit(row: Row, limit: float | None) -> str:
    return "" if limit is None else f"{'≤' if row.at_most else '≥'} {_text(limit)}"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _plain(row: Row) -> dict[str, object]:
    return asdict(row) | {"verdict": row.verdict}


def _machine() -> dict[str, str]:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    packages = {name: version(name) for name in PACKAGES}
    return {"cpu": cpu[0].partition(":")[2].strip(), "python": platform.python_version(), **packages}


if __name__ == "__main__":
    main()
