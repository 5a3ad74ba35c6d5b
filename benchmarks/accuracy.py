"""Compare predictions with measurements and replay every trace: writes docs/accuracy.md and the README's summary.

python benchmarks/accuracy.py [--check]

The comparison is that of `whatif validate` on the recordings of traces/ and on the pairs among the public recordings
(benchmarks/pairs.toml) in the folder WHATIF_EXTRA_DATA. ``--check`` writes nothing and exits 1
if the pages are out of date.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from extra_data import extra_data, write_pairs
from msgspec import structs
from ranges import coverage_table

import whatif
from whatif import WhatifError
from whatif.prediction.predict import Baseline
from whatif.questions.validate.validate import MEDIAN_BOUND_PCT, Outcome, Validation, validate
from whatif.report.layout import markdown_table, ms_format
from whatif.report.markdown_validate import not_compared_table, pairs_table, scores_table
from whatif.report.text_validate import headline

ROOT = Path(__file__).resolve().parent.parent
# Relative to the root, so that the pages name files as readers see them.
OWN = Path("traces")
# Its pairs are cited. Each has an older twin (processes minutes apart) with the same what-if, or the one listed here.
CITED = OWN / "campaign_cpu_5"
TWINS = {"transformer: fused_adam": "fused Adam (from a loop), transformer"}

PAGE = """# Accuracy

`python benchmarks/accuracy.py` writes this page; do not edit it by hand. `whatif validate` makes the same comparison
for any folder of pairs ([validate.md](validate.md)). For pairs of a campaign, the baseline's recording is corrected to
its step time without the profiler, and the prediction is compared with the changed run's step time without the profiler
(CPU time of the training thread on a CPU; wall clock for loader workers and on a GPU). For pairs in a pairs.toml, the
step times without the profiler are compared if both recordings hold them, else the recorded ones. A prediction uses
nothing of the changed run.

## How the measured step is made

The two runs of a campaign's pair were timed in alternation, in several rounds: in `{cited_folder}` within
one process, where they took turns about every half second (`--in-turn`, [the campaign](campaign.md)); in older folders
in processes of their own, minutes apart. Other programs change the machine's pace from round to round, and less within
one, so *measured* is the baseline's median step times the median, over the rounds, of the changed run's step over the
baseline's. *raw* is the median of the changed run's own rounds, whatever the pace in them, with the error against it.
For pairs of the lab both are the same, a step's own median; recordings that a pairs.toml names hold no rounds.
Of the {paced} pairs of campaigns that are scored, the median error is
{paced_error:.1f} % against *measured* and {raw_error:.1f} % against *raw*; *raw* differs from *measured* by
{moved:.1f} % in the median and {moved_most:.1f} % at most.

The ± beside a measured step says how uncertain its own rounds leave it, nominal 90 %: 1.645 standard deviations of the
medians of rounds drawn again from themselves (the bootstrap). A pair whose measured step is more uncertain than the
bound of its prediction is shown, but not scored: {uncertain} of {pairs_count}. The median ± is {spread:.1f} %.
With these pairs the median error is {all_error:.1f} %, the largest {all_largest:.1f} %, and {all_inside} of
{all_count} measured steps are inside their range.

### The pairs that are cited

Pairs whose measured step other pages cite, or whose older measurement was among the most uncertain, were recorded
again, with baselines of their own (`{cited_folder}` in the repository, whose README says how). The program was not
changed after looking at them, but where a remark says so. An older pair of the same model and change stays in the
list of every pair below, and is not the one to cite; it ran on another CPU, so the two measured steps need not agree.

{cited}

## What-ifs compared with the real change

{headline}.
A pair on which a constant of the model was chosen is listed but not scored either. Targets: median
{median_target:.0f} %, largest 10 % on a GPU and 12 % on a CPU.

{scores}

### Ranges on pairs that are left out

Two runs of one program differ by what no recording shows. How much is fitted on these same pairs (`RUN_TO_RUN` and
`RUN_TO_RUN_WORKERS` in `whatif/prediction/ranges.py`), so the table above flatters the ranges. Here both are fitted
again without each pair, and then that pair is scored; goal: 85 to 95 % inside, median width at most 15 % of the step.
{fit}. The share of a collective's upper end on a CPU (`GLOO_SLOWED`) was chosen on the pairs of several workers and is
not left out. No pair scores ranges on a GPU (`RUN_TO_RUN_GPU` is assumed).

{left_out}

Every pair:

{pairs}
{not_compared}
For the loader pairs on the V100: one recording does not show how much four workers slow the training process (there
its main thread by 4 to 12 %, its backward thread by 11 to 33 %). So the answer is a range, and the prediction is its
middle.

## Replay

The replay error of every readable public recording: median {replay_median:.2f} %, 95th percentile
{replay_p95:.2f} %, largest {replay_max:.2f} %. These errors are in-sample: the rules were found while looking at
these traces. A low error alone proves nothing, so tests also check how each graph responds when its kernels get
faster (`tests/test_real_traces.py`).

{replay}

Traces with much unexplained wait: `a100_dlrm_rank0of16` is one of 16 ranks whose embedding exchange waits for the
others while the CPU spins on event queries. `mi300.resnet_act_checkpoint_ddp_train` waits for other ranks before its
first all-reduce; a quarter of its gaps between queued kernels last 3.4 µs and the others have no length, which one
mean lag for each stream does not represent. `edls-a4000` has GPU work 3.8 s before its first recorded call, and
nothing shows what happened in between.
"""


def page(validation: Validation, public: Path) -> str:
    """Return docs/accuracy.md; ``public`` is the folder of the public recordings."""
    replay, replay_errors = replay_table(public)
    left_out, fit = coverage_table(validation.outcomes)
    paced = [
        outcome for outcome in validation.outcomes if outcome.scored and outcome.pair.truth and outcome.pair.truth.paced
    ]
    raw_ms = np.array([outcome.raw_ms for outcome in paced], dtype=np.float64)
    measured_ms, predicted_ms = (
        np.array([getattr(o, f"{name}_ms") for o in paced]) for name in ("measured", "predicted")
    )
    moved_pct = 100 * np.abs(raw_ms / measured_ms - 1)
    judged = [outcome for outcome in validation.outcomes if outcome.pair.scored]
    errors_pct = [abs(outcome.error_pct) for outcome in judged]
    spreads = [o.truth_spread_pct for o in validation.outcomes if o.truth_spread_pct is not None]
    return PAGE.format(
        headline=headline(validation),
        cited=cited_table(validation.outcomes),
        cited_folder=CITED,
        paced=len(paced),
        paced_error=100 * np.median(np.abs(predicted_ms / measured_ms - 1)),
        raw_error=100 * np.median(np.abs(predicted_ms / raw_ms - 1)),
        moved=np.median(moved_pct),
        moved_most=moved_pct.max(),
        uncertain=validation.score.uncertain,
        pairs_count=len(validation.outcomes),
        spread=np.median(spreads),
        all_error=np.median(errors_pct),
        all_largest=max(errors_pct),
        all_inside=sum(outcome.inside for outcome in judged),
        all_count=len(judged),
        left_out=left_out,
        fit=fit,
        median_target=MEDIAN_BOUND_PCT,
        scores=scores_table(validation),
        pairs=pairs_table(validation),
        not_compared=f"\nNot compared:\n\n{not_compared_table(validation)}\n" if validation.unpaired else "",
        replay=replay,
        replay_median=np.median(replay_errors),
        replay_p95=np.percentile(replay_errors, 95),
        replay_max=max(replay_errors),
    )


def cited_table(outcomes: Sequence[Outcome]) -> str:
    """Return the pairs to cite in Markdown, each with the errors of its older twins."""
    rows = []
    for outcome in outcomes:
        if not is_cited(outcome):
            continue
        pair, ms = outcome.pair, ms_format(outcome.measured_ms)
        older = [o for o in outcomes if not is_cited(o) and o.pair.question == older_question(pair.question)]
        assert pair.truth is not None
        rows.append(
            (
                pair.question, f"{ms(outcome.baseline_ms)} ms", f"{ms(outcome.predicted_ms)} ms",
                f"{ms(outcome.low_ms)} … {ms(outcome.high_ms)}{'' if outcome.inside else ' (outside)'}",
                f"{ms(outcome.measured_ms)} ms", _spread(outcome), str(len(pair.truth.step.rounds_ms)),
                f"{outcome.error_pct:+.1f} %", "; ".join(f"{o.error_pct:+.1f} % {_spread(o)}".strip() for o in older),
            )
        )  # fmt: skip
    headers = ("pair", "baseline", "predicted", "range", "measured", "±", "rounds", "error", "error before, ±")
    return markdown_table(headers, rows)


def with_twins(validation: Validation) -> Validation:
    """Return the validation with a remark on every pair that has a better measured twin."""
    better = {older_question(o.pair.question) for o in validation.outcomes if is_cited(o)}
    remark = f"measured again in {CITED.name}, which is cited"
    outcomes = [
        structs.replace(o, pair=replace(o.pair, remark="; ".join(filter(None, [o.pair.remark, remark]))))
        if o.pair.question in better and not is_cited(o)
        else o
        for o in validation.outcomes
    ]
    return structs.replace(validation, outcomes=tuple(outcomes))


def is_cited(outcome: Outcome) -> bool:
    return outcome.pair.changed.parent == CITED


def older_question(question: str) -> str:
    return TWINS.get(question, question)


def _spread(outcome: Outcome) -> str:
    return "" if outcome.truth_spread_pct is None else f"± {outcome.truth_spread_pct:.1f} %"


def replay_table(public: Path) -> tuple[str, list[float]]:
    """Return the replay of every readable public recording in Markdown, and the absolute errors in percent."""
    rows = []
    errors = []
    for path in sorted(public.glob("*/*.json.gz")):
        try:
            baseline = Baseline.of(whatif.read(path), calibrated=False)
        except WhatifError:
            continue
        errors.append(abs(baseline.replay_error_pct))
        rows.append(
            (
                f"{path.parent.name}/{path.name.split('.json')[0]}", f"{len(baseline.graph):,}", baseline.clock,
                f"{baseline.measured_ns / 1e6:.2f} ms", f"{baseline.step_ns / 1e6:.2f} ms",
                f"{baseline.replay_error_pct:+.2f} %", f"{baseline.unexplained_wait_pct:.1f} %",
            )
        )  # fmt: skip
    headers = ("trace", "tasks", "step clock", "measured", "replayed", "error", "unexplained wait")
    return markdown_table(headers, rows), errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    public = extra_data("traces")
    with tempfile.TemporaryDirectory() as folder:
        pairs = write_pairs(Path(folder))
        os.chdir(ROOT)
        validation = with_twins(validate([OWN, pairs]))
    readme = ROOT / "README.md"
    filled = re.sub(
        r"(<!-- accuracy -->\n).*?(<!-- /accuracy -->)",
        lambda m: f"{m[1]}\n{headline(validation)}.\n\n{m[2]}",
        readme.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    wanted = {readme: filled, ROOT / "docs" / "accuracy.md": page(validation, public)}
    stale = [path for path, content in wanted.items() if not path.exists() or path.read_text("utf-8") != content]
    for path in stale if not check else []:
        path.write_text(wanted[path], encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
