"""Segments of a model whose activations are not kept: which layers they are, and what recomputing them takes.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; torch.utils.checkpoint (use_reentrant=False
recomputes a segment when the first of its activations is needed in the backward pass).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from whatif.graph import TaskGraph, matching
from whatif.insert import NewTasks
from whatif.types import Array, Bool, Int64, Phase, TaskKind

RECOMPUTED_NAME = "recomputed (activation checkpointing)"
# For the hooks of a checkpoint, which run Python for every tensor that would have been saved, and for caches: our
# estimate.
SPREAD = 0.05

_NUMBERED = re.compile(r"\d+$")


def repeated_blocks(layers: Sequence[str]) -> list[str]:
    """Give the outermost layers that have layers of their own and a number at the end, as "encoder.layer.3" has.

    These are what people checkpoint: blocks of a transformer, residual blocks of a network of stages.
    """
    inner = {above for layer in layers for above in _above(layer)}
    numbered = [layer for layer in layers if _NUMBERED.search(layer) and layer in inner]
    families = Counter(_NUMBERED.sub("", layer) for layer in numbered)
    blocks = {layer for layer in numbered if families[_NUMBERED.sub("", layer)] > 1}
    return [layer for layer in layers if layer in blocks and blocks.isdisjoint(_above(layer))]


def _above(layer: str) -> list[str]:
    """The layers that ``layer`` lies in, outermost first."""
    parts = layer.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def segments(graph: TaskGraph, layers: str | None) -> list[str]:
    """Give the layers whose activations go: the outermost that ``layers`` matches whole, or the repeated blocks."""
    if layers is None:
        return repeated_blocks(graph.layers)
    mask = matching(graph.layers, rf"^(?:{layers})$").tolist()
    chosen = {layer for layer, matches in zip(graph.layers, mask, strict=True) if matches and layer}
    return [layer for layer in graph.layers if layer in chosen and chosen.isdisjoint(_above(layer))]


def segment_of(graph: TaskGraph, chosen: Sequence[str]) -> Int64:
    """Give the position in ``chosen`` of the segment of each task, shape (n_tasks,); -1 outside of all."""
    position = {layer: number for number, layer in enumerate(chosen)}
    table = np.full(len(graph.layers), -1, dtype=np.int64)
    for code, layer in enumerate(graph.layers):
        table[code] = next((position[part] for part in (*_above(layer), layer) if part in position), -1)
    return table[graph.layer]


def recompute(graph: TaskGraph, chosen: Sequence[str]) -> TaskGraph:
    """Give the graph in which each step runs the forward work of each segment again before its backward work.

    On a GPU every kernel comes again, with its share of the segment's CPU time as its launch.
    """
    segment = segment_of(graph, chosen)
    inside = (segment >= 0) & (graph.step >= 0)
    forward, backward = (inside & graph.select(phase=phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    key = graph.step.astype(np.int64) * max(len(chosen), 1) + segment
    first_cpu = _first_of_key(key, backward & graph.on_cpu)
    cpu_ns = _time_of_key(graph, key, forward & graph.on_cpu)
    keys = np.array(sorted(first_cpu.keys() & cpu_ns.keys()), dtype=np.int64)
    if not len(keys):
        return graph
    begins = np.array([first_cpu[int(k)] for k in keys])
    spent_ns = np.array([cpu_ns[int(k)] for k in keys])
    before = graph.neighbours[0][begins]
    before = np.where(before >= 0, before, begins)
    if not graph.on_gpu.any():
        tasks = NewTasks(
            before, RECOMPUTED_NAME, TaskKind.CPU_OP, spent_ns, low_ns=spent_ns * (1 - SPREAD),
            high_ns=spent_ns * (1 + SPREAD), layer=graph.layer[begins], phase=Phase.BACKWARD,
        )  # fmt: skip
        return graph.insert(tasks).graph
    return _recompute_on_gpu(
        graph, key, forward, backward, dict(zip(keys.tolist(), before.tolist(), strict=True)), cpu_ns
    )


def _recompute_on_gpu(
    graph: TaskGraph, key: Int64, forward: Bool, backward: Bool, before_cpu: dict[int, int], cpu_ns: dict[int, float]
) -> TaskGraph:
    first_gpu = _first_of_key(key, backward & graph.on_gpu)
    again = np.flatnonzero(forward & graph.on_gpu & (graph.launch_of >= 0))
    again = again[np.isin(key[again], [k for k in before_cpu if k in first_gpu])]
    if not len(again):
        return graph
    keys, which, count = np.unique(key[again], return_inverse=True, return_counts=True)
    which = np.asarray(which).reshape(-1)
    gpu_first = np.array([first_gpu[int(k)] for k in keys])
    gpu_before = graph.neighbours[0][gpu_first]
    after = np.where(gpu_before >= 0, gpu_before, gpu_first)[which]
    launch_ns = np.array([cpu_ns[int(k)] for k in keys])[which] / count[which]
    tasks = NewTasks(
        after, RECOMPUTED_NAME, graph.kind[again], graph.duration_ns[again], thread=graph.thread[gpu_first[which]],
        layer=graph.layer[again], phase=Phase.BACKWARD, family=graph.family[again], dtype=graph.dtype[again],
        size_bytes=graph.size_bytes[again], flops=graph.flops[again],
        launched_after=np.array([before_cpu[int(k)] for k in keys])[which], launch_ns=launch_ns,
    )  # fmt: skip
    return graph.insert(tasks).graph


def _first_of_key(key: Int64, tasks: Bool) -> dict[int, int]:
    ids = np.flatnonzero(tasks)
    keys, first = np.unique(key[ids], return_index=True)
    return dict(zip(keys.tolist(), ids[first].tolist(), strict=True))


def _time_of_key(graph: TaskGraph, key: Int64, tasks: Bool) -> dict[int, float]:
    ids = np.flatnonzero(tasks)
    keys, which = np.unique(key[ids], return_inverse=True)
    times: Array = np.bincount(np.asarray(which).reshape(-1), weights=graph.duration_ns[ids], minlength=len(keys))
    return dict(zip(keys.tolist(), times.tolist(), strict=True))
