"""New over old time by two estimates of one answered_by."""

from __future__ import annotations

import numpy as np
import pytest

from tests.opdb.builders import T4, V100, indexed, origin, products, timed
from whatif.graph.described import Described
from whatif.models.durations.database import same_source_ratio
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.importers.described import operators_of


def sides(*contributions: tuple[object, object]) -> tuple[Estimator, Estimator]:
    index = indexed(*contributions)  # type: ignore[arg-type]
    return Estimator(index, V100), Estimator(index, T4)


def alone(device: str) -> object:
    return origin(device, method="kernel", launch=False)


def test_two_measurements_give_their_ratio() -> None:
    old, new = sides((timed([256], [100.0]), alone(V100)), (timed([256], [250.0]), alone(T4)))
    found = same_source_ratio(products([256]), products([256]), old, new)
    assert found.ratio[0] == pytest.approx(2.5)
    assert found.answered_by[0] == AnswerSource.EXACT
    assert found.low[0] < 2.5 < found.high[0]
    # Each of the two is known within 8 %: their ratio within the root of twice that.
    assert np.log(found.high[0] / 2.5) == pytest.approx(np.sqrt(2) * 1.645 * 0.05, rel=1e-3)


def test_a_measurement_is_not_divided_by_a_data_sheet() -> None:
    """Measured on one device alone: both step down to the data sheets, or no source answers."""
    old, new = sides((timed([256], [100.0]), alone(V100)))
    ops = products([256])
    sheet = same_source_ratio(ops, ops, old, new, worst=AnswerSource.ANALYTIC)
    assert sheet.answered_by[0] == AnswerSource.ANALYTIC
    by_hand = [
        Estimator(old.index, device, sources=[AnswerSource.ANALYTIC]).estimate(ops).t_s[0] for device in (V100, T4)
    ]
    assert sheet.ratio[0] == pytest.approx(by_hand[1] / by_hand[0])
    nobody = same_source_ratio(ops, ops, old, new, worst=AnswerSource.LEARNED)
    assert nobody.answered_by[0] == AnswerSource.NONE
    assert np.isnan(nobody.ratio[0])


def test_each_operator_steps_down_on_its_own() -> None:
    """The first is measured on both, the second on one, the third on none; what the sides are allowed stays theirs."""
    old, new = sides((timed([256, 512], [100.0, 300.0]), alone(V100)), (timed([256], [250.0]), alone(T4)))
    ops = products([256, 512, 1024])
    before = old.sources
    found = same_source_ratio(ops, ops, old, new, worst=AnswerSource.ANALYTIC)
    assert found.answered_by.tolist() == [AnswerSource.EXACT, AnswerSource.ANALYTIC, AnswerSource.ANALYTIC]
    assert found.ratio[0] == pytest.approx(2.5)
    assert old.sources is before


def test_another_operator_on_one_device_is_a_ratio_too() -> None:
    """A what-if that changes the operator asks the same chain twice."""
    old, _ = sides((timed([256, 512], [100.0, 300.0]), alone(V100)))
    assert same_source_ratio(products([256]), products([512]), old, old).ratio[0] == pytest.approx(3.0)


def test_short_times_with_a_launch_say_nothing_of_kernels() -> None:
    launched_old, launched_new = origin(V100), origin(T4)  # events around the launch
    old, new = sides((timed([256, 512], [15.0, 200.0]), launched_old), (timed([256, 512], [40.0, 500.0]), launched_new))
    found = same_source_ratio(products([256, 512]), products([256, 512]), old, new)
    assert found.answered_by.tolist() == [AnswerSource.NONE, AnswerSource.EXACT]
    assert np.isnan(found.ratio[0])
    assert found.ratio[1] == pytest.approx(2.5)


def test_a_table_of_operators_by_family() -> None:
    table = (
        Described("matmul", "mm", "fp32", (("batch", 1), ("m", 2), ("n", 3), ("k", 4))),
        Described("elementwise", "add", "fp16", (("elements", 7), ("tensors", 2))),
        Described("matmul", "bmm", "bf16", (("batch", 5), ("m", 2), ("n", 3), ("k", 4))),
        Described("other", "aten::sort", "fp32", (), layout="[[5]]"),
    )
    found = {ops.family: (places.tolist(), ops) for places, ops in operators_of(table)}
    assert {family: places for family, (places, _) in found.items()} == {
        "matmul": [0, 2], "elementwise": [1], "other": [3],
    }  # fmt: skip
    assert found["matmul"][1].described(1) == {
        "family": "matmul", "name": "bmm", "phase": "fwd", "dtype": "bf16", "layout": "",
        "batch": 5, "m": 2, "n": 3, "k": 4,
    }  # fmt: skip
    assert operators_of(()) == []
