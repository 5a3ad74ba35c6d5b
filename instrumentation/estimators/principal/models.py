"""Fit Tianshu's networks to the measurements of a device: a principal component and networks for each operator name."""

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
    Said,
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
    """One operator name: what the search found, and the network of each mode by the values that choose it."""

    name: str
    found: Found
    networks: dict[tuple[int, ...], Network]
    shortest_s: dict[tuple[int, ...], float]


def fit_networks(
    samples: Sequence[Sample], *, effort: Effort | None = None, say: Said | None = None
) -> Iterator[Fitted]:
    """Fit networks to each sample of a device that has an operator with enough measurements."""
    for sample in samples:
        if sample.sound.sum() >= FEWEST_ROWS:
            fitted = _fit_device(sample, effort or Effort(), say)
            if fitted is not None:
                yield fitted


def _fit_device(sample: Sample, effort: Effort, say: Said | None) -> Fitted | None:
    """Search and train without the operators that are held out, which tell the error; then train on all of them."""
    tried = held_out(sample.ops.keys, TRIED_SEED, TRIED_SHARE)
    first, last = [], []
    for name in sorted(set(sample.names.tolist())):
        if say:
            say(f"{sample.device} {name} {sample.kind.dtype}")
        own = sample.sound & (sample.names == name)
        kept = sample.take(own & ~tried)
        try:
            # As in the paper: of raw numbers, where a component says what no layer finds by itself.
            found = search(parameters_of(kept.ops), kept.t_s, effort, logs=False)
        except WhatifError:  # too few measurements of this one: it stays with trees and interpolation
            continue
        tuned = _trained(name, kept, found, found.architectures, effort)
        # The final networks have the architecture that was best in each mode.
        best = {
            number: [(net.hidden, net.neurons)]
            for number, net in ((n, tuned.networks.get(v)) for n, v in _modes(found).items())
            if net is not None
        }
        first.append(tuned)
        last.append(_trained(name, sample.take(own), found, best, effort))
    if not last:
        return None
    names = tuple(one.name for one in last)
    model, final = (_model(sample.kind.family, names, operations) for operations in (first, last))
    judged = tried & model.covers(sample.ops)
    trial = sample.take(judged)
    miss = np.abs(np.log(trial.t_s) - model.log_time(trial.ops))
    wins, error = against_interpolation(sample, judged, miss)
    answered = sample.take(sample.sound & final.covers(sample.ops))
    facts = msgspec.structs.replace(
        facts_of(sample.kind, [answered], names, Settings(), across=False), kind=PRINCIPAL, features=(),
        half=halves_of(miss, trial.names, names), growth=UNKNOWN_GROWTH, before_interpolation=wins,
        validation_pct=error, device=sample.device, sheet=sample.sheet, settings={},
        components={one.name: one.found.told() for one in last},
    )  # fmt: skip
    return Fitted(f"{name_of(sample.device, sample.kind)}-principal", facts, final.arrays())


def _trained(
    name: str, sample: Sample, found: Found, architectures: dict[int, list[tuple[int, int]]], effort: Effort
) -> _Operation:
    """Train a network for each mode of a sample of one name; modes are those of the sample that was searched."""
    parameters = parameters_of(sample.ops)
    values, chosen_by = values_of(parameters, found.varying), _chosen_by(found, parameters)
    networks, shortest_s = {}, {}
    with one_thread():
        for number, fixed in _modes(found).items():
            own: Bool = (chosen_by == np.array(fixed)).all(axis=1)
            if number in architectures and own.any():
                data = Data(values[own], sample.t_s[own], logs=True)
                networks[fixed] = fine_tune(data, found.exponents, architectures[number], effort)
                shortest_s[fixed] = float(sample.t_s[own].min())
    return _Operation(name, found, networks, shortest_s)


def _chosen_by(found: Found, parameters: Sequence[Parameter]) -> Int64:
    """The values of the attributes that choose a network, 0 where the networks see one, shape (n, attributes)."""
    seen = {place - 1 for place in found.varying}  # the first parameter is the name
    columns = [p.values * (place not in seen) for place, p in enumerate(parameters[1:])]
    return np.stack(columns, axis=1).astype(np.int64)


def _modes(found: Found) -> dict[int, tuple[int, ...]]:
    """The values that choose each mode's network, by the mode's number."""
    chosen_by = _chosen_by(found, found.parameters)
    return {int(number): tuple(chosen_by[found.mode == number][0].tolist()) for number in np.unique(found.mode)}


def _model(family: str, names: tuple[str, ...], operations: Sequence[_Operation]) -> NetworkModel:
    """The networks of all names as one model."""
    attributes = len(operations[0].found.parameters) - 1
    exponents, seen = np.zeros((len(names), attributes), dtype=np.int8), np.zeros((len(names), attributes), dtype=bool)
    of, networks = [], []
    for place, one in enumerate(operations):
        inputs = [i - 1 for i in one.found.varying]
        seen[place, inputs] = True
        exponents[place, inputs] = one.found.exponents
        for fixed, network in one.networks.items():
            of.append((place, *fixed))
            networks.append(network.in_numpy(one.shortest_s[fixed]))
    return NetworkModel(family, names, exponents, seen, np.array(of, dtype=np.int64), tuple(networks))
