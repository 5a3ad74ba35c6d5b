"""A model cut into stages: the layer call of every task of the passes, and the cuts that balance the work."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    DependencyKind,
    Float64,
    Int64,
    Phase,
    among,
)
from whatif.models.layers.feature_maps import input_bytes, memory_rows
from whatif.models.layers.layer_calls import Calls, layer_calls
from whatif.models.layers.layer_facts import frozen_bytes, gradient_bytes, layer_rows
from whatif.models.layers.segments import are_classes, places_within, prefixes
from whatif.runtime.errors import WhatifError
from whatif.simulation.transfers import of_activations

_NUMBER = re.compile(r"\d+")
# Containers pass one tensor from child to child, so that a model can be cut between their children.
_CHAINS = {"Sequential", "ModuleList"}


class Model(Struct, frozen=True):
    """The forward pass of a recorded step as n calls of layers in order, and the parts that no cut may divide.

    ``position`` is the call that each task of a forward or backward pass belongs to, shape (n_tasks,), -1 for other
    tasks. ``part`` numbers the parts along the calls; ``input_bytes`` is each call's input, -1 if unknown;
    ``gradient_bytes`` and ``parameter_bytes`` are its parameters', the latter also of frozen ones, ``layer`` is its
    layer's code and ``memory_row`` its row in the memory of the step (-1 for none), all of shape (n,).
    """

    position: Int64
    part: Int64
    layer: Int64
    input_bytes: Int64
    gradient_bytes: Int64
    parameter_bytes: Int64
    memory_row: Int64

    @property
    def n_parts(self) -> int:
        """The maximum number of parts of the model."""
        return int(self.part.max(initial=-1)) + 1


def model_of(graph: TaskGraph) -> Model:
    """Return the calls of the model that was recorded.

    Steps with another number of calls are stretched to the most frequent one. A part is a call, or a repeated block of
    layers (an encoder layer, a residual block), inside which several tensors may flow. Raises WhatifError if no step
    has a forward and a backward pass, or if one has several.
    """
    calls = layer_calls(graph)
    runs, first, length = np.unique(calls.run, return_index=True, return_counts=True)
    forward_run = ~calls.backward[first]
    if not forward_run.any() or forward_run.all():
        raise WhatifError("pipeline: expected a recording whose steps have a forward and a backward pass, got none.")
    passes = np.unique(calls.step[first][~forward_run], return_counts=True)[1]
    if np.median(passes) > 1:
        raise WhatifError(
            f"pipeline: expected one backward pass a step, got {int(np.median(passes))}; record steps without gradient "
            "accumulation."
        )
    n = int(np.bincount(length[forward_run]).argmax())
    of_run = np.searchsorted(runs, calls.run)
    rank = np.arange(len(calls)) - first[of_run]
    position = np.where(calls.backward, -1, rank * n // length[of_run])
    at = np.where(calls.forward >= 0, position[calls.forward], -1)
    # A backward call that cannot be distinguished follows the one before it; the first ones belong to the last layer.
    at = _filled(at, calls.run, ahead=False)
    at = np.where(at < 0, np.where(calls.backward, n - 1, 0), at)

    chosen = int(first[forward_run & (length == n)][0])
    rows = np.arange(chosen, chosen + n)
    layer, memory_row = calls.layer[rows], memory_rows(graph, calls)[rows]
    gradients = _gradient_bytes(graph, layer, memory_row)
    return Model(
        position=_positions(graph, calls, at, n),
        part=_parts(graph, layer),
        layer=layer,
        input_bytes=input_bytes(graph, calls)[rows],
        gradient_bytes=gradients,
        parameter_bytes=gradients + np.where(_is_first(layer), frozen_bytes(graph)[layer], 0),
        memory_row=memory_row,
    )


def _filled(values: Array, group: Array, *, ahead: bool) -> Int64:
    """Replace values below 0 by that of the nearest row before it (``ahead``: after it) of the same group."""
    if ahead:
        return _filled(values[::-1], group[::-1], ahead=False)[::-1]
    source = np.maximum.accumulate(np.where(values >= 0, np.arange(len(values)), 0))
    return np.where(group[source] == group, values[source], -1).astype(np.int64)


def _positions(graph: TaskGraph, calls: Calls, at: Int64, n: int) -> Int64:
    """The call of each task: its own, that of the next kernel that it launches, or that of its neighbours."""
    in_pass = among(graph.phase, (Phase.FORWARD, Phase.BACKWARD)) & ((graph.step >= 0) | (graph.info.n_steps == 0))
    found = np.append(at, -1)[calls.call]
    order = graph.by_thread[in_pass[graph.by_thread]]
    # A stretch of one pass on one thread.
    turns = [np.diff(column[order]) != 0 for column in (graph.thread, graph.step, graph.phase)]
    stretch = np.cumsum(np.append(True, turns[0] | turns[1] | turns[2])[: len(order)])
    on_gpu = graph.on_gpu[order]
    kernels = order[on_gpu]
    found[kernels] = _filled(found[kernels], stretch[on_gpu], ahead=False)
    found[kernels] = _filled(found[kernels], stretch[on_gpu], ahead=True)
    launched = kernels[graph.launch_of[kernels] >= 0]
    found[graph.launch_of[launched]] = found[launched]
    found[order] = _filled(found[order], stretch, ahead=True)
    found[order] = _filled(found[order], stretch, ahead=False)
    lost = np.where(graph.phase == Phase.FORWARD, 0, n - 1)
    found = np.where(in_pass, np.where(found >= 0, found, lost), -1).astype(np.int64)
    # A transfer between the parts of a layer belongs to the call whose work it waits for.
    edges = graph.dependencies
    sent = of_activations(graph)[edges.target] & (edges.kind == DependencyKind.COMMUNICATION)
    found[edges.target[sent]] = found[edges.source[sent]]
    return found


def _parts(graph: TaskGraph, layer: Int64) -> Int64:
    block = blocks_of_layers(graph)[layer]
    begins = (block[1:] != block[:-1]) | (block[1:] < 0)
    return np.append(0, np.cumsum(begins)).astype(np.int64)


def blocks_of_layers(graph: TaskGraph) -> Int64:
    """Return the number of the outermost block, other than a container, around each layer; -1 for none."""
    if are_classes(graph):
        return np.full(len(graph.layers), -1, dtype=np.int64)
    inner = {above for layer in graph.layers for above in prefixes(layer)[:-1]}
    numbered = {prefix for prefix in inner if prefix[-1:].isdigit()}
    families = Counter(_NUMBER.sub("#", prefix) for prefix in numbered)
    rows = layer_rows(graph)
    blocks = {
        prefix
        for prefix in numbered
        if families[_NUMBER.sub("#", prefix)] > 1 and not (prefix in rows and rows[prefix].type in _CHAINS)
    }
    return places_within(graph.layers, sorted(blocks))


def _gradient_bytes(graph: TaskGraph, layer: Int64, memory_row: Int64) -> Int64:
    """The gradients of each call's layer, with its first call; by the recorder, else by the memory of the step."""
    sizes, of = gradient_bytes(graph)[layer], layer
    if not sizes.any():
        layers = graph.info.memory.layers if graph.info.memory else ()
        sizes, of = np.array([row.gradients for row in layers] + [0], dtype=np.int64)[memory_row], memory_row
    return np.where(_is_first(of), sizes, 0)


def _is_first(of: Int64) -> Bool:
    """Select the first call of each layer, or row, shape (n_calls,)."""
    first = np.zeros(len(of), dtype=np.bool_)
    first[np.unique(of, return_index=True)[1]] = True
    return first


def balanced(time_ns: Sequence[Float64], parts: Int64, stages: int, message_ns: Float64) -> Int64:
    """Return the calls at which stages 1 to ``stages`` - 1 begin, such that the slowest stage is as fast as possible.

    ``time_ns``: the time of each call (n,) on each concurrent resource (CPU and GPU); a stage takes the time of its
    busiest resource, or of the message to its first call, ``message_ns`` (n,), if that is longer (as in PipeDream's
    partitioning, §3.1). ``parts`` (n,) are not divided. Ties go to the least sum of squares; exact by dynamic
    programming. Raises WhatifError if there are fewer parts than stages.
    """
    n_parts = int(parts.max(initial=-1)) + 1
    if not 1 <= stages <= n_parts:
        raise WhatifError(f"expected from 1 to {n_parts} stages, got {stages}.")
    # sums[r, i]: the time of the first i parts on resource r.
    sums = np.stack([np.append(0, np.cumsum(np.bincount(parts, weights=t, minlength=n_parts))) for t in time_ns])
    cost = (sums[:, None, :] - sums[:, :, None]).max(axis=0)  # of a stage that begins with one part and ends before one
    first = np.searchsorted(parts, np.arange(1, n_parts))
    cost[1:n_parts] = np.maximum(cost[1:n_parts], message_ns[first][:, None])
    cost[np.tril_indices(n_parts + 1)] = np.inf
    slowest, _ = _best(cost, stages, np.maximum)
    # Sums of the same parts in a different order differ in their last digits.
    squares = np.where(cost <= slowest * (1 + 1e-12), np.square(cost), np.inf)
    _, begins = _best(squares, stages, np.add)
    return np.searchsorted(parts, np.array(begins[1:], dtype=np.int64), side="left").astype(np.int64)


def _best(cost: Float64, stages: int, join: np.ufunc) -> tuple[float, list[int]]:
    """The least joined cost of ``stages`` consecutive stages, and the part at which each begins."""
    n = len(cost) - 1
    reached = cost[0].copy()
    came_from = []
    for _ in range(1, stages):
        through = join(reached[:, None], cost)
        came_from.append(through.argmin(axis=0))
        reached = through[came_from[-1], np.arange(n + 1)]
    begins, at = [], n
    for source in reversed(came_from):
        at = int(source[at])
        begins.append(at)
    return float(reached[n]), [0, *reversed(begins)]


def stage_of(model: Model, begins: Int64) -> Int64:
    """Return the stage of each task, shape (n_tasks,), -1 outside the passes; ``begins`` comes from ``balanced``."""
    stage = np.searchsorted(begins, model.position, side="right")
    return np.where(model.position >= 0, stage, -1).astype(np.int64)


def working_threads(graph: TaskGraph, model: Model) -> Bool:
    """Return a mask (n_threads,) of the CPU threads that train: the main one, and those that launch or run a pass."""
    chosen = np.zeros(len(graph.threads), dtype=np.bool_)
    chosen[0] = True
    launches = graph.launch_of[graph.launch_of >= 0]
    chosen[graph.thread[launches]] = True
    if not graph.has_gpu:
        chosen[graph.thread[(model.position >= 0) & graph.on_cpu & (graph.family >= 0)]] = True
    return chosen
