"""The search for the complexity function that helps a default network most, then for the network, then its training.

Tianshu, sections 3.2.2 and 3.2.3. Deviations: every candidate is trained from three starts, since a 6 x 6 network may
start dead; the grid of architectures is thinned (``Effort.layers`` and ``neurons``); candidates are validated on a part
of the training data, so that no test row is used before the test; the loss is the mean relative error that is reported,
as the paper does not give its loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from whatif.graph.types import Float64, Int8
from whatif.opdb.networks import Network as Inference
from whatif.opdb.networks import inputs_of

from .batched import Float32, Networks, Task, misses, new_networks, train
from .parameters import Parameter, as_numbers, candidates

_DEFAULT_LAYERS = _DEFAULT_NEURONS = 6
_DEFAULT_RATE = 0.01
_STARTS = 3
# The number of functions that are trained again, and by which factor longer.
_FINALISTS, _LONGER = 4, 4
# The validation part of the training data.
_VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Effort:
    """Training steps of each part, the architectures to try, and the learning rates for the best."""

    candidate_steps: int = 1000
    architecture_steps: int = 300
    final_steps: int = 2500
    last_steps: int = 10_000  # the best one again, from its start; 0: skipped
    batch: int = 256
    layers: tuple[int, ...] = (3, 4, 6, 8, 12)  # the paper: 3 to 20
    neurons: tuple[int, ...] = (3, 6, 12, 20, 40)  # the paper: 3 to 40
    kept: int = 5
    rates: tuple[float, ...] = (0.003, 0.01)
    seed: int = 2026


@dataclass(frozen=True)
class Network:
    """A trained network of one mode: ``arrays`` of its layers (weight, bias, ...), scaling of inputs and output.

    ``centre`` and ``scale`` have the shape of the inputs; times are in units of ``unit_s``.
    """

    hidden: int
    neurons: int
    arrays: tuple[Float32, ...]
    centre: Float64
    scale: Float64
    low: Float64
    high: Float64
    unit_s: float
    validation: float  # mean relative error on the validation part

    def in_numpy(self, shortest_s: float) -> Inference:
        """Return the network in numpy; ``shortest_s`` is the shortest measured time."""
        layers = tuple(
            (w.astype(np.float64), b.astype(np.float64))
            for w, b in zip(self.arrays[::2], self.arrays[1::2], strict=True)
        )
        return Inference(layers, self.centre, self.scale, self.low, self.high, self.unit_s, shortest_s)


@dataclass(frozen=True)
class Data:
    """n calls of one mode: the varying inputs (n, d), their times, and whether logarithms are learned."""

    values: Float64
    t_s: Float64
    logs: bool

    def columns(self, exponents: npt.NDArray[np.integer]) -> Float64:
        """Return the inputs, with the principal component as the last one if there is one, shape (n, d or d + 1)."""
        return inputs_of(self.values, exponents, logs=self.logs)

    @property
    def unit_s(self) -> float:
        """The unit in which times are learned: the mean of them, or of their logarithms."""
        return float(np.exp(np.mean(np.log(self.t_s))) if self.logs else np.mean(self.t_s))

    def target(self) -> torch.Tensor:
        """Return the target, shape (n,)."""
        t = self.t_s / self.unit_s
        return _tensor(np.log(t) if self.logs else t)

    def parts(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return training rows and validation rows."""
        order = np.random.default_rng(seed).permutation(len(self.t_s))
        cut = max(int(len(order) * _VALIDATION_SHARE), 1)
        return torch.from_numpy(np.sort(order[cut:])), torch.from_numpy(np.sort(order[:cut]))


def search_component(data: Data, functions: Int8, effort: Effort) -> tuple[Int8, Float64]:
    """Return the exponents of the function that helps a default network most, and every function's error, (functions,).

    The best few are trained again and longer: short training separates good from bad, not best from good.
    """
    first = _candidate_misses(data, functions, effort, effort.candidate_steps)
    again = np.argsort(first, kind="stable")[:_FINALISTS]
    longer = _candidate_misses(data, functions[again], effort, _LONGER * effort.candidate_steps)
    first[again] = np.minimum(first[again], longer)
    return functions[again[int(np.argmin(longer))]], first


def _candidate_misses(data: Data, functions: Int8, effort: Effort, steps: int) -> Float64:
    """Return the error of a default network with each function, from the best of its starts, shape (functions,)."""
    shared = _tensor(_standard(data.columns(np.zeros(data.values.shape[1], dtype=np.int8)))[0])
    components = []
    for function in functions:
        columns = data.columns(function)
        # Without a function this input is constant.
        components.append(_standard(columns[:, -1:])[0][:, 0] if function.any() else np.zeros(len(columns)))
    repeated = [index for index in range(len(functions)) for _ in range(_STARTS)]
    task = Task(shared, _tensor(np.stack(components)[repeated]), data.target(), not data.logs)
    fit_rows, validation_rows = data.parts(effort.seed)
    starts = [effort.seed + index % _STARTS for index in range(len(repeated))]
    networks = new_networks(shared.shape[1] + 1, _DEFAULT_LAYERS, [_DEFAULT_NEURONS] * len(repeated), starts)
    train(
        networks, task, fit_rows, steps=steps, batch=effort.batch, rates=[_DEFAULT_RATE] * len(repeated),
        seed=effort.seed,
    )  # fmt: skip
    return np.asarray(misses(networks, task, validation_rows).reshape(len(functions), _STARTS).min(axis=1))


def search_architecture(data: Data, exponents: npt.NDArray[np.integer], effort: Effort) -> list[tuple[int, int]]:
    """Return the ``effort.kept`` best (hidden layers, neurons), the best first."""
    task, _, _ = _task(data, exponents)
    fit_rows, validation_rows = data.parts(effort.seed)
    found = []
    for layers in effort.layers:
        networks = new_networks(task.shared.shape[1], layers, effort.neurons, [effort.seed] * len(effort.neurons))
        train(
            networks, task, fit_rows, steps=effort.architecture_steps, batch=effort.batch,
            rates=[_DEFAULT_RATE] * len(effort.neurons), seed=effort.seed,
        )  # fmt: skip
        errors = misses(networks, task, validation_rows).tolist()
        found += [(miss, layers, neurons) for miss, neurons in zip(errors, effort.neurons, strict=True)]
    return [(layers, neurons) for _, layers, neurons in sorted(found)[: effort.kept]]


def fine_tune(
    data: Data, exponents: npt.NDArray[np.integer], architectures: Sequence[tuple[int, int]], effort: Effort
) -> Network:
    """Train each architecture with other rates and starts; return the one with the least validation error."""
    task, centre, scale = _task(data, exponents)
    fit_rows, validation_rows = data.parts(effort.seed)
    columns = data.columns(exponents)
    best: Network | None = None
    last: tuple[int, int, float, int] | None = None

    def try_networks(layers: int, widths: list[int], rates: list[float], seeds: list[int], steps: int) -> None:
        """Train networks with the given number of layers; keep the one with the least validation error."""
        nonlocal best, last
        networks: Networks = new_networks(task.shared.shape[1], layers, widths, seeds)
        train(networks, task, fit_rows, steps=steps, batch=effort.batch, rates=rates, seed=effort.seed + 1)
        errors = misses(networks, task, validation_rows)
        index = int(np.argmin(errors))
        if best is None or errors[index] < best.validation:
            last = layers, widths[index], rates[index], seeds[index]
            best = Network(
                layers, widths[index], tuple(networks.arrays_of(index, widths[index])), centre, scale,
                columns.min(axis=0), columns.max(axis=0), data.unit_s, float(errors[index]),
            )  # fmt: skip

    for layers in sorted({layers for layers, _ in architectures}):
        widths = [w for n_layers, w in architectures if n_layers == layers for _ in effort.rates]
        rates = [r for n_layers, _ in architectures if n_layers == layers for r in effort.rates]
        try_networks(layers, widths, rates, [effort.seed + index for index in range(len(widths))], effort.final_steps)
    if best is None or last is None:
        raise ValueError("expected at least one architecture, got none")
    if effort.last_steps:
        layers, width, rate, seed = last
        try_networks(layers, [width], [rate], [seed], effort.last_steps)
    return best


def functions_of(parameters: Sequence[Parameter], varying: Sequence[int]) -> Int8:
    """Return the candidates' exponents of the parameters that vary within a mode, shape (functions, varying)."""
    return np.unique(candidates(parameters)[:, list(varying)], axis=0)


def values_of(parameters: Sequence[Parameter], varying: Sequence[int]) -> Float64:
    """Return the values of the parameters that vary within a mode, shape (n, varying)."""
    return as_numbers([parameters[index] for index in varying])


def _task(data: Data, exponents: npt.NDArray[np.integer]) -> tuple[Task, Float64, Float64]:
    scaled, centre, scale = _standard(data.columns(exponents))
    return Task(_tensor(scaled), None, data.target(), not data.logs), centre, scale


def _standard(columns: Float64) -> tuple[Float64, Float64, Float64]:
    centre, scale = columns.mean(axis=0), columns.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    return (columns - centre) / scale, centre, scale


def _tensor(values: Float64) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
