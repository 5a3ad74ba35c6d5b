"""Sources for an unmeasured device: weights by hand; a model counts for less far from its training devices."""

from __future__ import annotations

import json
from collections import defaultdict
from importlib import resources

import numpy as np
import pytest

from tests.opdb.builders import products
from whatif.hardware.gpu import load_gpu
from whatif.opdb import blending
from whatif.opdb.answers import Answers, AnswerSource, unanswered
from whatif.opdb.blending import Candidate, blend, device_distance
from whatif.opdb.chain import Estimator, same_chip
from whatif.opdb.index import index_of
from whatif.opdb.learned import shipped_models
from whatif.opdb.model_answers import Estimates
from whatif.opdb.rows import operators


def answers_of(source: AnswerSource, t_s: float, count: int = 2) -> Answers:
    found = unanswered(count, ())
    t = np.full(count, t_s)
    found.fill(np.arange(count), Estimates(t, t / 4, t * 4), source, -1, 0)
    return found


def table(monkeypatch: pytest.MonkeyPatch, **errors: float) -> None:
    monkeypatch.setattr(blending, "errors", lambda: {(source, "mm", "fp32"): e for source, e in errors.items()})


def blended(across: Candidate | None = None) -> Answers:
    """A model's 1 s and the data sheet's 32 s, of two products."""
    answers = unanswered(2, ())
    first = across or Candidate(AnswerSource.LEARNED_ACROSS, answers_of(AnswerSource.LEARNED_ACROSS, 1.0))
    sheet = Candidate(AnswerSource.ANALYTIC, answers_of(AnswerSource.ANALYTIC, 32.0))
    blend(products([64, 80]), answers, [first, sheet])
    return answers


def test_weights_are_the_inverse_squares_of_the_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1 and 0.2 weigh 4 to 1: 1 s and 32 s become 2 s; the range is of sqrt(0.8 x 0.01 + 0.2 x 0.04)."""
    table(monkeypatch, learned_across=0.1, analytic=0.2)
    answers = blended()
    assert answers.t_s == pytest.approx([2.0, 2.0])
    assert np.log(answers.high_s / answers.t_s) == pytest.approx(1.645 * np.sqrt(0.016))
    assert answers.answered_by.tolist() == [AnswerSource.LEARNED_ACROSS] * 2


def test_a_launch_adds_to_the_range_of_short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected errors are those of longer times: 10 us beside 20 are half of them, beside a second nothing."""
    table(monkeypatch, analytic=0.2)
    for t_s, error in ((20e-6, np.hypot(0.2, 0.5)), (1.0, 0.2)):
        answers = unanswered(2, ())
        sheet = Candidate(AnswerSource.ANALYTIC, answers_of(AnswerSource.ANALYTIC, t_s))
        blend(products([64, 80]), answers, [sheet], np.array([True, False]))
        assert np.log(answers.high_s / answers.t_s) == pytest.approx([1.645 * error, 1.645 * 0.2])


def test_far_from_its_data_a_model_counts_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    table(monkeypatch, learned_across=0.1, analytic=0.2)
    answers = blended(
        Candidate(AnswerSource.LEARNED_ACROSS, answers_of(AnswerSource.LEARNED_ACROSS, 1.0), extra=np.array([0.0, 2.0]))
    )
    assert answers.t_s[0] == pytest.approx(2.0)
    assert answers.t_s[1] > 30
    assert answers.answered_by.tolist() == [AnswerSource.LEARNED_ACROSS, AnswerSource.ANALYTIC]


def test_without_known_errors_the_first_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    table(monkeypatch, analytic=0.2)
    answers = blended()
    assert answers.t_s == pytest.approx([1.0, 1.0])
    assert answers.high_s == pytest.approx([4.0, 4.0])


def test_an_h100_is_far_from_what_neusight_measured() -> None:
    across = next(
        m.facts for m in shipped_models() if m.facts.across and m.facts.dtype == "fp32" and m.facts.family == "matmul"
    )
    assert device_distance(across, load_gpu("V100-PCIE-32")) == 0
    assert device_distance(across, load_gpu("H100-SXM-80")) > 0.1


def test_a_board_of_the_same_chip_scales_by_bandwidth() -> None:
    """1.6 GB in all: an A100-PCIE-80 has 1,935 GB/s where the A100-PCIE-40, whose model answers, has 1,555."""
    asked = operators("elementwise", {"elements": 2**27, "tensors": 2}, name="add", dtype="fp32")
    there, here = (
        Estimator(index_of([]), name, models=shipped_models(), kernels_alone=True).estimate(asked)
        for name in ("A100-PCIE-40", "A100-PCIE-80")
    )
    assert (there.answered_by[0], here.answered_by[0]) == (AnswerSource.LEARNED, AnswerSource.SAME_CHIP)
    assert there.t_s[0] / here.t_s[0] == pytest.approx(1935 / 1555, rel=0.01)
    assert not same_chip(load_gpu("A100-PCIE-40"), load_gpu("V100-PCIE-32"))


def test_a_board_of_the_same_chip_is_no_faster_than_its_file_says_that_it_sustains() -> None:
    for m, n, k in ((8192, 8192, 8192), (16384, 1024, 256), (16384, 2048, 256)):
        asked = operators("matmul", {"batch": 1, "m": m, "n": n, "k": k}, name="mm", dtype="fp32")
        answer = Estimator(index_of([]), "A100-SXM-80", models=shipped_models(), kernels_alone=True).estimate(asked)
        assert answer.answered_by[0] == AnswerSource.SAME_CHIP
        assert 2 * m * n * k / answer.t_s[0] / 1e12 <= 18.6 * 1.001
        assert 2 * m * n * k / answer.low_s[0] / 1e12 <= 19.5 * 1.001
        assert answer.low_s[0] < answer.t_s[0] < answer.high_s[0]


def test_the_shipped_table_knows_every_source_of_each_family() -> None:
    """Every weight is based on the errors of at least three devices left out."""
    text = (resources.files("whatif.opdb") / "source_errors.json").read_text(encoding="utf-8")
    devices = defaultdict(set)
    for row in json.loads(text)["errors"]:
        assert 0 < row["rms_log"] <= 1
        devices[row["source"], row["family"]].add(row["device"])
    for source in ("same_shape", "learned_across", "analytic"):
        for family in ("matmul", "conv", "elementwise", "normalization"):
            assert len(devices[source, family]) >= 3, (source, family)
