"""DTS's architectures predicted beside measured: writes the table of docs/dts.md from traces/lab_dts.

python benchmarks/dts_accuracy.py [--check]
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from pathlib import Path

from whatif.questions.validate.validate import Outcome, validate
from whatif.report.layout import markdown_table

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = Path("docs/dts.md"), Path("traces/lab_dts")
# Table IV of the paper: accuracies of batch (BTTE) and epoch (ETTE) on its own testbed.
PAPER = {
    ("dnn1", "pipeline_learning"): (0.8389, 0.8019),
    ("dnn1", "federated"): (0.8178, 0.7984),
    ("dnn1", "split"): (0.8950, 0.9139),
    ("dnn1", "parallel_split"): (0.8120, 0.7361),
    ("dnn1", "federated_split"): (0.8136, 0.7750),
    ("dnn2", "pipeline_learning"): (0.9477, 0.8711),
    ("dnn2", "federated"): (0.8986, 0.8308),
    ("dnn2", "split"): (0.9570, 0.8953),
    ("dnn2", "parallel_split"): (0.8024, 0.7969),
    ("dnn2", "federated_split"): (0.8246, 0.7831),
}
# What is held, percent.
MEAN_BOUND_PCT, WORST_BOUND_PCT = 8.0, 15.0

Scores = dict[tuple[str, str], dict[str, Outcome]]


def scores() -> Scores:
    """Return the outcome of each network's, architecture's batch and epoch."""
    found: Scores = {}
    for outcome in validate([RESULTS]).outcomes:
        record, run = outcome.pair.question.split(":")[0].split("/")
        dnn, architecture = record.split("-")
        found.setdefault((dnn, architecture), {})[run] = outcome
    return found


def errors_pct(found: Scores) -> list[float]:
    """Return all errors without their signs."""
    return [abs(outcome.error_pct) for runs in found.values() for outcome in runs.values()]


def accuracy_table(found: Scores) -> str:
    """Return the table as Markdown."""
    headers = (
        "network, architecture", "batch measured", "predicted", "error", "epoch measured", "predicted", "error",
        "DTS, batch / epoch",
    )  # fmt: skip
    rows = []
    for key in PAPER:
        runs = found.get(key)
        if runs is None:
            continue
        cells = []
        for name in ("batch", "epoch"):
            one = runs[name]
            cells += [f"{one.measured_ms:,.0f} ms", f"{one.predicted_ms:,.0f} ms", f"{one.error_pct:+.1f} %"]
        theirs = " / ".join(f"{100 * (1 - accuracy):.1f} %" for accuracy in PAPER[key])
        rows.append((f"{key[0]} {key[1].replace('_', ' ')}", *cells, theirs))
    errors = errors_pct(found)
    paper = [100 * (1 - accuracy) for pair in PAPER.values() for accuracy in pair]
    return markdown_table(headers, rows) + (
        f"\n\nOver {len(errors)} predictions the mean error is {statistics.fmean(errors):.1f} % and the largest "
        f"{max(errors):.1f} %; the paper's, on its testbed, {statistics.fmean(paper):.1f} % and {max(paper):.1f} %."
    )


def main() -> int:
    """Write the page, or with --check compare it with what it should be and the errors with what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    found = scores()
    text = PAGE.read_text(encoding="utf-8")
    mark = re.compile(r"(<!-- accuracy -->\n).*?(<!-- /accuracy -->)", re.DOTALL)
    fresh = mark.sub(lambda part: f"{part[1]}{accuracy_table(found)}\n{part[2]}", text)
    if not arguments.check:
        PAGE.write_text(fresh, encoding="utf-8")
        return 0
    errors = errors_pct(found)
    if fresh != text:
        print(f"{PAGE} is not what the code gives; run {Path(__file__).name}", file=sys.stderr)
    if statistics.fmean(errors) > MEAN_BOUND_PCT or max(errors) > WORST_BOUND_PCT:
        print("an error is larger than it was", file=sys.stderr)
        return 1
    return int(fresh != text)


if __name__ == "__main__":
    sys.exit(main())
