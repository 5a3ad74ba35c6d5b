"""The kind "network" of the learned models: Tianshu's small networks with a principal component, in numpy.

A model holds one network for each *mode* (an operator's name, and the values of the attributes that choose an
implementation). Its inputs are the other attributes, as they are or as logarithms, and the principal component: their
product by ``exponents``, which all modes share. Training lives in ``benchmarks/principal``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from whatif.errors import WhatifError
from whatif.graph.described import FAMILIES
from whatif.graph.types import Float64, Int64
from whatif.hardware.gpu import Gpu
from whatif.opdb.rows import Operators

if TYPE_CHECKING:
    from whatif.opdb.learned import LogTime, ModelFacts


# The arrays of a file: the type and the number of dimensions of each. k modes, d attributes that are inputs, q that
# are modes, e inputs of a network (d, and one more where there is a principal component).
ARRAYS = {
    "logs": ("i8", 1),  # (1,): whether inputs and times are logarithms
    "inputs": ("i8", 1),  # (d,): places among the family's attributes
    "exponents": ("i8", 1),  # (d,): 1, 0 or -1; all 0: no principal component
    "mode_attributes": ("i8", 1),  # (q,): places among the family's attributes
    "modes": ("i8", 2),  # (k, 1 + q): the name's place in the model's names, and the attributes' values
    "layers": ("i8", 1),  # (k,): hidden layers
    "neurons": ("i8", 1),  # (k,): of each of them
    "weights": ("f4", 1),  # of all networks, layer by layer: matrix (in, out), then biases (out,)
    "starts": ("i8", 1),  # (k + 1,): where each network's weights begin
    "centre": ("f8", 2),  # (k, e): inputs are (x - centre) / scale
    "scale": ("f8", 2),
    "low": ("f8", 2),  # (k, e): what was measured, of every input
    "high": ("f8", 2),
    "unit_s": ("f8", 1),  # (k,): times are in this unit
    "shortest_s": ("f8", 1),  # (k,): that was measured; no answer is below half of it
}
# Larger networks are none of the paper's (20 layers of 40 neurons).
_MOST_LAYERS, _MOST_NEURONS = 64, 1024
# A network of raw numbers may leave the range of times; below half of the shortest it knows nothing.
_LEAST_OF_SHORTEST = 0.5


@dataclass(frozen=True)
class Network:
    """One mode's network: matrices and biases, and how its inputs and its output are scaled."""

    layers: tuple[tuple[Float64, Float64], ...]
    centre: Float64
    scale: Float64
    low: Float64
    high: Float64
    unit_s: float
    shortest_s: float

    def log_time(self, columns: Float64, *, logs: bool, component: bool) -> Float64:
        """Return the log of seconds of n operators from their inputs, (n, e), the principal component last.

        Inputs are clamped to what was measured. Beyond it time goes on in proportion to the principal component, where
        there is one.
        """
        inside = np.clip(columns, self.low, self.high)
        value = (inside - self.centre) / self.scale
        for weight, bias in self.layers[:-1]:
            value = np.maximum(value @ weight + bias, 0.0)
        weight, bias = self.layers[-1]
        found = (value @ weight + bias)[:, 0]
        if not logs:
            least = _LEAST_OF_SHORTEST * self.shortest_s / self.unit_s
            found = np.log(np.maximum(found, least))
        if component and logs:
            found = found + (columns[:, -1] - inside[:, -1]) * np.log(2.0)
        elif component:
            found = found + np.log(columns[:, -1] / inside[:, -1])
        return np.asarray(found + np.log(self.unit_s))


def inputs_of(values: Float64, exponents: npt.NDArray[np.integer[Any]], *, logs: bool) -> Float64:
    """Return a network's inputs, (n, d) or with a principal component (n, d + 1), from attributes (n, d)."""
    log2 = np.log2(np.maximum(values, 1.0))
    inputs = log2 if logs else values
    if not exponents.any():
        return inputs
    component = log2 @ exponents.astype(np.float64)
    return np.column_stack([inputs, component if logs else np.exp2(component)])


def log_time_of(facts: ModelFacts, arrays: Mapping[str, npt.NDArray[Any]], where: str) -> LogTime:
    """Return what answers with a model's arrays; an operator of a mode that it has no network of gets NaN.

    Raises WhatifError, one sentence, where the arrays are not those of a network of this family.
    """
    attributes = FAMILIES[facts.family].attributes
    networks = _networks(arrays, len(attributes), len(facts.names), where)
    logs, exponents, modes = bool(arrays["logs"][0]), arrays["exponents"], arrays["modes"]
    inputs = [attributes[i] for i in arrays["inputs"].tolist()]
    mode_attributes = [attributes[i] for i in arrays["mode_attributes"].tolist()]

    def log_time(ops: Operators, gpu: Gpu | None) -> Float64:
        found = np.full(len(ops), np.nan)
        mode = _mode_of(ops, facts.names, mode_attributes, modes)
        values = np.stack([ops.integers[name] for name in inputs], axis=1).astype(np.float64)
        columns = inputs_of(values, exponents, logs=logs)
        for place in np.unique(mode[mode >= 0]).tolist():
            rows = mode == place
            found[rows] = networks[place].log_time(columns[rows], logs=logs, component=bool(exponents.any()))
        return found

    return log_time


def _mode_of(ops: Operators, names: tuple[str, ...], attributes: list[str], modes: Int64) -> Int64:
    """Return the place of every operator's mode, -1 where the model has none like it, shape (n,)."""
    told = ops.texts["name"]
    place = {name: i for i, name in enumerate(names)}
    name = np.array([place.get(text, -1) for text in told.table] or [-1])[told.codes]
    own = np.stack([name, *(ops.integers[a] for a in attributes)], axis=1)
    found = np.full(len(ops), -1, dtype=np.int64)
    for number, mode in enumerate(modes):
        found[(own == mode).all(axis=1)] = number
    return found


def _networks(arrays: Mapping[str, npt.NDArray[Any]], attributes: int, names: int, where: str) -> list[Network]:
    def refuse(wrong: str) -> WhatifError:
        return WhatifError(f"{where}: expected the arrays of a model of networks, got {wrong}; fetch or fit it again.")

    for name, (kind, dimensions) in ARRAYS.items():
        if name not in arrays or arrays[name].ndim != dimensions or arrays[name].dtype.str[1:] != kind:
            raise refuse(f"no such array {name!r}")
        if kind[0] == "f" and not np.isfinite(arrays[name]).all():
            raise refuse("numbers that are none")
    count, inputs = len(arrays["modes"]), len(arrays["inputs"])
    width = inputs + bool(arrays["exponents"].any())
    places = np.concatenate([arrays["inputs"], arrays["mode_attributes"]])
    if not count or not inputs or ((places < 0) | (places >= attributes)).any() or len(arrays["logs"]) != 1:
        raise refuse("attributes of another family")
    if len(arrays["exponents"]) != inputs or (np.abs(arrays["exponents"]) > 1).any():
        raise refuse("another principal component")
    if arrays["modes"].shape[1] != 1 + len(arrays["mode_attributes"]) or not _within(arrays["modes"][:, 0], 0, names):
        raise refuse("modes of another model")
    if any(len(arrays[n]) != count for n in ("layers", "neurons", "unit_s", "shortest_s")):
        raise refuse("columns of different lengths")
    if any(arrays[n].shape != (count, width) for n in ("centre", "scale", "low", "high")):
        raise refuse("inputs of another model")
    if not _within(arrays["layers"], 1, _MOST_LAYERS + 1) or not _within(arrays["neurons"], 1, _MOST_NEURONS + 1):
        raise refuse("networks of impossible sizes")
    if any((arrays[n] <= 0).any() for n in ("scale", "unit_s", "shortest_s")) or (arrays["low"] > arrays["high"]).any():
        raise refuse("scales that are none")
    sizes = [_shapes(width, *pair) for pair in zip(arrays["layers"].tolist(), arrays["neurons"].tolist(), strict=True)]
    starts = np.cumsum([0, *(sum(rows * columns + columns for rows, columns in size) for size in sizes)])
    if not np.array_equal(arrays["starts"], starts) or starts[-1] != len(arrays["weights"]):
        raise refuse("weights of networks of other sizes")
    return [
        Network(
            _layers(arrays["weights"][starts[k] : starts[k + 1]].astype(np.float64), sizes[k]),
            arrays["centre"][k], arrays["scale"][k], arrays["low"][k], arrays["high"][k],
            float(arrays["unit_s"][k]), float(arrays["shortest_s"][k]),
        )
        for k in range(count)
    ]  # fmt: skip


def _within(values: npt.NDArray[Any], low: int, high: int) -> bool:
    return bool(((values >= low) & (values < high)).all())


def _shapes(inputs: int, layers: int, neurons: int) -> list[tuple[int, int]]:
    """The matrices of a network: (in, out) of every layer, the last one the output."""
    sizes = [inputs, *[neurons] * layers, 1]
    return list(pairwise(sizes))


def _layers(weights: Float64, shapes: list[tuple[int, int]]) -> tuple[tuple[Float64, Float64], ...]:
    found, at = [], 0
    for rows, columns in shapes:
        weight = weights[at : at + rows * columns].reshape(rows, columns)
        at += rows * columns
        found.append((weight, weights[at : at + columns]))
        at += columns
    return tuple(found)
