"""Gradient-boosted trees fitted with scikit-learn, given back as the arrays that ``whatif.opdb.trees`` adds up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from whatif.graph.types import Float64
from whatif.opdb.trees import LEAF


@dataclass(frozen=True)
class Settings:
    """How trees are grown; several ``seeds`` are averaged."""

    rounds: int = 400
    rate: float = 0.06
    leaves: int = 31
    in_leaf: int = 10
    features: float = 0.5  # share of them that each split may choose from
    ridge: float = 1.0
    seeds: int = 1

    def as_floats(self) -> dict[str, float]:
        """Return the settings as a model's file has them."""
        return {name: float(value) for name, value in asdict(self).items()}


def fit_trees(x: Float64, y: Float64, settings: Settings) -> dict[str, npt.NDArray[Any]]:
    """Fit trees to n rows: features (n, f), targets (n,), least absolute error; gives a forest's arrays."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    found = []
    for seed in range(settings.seeds):
        model = HistGradientBoostingRegressor(
            loss="absolute_error", learning_rate=settings.rate, max_iter=settings.rounds,
            max_leaf_nodes=settings.leaves, min_samples_leaf=settings.in_leaf, l2_regularization=settings.ridge,
            max_features=settings.features, max_bins=254, early_stopping=False, random_state=seed,
        )  # fmt: skip
        found.append(model.fit(x, y))
    arrays = arrays_of(found)
    return arrays | {"value": _short(arrays["value"])}


def _short(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The values to 12 bits: a sum of hundreds of them is right to a ten thousandth, and packs into half the file."""
    return ((values.view(np.uint32) + np.uint32(1 << 11)) & np.uint32(0xFFFFF000)).view(np.float32)


def arrays_of(models: list[Any]) -> dict[str, npt.NDArray[Any]]:
    """Return the mean of fitted ``HistGradientBoostingRegressor`` as one forest's arrays: each has bins of its own.

    All were fitted to the same features; bins follow from them alone where there are at most 200,000 rows
    (scikit-learn draws a sample of more), and the first model's are used for all.
    """
    edges = [np.asarray(e, dtype=np.float64) for e in models[0]._bin_mapper.bin_thresholds_]
    feature, bins, right, value, starts = [], [], [], [], [0]
    for model in models:
        for stage in model._predictors:
            nodes = stage[0].nodes
            order = _preorder(nodes)
            place = np.empty(len(nodes), dtype=np.int64)
            place[order] = np.arange(len(order))
            node = nodes[order]
            leaf = node["is_leaf"].astype(bool)
            feature.append(np.where(leaf, LEAF, node["feature_idx"]).astype(np.uint8))
            bins.append(np.where(leaf, 0, _bins(node, edges, leaf)).astype(np.uint8))
            offset = np.where(leaf, 0, place[np.where(leaf, 0, node["right"].astype(np.int64))] - np.arange(len(order)))
            right.append(offset.astype(np.uint16))
            value.append((node["value"][leaf] / len(models)).astype(np.float32))
            starts.append(starts[-1] + len(order))
    base = np.mean([float(np.ravel(model._baseline_prediction)[0]) for model in models])
    return {
        "edges": np.concatenate(edges), "edge_starts": np.cumsum([0, *map(len, edges)]).astype(np.int64),
        "feature": np.concatenate(feature), "bin": np.concatenate(bins), "right": np.concatenate(right),
        "value": np.concatenate(value), "starts": np.array(starts, dtype=np.int64), "base": np.array([base]),
    }  # fmt: skip


def _bins(node: Any, edges: list[Float64], leaf: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The bin up to which rows go to the left, found by the threshold: the models' bins may differ by a rounding."""
    found = np.zeros(len(node), dtype=np.int64)
    for row in np.flatnonzero(~leaf).tolist():
        of = edges[int(node["feature_idx"][row])]
        found[row] = min(int(np.searchsorted(of, node["num_threshold"][row], side="left")), len(of) - 1)
    return found


def _preorder(nodes: Any) -> npt.NDArray[np.int64]:
    order, waiting = [], [0]
    while waiting:
        here = waiting.pop()
        order.append(here)
        if not nodes["is_leaf"][here]:
            waiting += [int(nodes["right"][here]), int(nodes["left"][here])]
    return np.array(order, dtype=np.int64)
