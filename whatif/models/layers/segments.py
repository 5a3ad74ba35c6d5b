"""Segments of a model whose activations are not kept: their layers, and the time of recomputing them.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; torch.utils.checkpoint (use_reentrant=False
recomputes a segment when the first of its activations is needed in the backward pass).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from whatif.graph.insert import NewTasks
from whatif.graph.task_graph import TaskGraph, matching
from whatif.graph.types import (
    Array,
    Bool,
    Change,
    DependencyKind,
    Int64,
    Phase,
    TaskKind,
)
from whatif.models.layers.calls import task_before
from whatif.models.layers.columns import with_values
from whatif.simulation.transfers import (
    ACTIVATIONS,
    LATENCY,
    ON_CPU,
    WORKERS,
    latency_of,
    of_activations,
    workers_of,
)

RECOMPUTED_NAME = "recomputed (activation checkpointing)"
# Upper range for the hooks of a checkpoint, which run Python for every tensor not saved, and for caches: our estimate.
SPREAD = 0.05

_NUMBERED = re.compile(r"\d+$")
# Layers named by torch.profiler (with_modules): a class and a number, without the place in the model.
_CLASS_NAME = re.compile(r"[A-Za-z_]\w*_\d+")


def repeated_blocks(layers: Sequence[str]) -> list[str]:
    """Return the outermost layers that contain layers and end in a number, such as "encoder.layer.3".

    These are usually checkpointed: blocks of a transformer, residual blocks of a network of stages.
    """
    inner = {above for layer in layers for above in prefixes(layer)[:-1]}
    numbered = [layer for layer in layers if _NUMBERED.search(layer) and layer in inner]
    families = Counter(_NUMBERED.sub("", layer) for layer in numbered)
    blocks = {layer for layer in numbered if families[_NUMBERED.sub("", layer)] > 1}
    return [layer for layer in layers if layer in blocks and blocks.isdisjoint(prefixes(layer)[:-1])]


def prefixes(layer: str) -> list[str]:
    """Return the layers that contain ``layer``, outermost first, and ``layer`` itself."""
    parts = layer.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def places_within(layers: Sequence[str], chosen: Sequence[str]) -> Int64:
    """Return the position in ``chosen`` of each of ``layers``, or of the outermost layer around it; -1 for none."""
    position = {layer: number for number, layer in enumerate(chosen)}
    found = [next((position[part] for part in prefixes(layer) if part in position), -1) for layer in layers]
    return np.array(found, dtype=np.int64)


def segments(graph: TaskGraph, layers: str | None) -> list[str]:
    """Return the names of the layers to checkpoint: the outermost that fully match ``layers``, a regular expression.

    With None: the repeated blocks of the model, such as "encoder.layer.3". Raises WhatifError on an invalid expression.
    """
    if layers is None:
        return repeated_blocks(graph.layers)
    mask = matching(graph.layers, rf"^(?:{layers})$").tolist()
    chosen = {layer for layer, matches in zip(graph.layers, mask, strict=True) if matches and layer}
    return [layer for layer in graph.layers if layer in chosen and chosen.isdisjoint(prefixes(layer)[:-1])]


def are_classes(graph: TaskGraph) -> bool:
    """Return whether layers are named by class ("Conv2d_3"), which does not show which layer contains which."""
    return len(graph.layers) > 1 and all(_CLASS_NAME.fullmatch(layer) for layer in graph.layers if layer)


def recompute(graph: TaskGraph, chosen: Sequence[str]) -> TaskGraph:
    """Return the graph in which each step repeats the forward work of segments ``chosen`` before their backward work.

    On a CPU every task is repeated; on a GPU every kernel except collectives, on the stream of the segment's backward
    kernels, with its share of the segment's CPU time as its launch. Exchanges between the parts of a layer in a segment
    (``tensor_parallel``) are repeated after it, in one transfer that the backward work waits for. Segments that are
    already recomputed, or have no backward work, stay; if all do, ``graph`` itself is returned.
    """
    segment = places_within(graph.layers, chosen).take(graph.layer)
    inside = (segment >= 0) & (graph.step >= 0) & ~np.isin(segment, segment[graph.recomputed])
    forward, backward = (inside & graph.select(phase=phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    key = graph.step.astype(np.int64) * max(len(chosen), 1) + segment
    first_cpu = _first_of_key(key, backward & graph.on_cpu)
    if graph.has_gpu:
        return _recompute_on_gpu(graph, key, forward, backward, first_cpu)
    again = np.flatnonzero(forward & graph.on_cpu)
    again = again[np.isin(key[again], list(first_cpu))]
    put = _put_in(graph, again, _before(graph, first_cpu, key[again]), SPREAD)
    return _exchanged_again(graph, put, key[again], key, forward, first_cpu)


def _recompute_on_gpu(
    graph: TaskGraph, key: Int64, forward: Bool, backward: Bool, first_cpu: dict[int, int]
) -> TaskGraph:
    first_gpu = _first_of_key(key, backward & graph.gpu_work)
    again = np.flatnonzero(forward & graph.gpu_work & (graph.launch_of >= 0))
    again = again[np.isin(key[again], list(first_cpu.keys() & first_gpu.keys()))]
    cpu_ns = _time_of_key(graph, key, forward & graph.on_cpu)
    keys, inverse, count = np.unique(key[again], return_inverse=True, return_counts=True)
    inverse = np.asarray(inverse).reshape(-1)
    share_ns = np.array([cpu_ns.get(int(k), 0.0) for k in keys]) / count
    put = _put_in(
        graph, again, _before(graph, first_gpu, key[again]), 0.0,
        thread=graph.thread[np.array([first_gpu[int(k)] for k in keys], dtype=np.int64)][inverse],
        launched_after=_before(graph, first_cpu, key[again]), launch_ns=share_ns[inverse],
    )  # fmt: skip
    return _exchanged_again(graph, put, key[again], key, forward, first_gpu)


class _Put(NamedTuple):
    """A graph with copies of tasks, their ids, and the new id of each old task."""

    graph: TaskGraph
    ids: Array
    moved: Array


def _exchanged_again(
    graph: TaskGraph, put: _Put, of_copies: Int64, key: Int64, forward: Bool, first: dict[int, int]
) -> TaskGraph:
    """The graph in which the forward exchanges of segments are repeated after the copies of their work.

    ``of_copies`` are the keys of the copies, ``key`` of all old tasks; ``first`` is the backward work that waits.
    """
    sums = np.flatnonzero(of_activations(graph) & forward)
    sums = sums[np.isin(key[sums], of_copies)]
    if not len(sums):
        return put.graph
    keys, at, inverse = np.unique(key[sums], return_index=True, return_inverse=True)
    last = np.array([put.ids[of_copies == segment].max() for segment in keys.tolist()], dtype=np.int64)

    def summed(column: Array) -> Int64:
        return np.bincount(np.asarray(inverse).reshape(-1), weights=column[sums]).astype(np.int64)

    inserted = put.graph.insert(
        NewTasks(
            last, RECOMPUTED_NAME, TaskKind.COMMUNICATION, summed(graph.duration_ns), thread=graph.thread[sums[at]],
            low_ns=summed(graph.low_ns), high_ns=summed(graph.high_ns), size_bytes=summed(graph.size_bytes),
            family=graph.family[sums[at]], layer=graph.layer[sums[at]], phase=Phase.BACKWARD,
        )
    )  # fmt: skip
    columns = {LATENCY: summed(latency_of(graph)), WORKERS: workers_of(graph)[sums[at]], ACTIVATIONS: True}
    columns |= {name: summed(graph.attached[name]) for name in ON_CPU if name in graph.attached}
    attached = {name: column.copy() for name, column in inserted.graph.attached.items()}
    for name, values in columns.items():
        attached[name][inserted.ids] = values
    waiting = inserted.moved[put.moved[np.array([first[segment] for segment in keys.tolist()], dtype=np.int64)]]
    return inserted.graph.replace(attached=attached).add_dependencies(
        np.concatenate([inserted.moved[last], inserted.ids]), np.concatenate([inserted.ids, waiting]),
        kind=DependencyKind.COMMUNICATION,
    )  # fmt: skip


def _put_in(graph: TaskGraph, originals: Int64, after: Int64, spread: float, **launch: Any) -> _Put:
    """The graph with copies of ``originals``, which later what-ifs change like the originals."""
    if not len(originals):
        return _Put(graph, originals, np.arange(len(graph)))
    same: dict[str, Any] = {
        name: getattr(graph, name)[originals] for name in ("layer", "family", "dtype", "size_bytes", "flops")
    }
    inserted = graph.insert(
        NewTasks(
            after, RECOMPUTED_NAME, graph.kind[originals], graph.duration_ns[originals], phase=Phase.BACKWARD,
            low_ns=graph.low_ns[originals] * (1 - spread), high_ns=graph.high_ns[originals] * (1 + spread),
            **same, **launch,
        )
    )  # fmt: skip
    attached = {name: column.copy() for name, column in inserted.graph.attached.items()}
    for name, column in attached.items():
        column[inserted.ids] = graph.attached[name][originals]
    facts = {name: getattr(graph, name)[originals] for name in ("measured", "called")}
    changed = with_values(inserted.graph, inserted.ids, recomputed=True, **facts).replace(attached=attached)
    return _Put(changed.with_change(Change.RECOMPUTES), inserted.ids, inserted.moved)


def _before(graph: TaskGraph, first: dict[int, int], keys: Int64) -> Int64:
    """The task before the first one of each key on its thread; that one itself if it begins its thread."""
    tasks = np.array([first[key] for key in keys.tolist()], dtype=np.int64)
    return task_before(graph, tasks)


def _first_of_key(key: Int64, tasks: Bool) -> dict[int, int]:
    ids = np.flatnonzero(tasks)
    keys, first = np.unique(key[ids], return_index=True)
    return dict(zip(keys.tolist(), ids[first].tolist(), strict=True))


def _time_of_key(graph: TaskGraph, key: Int64, tasks: Bool) -> dict[int, float]:
    ids = np.flatnonzero(tasks)
    keys, inverse = np.unique(key[ids], return_inverse=True)
    times: Array = np.bincount(np.asarray(inverse).reshape(-1), weights=graph.duration_ns[ids], minlength=len(keys))
    return dict(zip(keys.tolist(), times.tolist(), strict=True))
