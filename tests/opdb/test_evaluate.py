"""The evaluation: what its columns mean, by hand, and that its split is everybody's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.opdb.builders import T4, V100, database, origin, timed
from whatif.opdb.chain import AnswerSource
from whatif.opdb.evaluate import evaluate, score
from whatif.opdb.merging import merge
from whatif.opdb.store import Store
from whatif.runtime.errors import WhatifError


def test_a_score_by_hand() -> None:
    """10 us four times, estimated as 11, 8, 10 and not at all; ranges of a factor of 1.25 either way."""
    estimated = np.array([11.0, 8.0, 10.0, np.nan])
    rows = pd.DataFrame({"measured": 10.0, "estimated": estimated, "low": estimated / 1.25, "high": estimated * 1.25})
    found = score(rows, "mm", "T4")
    assert (found.rows, found.answered) == (4, 3)
    assert found.mape_pct == pytest.approx((10 + 20 + 0) / 3)
    assert found.median_pct == pytest.approx(10)
    assert found.bias_pct == pytest.approx((10 - 20 + 0) / 3)
    assert found.coverage_pct == pytest.approx(100)  # 8 times 1.25 is just 10
    assert found.half_width_pct == pytest.approx(25)
    assert score(rows[3:], "mm", "T4").answered == 0


def lawful(size: int) -> list[float]:
    return [5.0 + 0.1 * m for m in range(1, size + 1)]


def test_lawful_operators_are_met(tmp_path: Path) -> None:
    store = database(tmp_path / "db", (timed(range(1, 301), lawful(300)), origin()))
    found = evaluate(store, share=0.2)
    assert found.rows == 300
    assert 30 < found.held_out < 90
    assert found.sources == {"interpolated": found.held_out}
    assert found.total.mape_pct < 0.5
    sheet = evaluate(store, share=0.2, sources=(AnswerSource.ANALYTIC,))
    assert sheet.held_out == found.held_out
    assert sheet.total.mape_pct > found.total.mape_pct


def test_the_split_does_not_depend_on_who_merged_what(tmp_path: Path) -> None:
    parts = [(timed(range(1, 301), lawful(300)), origin(T4)), (timed(range(1, 201), lawful(200)), origin(V100))]
    one = database(tmp_path / "one", *parts)
    other = Store.open(tmp_path / "other", create=True)
    for number, part in reversed(list(enumerate(parts))):
        merge(database(tmp_path / str(number), part), other)
    assert evaluate(one).to_dict() == evaluate(other).to_dict()
    assert evaluate(one, seed=5).to_dict()["total"] != evaluate(one, seed=6).to_dict()["total"]
    alone = evaluate(one, device=T4)
    by_device = {s.device: s.rows for s in evaluate(one).by_device}
    assert alone.held_out == by_device[T4]


def test_too_little_is_one_sentence(tmp_path: Path) -> None:
    for rows in (timed([1], [10.0]), None):
        store = Store.open(tmp_path / str(rows is None), create=True)
        if rows is not None:
            store.add(rows, origin())
        with pytest.raises(WhatifError, match="too few"):
            evaluate(store)
