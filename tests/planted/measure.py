"""Print the table of ``docs/why.md``: the predicted gain of removing each planted cause, and the measured one.

``python -m tests.planted.measure [CAUSE ...]``; about four minutes a cause on two idle cores.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.planted.test_planted import (
    CAUSES,
    COLLECT,
    PERIODS,
    RANK_FILES,
    SCRIPT,
    command,
    output,
    planted_lines,
    record,
    two_ranks,
    whatif_json,
)

ROUNDS = 3


def predicted(folder: Path, cause: str) -> float:
    """The share of a step that the removal of a cause gains, by a new recording."""
    if cause == "rank":
        two_ranks(folder, *COLLECT, PERIODS, str(SCRIPT), "rank")
        answer = whatif_json(folder, "apply", "balance_ranks", *RANK_FILES)
        return 1 - float(answer["predicted_ms"]) / float(answer["baseline_ms"])
    answer = record(folder, cause)
    return sum(float(line["gain_ms"]) for line in planted_lines(answer, cause)) / float(answer["mean_ms"])


def measured(folder: Path, cause: str) -> tuple[float, float]:
    """The share of a step that the removal of a cause gains, and the step with it in milliseconds."""
    words = (str(SCRIPT), cause, "--time")
    out = two_ranks(folder, *words) if cause == "rank" else output(command(folder, *words))
    share, _of, step_ms, _unit = out.split()
    return float(share), float(step_ms)


def main() -> None:
    print("| cause | step, ms | predicted share | measured share |\n|---|---|---|---|")
    for cause in sys.argv[1:] or (*CAUSES, "rank"):
        rounds = []
        for _ in range(ROUNDS):  # both by turns, since the machine's pace changes within minutes
            with tempfile.TemporaryDirectory() as folder:
                rounds.append((*measured(Path(folder), cause), predicted(Path(folder), cause)))
        truths, steps_ms, shares = zip(*rounds, strict=True)
        print(f"| {cause} | {median(steps_ms):.1f} | {spread(shares)} | {spread(truths)} |", flush=True)


def spread(shares: tuple[float, ...]) -> str:
    return f"{median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"


if __name__ == "__main__":
    main()
