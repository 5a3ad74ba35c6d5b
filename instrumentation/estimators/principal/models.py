"""Fits Tianshu's networks to the measurements of a device: a principal component and networks per operator name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from whatif.graph.types import Bool, Int64
from whatif.opdb.keys import held_out
from whatif.opdb.learned import PRINCIPAL
from whatif.opdb.networks import NetworkModel
from whatif.runtime.errors import WhatifError

from ..boosting import Settings
from ..fitting import (
    FEWEST_ROWS,
    TRIED_SEED,
    TRIED_SHARE,
    UNKNOWN_GROWTH,
    Fitted,
    Say,
    against_interpolation,
    facts_of,
    halves_of,
    name_of,
)
from ..samples import Sample
from .fitting import Found, one_thread, parameters_of, search
from .parameters import Parameter
from .search import Data, Effort, Network, fine_tune, values_of


@dataclass(frozen=True)
class _Operation:
    """One operator name: the result of the search, and each mode's network by the values that select it."""

    name: str
    found: Found
    networks: dict[tuple[int, ...], Network]
    shortest_s: dict[tuple[int, ...], float]


def fit_networks(
    samples: Sequence[Sample], *, effort: Effort | None = None, say: Say | None = None
) -> Iterator[Fitted]:
    """Fit networks to each sample of a device that has an operator with enough measurements."""
    for sample in samples:
        if sample.sound.sum() >= FEWEST_ROWS:
            fitted = _fit_device(sample, effort or Effort(), say)
            if fitted is not None:
                yield fitted


def _fit_device(sample: Sample, effort: Effort, say: Say | None) -> Fitted | None:
    """Search and train without the held-out operators, which give the error; then train on all."""
    tried = held_out(sample.ops.keys, TRIED_SEED, TRIED_SHARE)
    first, last = [], []
    for name in sorted(set(sample.names.tolist())):
        if say:
            say(f"{sample.device} {name} {sample.kind.dtype}")
        of_name = sample.sound & (sample.names == name)
        training = sample.take(of_name & ~tried)
        try:
            # As in the paper, on raw numbers: there a component adds what no layer finds by itself.
            found = search(parameters_of(training.ops), training.t_s, effort, logs=False)
        except WhatifError:  # too few measurements: left to trees and interpolation
            continue
        tuned = _trained(name, training, found, found.architectures, effort)
        # The final networks use the best architecture of each mode.
        best = {
            number: [(net.hidden, net.neurons)]
            for number, net in ((n, tuned.networks.get(v)) for n, v in _modes(found).items())
            if net is not None
        }
        first.append(tuned)
        last.append(_trained(name, sample.take(of_name), found, best, effort))
    if not last:
        return None
    names = tuple(operation.name for operation in last)
    model, final = (_model(sample.kind.family, names, operations) for operations in (first, last))
    validated = tried & model.covers(sample.ops)
    trial = sample.take(validated)
    miss = np.abs(np.log(trial.t_s) - model.log_time(trial.ops))
    wins, error = against_interpolation(sample, validated, miss)
    covered = sample.take(sample.sound & final.covers(sample.ops))
    facts = msgspec.structs.replace(
        facts_of(sample.kind, [covered], names, Settings(), across=False), kind=PRINCIPAL, features=(),
        half=halves_of(miss, trial.names, names), growth=UNKNOWN_GROWTH, before_interpolation=wins,
        validation_pct=error, device=sample.device, sheet=sample.sheet, settings={},
        components={operation.name: operation.found.formula() for operation in last},
    )  # fmt: skip
    return Fitted(f"{name_of(sample.device, sample.kind)}-principal", facts, final.arrays())


def _trained(
    name: str, sample: Sample, found: Found, architectures: dict[int, list[tuple[int, int]]], effort: Effort
) -> _Operation:
    """Train a network for each mode of a sample of one name; modes are those found by the search."""
    parameters = parameters_of(sample.ops)
    values, selectors = values_of(parameters, found.varying), _selectors(found, parameters)
    networks, shortest_s = {}, {}
    with one_thread():
        for number, fixed in _modes(found).items():
            of_mode: Bool = (selectors == np.array(fixed)).all(axis=1)
            if number in architectures and of_mode.any():
                data = Data(values[of_mode], sample.t_s[of_mode], logs=True)
                networks[fixed] = fine_tune(data, found.exponents, architectures[number], effort)
                shortest_s[fixed] = float(sample.t_s[of_mode].min())
    return _Operation(name, found, networks, shortest_s)


def _selectors(found: Found, parameters: Sequence[Parameter]) -> Int64:
    """Return the attribute values that select a network, 0 for attributes that are inputs, shape (n, attributes)."""
    inputs = {position - 1 for position in found.varying}  # the first parameter is the name
    columns = [p.values * (position not in inputs) for position, p in enumerate(parameters[1:])]
    return np.stack(columns, axis=1).astype(np.int64)


def _modes(found: Found) -> dict[int, tuple[int, ...]]:
    """Return the values that select each mode's network, by the mode's number."""
    selectors = _selectors(found, found.parameters)
    return {int(number): tuple(selectors[found.mode == number][0].tolist()) for number in np.unique(found.mode)}


def _model(family: str, names: tuple[str, ...], operations: Sequence[_Operation]) -> NetworkModel:
    """Return the networks of all names as one model."""
    attributes = len(operations[0].found.parameters) - 1
    exponents, used = np.zeros((len(names), attributes), dtype=np.int8), np.zeros((len(names), attributes), dtype=bool)
    keys, networks = [], []
    for index, operation in enumerate(operations):
        inputs = [i - 1 for i in operation.found.varying]
        used[index, inputs] = True
        exponents[index, inputs] = operation.found.exponents
        for fixed, network in operation.networks.items():
            keys.append((index, *fixed))
            networks.append(network.in_numpy(operation.shortest_s[fixed]))
    return NetworkModel(family, names, exponents, used, np.array(keys, dtype=np.int64), tuple(networks))
