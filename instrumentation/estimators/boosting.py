"""Gradient-boosted trees fitted with scikit-learn, as the arrays that ``whatif.opdb.trees`` evaluates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from whatif.graph.types import Float64
from whatif.opdb.trees import LEAF


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of the trees; the models of several ``seeds`` are averaged."""

    rounds: int = 400
    rate: float = 0.06
    leaves: int = 31
    in_leaf: int = 10
    features: float = 0.5  # share of features considered for each split
    ridge: float = 1.0
    seeds: int = 1

    def as_floats(self) -> dict[str, float]:
        """Return the settings in the format of a model file."""
        return {name: float(value) for name, value in asdict(self).items()}


def fit_trees(x: Float64, y: Float64, settings: Settings) -> dict[str, npt.NDArray[Any]]:
    """Fit trees to n rows: features (n, f), targets (n,), least absolute error; return the arrays of a forest."""
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
    """Round values to 12 bits: a sum of hundreds is exact to a ten thousandth, and the file packs to half the size."""
    return ((values.view(np.uint32) + np.uint32(1 << 11)) & np.uint32(0xFFFFF000)).view(np.float32)


def arrays_of(models: list[Any]) -> dict[str, npt.NDArray[Any]]:
    """Return the mean of fitted ``HistGradientBoostingRegressor`` as the arrays of one forest: each has its own bins.

    All were fitted to the same features. Up to 200,000 rows (scikit-learn samples more) the bins depend only on the
    features, and those of the first model are used for all.
    """
    edges = [np.asarray(e, dtype=np.float64) for e in models[0]._bin_mapper.bin_thresholds_]
    feature, bins, right, value, starts = [], [], [], [], [0]
    for model in models:
        for stage in model._predictors:
            nodes = stage[0].nodes
            order = _preorder(nodes)
            rank = np.empty(len(nodes), dtype=np.int64)
            rank[order] = np.arange(len(order))
            node = nodes[order]
            leaf = node["is_leaf"].astype(bool)
            feature.append(np.where(leaf, LEAF, node["feature_idx"]).astype(np.uint8))
            bins.append(np.where(leaf, 0, _bins(node, edges, leaf)).astype(np.uint8))
            offset = np.where(leaf, 0, rank[np.where(leaf, 0, node["right"].astype(np.int64))] - np.arange(len(order)))
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
    """Return the last bin that goes left, found by the threshold: the models' bins may differ by rounding."""
    found = np.zeros(len(node), dtype=np.int64)
    for row in np.flatnonzero(~leaf).tolist():
        thresholds = edges[int(node["feature_idx"][row])]
        found[row] = min(int(np.searchsorted(thresholds, node["num_threshold"][row], side="left")), len(thresholds) - 1)
    return found


def _preorder(nodes: Any) -> npt.NDArray[np.int64]:
    order, pending = [], [0]
    while pending:
        node = pending.pop()
        order.append(node)
        if not nodes["is_leaf"][node]:
            pending += [int(nodes["right"][node]), int(nodes["left"][node])]
    return np.array(order, dtype=np.int64)
