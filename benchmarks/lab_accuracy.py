"""Compare predicted and measured steps over a real network: writes the tables of docs/data_parallel.md.

python benchmarks/lab_accuracy.py [--check]

Every run of the lab whose record names its what-ifs (docs/lab.md), from the recording of one worker and the plain steps
of the same session. For DistributedDataParallel also the sum without overlap: the same buckets, all of them sent
after the backward pass. Doubling the bandwidth: the reduction of the step at 200 Mbit/s compared with 100 Mbit/s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whatif import WhatifError
from whatif.prediction.baseline import Baseline
from whatif.prediction.predict import apply
from whatif.questions.validate.validate import baseline_of, predict
from whatif.questions.validate.validate_pairs import Pair, find_pairs
from whatif.report.layout import markdown_table

ROOT = Path(__file__).resolve().parent.parent
PAGE, FOLDERS = Path("docs/data_parallel.md"), (Path("traces/lab_cpu"), Path("traces/lab_pipeline_cpu"))
SLOW_MBIT_S, FAST_MBIT_S = 100.0, 200.0
KINDS = {
    "ddp": "DistributedDataParallel", "parameter_server": "parameter server and P3",
    "hierarchical": "one ring, and BlueConnect's stages", "pipeline": "pipeline of two stages",
    "pipeline_copies": "two copies of such a pipeline",
}  # fmt: skip
INFINITE = float("inf")


@dataclass(frozen=True)
class Scored:
    """One run: its predicted and measured step, ms, and for DDP the step without overlap."""

    experiment: str
    model: str
    rate_mbit_s: float | None
    run: str
    compute: str
    baseline_ms: float
    predicted_ms: float
    low_ms: float
    high_ms: float
    measured_ms: float
    unhidden_ms: float | None

    @property
    def error_pct(self) -> float:
        """Predicted over measured, signed error in percent."""
        return 100.0 * (self.predicted_ms / self.measured_ms - 1)

    @property
    def unhidden_pct(self) -> float:
        """The signed error of the sum without overlap, percent; NaN if there is none."""
        return float("nan") if self.unhidden_ms is None else 100.0 * (self.unhidden_ms / self.measured_ms - 1)

    @property
    def rate(self) -> str:
        """The rate of the limiting link, as text."""
        return "unlimited" if self.rate_mbit_s is None else f"{self.rate_mbit_s:,.0f} Mbit/s"


def score(folders: Iterable[Path]) -> list[Scored]:
    """Predict every run in the folders' records that a what-if describes."""
    found = (row for folder in folders for row in _scored(folder))
    rows = sorted(found, key=lambda row: (row.model, row.run, row.rate_mbit_s or INFINITE))
    return sorted(rows, key=lambda row: [*KINDS, row.experiment].index(row.experiment))


def _scored(folder: Path) -> Iterator[Scored]:
    held: tuple[object, Baseline | WhatifError] = (None, WhatifError("no pair yet"))
    for pair in find_pairs([folder])[0]:
        record = json.loads(pair.changed.read_text())
        if held[0] != pair.changed:
            held = pair.changed, baseline_of(pair, True)
        baseline = held[1]
        if isinstance(baseline, WhatifError):
            raise baseline
        outcome = predict(pair, baseline)
        name = pair.question.split(": ")[0].partition("/")[2]
        network = record["network"]
        yield Scored(
            record["experiment"], record["model"], network.get("uplink_mbit_s") or network["rate_mbit_s"], name,
            next(run["compute"] for run in record["runs"] if run["name"] == name), outcome.baseline_ms,
            outcome.predicted_ms, outcome.low_ms, outcome.high_ms, outcome.measured_ms,
            _unhidden_ms(baseline, pair) if record["experiment"] == "ddp" else None,
        )  # fmt: skip


def _unhidden_ms(baseline: Baseline, pair: Pair) -> float:
    return apply(baseline, f"{pair.what_ifs[0]},overlap=false", *pair.what_ifs[1:]).predicted_ms


def summary_table(scored: Sequence[Scored]) -> str:
    """Return median and largest errors by experiment, in Markdown."""
    rows = []
    for experiment in dict.fromkeys(row.experiment for row in scored):
        chosen = [row for row in scored if row.experiment == experiment]
        errors = [abs(row.error_pct) for row in chosen]
        unhidden = [abs(row.unhidden_pct) for row in chosen if row.unhidden_ms is not None]
        without = (f"{statistics.median(unhidden):.1f} %", f"{max(unhidden):.1f} %") if unhidden else ("–", "–")
        inside = sum(row.low_ms <= row.measured_ms <= row.high_ms for row in chosen)
        rows.append(
            (
                KINDS.get(experiment, experiment), f"{statistics.median(errors):.1f} %", f"{max(errors):.1f} %",
                *without, str(inside), str(len(chosen)),
            )
        )  # fmt: skip
    headers = (
        "runs", "median error", "largest", "sum without overlap: median", "largest", "in their range", "runs",
    )  # fmt: skip
    return markdown_table(headers, rows)


def doubled(scored: Sequence[Scored]) -> list[tuple[Scored, Scored]]:
    """Pair the runs of DDP at 100 Mbit/s with those at twice the rate."""
    fast = {(row.model, row.run): row for row in scored if row.experiment == "ddp" and row.rate_mbit_s == FAST_MBIT_S}
    slow = [row for row in scored if row.experiment == "ddp" and row.rate_mbit_s == SLOW_MBIT_S]
    return [(row, fast[row.model, row.run]) for row in slow if (row.model, row.run) in fast]


def doubled_table(scored: Sequence[Scored]) -> str:
    """Return the predicted and measured effect of twice the bandwidth, in Markdown.

    Each side is relative to its own session's plain steps, whose speed differs.
    """
    rows = []
    for slow, fast in doubled(scored):
        measured, predicted = change_pct(slow, fast)
        cells = f"{measured:+.1f} %", f"{predicted:+.1f} %", f"{predicted - measured:+.1f} points"
        rows.append((slow.model, slow.run, *cells))
    return markdown_table(("model", "run", "measured change", "predicted", "error"), rows)


def change_pct(slow: Scored, fast: Scored) -> tuple[float, float]:
    """Return the change of a step with twice the bandwidth, percent: measured and predicted."""
    return 100.0 * (fast.measured_ms / slow.measured_ms - 1), 100.0 * (fast.predicted_ms / slow.predicted_ms - 1)


def full_table(scored: Sequence[Scored]) -> str:
    """Return every prediction, in Markdown."""
    rows = []
    for row in scored:
        unhidden = "–" if row.unhidden_ms is None else f"{row.unhidden_pct:+.1f} %"
        compute = "" if row.compute == "real" else f" ({row.compute})"
        rows.append(
            (
                row.model, f"{row.run}{compute}", row.rate, f"{row.baseline_ms:,.1f} ms",
                f"{row.measured_ms:,.1f} ms", f"{row.predicted_ms:,.1f} ms", f"{row.error_pct:+.1f} %", unhidden,
            )
        )  # fmt: skip
    headers = ("model", "run", "rate", "one worker", "measured", "predicted", "error", "without overlap")
    return markdown_table(headers, rows)


def written(page: str, tables: dict[str, str]) -> str:
    """Return the page with each table inserted between its marks."""
    for name, table in tables.items():
        found = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        assert found.search(page), name
        page = found.sub(lambda match, table=table: f"{match[1]}{table}{match[2]}", page)  # type: ignore[misc]
    return page


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where the page differs, write nothing")
    args = parser.parse_args()
    os.chdir(ROOT)
    scored = score(FOLDERS)
    tables = {"summary": summary_table(scored), "doubled": doubled_table(scored), "all": full_table(scored)}
    before = PAGE.read_text()
    after = written(before, tables)
    if args.check:
        if after != before:
            print(f"{PAGE}: expected this script's output, got another text; run it without --check", file=sys.stderr)
        return int(after != before)
    PAGE.write_text(after)
    print(tables["summary"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
