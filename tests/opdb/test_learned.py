"""Learned models: as files, in the chain, and where they have to give way; the models here are made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.opdb.builders import T4, V100, database, indexed, origin, own_cache, products, timed
from tests.opdb.learned import EMPTY, KERNELS, LAUNCHED, expected_s, model, written
from whatif.hardware.gpu import load_gpu
from whatif.opdb.anchors import fit_anchors
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.data_sheet import bound_s
from whatif.opdb.default import estimator, opened
from whatif.opdb.learned import (
    LearnedModel,
    shipped_models,
)
from whatif.opdb.rows import measurements, operators
from whatif.runtime.errors import WhatifError

__all__ = ["own_cache"]


# -- in the chain ---------------------------------------------------------------------------------------------------


def test_a_model_answers_without_any_database() -> None:
    asked = products([64, 2048])
    answers = Estimator(EMPTY, V100, models=[model(2.0)]).estimate(asked)
    assert answers.answered_by.tolist() == [AnswerSource.LEARNED] * 2
    assert answers.t_s == pytest.approx(2 * expected_s(asked, V100))
    assert answers.high_s == pytest.approx(answers.t_s * np.exp(0.1))
    assert answers.low_s == pytest.approx(answers.t_s * np.exp(-0.1))
    assert answers.evidence.tolist() == [1000, 1000]
    assert answers.bases[answers.basis[0]] == LAUNCHED
    assert Estimator(EMPTY, T4, models=[model(2.0)]).estimate(asked).answered_by.tolist() == [AnswerSource.ANALYTIC] * 2
    with_other = Estimator(EMPTY, V100, method="trace", models=[model(2.0)])
    assert with_other.estimate(asked).answered_by.tolist() == [AnswerSource.ANALYTIC] * 2


@pytest.mark.usefixtures("no_known_errors")
def test_a_model_across_devices_answers_for_one_that_was_not_measured() -> None:
    asked = products([64, 2048])
    across = model(3.0, "", half=0.5)
    answers = Estimator(EMPTY, "A100-SXM-80", models=[across]).estimate(asked)
    assert answers.answered_by.tolist() == [AnswerSource.LEARNED_ACROSS] * 2
    assert answers.t_s == pytest.approx(3 * expected_s(asked, "A100-SXM-80"))
    assert answers.high_s == pytest.approx(answers.t_s * np.exp(0.5))
    both = Estimator(EMPTY, V100, models=[across, model(2.0)]).estimate(asked)
    assert both.answered_by.tolist() == [AnswerSource.LEARNED] * 2
    assert (
        Estimator(EMPTY, "no such GPU", models=[across]).estimate(asked).answered_by.tolist() == [AnswerSource.NONE] * 2
    )


@pytest.mark.usefixtures("no_known_errors")
def test_a_model_across_devices_answers_for_the_vendors_that_it_has_seen() -> None:
    """Another vendor's devices run other libraries: NVIDIA's times say nothing of an MI300X."""
    asked, across = products([64, 2048]), model(3.0, "")
    amd = Estimator(EMPTY, "MI300X", models=[across])
    assert amd.estimate(asked).answered_by.tolist() == [AnswerSource.ANALYTIC] * 2
    assert amd.bases == ()
    assert (
        Estimator(EMPTY, "MI300X", sources=[AnswerSource.LEARNED_ACROSS], models=[across])
        .estimate(asked)
        .answered_by[0]
        == AnswerSource.NONE
    )
    of_both = model(3.0, "", devices=(T4, "MI210"))
    assert (
        Estimator(EMPTY, "MI300X", models=[of_both]).estimate(asked).answered_by.tolist()
        == [AnswerSource.LEARNED_ACROSS] * 2
    )


def test_nothing_is_under_what_the_device_can_do() -> None:
    asked = products([4096], n=4096, k=4096)
    answers = Estimator(EMPTY, V100, models=[model(0.01)]).estimate(asked)
    bound = bound_s(load_gpu(V100), asked, cold=False)
    assert answers.t_s == pytest.approx(bound)
    assert answers.low_s == pytest.approx(bound)
    assert answers.high_s[0] > bound[0]


def test_outside_of_what_was_measured_the_range_grows_and_the_data_sheet_takes_over() -> None:
    """Two doublings outside at 0.2 each: 0.1 + 0.4. The data sheet's range is a factor of 4, log 1.39."""
    asked = products([4096, 4096 * 4, 4096 * 32])
    answers = Estimator(EMPTY, V100, models=[model(2.0)]).estimate(asked)
    assert answers.outside.tolist() == [0.0, 2.0, 0.0]
    assert answers.answered_by.tolist() == [AnswerSource.LEARNED, AnswerSource.LEARNED, AnswerSource.ANALYTIC]
    assert np.log(answers.high_s[1] / answers.t_s[1]) == pytest.approx(0.5)
    alone = Estimator(EMPTY, V100, sources=(AnswerSource.LEARNED,), models=[model(2.0)]).estimate(asked)
    assert alone.outside.tolist() == [0.0, 2.0, 5.0]
    assert alone.answered_by.tolist() == [AnswerSource.LEARNED] * 3


def test_other_operators_are_not_answered() -> None:
    models = [model(2.0), model(3.0, "")]
    for other in (products([64], dtype="fp64"), products([64], name="bmm")):
        assert Estimator(EMPTY, V100, models=models).estimate(other).answered_by.tolist() == [AnswerSource.ANALYTIC]
    softmax = operators("normalization", {"rows": 8, "columns": 8}, name="softmax", dtype="fp32")
    assert Estimator(EMPTY, V100, models=models).estimate(softmax).answered_by.tolist() == [AnswerSource.ANALYTIC]
    kin = Estimator(EMPTY, V100, models=models).estimate(products([64], name="linear"))
    assert kin.answered_by.tolist() == [AnswerSource.LEARNED]
    assert np.log(kin.high_s / kin.t_s) == pytest.approx(0.15)  # under another name: 0.05 wider


@pytest.mark.usefixtures("no_known_errors")
def test_operators_of_several_formats_are_asked_together() -> None:
    """Each finds its own: the model the fp32 one, the data sheet the others."""
    ops = operators(
        "matmul", {"batch": 1, "m": 64, "n": 64, "k": 64}, name="mm", dtype=["fp16", "fp32", "int8", "unknown"]
    )
    for models in ([model(2.0)], [model(2.0, "")]):
        answers = Estimator(EMPTY, V100, models=models).estimate(ops)
        learned = AnswerSource.LEARNED_ACROSS if models[0].facts.across else AnswerSource.LEARNED
        assert answers.answered_by.tolist() == [
            AnswerSource.ANALYTIC,
            learned,
            AnswerSource.ANALYTIC,
            AnswerSource.ANALYTIC,
        ]


def test_who_missed_less_comes_first() -> None:
    """Measured operators answer for themselves; between them the model does where it won, else the interpolation."""
    sizes = range(8, 8 + 300 * 4, 4)
    rows = timed(sizes, (1e6 * expected_s(products(sizes), V100)).tolist())
    index = indexed((rows, origin()))
    asked = products([8, 9])
    loser, winner = model(2.0), model(2.0, before_interpolation=("mm",))
    assert Estimator(index, V100, models=[loser]).estimate(asked).answered_by.tolist() == [
        AnswerSource.EXACT,
        AnswerSource.INTERPOLATED,
    ]
    assert Estimator(index, V100, models=[winner]).estimate(asked).answered_by.tolist() == [
        AnswerSource.EXACT,
        AnswerSource.LEARNED,
    ]
    shipped = LearnedModel("another's", winner.facts, winner.read_arrays, shipped=True)
    assert Estimator(index, V100, models=[shipped]).estimate(asked).answered_by.tolist() == [
        AnswerSource.EXACT,
        AnswerSource.INTERPOLATED,
    ]
    # Kernels alone, interpolated, come before a model of times with launches.
    kernels = indexed((rows, origin(method="kernel", launch=False)))
    assert Estimator(kernels, V100, models=[winner]).estimate(asked).answered_by.tolist() == [
        AnswerSource.EXACT,
        AnswerSource.INTERPOLATED,
    ]


def test_a_launch_is_taken_out_for_kernels() -> None:
    launched = model(2.0, launch_s={"mm": 15e-6})
    asked = products([8, 4096], n=4096, k=4096)
    whole = Estimator(EMPTY, V100, models=[launched]).estimate(asked)
    alone = Estimator(EMPTY, V100, models=[launched], kernels_alone=True).estimate(asked)
    assert whole.t_s - alone.t_s == pytest.approx([15e-6, 15e-6])
    tiny = products([1], n=1, k=1)
    assert Estimator(EMPTY, V100, models=[model(0.5, launch_s={"mm": 15e-6})], kernels_alone=True).estimate(
        tiny
    ).t_s == pytest.approx([2e-6])
    kernels = model(2.0, basis=KERNELS)
    for alone_too in (False, True):
        answers = Estimator(EMPTY, V100, models=[kernels], kernels_alone=alone_too).estimate(asked)
        assert answers.t_s == pytest.approx(2 * expected_s(asked, V100, launch=False))
    both = Estimator(EMPTY, V100, models=[launched, kernels]).estimate(asked)
    assert {both.bases[b] for b in both.basis} == {KERNELS}


def test_what_was_mostly_launch_is_left_to_the_data_sheet() -> None:
    """20 us of which 18 were a launch leave 2 give or take 7: the data sheet is more accurate than that."""
    asked = products([8, 4096], n=64, k=1024)
    short_s = float(expected_s(asked, V100)[0])
    launched = model(1.0, half=0.3, launch_s={"mm": 0.9 * short_s})
    assert Estimator(EMPTY, V100, models=[launched]).estimate(asked).answered_by.tolist() == [AnswerSource.LEARNED] * 2
    for sources, who in (
        ((AnswerSource.LEARNED, AnswerSource.ANALYTIC), AnswerSource.ANALYTIC),
        ((AnswerSource.LEARNED,), AnswerSource.LEARNED),
    ):
        answers = Estimator(EMPTY, V100, sources=sources, models=[launched], kernels_alone=True).estimate(asked)
        assert answers.answered_by.tolist() == [who, AnswerSource.LEARNED]
    sure = model(1.0, half=0.001, launch_s={"mm": 0.9 * short_s})
    assert (
        Estimator(EMPTY, V100, models=[sure], kernels_alone=True).estimate(asked).answered_by.tolist()
        == [AnswerSource.LEARNED] * 2
    )


# -- anchors --------------------------------------------------------------------------------------------------------


def test_anchors_by_hand() -> None:
    """Six that are all 30 % slower: the level is shrunken by 6 / 7, and there is no slope to see."""
    found = fit_anchors(np.full(6, 0.3), np.linspace(-12, -6, 6))
    assert found is not None
    assert found.level == pytest.approx(0.3 * 6 / 7)
    assert found.slope == pytest.approx(0, abs=1e-12)
    assert found.half is None
    assert fit_anchors(np.full(4, 0.3), np.zeros(4)) is None
    ten = fit_anchors(np.full(10, 0.3), np.linspace(-12, -6, 10))
    assert ten is not None
    assert ten.half == pytest.approx(0.3 / 10)  # nine of ten anchors: 0.3 x 9 / 10
    stray = fit_anchors(np.array([0.1] * 19 + [9.0]), np.linspace(-12, -6, 20))
    assert stray is not None
    assert stray.level < 0.15


@pytest.mark.usefixtures("no_known_errors")
def test_a_few_measurements_anchor_a_model_across_devices() -> None:
    """The model predicts the reference, this device takes 1.5 times that: twenty anchors correct it and its range."""
    device, sizes = "A100-SXM-80", np.unique(np.geomspace(64, 4000, 20).astype(int)).tolist()
    ops = products(sizes, n=1024, k=1024)
    slower = 1.5 * expected_s(ops, device) * np.exp(np.random.default_rng(2).normal(0, 0.02, len(sizes)))
    index = indexed((measurements(ops, slower), origin(device)))
    asked = products([100, 3001], n=2048, k=512)
    across = model(1.0, "", half=0.6)
    answers = Estimator(index, device, models=[across]).estimate(asked)
    assert answers.answered_by.tolist() == [AnswerSource.LEARNED_ACROSS] * 2
    assert answers.t_s == pytest.approx(1.5 * expected_s(asked, device), rel=0.05)
    assert (np.log(answers.high_s / answers.t_s) < 0.1).all()
    unanchored = Estimator(EMPTY, device, models=[across]).estimate(asked)
    assert unanchored.t_s == pytest.approx(expected_s(asked, device))
    assert (np.log(unanchored.high_s / unanchored.t_s) > 0.5).all()
    # Times that were taken in another way are no anchors.
    other = indexed((measurements(ops, slower), origin(device, method="trace", launch=False)))
    other_way = Estimator(other, device, sources=(AnswerSource.LEARNED_ACROSS,), models=[across]).estimate(asked)
    assert other_way.t_s == pytest.approx(expected_s(asked, device))


@pytest.mark.usefixtures("no_known_errors")
def test_a_model_without_anchors_does_not_replace_what_was_measured_here() -> None:
    """Its range is the narrower one, but this device's own times say otherwise; they were taken in another way."""
    device, sizes = "A100-SXM-80", np.unique(np.geomspace(64, 4000, 20).astype(int)).tolist()
    ops = products(sizes, n=1024, k=1024)
    slower = 1.5 * expected_s(ops, device) * np.exp(np.random.default_rng(2).normal(0, 0.3, len(sizes)))
    index = indexed((measurements(ops, slower), origin(device, method="trace", launch=False)))
    asked = products([100, 3001], n=1024, k=1024)
    certain = model(1.0, "", half=0.01)
    answers = Estimator(index, device, models=[certain]).estimate(asked)
    assert answers.answered_by.tolist() == [AnswerSource.INTERPOLATED] * 2
    assert (np.log(answers.high_s / answers.low_s) > 0.1).all()


# -- the estimator that everybody asks ------------------------------------------------------------------------------


def test_without_a_database_models_and_data_sheets_answer(own_cache: Path, tmp_path: Path) -> None:
    asked = operators("elementwise", {"elements": 10**7, "tensors": 2}, name="add", dtype="fp32")
    answers = estimator("NVIDIA A100-SXM4-80GB").estimate(asked)
    assert answers.answered_by[0] == AnswerSource.SAME_CHIP
    # 120 MB at 2 TB/s: 60 us.
    assert 50e-6 < answers.t_s[0] < 120e-6
    with pytest.raises(WhatifError, match="expected an op database"):
        estimator(V100, database=tmp_path / "none")


def test_a_database_and_its_own_models(own_cache: Path, tmp_path: Path) -> None:
    store = database(tmp_path / "db", (timed([8], [10.0]), origin()))
    (store.folder / "models").mkdir()
    written(store.folder / "models", device=V100)
    (store.folder / "models" / "broken.json").write_text("no")
    index, models = opened(store.folder)
    assert len(models) == 1
    assert any("broken.json" in sentence for sentence in index.warnings)
    chain = estimator(V100, database=store.folder)
    answers = chain.estimate(products([8, 16]))
    assert answers.answered_by[0] == AnswerSource.EXACT
    assert answers.t_s[0] == pytest.approx(10e-6)
    assert answers.answered_by[1] == AnswerSource.LEARNED


def test_without_pyarrow_the_rest_still_answers(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = database(tmp_path / "data" / "whatif" / "opdb", (timed([8], [10.0]), origin()))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    monkeypatch.setattr("whatif.opdb.default.importlib.util.find_spec", lambda name: None)
    index, _ = opened()
    assert len(index) == 0
    assert "pyarrow is missing" in index.warnings[0]
    with pytest.raises(WhatifError, match="pyarrow"):
        opened(store.folder)


@pytest.mark.parametrize("kernels_alone", [False, True])
def test_large_products_on_an_h100_take_about_what_its_data_sheet_says(kernels_alone: bool) -> None:
    """No H100 was among the GPUs of the fp32 products; one of them is a card of 75 W, far below its peak."""
    sizes = {"batch": 1, "m": [512, 2048, 4096, 8192], "n": [4096, 2048, 4096, 8192], "k": [25088, 8192, 4096, 8192]}
    for name in ("linear", "bmm"):
        asked = operators("matmul", sizes, name=name, dtype="fp32")
        answers = Estimator(
            EMPTY, "H100-SXM-80", (AnswerSource.LEARNED_ACROSS,), models=shipped_models(), kernels_alone=kernels_alone
        ).estimate(asked)
        over = answers.t_s / bound_s(load_gpu("H100-SXM-80"), asked, cold=False)
        assert (over >= 1).all()
        assert (over < 1.6).all()


def test_the_models_that_ship_are_sound() -> None:
    """Each is read whole, answers, gives its source and licence; together they stay under four megabytes."""
    folder = Path(__file__).resolve().parents[2] / "whatif" / "opdb" / "fitted"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4_000_000
    for one in shipped_models():
        facts = one.facts
        assert facts.sources
        assert all(s.licence in ("MIT", "Apache-2.0") for s in facts.sources)
        middle = {a: int(np.sqrt(max(facts.low[a], 1) * max(facts.high[a], 1))) for a in facts.low}
        integers = {a: np.array([facts.low[a], middle[a] if facts.high[a] else 0]) for a in facts.low}
        ops = operators(
            facts.family, integers, name=facts.names[0], dtype=facts.dtype, phase=facts.phase, layout=facts.layouts[0]
        )
        known, spoken, extra = one.covers(ops)
        assert known.all()
        assert (extra == 0).all()
        log_time = one.predict(spoken, load_gpu(facts.device or V100))
        assert np.isfinite(log_time).all()
        assert (log_time < np.log(100)).all()
