"""Gradient-boosted trees as arrays, evaluated for many operators at once; training is in ``instrumentation``.

Every feature is first replaced by the number of its bin, as in training. The nodes of a tree are
in preorder: the left child of a node is the next one, and the right child is at an offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from whatif.graph.types import Bool, Float64, Int64
from whatif.runtime.errors import WhatifError

Uint8 = npt.NDArray[np.uint8]

# The arrays of a file, and their types.
ARRAYS = {
    "edges": "f8", "edge_starts": "i8", "feature": "u1", "bin": "u1", "right": "u2", "value": "f4", "starts": "i8",
    "base": "f8",
}  # fmt: skip
# Marks a leaf in ``feature``.
LEAF = 255
# Pairs of an operator and a tree that are traversed at once: as many as fit the cache.
_PAIRS_AT_ONCE = 1 << 15
# Hardly any leaf is above this depth.
_FIRST_STEPS = 4


class Forest(Struct, frozen=True, dict=True):
    """Trees whose values add up: bins of each feature (``edges`` from ``edge_starts``), and the nodes of all trees.

    ``feature``, ``bin``, ``right`` have shape (nodes,), ``value`` (leaves,), ``starts`` (trees + 1,).
    """

    edges: Float64
    edge_starts: Int64
    feature: Uint8
    bin: Uint8
    right: npt.NDArray[np.uint16]
    value: npt.NDArray[np.float32]
    starts: Int64
    base: float

    @cached_property
    def _walks(self) -> tuple[Int64, Int64, Bool, Float64]:
        """For every node its feature, both children (at twice its index), whether it is a leaf, and a leaf's value."""
        leaf = self.feature == LEAF
        node = np.arange(len(leaf))
        # A leaf is its own child: finished traversals stay there.
        children = np.stack([np.where(leaf, node, node + 1), np.where(leaf, node, node + self.right)], axis=1)
        values = np.zeros(len(leaf))
        values[leaf] = self.value
        return np.where(leaf, 0, self.feature).astype(np.int64), children.ravel(), leaf, values

    def predict(self, x: Float64) -> Float64:
        """Return the sum of all trees for features of shape (n, f), shape (n,)."""
        codes = self.bins(x)
        total = np.empty(len(x))
        size = max(_PAIRS_AT_ONCE // max(len(self.starts) - 1, 1), 1)
        for start in range(0, len(x), size):
            total[start : start + size] = self._walk(codes[start : start + size])
        return total + self.base

    def bins(self, x: Float64) -> Uint8:
        """Return the bin of every feature, shape (n, f): the number of edges below it."""
        codes = np.empty(x.shape, dtype=np.uint8)
        for feature in range(x.shape[1]):
            edges = self.edges[self.edge_starts[feature] : self.edge_starts[feature + 1]]
            codes[:, feature] = np.searchsorted(edges, x[:, feature], side="left")
        return codes

    def _walk(self, codes: Uint8) -> Float64:
        """The sum over all trees for a few operators: all pairs of an operator and a tree descend at once."""
        feature, children, leaf, values = self._walks
        trees = len(self.starts) - 1
        flat = codes.ravel()
        node = np.tile(self.starts[:-1], len(codes))
        row = np.repeat(np.arange(len(codes)) * codes.shape[1], trees)
        arrived, open_ = node, np.arange(len(node))
        step = 0
        # All indices are valid (``forest_of``); "clip" only avoids the bounds check.
        while len(open_):
            place = feature.take(node, mode="clip")
            place += row
            right = flat.take(place, mode="clip") > self.bin.take(node, mode="clip")
            node = node + node
            node += right
            node = children.take(node, mode="clip")
            step += 1
            # Leaves are at different depths: now and then, finished pairs are removed.
            if step >= _FIRST_STEPS and step % 2 == 0:
                going = np.flatnonzero(~leaf.take(node, mode="clip"))
                arrived[open_] = node
                node, row, open_ = node[going], row[going], open_[going]
        return np.asarray(values.take(arrived).reshape(len(codes), trees).sum(axis=1))


def forest_of(arrays: Mapping[str, npt.NDArray[Any]], features: int, where: str) -> Forest:
    """Return the forest stored in arrays. Raises WhatifError if they are invalid for ``features`` features."""

    def refuse(reason: str) -> WhatifError:
        return WhatifError(f"{where}: expected the arrays of a model of trees, got {reason}; fetch or fit it again.")

    for name, kind in ARRAYS.items():
        if name not in arrays or arrays[name].ndim != 1 or arrays[name].dtype.str[1:] != kind:
            raise refuse(f"no valid column {name!r}")
    edges, edge_starts, starts = (arrays[name] for name in ("edges", "edge_starts", "starts"))
    if len(arrays["base"]) != 1 or not all(np.isfinite(arrays[n]).all() for n in ("edges", "value", "base")):
        raise refuse("numbers that are not finite")
    feature, right = arrays["feature"], arrays["right"]
    nodes = len(feature)
    leaf = feature == LEAF
    if not _splits(edge_starts, len(edges), features) or np.diff(edge_starts).max(initial=0) > LEAF:
        raise refuse("invalid feature bins")
    if not _splits(starts, nodes, max(len(starts) - 1, 0)) or not (np.diff(starts) > 0).all():
        raise refuse("empty trees")
    if len(arrays["bin"]) != nodes or len(right) != nodes or leaf.sum() != len(arrays["value"]):
        raise refuse("columns of different lengths")
    # Children come after their parent, within its tree: every traversal ends.
    end = np.repeat(starts[1:], np.diff(starts))
    child = np.arange(nodes) + np.maximum(right, 1)
    if (feature[~leaf] >= features).any() or (~leaf & ((right < 2) | (child >= end))).any():
        raise refuse("invalid child nodes")
    return Forest(edges, edge_starts, feature, arrays["bin"], right, arrays["value"], starts, float(arrays["base"][0]))


def _splits(starts: npt.NDArray[Any], size: int, parts: int) -> bool:
    """Whether ``starts`` divides ``size`` rows into ``parts`` parts."""
    return bool(len(starts) == parts + 1 and starts[0] == 0 and starts[-1] == size and (np.diff(starts) >= 0).all())
