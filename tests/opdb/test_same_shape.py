"""The same operator on other devices: the estimate by hand, its range, and that it answers only where it may."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.opdb.builders import T4, V100, database, indexed, origin, products, timed
from whatif.hardware.gpu import load_gpu
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.data_sheet import analytic_s, bound_s
from whatif.opdb.evaluate import evaluate_unseen_devices
from whatif.opdb.provenance import Origin
from whatif.opdb.rows import Operators, Rows, measurements
from whatif.opdb.store import Store
from whatif.runtime.errors import WhatifError

P100, A100, H100 = "P100-PCIE-16", "A100-SXM-80", "H100-SXM-80"
pytestmark = pytest.mark.usefixtures("no_known_errors")


SIZES = range(64, 64 + 40 * 16, 16)


def sheet_s(device: str, ops: Operators) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return analytic_s(load_gpu(device), ops, launch=True)[0]


def measured(device: str, factor: float, sizes: range = SIZES, noise: float = 0.0) -> tuple[Rows, Origin]:
    """Products that take ``factor`` times the data sheet's estimate."""
    ops = products(sizes)
    wobble = np.exp(np.random.default_rng(len(device)).normal(0, noise, len(ops)))
    return measurements(ops, factor * sheet_s(device, ops) * wobble), origin(device)


def test_the_median_of_the_others_by_hand() -> None:
    """Ratios of 1.1, 1.2 and 1.5 on other devices: 1.2 here, and their errors of one another are up to 1.5 / 1.15.

    Left out, 1.1 gets 1.2 and 1.5 (geometric mean 1.342), 1.2 gets 1.1 and 1.5 (1.285), 1.5 gets 1.1 and 1.2.
    """
    index = indexed(measured(V100, 1.1), measured(T4, 1.2), measured(P100, 1.5))
    asked = products([80, 640])
    answers = Estimator(index, A100).estimate(asked)
    assert answers.answered_by.tolist() == [AnswerSource.SAME_SHAPE] * 2
    assert answers.t_s == pytest.approx(1.2 * sheet_s(A100, asked))
    worst = max(1.5 / np.sqrt(1.1 * 1.2), np.sqrt(1.2 * 1.5) / 1.1, np.sqrt(1.1 * 1.5) / 1.2)
    assert answers.high_s == pytest.approx(answers.t_s * worst)
    assert answers.low_s == pytest.approx(answers.t_s / worst)
    assert answers.evidence.tolist() == [3, 3]
    assert answers.bases[answers.basis[0]].launch == "with launch"


def test_it_answers_only_what_two_devices_measured() -> None:
    index = indexed(measured(V100, 1.1), measured(T4, 1.2, range(64, 640, 16)))
    answers = Estimator(index, A100).estimate(products([80, 672, 81]))
    # 672 was measured once; 81 never: another shape is no evidence here.
    assert answers.answered_by.tolist() == [AnswerSource.SAME_SHAPE, AnswerSource.ANALYTIC, AnswerSource.ANALYTIC]
    assert Estimator(index, "a GPU without facts").estimate(products([80])).answered_by.tolist() == [AnswerSource.NONE]
    alone = Estimator(index, A100, sources=(AnswerSource.SAME_SHAPE,)).estimate(products([80, 672]))
    assert alone.answered_by.tolist() == [AnswerSource.SAME_SHAPE, AnswerSource.NONE]
    for other in (products([80], dtype="fp16"), products([80], name="bmm")):
        assert Estimator(index, A100).estimate(other).answered_by.tolist() == [AnswerSource.ANALYTIC]
    # Another vendor's libraries are others.
    assert Estimator(index, "MI300X").estimate(products([80])).answered_by.tolist() == [AnswerSource.ANALYTIC]
    amd = indexed(measured("MI210", 1.1), measured("MI250-GCD", 1.2))
    assert Estimator(amd, "MI300X").estimate(products([80])).answered_by.tolist() == [AnswerSource.SAME_SHAPE]


def test_ways_of_measuring_and_strangers_are_not_mixed() -> None:
    """Kernels alone on one device and launches on the other make no two; a device without a data sheet is none."""
    rows, where = measured(V100, 1.1)
    kernels = origin(T4, method="graph_replay", launch=False)
    index = indexed((rows, where), (measured(T4, 1.2)[0], kernels), (rows.take(np.arange(30)), origin("no such GPU")))
    assert Estimator(index, A100).estimate(products([80])).answered_by.tolist() == [AnswerSource.ANALYTIC]
    both = indexed((rows, where), measured(T4, 1.2))
    assert Estimator(both, A100, method="trace").estimate(products([80])).answered_by.tolist() == [
        AnswerSource.ANALYTIC
    ]
    assert Estimator(both, A100, framework="pytorch").estimate(products([80])).answered_by.tolist() == [
        AnswerSource.SAME_SHAPE
    ]


def test_the_devices_own_measurements_come_first() -> None:
    own = timed([80], [123.0]), origin(A100)
    index = indexed(measured(V100, 1.1), measured(T4, 1.2), own)
    answers = Estimator(index, A100).estimate(products([80, 96]))
    assert answers.answered_by.tolist() == [AnswerSource.EXACT, AnswerSource.SAME_SHAPE]
    assert answers.t_s[0] == pytest.approx(123e-6)


def test_where_the_others_disagree_the_range_says_so() -> None:
    """Ratios of one and nine: three, and a factor of nine either way."""
    index = indexed(measured(V100, 1.0), measured(T4, 9.0))
    answers = Estimator(index, A100).estimate(products([80]))
    assert answers.t_s == pytest.approx(3 * sheet_s(A100, products([80])))
    assert answers.high_s == pytest.approx(9 * answers.t_s)


def test_few_operators_take_the_data_sheets_range_and_nothing_undercuts_the_device() -> None:
    index = indexed(measured(V100, 1.1, range(64, 128, 16)), measured(T4, 1.1, range(64, 128, 16)))
    asked = products([80])
    answers = Estimator(index, A100).estimate(asked)
    t, low, high = analytic_s(load_gpu(A100), asked, launch=True)
    assert answers.answered_by.tolist() == [AnswerSource.SAME_SHAPE]
    assert (answers.t_s[0], answers.low_s[0], answers.high_s[0]) == pytest.approx(
        (1.1 * t[0], 1.1 * low[0], 1.1 * high[0])
    )
    large = products([60_000, 61_000], n=8192, k=8192)
    fast = [(measurements(large, 0.75 * sheet_s(d, large)), origin(d)) for d in (V100, T4)]
    answers = Estimator(indexed(*fast), A100, sources=(AnswerSource.SAME_SHAPE,)).estimate(large)
    assert (answers.low_s >= bound_s(load_gpu(A100), large, cold=False) * (1 - 1e-12)).all()
    assert (answers.low_s <= answers.t_s).all()
    assert (answers.t_s <= answers.high_s).all()


def test_a_device_that_is_held_out_is_not_learned_from(tmp_path: Path) -> None:
    """Whatever the held-out device measured, its estimates are the same."""
    others = measured(V100, 1.1, noise=0.05), measured(T4, 1.2, noise=0.05), measured(P100, 1.3, noise=0.05)
    found = []
    for factor in (1.0, 1.4):
        store = database(tmp_path / str(factor), *others, measured(H100, factor))
        found.append(evaluate_unseen_devices(store, device=H100))
    one, other = (f.total for f in found)
    assert (one.rows, one.answered) == (40, 40)
    assert found[0].sources == {"same_shape": 40}
    # The same estimate over a time that is 1.4 times as long.
    assert (1 + one.bias_pct / 100) / (1 + other.bias_pct / 100) == pytest.approx(1.4)
    whole = evaluate_unseen_devices(store)
    assert whole.held_out == whole.rows == 160
    assert {s.device for s in whole.by_device} == {V100, T4, P100, H100}
    assert whole.seed is None
    with pytest.raises(WhatifError, match="too few"):
        evaluate_unseen_devices(database(tmp_path / "one", measured(V100, 1.0)))
    with pytest.raises(WhatifError, match="too few"):
        evaluate_unseen_devices(Store.open(store.folder), device="K40")
