"""Runs that took turns are compared round by round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.campaign_records import pairs_of, record
from whatif.questions.validate.validate_records import read_run


def rounds(*medians_ms: float) -> list[dict[str, list[list[float]]]]:
    """Rounds of one block of three steps each: 1 % below the median, at it, 2 % above."""
    blocks = [[[0.99 * ms, ms, 1.02 * ms]] for ms in medians_ms]
    return [{"samples_ms": block, "cpu_samples_ms": block} for block in blocks]


def test_runs_are_compared_round_by_round(tmp_path: Path) -> None:
    """The machine is half as fast in the third round, and the changed run had another minute in the second."""
    record(tmp_path, "baseline", rounds=rounds(100, 100, 150))
    record(tmp_path, "bn_eval", bn_eval=True, rounds=rounds(80, 130, 120))
    pair = pairs_of(tmp_path)["baseline", "bn_eval"]
    assert pair.baseline_untraced is not None
    assert pair.changed_untraced is not None
    assert pair.baseline_untraced.median_ms == 100
    assert pair.changed_untraced.median_ms == pytest.approx(80)
    # Quartiles are those of the steps within a round, not of the machine between rounds.
    assert pair.baseline_untraced.q25_ms == pytest.approx(99.5)
    assert pair.baseline_untraced.q75_ms == pytest.approx(101)


@pytest.mark.parametrize(
    "damaged", [None, 3, [], [3], [{}], [{"cpu_samples_ms": 3}], [{"cpu_samples_ms": [[]]}],
                [{"cpu_samples_ms": [["x", -1, None]]}], [{"cpu_samples_ms": [[10**400]]}]],
)  # fmt: skip
def test_damaged_rounds_leave_the_summary(tmp_path: Path, damaged: Any) -> None:
    run = read_run(record(tmp_path, "baseline", rounds=damaged))
    assert run is not None
    assert run.cpu is not None
    assert run.cpu.rounds_ms == ()
    assert run.cpu.median_ms == 11


def test_a_run_that_took_turns_is_compared_with_its_partner_in_those_rounds(tmp_path: Path) -> None:
    """The baseline's own rounds were timed at another pace, and a run with a slower optimizer in other rounds."""
    record(tmp_path, "baseline", rounds=rounds(200, 210))
    record(tmp_path, "adam_foreach", implementation="foreach", rounds=rounds(150, 160))
    beside = {"name": "net--baseline", "rounds": rounds(100, 150, 110)}
    record(tmp_path, "adam_fused", implementation="fused", rounds=rounds(80, 120, 88), beside=beside)
    found = pairs_of(tmp_path)
    assert set(found) == {("baseline", "adam_foreach"), ("baseline", "adam_fused")}
    pair = found["baseline", "adam_fused"]
    assert pair.baseline_untraced is not None
    assert pair.baseline_untraced.median_ms == 110
    assert pair.truth is not None
    assert pair.truth.step.median_ms == pytest.approx(88)
    assert pair.truth.spread_pct == pytest.approx(0)


@pytest.mark.parametrize("damaged", [3, {}, {"name": 3}, {"name": "net--baseline", "rounds": [3]}])
def test_a_damaged_partner_leaves_the_baselines_own_rounds(tmp_path: Path, damaged: Any) -> None:
    record(tmp_path, "baseline", rounds=rounds(200, 210))
    record(tmp_path, "bn_eval", bn_eval=True, rounds=rounds(80, 88), beside=damaged)
    pair = pairs_of(tmp_path)["baseline", "bn_eval"]
    assert pair.baseline_untraced is not None
    assert pair.baseline_untraced.median_ms == 205
