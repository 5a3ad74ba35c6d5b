"""Remove layers from a step, resize them, or merge several into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from whatif.graph.memory import Memory
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    Int64,
    Phase,
    TaskKind,
    among,
)
from whatif.models.durations.estimator import put, scaled
from whatif.models.layers.calls import launches_of
from whatif.models.layers.layer_facts import gradient_bytes
from whatif.models.layers.memory_effects import change_memory, with_share
from whatif.models.layers.update_tasks import implementation, step_kernels, update_in_marks
from whatif.runtime.errors import WhatifError


def layer_work(graph: TaskGraph, layers: Bool) -> Bool:
    """Return a mask, shape (n_tasks,), of the work of ``layers`` (a mask over ``graph.layers``), forward and backward.

    GPU tasks except collectives, which belong to no layer; on a CPU operators.
    """
    passes = graph.select(phase=Phase.FORWARD) | graph.select(phase=Phase.BACKWARD)
    worker = graph.gpu_work if graph.has_gpu else graph.select(kind=TaskKind.CPU_OP)
    return np.asarray(worker & passes & layers.take(graph.layer), dtype=np.bool_)


def scale_layers(graph: TaskGraph, layers: Bool, factor: float) -> TaskGraph:
    """Return the graph with the forward and backward work of ``layers`` (a mask over ``graph.layers``) scaled."""
    return graph.scale(layer_work(graph, layers), factor)


def resize_layers(graph: TaskGraph, layers: Bool, sizes: Mapping[str, int]) -> TaskGraph:
    """Return the graph in which operators of ``layers`` have other ``sizes`` (name: value), by op database estimates.

    Raises WhatifError if none of their recorded operators has such a size.
    """
    from whatif.models.durations.changed_operators import resized

    tasks = np.flatnonzero(layer_work(graph, layers))
    found = resized(graph, tasks, sizes)
    known = found.known
    if not known.any():
        names = [graph.layers[code] for code in np.flatnonzero(layers)[:2].tolist()]
        raise WhatifError(
            f"metaflow: expected operators with {', '.join(sizes)} in {', '.join(names)}, got none that the recording "
            "has sizes of; give a factor instead."
        )
    ratio, low, high, source = (column[known] for column in found)
    return put(graph, tasks[known], scaled(graph, tasks[known], ratio, source, low=low, high=high))


def merge_layers(graph: TaskGraph, parts: Sequence[Bool], factor: float) -> TaskGraph:
    """Return the graph in which the first of ``parts`` (masks over ``graph.layers``) does the work of all.

    In each step and pass it takes ``factor`` of the time of all; the others are removed with their launches. If the
    first has no work in a pass, the others stay and take ``factor`` of their time.
    """
    first, others = layer_work(graph, parts[0]), layer_work(graph, np.logical_or.reduce(parts[1:]))
    key = graph.step.astype(np.int64) * len(Phase) + graph.phase
    key -= key.min(initial=0)
    n_keys = int(key.max(initial=0)) + 1

    def by_key(work: Bool, weights: Int64 | None = None) -> Array:
        return np.bincount(key[work], weights=None if weights is None else weights[work], minlength=n_keys)

    count = by_key(first)
    first_ns, all_ns = by_key(first, graph.duration_ns), by_key(first | others, graph.duration_ns)
    # Kernels without time share the new time equally.
    ratio = (factor * all_ns / np.where(first_ns > 0, first_ns, 1))[key[first]]
    equal_ns = (factor * all_ns / np.maximum(count, 1))[key[first]]
    centre, low, high = (
        np.where(first_ns[key[first]] > 0, column[first] * ratio, equal_ns)
        for column in (graph.duration_ns, graph.low_ns, graph.high_ns)
    )
    graph = graph.with_duration(first, centre, low_ns=low, high_ns=high)
    replaced = count[key] > 0
    graph = graph.scale(others & ~replaced, factor)
    return graph.remove(_with_calls(graph, np.logical_or.reduce(parts[1:])) & replaced)


def remove_layers(graph: TaskGraph, layers: Bool) -> TaskGraph:
    """Return the graph without ``layers`` (a mask over ``graph.layers``), their work, calls, memory and update.

    The update shrinks by the layers' share of the gradient bytes, if the recording lists them.
    """
    gone = _with_calls(graph, layers)
    return _without_memory(_smaller_update(graph, layers), layers).remove(gone)


def _with_calls(graph: TaskGraph, layers: Bool) -> Bool:
    """The work of layers, and the CPU's tasks in them, except waits and launches of remaining tasks."""
    work = layer_work(graph, layers)
    passes = among(graph.phase, (Phase.FORWARD, Phase.BACKWARD))
    calls = (graph.on_cpu & passes & layers.take(graph.layer)).mask & ~launches_of(graph, graph.on_gpu & ~work)
    before_wait = graph.neighbours[0][graph.kind == TaskKind.WAIT]
    calls[before_wait[before_wait >= 0]] = False
    # Work without a call in its layer (launched before the recording) is removed as well.
    return np.asarray(work | calls, dtype=np.bool_)


def _smaller_update(graph: TaskGraph, layers: Bool) -> TaskGraph:
    """The update without the parameters of ``layers``: kernels shrink by bytes, per-parameter work by count."""
    sizes = gradient_bytes(graph)
    kernels = step_kernels(graph)
    gone = int(sizes[layers].sum())
    if not gone or not kernels.any():
        return graph
    graph = graph.scale(kernels, 1 - gone / int(sizes.sum()))
    if implementation(graph) != "for_loop":
        return graph
    names = [gradient.layer for gradient in graph.info.recorded.gradients]
    removed = {graph.layers[code] for code in np.flatnonzero(layers).tolist()}
    share = sum(name in removed for name in names) / max(len(names), 1)
    return graph.scale(update_in_marks(graph) & ~kernels, 1 - share)


def _without_memory(graph: TaskGraph, layers: Bool) -> TaskGraph:
    removed = {graph.layers[code] for code in np.flatnonzero(layers).tolist()}

    def effect(memory: Memory) -> Memory:
        left = [row for row in memory.layers if row.name not in removed]
        gone = sum(row.gradients for row in memory.layers if row.name in removed)
        share = 1 - gone / max(memory.gradients, 1)
        parameters = max(memory.parameters - gone, 0)
        return replace(with_share(memory, share), parameters=parameters, layers=tuple(left))

    return change_memory(graph, effect)
