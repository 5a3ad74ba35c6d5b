"""A trained network in numpy: one mode's, with the principal component as its last input.

Its inputs are attributes, as they are or as logarithms, and the principal component: their product by ``exponents``,
which all modes share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from whatif.graph.types import Float64

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
