"""A sample becomes a model of kind "network": one network a mode, and a principal component that all share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from whatif.instrumentation.estimators.boosting import Settings
from whatif.instrumentation.estimators.fitting import Fitted, facts_of, halves_of
from whatif.instrumentation.estimators.samples import Sample

from whatif.errors import WhatifError
from whatif.graph.described import FAMILIES
from whatif.graph.types import Bool, Float64, Int8, Int64
from whatif.opdb.devices import folder_name
from whatif.opdb.keys import held_out
from whatif.opdb.network_model import inputs_of, log_time_of
from whatif.opdb.rows import Operators

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
# The part of the operators that the range is learned on; as the trees' is.
_TRIED_SHARE, _TRIED_SEED = 0.15, 11
# Outside of what was measured, a doubling; our estimate: as an interpolation assumes where it cannot tell.
_GROWTH = float(np.log(1.5))


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


def arrays_of(
    found: Found, networks: dict[int, Network], names: Sequence[str], t_s: Float64, *, logs: bool, component: bool
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that ``whatif.opdb.network_model`` answers with."""
    numbers = [i for i in range(1, len(found.parameters)) if i not in found.varying]
    modes, weights, starts = [], [], [0]
    for mode in networks:
        row = int(np.argmax(found.mode == mode))
        values = [int(found.parameters[i].values[row]) for i in numbers]
        modes.append([names.index(str(found.parameters[0].values[row])), *values])
        weights.append(np.concatenate([np.ravel(a) for a in networks[mode].arrays]))
        starts.append(starts[-1] + len(weights[-1]))
    all_ = list(networks.values())
    shortest = [float(t_s[found.mode == mode].min()) for mode in networks]
    return {
        "logs": np.array([int(logs)]), "inputs": np.array(found.varying, dtype=np.int64) - 1,
        "exponents": found.exponents.astype(np.int64) * int(component),
        "mode_attributes": np.array(numbers, dtype=np.int64) - 1, "modes": np.array(modes, dtype=np.int64),
        "layers": np.array([n.hidden for n in all_]), "neurons": np.array([n.neurons for n in all_]),
        "weights": np.concatenate(weights).astype(np.float32), "starts": np.array(starts, dtype=np.int64),
        "centre": np.stack([n.centre for n in all_]), "scale": np.stack([n.scale for n in all_]),
        "low": np.stack([n.low for n in all_]), "high": np.stack([n.high for n in all_]),
        "unit_s": np.array([n.unit_s for n in all_]), "shortest_s": np.array(shortest),
    }  # fmt: skip


def fit_network(sample: Sample, effort: Effort | None = None, *, logs: bool = True, component: bool = True) -> Fitted:
    """Fit Tianshu's estimator to a sample of one device.

    ``logs`` learns logarithms, our own improvement; without it the paper's raw numbers. Raises WhatifError where the
    sample is too small.
    """
    effort = effort or Effort()
    sound = sample.take(sample.sound)
    found = search(parameters_of(sound.ops), sound.t_s, effort, logs=logs)
    names = tuple(sorted(set(sound.names.tolist())))
    facts = msgspec.structs.replace(
        facts_of(sample.kind, [sound], names, Settings(), across=False),
        kind="network", settings={"logs": float(logs), "steps": float(effort.final_steps)}, device=sample.device,
        growth=_GROWTH,
        features=tuple(found.parameters[i].name for i in found.varying),
    )  # fmt: skip
    tried = held_out(sound.ops.keys, _TRIED_SEED, _TRIED_SHARE)
    first = train_modes(found, sound.t_s, ~tried, replace(effort, seed=effort.seed + 1), logs=logs, component=component)
    learned = arrays_of(found, first, names, sound.t_s, logs=logs, component=component)
    trial = sound.take(tried)
    miss = np.abs(log_time_of(facts, learned, "a network that was just fitted")(trial.ops, None) - np.log(trial.t_s))
    known = np.isfinite(miss)
    if not known.any():
        raise WhatifError(f"{sample.device}: expected enough measurements of a {sample.kind.family} to try, got none.")
    every = np.ones(len(sound), dtype=np.bool_)
    whole = train_modes(found, sound.t_s, every, effort, logs=logs, component=component)
    facts = msgspec.structs.replace(
        facts, half=halves_of(miss[known], trial.names[known], names),
        validation_pct={n: 100 * float(np.mean(np.expm1(miss[known & (trial.names == n)]))) for n in names
                        if (known & (trial.names == n)).any()},
    )  # fmt: skip
    arrays = arrays_of(found, whole, names, sound.t_s, logs=logs, component=component)
    kind = sample.kind
    return Fitted(f"network-{folder_name(sample.device)}-{kind.family}-{kind.dtype}-{kind.phase}", facts, arrays)


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
