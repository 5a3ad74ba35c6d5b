"""DTS's two networks in its five architectures: prints the paper's table IV and ours, from traces/lab_dts.

python -m benchmarks.dts_accuracy [--check]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from whatif.questions.validate.validate import Outcome, validate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("traces/lab_dts")
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
# The bounds that --check enforces, percent.
MEAN_BOUND_PCT, WORST_BOUND_PCT = 8.0, 15.0

Scores = dict[tuple[str, str], dict[str, Outcome]]


def scores() -> Scores:
    """Return the outcomes of a batch and an epoch for each network and architecture."""
    found: Scores = {}
    for outcome in validate([RESULTS]).outcomes:
        record, run = outcome.pair.question.split(":")[0].split("/")
        dnn, architecture = record.split("-")
        found.setdefault((dnn, architecture), {})[run] = outcome
    return found


def errors_pct(found: Scores) -> list[float]:
    """Return all absolute errors."""
    return [abs(outcome.error_pct) for runs in found.values() for outcome in runs.values()]


def accuracy_table(found: Scores) -> str:
    """Return the paper's table with our errors and theirs, percent, as text."""
    lines = [
        "                             batch, ms: measured,      epoch, ms: measured,  errors of DTS:",
        "                             predicted, error          predicted, error      batch   epoch",
    ]
    for (dnn, architecture), accuracies in PAPER.items():
        runs = found[dnn, architecture]
        cells = "".join(
            f"{outcome.measured_ms:8,.0f} {outcome.predicted_ms:7,.0f} {outcome.error_pct:+6.1f} %  "
            for outcome in (runs["batch"], runs["epoch"])
        )
        theirs = "".join(f"{100 * (1 - accuracy):6.1f} %" for accuracy in accuracies)
        lines.append(f"{dnn} {architecture.replace('_', ' '):17s}{cells}{theirs}")
    errors = errors_pct(found)
    paper = [100 * (1 - accuracy) for pair in PAPER.values() for accuracy in pair]
    return "\n".join(lines) + (
        f"\n\n{len(errors)} predictions: mean error {statistics.fmean(errors):.1f} %, largest {max(errors):.1f} %; "
        f"the paper's: {statistics.fmean(paper):.1f} %, {max(paper):.1f} %"
    )


def main() -> int:
    """Print the table; with --check, exit 1 if an error exceeds its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if an error exceeds its bound")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    found = scores()
    print(accuracy_table(found))
    errors = errors_pct(found)
    if arguments.check and (statistics.fmean(errors) > MEAN_BOUND_PCT or max(errors) > WORST_BOUND_PCT):
        print(f"an error exceeds its bound: {MEAN_BOUND_PCT} % on average, {WORST_BOUND_PCT} %", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
