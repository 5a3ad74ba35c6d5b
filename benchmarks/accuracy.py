"""Predictions against measurements and the replay of every trace: writes docs/accuracy.md, and the README's table.

python benchmarks/accuracy.py [--check]

The comparison is that of `whatif validate` on the recordings of traces/ and on the pairs among other people's traces in
../shared/traces. ``--check`` writes nothing and exits 1 where the pages are not what it would write.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import numpy as np

import whatif
from whatif import WhatifError
from whatif.predict import Baseline
from whatif.report.markdown_validate import not_compared_table, pairs_table, scores_table
from whatif.report.text_validate import headline
from whatif.validate import MEDIAN_BOUND_PCT, Validation, validate

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path("../shared/traces")
# Relative to the root: the pages name files as their readers see them.
VALIDATED = [Path("traces"), Path("benchmarks/pairs.toml")]

PAGE = """# Accuracy

Written by `python benchmarks/accuracy.py`; not edited by hand. `whatif validate` makes the same comparison of any
folder of pairs ([validate.md](validate.md)). Pairs of a campaign: the baseline's recording is corrected to its step
without the profiler, and the prediction is compared with the changed run's step without the profiler (CPU time of the
training thread on a CPU; wall clock for loader workers and on a GPU). Pairs that a pairs.toml names: the steps
without the profiler where both recordings tell them, else the recorded ones. Nothing of the changed
run goes into a prediction.

## What-ifs against the real change

{headline}.
A pair on which a constant was chosen stays in the tables and is not scored. Targets: median {median_target:.0f} %,
largest 10 % on a GPU and 12 % on a CPU.

{scores}

Every pair:

{pairs}
{not_compared}
The loader pairs on the V100: from one recording nobody can tell how much four workers slow the training process (its
main thread by 4 to 12 %, its backward thread by 11 to 33 % there), so a range is given and the prediction lies in its
middle.

## Replay

How well the simulated baseline meets the recording, for every readable trace of other people's that was tried: median
{replay_median:.2f} %, 95th percentile {replay_p95:.2f} %, largest {replay_max:.2f} %. In-sample: the rules were found
while looking at these traces. A low error alone proves nothing, so the tests also ask how each graph responds when its
kernels get faster (`tests/test_real_traces.py`).

{replay}

Where much waiting stays unexplained: `a100_dlrm_rank0of16` is one of 16 ranks whose embedding exchange waits for the
others while the CPU spins on event queries; `mi300.resnet_act_checkpoint_ddp_train` waits for other ranks before its
first all-reduce, and a quarter of its gaps between queued kernels last 3.4 µs where the others last none, which one
mean lag per stream does not tell apart; `edls-a4000` has GPU work 3.8 s before its first recorded call, and nothing
says what lay between.
"""


def page(validation: Validation) -> str:
    """Give docs/accuracy.md."""
    replay, replay_errors = replay_table()
    return PAGE.format(
        headline=headline(validation),
        median_target=MEDIAN_BOUND_PCT,
        scores=scores_table(validation),
        pairs=pairs_table(validation),
        not_compared=f"\nNot compared:\n\n{not_compared_table(validation)}\n" if validation.unpaired else "",
        replay=replay,
        replay_median=np.median(replay_errors),
        replay_p95=np.percentile(replay_errors, 95),
        replay_max=max(replay_errors),
    )


def replay_table() -> tuple[str, list[float]]:
    """Give the replay of every readable trace in Markdown, and the absolute errors in percent."""
    rows = [
        "| trace | tasks | step clock | measured | replayed | error | unexplained wait |",
        "|---|---|---|---|---|---|---|",
    ]
    errors = []
    for path in sorted(SHARED.glob("*/*.json.gz")):
        try:
            baseline = Baseline.of(whatif.read(path), calibrated=False)
        except WhatifError:
            continue
        errors.append(abs(baseline.replay_error_pct))
        rows.append(
            f"| {path.parent.name}/{path.name.split('.json')[0]} | {len(baseline.graph):,} | {baseline.clock} "
            f"| {baseline.measured_ns / 1e6:.2f} ms | {baseline.step_ns / 1e6:.2f} ms "
            f"| {baseline.replay_error_pct:+.2f} % | {baseline.unexplained_wait_pct:.1f} % |"
        )
    return "\n".join(rows), errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    os.chdir(ROOT)
    validation = validate(VALIDATED)
    readme = ROOT / "README.md"
    filled = re.sub(
        r"(<!-- accuracy -->\n).*?(<!-- /accuracy -->)",
        lambda m: f"{m[1]}\n{headline(validation)}.\n\n{scores_table(validation)}\n\n{m[2]}",
        readme.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    wanted = {readme: filled, ROOT / "docs" / "accuracy.md": page(validation)}
    stale = [path for path, content in wanted.items() if not path.exists() or path.read_text("utf-8") != content]
    for path in stale if not check else []:
        path.write_text(wanted[path], encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
