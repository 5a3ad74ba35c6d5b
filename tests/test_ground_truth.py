"""The campaign that ships: what its baselines are calibrated to, and how far its predictions are from the truth."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

import whatif
from whatif.prediction.predict import Baseline
from whatif.questions.validate.validate import Validation, validate
from whatif.questions.validate.validate_records import read_run

pytestmark = pytest.mark.slow

# What issue and design ask of CPU pairs, percent: of the median and of each.
MEDIAN_PCT, LARGEST_PCT = 5.0, 12.0
CAMPAIGN = "campaign_cpu"
ASKED = {"fused_adam", "channels_last", "batch_size", "gradient_accumulation", "activation_checkpoint",
         "data_loading", "batch_norm_eval", "compile"}  # fmt: skip


@pytest.fixture(scope="module")
def validation(own_traces: Path) -> Validation:
    return validate([own_traces / CAMPAIGN])


def recordings(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("*--baseline.trace.json.gz"))


def test_the_baselines_meet_their_untraced_step(own_traces: Path) -> None:
    found = list(recordings(own_traces / CAMPAIGN))
    assert len(found) == 7
    for path in found:
        baseline = Baseline.of(whatif.read(path), "mark")
        assert baseline.calibration is not None
        assert baseline.calibration.untraced is not None
        assert abs(baseline.calibration.missed) < 0.01, path.name


def test_every_run_is_in_the_tables(own_traces: Path, validation: Validation) -> None:
    """A record is a pair, a baseline of one, or listed with the reason why it is neither."""
    runs = {run.name for path in (own_traces / CAMPAIGN).glob("*.json") if (run := read_run(path))}
    paired = {outcome.pair.changed.stem for outcome in validation.outcomes}
    baselines = {outcome.pair.baseline.name.partition(".")[0] for outcome in validation.outcomes}
    listed = {unpaired.name for unpaired in validation.unpaired}
    assert len(runs) > 80
    assert runs == paired | baselines | listed
    assert all(unpaired.reason for unpaired in validation.unpaired)


def test_predictions_are_as_right_as_they_are_said_to_be(validation: Validation) -> None:
    assert set(validation.by_kind) >= ASKED
    # Also those whose measured step is too uncertain to judge a single prediction.
    judged = [outcome for outcome in validation.outcomes if outcome.pair.scored]
    assert len(judged) >= 50
    assert sum(outcome.scored for outcome in judged) >= 30
    for kind in ("", *ASKED):
        errors_pct = [abs(outcome.error_pct) for outcome in judged if kind in ("", outcome.kind)]
        assert statistics.median(errors_pct) <= MEDIAN_PCT, kind
