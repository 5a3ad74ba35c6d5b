"""Networks for the operators of a sample: one for each mode, and a principal component that all share."""

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

from .parameters import Parameter, combinations, modes_of, told
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

# A mode that was measured less often gets no network (our estimate: a 90/10 split then judges by 15 rows).
FEWEST_ROWS = 150


@dataclass(frozen=True)
class Found:
    """What a search found for the operators of a sample: parameters, modes, and the shared principal component.

    ``varying`` are the places of the parameters that are inputs, ``mode``, shape (n,), is each call's, and
    ``architectures`` lists (hidden layers, neurons) by mode.
    """

    parameters: tuple[Parameter, ...]
    varying: tuple[int, ...]
    mode: Int64
    exponents: Int8
    misses: Float64
    architectures: dict[int, list[tuple[int, int]]]

    def told(self) -> str:
        """The principal component as people write it."""
        return told([self.parameters[i] for i in self.varying], self.exponents)


def parameters_of(ops: Operators) -> tuple[Parameter, ...]:
    """Return the parameters of n operators: their name, and the integers of their family."""
    family = FAMILIES[ops.family]
    names = np.array(ops.texts["name"].decoded())
    numbers = [Parameter(a, ops.integers[a], dimension=a in family.sizes) for a in family.attributes]
    return (Parameter("name", names), *numbers)


def search(parameters: tuple[Parameter, ...], t_s: Float64, effort: Effort, *, logs: bool) -> Found:
    """Search the principal component on the mode that was measured most, and architectures of every mode.

    Raises WhatifError where no mode was measured often enough, or nothing varies in it.
    """
    places, mode = modes_of(parameters)
    count = np.bincount(mode)
    if count.max() < FEWEST_ROWS <= len(t_s):
        places, mode = _pooled(parameters)
        count = np.bincount(mode)
    varying = tuple(i for i in range(len(parameters)) if i not in places)
    if not varying or count.max() < FEWEST_ROWS:
        raise WhatifError(
            f"expected {FEWEST_ROWS} measurements or more of one mode that differ in a size, got {count.max()}."
        )
    values = values_of(parameters, varying)
    most = mode == int(np.argmax(count))
    with one_thread():
        functions = functions_of(parameters, varying)
        exponents, misses = search_component(Data(values[most], t_s[most], logs), functions, effort)
        found = Found(parameters, varying, mode, exponents, misses, {})
        for number in np.flatnonzero(count >= FEWEST_ROWS).tolist():
            own = mode == number
            found.architectures[number] = search_architecture(Data(values[own], t_s[own], logs), exponents, effort)
    return found


def _pooled(parameters: tuple[Parameter, ...]) -> tuple[tuple[int, ...], Int64]:
    """Modes of texts alone, as ``modes_of`` gives them: where too little was measured of each combination of numbers,
    these become inputs of one network.
    """
    places = tuple(i for i, p in enumerate(parameters) if p.text or len(np.unique(p.values)) == 1)
    return places, combinations([parameters[i] for i in places], len(parameters[0].values))


def train_modes(
    found: Found, t_s: Float64, rows: Bool, effort: Effort, *, logs: bool, component: bool
) -> dict[int, Network]:
    """Train the best architectures of every mode on ``rows``, a mask (n,), with or without the principal component."""
    values = values_of(found.parameters, found.varying)
    exponents = found.exponents if component else np.zeros_like(found.exponents)
    with one_thread():
        return {
            mode: fine_tune(Data(values[own], t_s[own], logs), exponents, architectures, effort)
            for mode, architectures in found.architectures.items()
            if (own := (found.mode == mode) & rows).sum() >= FEWEST_ROWS // 2
        }


def predict_s(found: Found, networks: dict[int, Network], t_s: Float64, *, logs: bool, component: bool) -> Float64:
    """Return each call's time by its mode's network, seconds, shape (n,); NaN where the mode has none.

    ``t_s`` are the times that were trained on, NaN elsewhere: no answer is far below the shortest of them.
    """
    predicted = np.full(len(found.mode), np.nan)
    values = values_of(found.parameters, found.varying)
    exponents = found.exponents if component else np.zeros_like(found.exponents)
    columns = inputs_of(values, exponents, logs=logs)
    for mode, network in networks.items():
        own = found.mode == mode
        inference = network.in_numpy(float(np.nanmin(t_s[own])))
        predicted[own] = np.exp(inference.log_time(columns[own], logs=logs, component=bool(exponents.any())))
    return predicted


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, as so small matrices gain nothing from more, and no time lost on numbers close to zero."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)
