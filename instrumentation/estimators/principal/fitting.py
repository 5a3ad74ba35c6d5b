"""Networks for the operators of a sample: one per mode, with a shared principal component."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from whatif.graph.described import FAMILIES
from whatif.graph.types import Bool, Float64, Int8, Int64
from whatif.opdb.networks import inputs_of
from whatif.opdb.rows import Operators
from whatif.runtime.errors import WhatifError

from .parameters import Parameter, combinations, formula, modes_of
from .search import (
    Data,
    Effort,
    Network,
    fine_tune,
    functions_of,
    search_architecture,
    search_component,
    values_of,
)

# A mode with fewer measurements gets no network (our estimate: a 90/10 split then validates on 15 rows).
FEWEST_ROWS = 150


@dataclass(frozen=True)
class Found:
    """Result of a search for the operators of a sample: parameters, modes, and the shared principal component.

    ``varying`` are the positions of the parameters that are inputs, ``mode``, shape (n,), is that of each call, and
    ``architectures`` lists (hidden layers, neurons) by mode.
    """

    parameters: tuple[Parameter, ...]
    varying: tuple[int, ...]
    mode: Int64
    exponents: Int8
    misses: Float64
    architectures: dict[int, list[tuple[int, int]]]

    def formula(self) -> str:
        """Return the principal component as a formula."""
        return formula([self.parameters[i] for i in self.varying], self.exponents)


def parameters_of(ops: Operators) -> tuple[Parameter, ...]:
    """Return the parameters of n operators: their name, and the integers of their family."""
    family = FAMILIES[ops.family]
    names = np.array(ops.texts["name"].decoded())
    numbers = [Parameter(a, ops.integers[a], dimension=a in family.sizes) for a in family.attributes]
    return (Parameter("name", names), *numbers)


def search(parameters: tuple[Parameter, ...], t_s: Float64, effort: Effort, *, logs: bool) -> Found:
    """Search for the principal component on the mode with the most measurements, and for architectures of every mode.

    Raises WhatifError if no mode has enough measurements, or if no parameter varies.
    """
    positions, mode = modes_of(parameters)
    count = np.bincount(mode)
    if count.max() < FEWEST_ROWS <= len(t_s):
        positions, mode = _pooled(parameters)
        count = np.bincount(mode)
    varying = tuple(i for i in range(len(parameters)) if i not in positions)
    if not varying or count.max() < FEWEST_ROWS:
        raise WhatifError(
            f"expected at least {FEWEST_ROWS} measurements of one mode with different sizes, got {count.max()}."
        )
    values = values_of(parameters, varying)
    most = mode == int(np.argmax(count))
    with one_thread():
        functions = functions_of(parameters, varying)
        exponents, misses = search_component(Data(values[most], t_s[most], logs), functions, effort)
        found = Found(parameters, varying, mode, exponents, misses, {})
        for number in np.flatnonzero(count >= FEWEST_ROWS).tolist():
            rows = mode == number
            found.architectures[number] = search_architecture(Data(values[rows], t_s[rows], logs), exponents, effort)
    return found


def _pooled(parameters: tuple[Parameter, ...]) -> tuple[tuple[int, ...], Int64]:
    """Return modes of texts alone, in the form of ``modes_of``: if each combination of numbers has too few
    measurements, the numbers become inputs of one network.
    """
    positions = tuple(i for i, p in enumerate(parameters) if p.text or len(np.unique(p.values)) == 1)
    return positions, combinations([parameters[i] for i in positions], len(parameters[0].values))


def train_modes(
    found: Found, t_s: Float64, rows: Bool, effort: Effort, *, logs: bool, component: bool
) -> dict[int, Network]:
    """Train the best architectures of every mode on ``rows``, a mask (n,), with or without the principal component."""
    values = values_of(found.parameters, found.varying)
    exponents = found.exponents if component else np.zeros_like(found.exponents)
    with one_thread():
        return {
            mode: fine_tune(Data(values[of_mode], t_s[of_mode], logs), exponents, architectures, effort)
            for mode, architectures in found.architectures.items()
            if (of_mode := (found.mode == mode) & rows).sum() >= FEWEST_ROWS // 2
        }


def predict_s(found: Found, networks: dict[int, Network], t_s: Float64, *, logs: bool, component: bool) -> Float64:
    """Return each call's time by its mode's network, seconds, shape (n,); NaN if the mode has none.

    ``t_s`` are the times used in training, NaN elsewhere: no answer is far below the shortest of them.
    """
    predicted = np.full(len(found.mode), np.nan)
    values = values_of(found.parameters, found.varying)
    exponents = found.exponents if component else np.zeros_like(found.exponents)
    columns = inputs_of(values, exponents, logs=logs)
    for mode, network in networks.items():
        of_mode = found.mode == mode
        inference = network.in_numpy(float(np.nanmin(t_s[of_mode])))
        predicted[of_mode] = np.exp(inference.log_time(columns[of_mode], logs=logs, component=bool(exponents.any())))
    return predicted


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, as small matrices gain nothing from more, and flush slow denormals to zero."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)
