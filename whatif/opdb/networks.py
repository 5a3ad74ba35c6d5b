"""Tianshu's networks in numpy, with the principal component as their last input; training is in ``instrumentation``.

A network belongs to one operator name and one mode: a combination of values of the attributes that are not its inputs.
Its inputs are the other attributes, as they are or as logarithms, and the principal component: their product with
``exponents`` as powers, which all modes of a name share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from whatif.graph.described import FAMILIES
from whatif.graph.types import Bool, Float64, Int8, Int64
from whatif.opdb.rows import Operators
from whatif.runtime.errors import expecting

# The output of a network on raw numbers may be no valid time; it is useless below half of the shortest one.
_LEAST_OF_SHORTEST = 0.5


class Network(Struct, frozen=True):
    """One mode's network: matrices and biases, and the scaling of its inputs and output."""

    layers: tuple[tuple[Float64, Float64], ...]
    centre: Float64
    scale: Float64
    low: Float64
    high: Float64
    unit_s: float
    shortest_s: float

    def log_time(self, columns: Float64, *, logs: bool, component: bool) -> Float64:
        """Return the log of seconds of n operators from their inputs, (n, e), the principal component last.

        Inputs are clamped to the measured range. Beyond it, time grows in proportion to the principal component, if
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


class NetworkModel(Struct, frozen=True):
    """The networks of a family: the inputs of each name's networks, and the mode of each network.

    ``exponents`` and the mask ``used`` of inputs have shape (names, attributes). ``of``, (networks, 1 + attributes),
    holds the place of a network's name and the values of attributes that are not its inputs, and 0 for its inputs.
    """

    family: str
    names: tuple[str, ...]
    exponents: Int8
    used: Bool
    of: Int64
    networks: tuple[Network, ...]

    def covers(self, ops: Operators) -> Bool:
        """Return a mask of the operators of the family that a network was trained for, shape (n,)."""
        known = np.zeros(len(ops), dtype=np.bool_)
        for covered, _, _ in self._parts(ops):
            known |= covered
        return known

    def log_time(self, ops: Operators) -> Float64:
        """Return the log of seconds of n operators, shape (n,); NaN if no network was trained for one."""
        found = np.full(len(ops), np.nan)
        values = np.stack([ops.integers[a].astype(np.float64) for a in FAMILIES[ops.family].attributes], axis=1)
        for rows, name, network in self._parts(ops):
            exponents = self.exponents[name][self.used[name]]
            columns = inputs_of(values[rows][:, self.used[name]], exponents, logs=True)
            found[rows] = network.log_time(columns, logs=True, component=bool(exponents.any()))
        return found

    def _parts(self, ops: Operators) -> Iterator[tuple[Bool, int, Network]]:
        """Yield for each network a mask of its operators, the index of its name, and the network itself."""
        for (name, *fixed), network in zip(self.of.tolist(), self.networks, strict=True):
            rows = ops.texts["name"].among(self.names[name])
            for attribute, value, is_used in zip(FAMILIES[self.family].attributes, fixed, self.used[name], strict=True):
                if not is_used:
                    rows &= ops.integers[attribute] == value
            if rows.any():
                yield rows, name, network

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a file; ``network_model_of`` reads them."""
        arrays: dict[str, npt.NDArray[Any]] = {"exponents": self.exponents, "seen": self.used, "of": self.of}
        for number, net in enumerate(self.networks):
            arrays[f"{number}.scaling"] = np.stack([net.centre, net.scale, net.low, net.high])
            arrays[f"{number}.seconds"] = np.array([net.unit_s, net.shortest_s])
            for layer, (weight, bias) in enumerate(net.layers):
                arrays[f"{number}.weight.{layer}"] = weight.astype(np.float32)
                arrays[f"{number}.bias.{layer}"] = bias.astype(np.float32)
        return arrays


def network_model_of(
    arrays: Mapping[str, npt.NDArray[Any]], family: str, names: Sequence[str], where: str
) -> NetworkModel:
    """Return the networks that a file's arrays hold. Raises WhatifError if they do not fit."""
    attributes = len(FAMILIES[family].attributes)
    with expecting(
        f"{where}: expected the arrays of a model of networks", KeyError, ValueError, IndexError,
        hint="; fetch or fit it again",
    ):  # fmt: skip
        exponents, used, of = arrays["exponents"], arrays["seen"].astype(np.bool_), arrays["of"]
        shape = (len(names), attributes)
        if exponents.shape != shape or used.shape != shape or of.ndim != 2 or of.shape[1] != 1 + attributes:
            raise ValueError("arrays of a wrong shape")
        networks = []
        for number, (name, *_) in enumerate(of.tolist()):
            if not 0 <= name < len(names):
                raise ValueError(f"unknown name number {name}")
            inputs = int(used[name].sum()) + bool(exponents[name][used[name]].any())
            networks.append(_network(arrays, number, inputs))
    return NetworkModel(family, tuple(names), exponents, used, of, tuple(networks))


def _network(arrays: Mapping[str, npt.NDArray[Any]], number: int, inputs: int) -> Network:
    """Read one network with ``inputs`` inputs. Raises KeyError or ValueError if its arrays do not fit one another."""
    layers: list[tuple[Float64, Float64]] = []
    width = inputs
    while f"{number}.weight.{len(layers)}" in arrays:
        weight, bias = (arrays[f"{number}.{part}.{len(layers)}"].astype(np.float64) for part in ("weight", "bias"))
        if weight.ndim != 2 or weight.shape[0] != width or bias.shape != weight.shape[1:]:
            raise ValueError(f"layer {len(layers)} of a wrong width")
        layers.append((weight, bias))
        width = weight.shape[1]
    scaling, seconds = arrays[f"{number}.scaling"], arrays[f"{number}.seconds"]
    if not layers or width != 1 or scaling.shape != (4, inputs) or seconds.shape != (2,):
        raise ValueError("a network without an output")
    numbers = [*(part for layer in layers for part in layer), scaling, seconds]
    if not all(np.isfinite(part).all() for part in numbers) or (scaling[1] <= 0).any() or (seconds <= 0).any():
        raise ValueError("invalid numbers")
    centre, scale, low, high = scaling
    return Network(tuple(layers), centre, scale, low, high, float(seconds[0]), float(seconds[1]))
