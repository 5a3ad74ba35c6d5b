"""Trees as arrays: they say what scikit-learn's say, what a slow twin says, and no damaged file leads anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import need
from whatif.opdb.trees import LEAF, Forest, forest_of
from whatif.runtime.errors import WhatifError

Arrays = dict[str, np.ndarray[Any, Any]]


def grown(seed: int, trees: int = 5, features: int = 3, leaves: int = 9) -> Arrays:
    """A random forest as a file holds it."""
    random = np.random.default_rng(seed)
    edges = [np.unique(random.normal(size=random.integers(1, 30))) for _ in range(features)]
    feature, bins, right, value, starts = [], [], [], [], [0]

    def grow(room: int) -> None:
        if room < 2:
            feature.append(LEAF)
            bins.append(0)
            right.append(0)
            value.append(random.normal())
            return
        here, left = len(feature), int(random.integers(1, room))
        feature.append(int(random.integers(0, features)))
        bins.append(int(random.integers(0, len(edges[feature[-1]]))))
        right.append(0)
        grow(left)
        right[here] = len(feature) - here
        grow(room - left)

    for _ in range(trees):
        grow(int(random.integers(1, leaves + 1)))
        starts.append(len(feature))
    return {
        "edges": np.concatenate(edges), "edge_starts": np.cumsum([0, *map(len, edges)]).astype(np.int64),
        "feature": np.array(feature, dtype=np.uint8), "bin": np.array(bins, dtype=np.uint8),
        "right": np.array(right, dtype=np.uint16), "value": np.array(value, dtype=np.float32),
        "starts": np.array(starts, dtype=np.int64), "base": np.array([random.normal()]),
    }  # fmt: skip


def slow(arrays: Arrays, row: np.ndarray[Any, Any]) -> float:
    """One operator down every tree, by comparing with the edges themselves."""
    total = float(arrays["base"][0])
    leaf_number = np.cumsum(arrays["feature"] == LEAF) - 1
    for root in arrays["starts"][:-1].tolist():
        node = root
        while arrays["feature"][node] != LEAF:
            feature = int(arrays["feature"][node])
            edge = arrays["edges"][arrays["edge_starts"][feature] + int(arrays["bin"][node])]
            node += 1 if row[feature] <= edge else int(arrays["right"][node])
        total += float(arrays["value"][leaf_number[node]])
    return total


@settings(max_examples=60)
@given(st.integers(0, 100_000), st.integers(0, 40))
def test_a_forest_is_the_sum_of_its_trees(seed: int, count: int) -> None:
    arrays = grown(seed)
    x = np.random.default_rng(seed + 1).normal(size=(count, 3))
    x[: count // 3, 0] = arrays["edges"][0]  # on an edge: to the left
    forest = forest_of(arrays, 3, "a test")
    assert forest.predict(x) == pytest.approx([slow(arrays, row) for row in x], abs=1e-9)


def test_a_forest_by_hand() -> None:
    """x0 <= 1: 10; else x1 <= 5: 20, else 30. And 0.5 for all."""
    arrays = {
        "edges": np.array([1.0, 5.0]), "edge_starts": np.array([0, 1, 2]), "feature": np.array([0, 255, 1, 255, 255]),
        "bin": np.zeros(5), "right": np.array([2, 0, 2, 0, 0]), "value": np.array([10.0, 20.0, 30.0]),
        "starts": np.array([0, 5]), "base": np.array([0.5]),
    }  # fmt: skip
    kinds = {"edge_starts": np.int64, "feature": np.uint8, "bin": np.uint8, "right": np.uint16, "value": np.float32}
    arrays |= {name: arrays[name].astype(kind) for name, kind in kinds.items()} | {"starts": np.array([0, 5])}
    x = np.array([[1.0, 9.0], [1.1, 5.0], [2.0, 5.1]])
    assert forest_of(arrays, 2, "a test").predict(x).tolist() == [10.5, 20.5, 30.5]
    assert forest_of(arrays, 2, "a test").predict(x[:0]).tolist() == []


def change(name: str, place: int, value: float) -> Callable[[Arrays], None]:
    def apply(arrays: Arrays) -> None:
        arrays[name] = arrays[name].copy()
        arrays[name][place] = value

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda arrays: arrays.pop("bin"),
        lambda arrays: arrays.update(bin=arrays["bin"][:-1]),
        lambda arrays: arrays.update(value=arrays["value"].astype(np.float64)),
        lambda arrays: arrays.update(value=arrays["value"][1:]),
        lambda arrays: arrays.update(base=np.array([np.nan])),
        lambda arrays: arrays.update(starts=np.array([], dtype=np.int64)),
        lambda arrays: arrays.update(feature=arrays["feature"].reshape(1, -1)),
        change("edges", 0, np.inf),
        change("edge_starts", 1, 10_000),
        change("starts", 1, -1),
        change("right", 0, 0),
        change("right", 0, 60_000),
        change("feature", 0, 200),
        change("value", 0, np.nan),
    ],
)
def test_damaged_arrays_are_refused(damage: Callable[[Arrays], None]) -> None:
    arrays = next(a for a in map(grown, range(50)) if a["feature"][0] != LEAF)
    damage(arrays)
    with pytest.raises(WhatifError, match="a test: expected the arrays of a model of trees"):
        forest_of(arrays, 3, "a test")


@settings(max_examples=200)
@given(st.integers(0, 50), st.sampled_from(["feature", "bin", "right"]), st.integers(0, 10**6), st.integers(0, 65_535))
def test_whatever_is_accepted_ends(seed: int, name: str, place: int, value: int) -> None:
    """One node overwritten with anything: refused, or a forest whose walks end within its own nodes."""
    arrays = grown(seed)
    column = arrays[name] = arrays[name].copy()
    column[place % len(column)] = value % (int(np.iinfo(column.dtype).max) + 1)
    try:
        forest = forest_of(arrays, 3, "a test")
    except WhatifError:
        return
    assert np.isfinite(forest.predict(np.random.default_rng(seed).normal(size=(20, 3)))).all()


@pytest.mark.usefixtures("one_thread")
def test_scikit_learns_own_predictions() -> None:
    ensemble = need("sklearn.ensemble")
    boosting = need("whatif.instrumentation.estimators.boosting")
    random = np.random.default_rng(1)
    x = random.normal(size=(3000, 6))
    x[:, 2] = np.round(x[:, 2])  # few distinct values: bins between them
    y = np.sin(x[:, 0]) + x[:, 1] * (x[:, 2] > 0) + 0.01 * random.normal(size=3000)
    models = [
        ensemble.HistGradientBoostingRegressor(
            loss="absolute_error", max_iter=40, max_bins=254, early_stopping=False, max_features=0.5, random_state=seed
        ).fit(x, y)
        for seed in range(2)
    ]
    asked = np.concatenate([x[:500], random.normal(size=(500, 6)) * 3])
    forest = forest_of(boosting.arrays_of(models), 6, "a test")
    assert isinstance(forest, Forest)
    wanted = np.mean([model.predict(asked) for model in models], axis=0)
    assert forest.predict(asked) == pytest.approx(wanted, abs=1e-6)
    short = forest_of(boosting.fit_trees(x, y, boosting.Settings(rounds=40)), 6, "a test")
    assert np.abs(short.predict(x) - y).mean() < 0.15
