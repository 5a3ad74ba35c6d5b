"""Many small networks trained at once: their weights are slices of the same tensors, one matrix product per layer.

All have the same number of layers; weights beyond a narrower network's width stay zero. A search over hundreds of
networks takes a minute this way, one by one it takes an hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

Float32 = npt.NDArray[np.float32]

# Adam's constants (Kingma and Ba, ICLR 2015, Algorithm 1).
_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8
# The learning rate falls along a cosine to this share, after a short warm-up.
_LAST_RATE, _RISE = 0.01, 0.05


@dataclass(frozen=True)
class Task:
    """Training data of c networks: ``shared`` inputs (n, d), one more input per network (c, n) or None, targets (n,).

    ``relative`` scores |prediction - target| / target, else |prediction - target| (targets are logarithms).
    """

    shared: torch.Tensor
    extra: torch.Tensor | None
    target: torch.Tensor
    relative: bool

    def inputs(self, rows: torch.Tensor, networks: int) -> torch.Tensor:
        """Return the inputs of ``rows`` for every network, shape (networks, rows, inputs)."""
        common = self.shared[rows].expand(networks, -1, -1)
        return common if self.extra is None else torch.cat([common, self.extra[:, rows, None]], dim=2)

    def error(self, predicted: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean error of each network, shape (networks,), from predictions (networks, rows)."""
        target = self.target[rows]
        error = (predicted - target).abs()
        return (error / target if self.relative else error).mean(dim=1)


@dataclass
class Networks:
    """c networks of ReLU layers, each of its own width: ``weights`` and ``biases`` layer by layer, (c, in, out)."""

    weights: list[torch.Tensor]
    biases: list[torch.Tensor]
    masks: list[torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return predictions, shape (c, n), from inputs (c, n, d)."""
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = torch.relu(torch.baddbmm(bias, x, weight))
        return torch.baddbmm(self.biases[-1], x, self.weights[-1]).squeeze(2)

    def arrays_of(self, index: int, width: int) -> list[Float32]:
        """Return the arrays of one network, layer by layer: weight (in, out), bias (out,), and so on."""
        found: list[Float32] = []
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            rows = weight.shape[1] if layer == 0 else width
            columns = 1 if layer == last else width
            found.append(weight[index, :rows, :columns].detach().numpy().copy())
            found.append(bias[index, 0, :columns].detach().numpy().copy())
        return found


def new_networks(inputs: int, layers: int, widths: Sequence[int], seeds: Sequence[int]) -> Networks:
    """Return networks with He's initial weights: ``layers`` hidden layers each, of ``widths[i]`` neurons."""
    count, widest = len(widths), max(widths)
    sizes = [inputs, *[widest] * layers, 1]
    weights, biases, masks = [], [], []
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for layer, (rows, columns) in enumerate(pairwise(sizes)):
        weight, mask = torch.zeros(count, rows, columns), torch.zeros(count, rows, columns)
        for index, width in enumerate(widths):
            used = (rows if layer == 0 else width, columns if layer == layers else width)
            drawn = torch.randn(used, generator=generators[index]) * (2.0 / used[0]) ** 0.5
            weight[index, : used[0], : used[1]] = drawn
            mask[index, : used[0], : used[1]] = 1.0
        weights.append(weight.requires_grad_())
        # Slightly above zero, so that few neurons of a narrow layer start dead.
        biases.append(torch.full((count, 1, columns), 0.05 if layer < layers else 0.0).requires_grad_())
        masks.append(mask)
    return Networks(weights, biases, masks)


def train(
    networks: Networks, task: Task, rows: torch.Tensor, *, steps: int, batch: int, rates: Sequence[float], seed: int
) -> None:
    """Train all networks on ``rows`` of a task, each with its own learning rate, on the same batches."""
    draw = torch.Generator().manual_seed(seed)
    values = [*networks.weights, *networks.biases]
    masks = [*networks.masks, *map(torch.ones_like, networks.biases)]
    # One vector of all weights, with the layers as views: ten operations per step instead of hundreds.
    flat = torch.cat([value.detach().reshape(-1) for value in values])
    rate_column = torch.tensor(list(rates)).reshape(-1, 1, 1)
    rate = torch.cat([(mask * rate_column).reshape(-1) for mask in masks])
    parts = torch.split(flat, [value.numel() for value in values])
    for value, part in zip(values, parts, strict=True):
        value.data = part.view_as(value)
    first, second = torch.zeros_like(flat), torch.zeros_like(flat)
    order, at = torch.randperm(len(rows), generator=draw), 0
    for step in range(steps):
        if at + batch > len(rows):
            order, at = torch.randperm(len(rows), generator=draw), 0
        chosen = rows[order[at : at + batch]]
        at += batch
        loss = task.error(networks(task.inputs(chosen, len(rates))), chosen).sum()
        slope = torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, values)])
        first.lerp_(slope, 1 - _BETA_1)
        second.mul_(_BETA_2).addcmul_(slope, slope, value=1 - _BETA_2)
        root = (second / (1 - _BETA_2 ** (step + 1))).sqrt_().add_(_EPSILON)
        flat -= rate * (first / root) * (_rate_share(step, steps) / (1 - _BETA_1 ** (step + 1)))


def _rate_share(step: int, steps: int) -> float:
    """Return the share of the learning rate at a step."""
    progress = step / steps
    falling = _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + float(np.cos(np.pi * progress)))
    return min(1.0, (progress + 1 / steps) / _RISE) * falling


def misses(networks: Networks, task: Task, rows: torch.Tensor) -> npt.NDArray[np.float64]:
    """Return the mean error of every network on ``rows``, shape (networks,); inf for a network that overflowed."""
    with torch.no_grad():
        count = networks.weights[0].shape[0]
        found = task.error(networks(task.inputs(rows, count)), rows).double().numpy()
    return np.asarray(np.where(np.isfinite(found), found, np.inf))
