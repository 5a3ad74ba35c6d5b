"""Replicas of a pipeline: each stage exchanges gradients with the same stage of the other replicas before its update.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training ... Using Megatron-LM", SC 2021, section 3.3
(data parallelism around a pipeline: one all-reduce of a stage's gradients per step, after its last backward pass);
Rajbhandari et al., "ZeRO", SC 2020, for sharded state.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from whatif.graph.memory import Memory, fullest
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Change, Int64, Phase
from whatif.hardware.cluster.network import Network
from whatif.ingest.ranks.merge import ranks_of
from whatif.models.exchange.buckets import checked_bytes
from whatif.models.exchange.collective_tasks import with_workers
from whatif.models.exchange.data_parallel import with_buckets
from whatif.models.exchange.exchanges import Exchange, exchange
from whatif.models.exchange.stragglers import with_slowest
from whatif.models.layers.calls import calls_of, task_before
from whatif.models.layers.memory_effects import with_stages
from whatif.models.parallel.sharded_memory import with_sharded_state
from whatif.models.parallel.sharding import BUCKET_CALL
from whatif.runtime.errors import WhatifError
from whatif.simulation.transfers import GRADIENTS, of_activations

CHANNEL = "stage {stage}: network"


def is_pipelined(graph: TaskGraph) -> bool:
    """Return whether the steps are those of a pipeline's stages, made by ``pipeline``."""
    return Change.IN_STAGES in graph.info.changes


def refuse_stages(graph: TaskGraph, name: str) -> None:
    """Raise WhatifError if the graph has stages of a pipeline; the what-if ``name`` needs layers."""
    if is_pipelined(graph):
        raise WhatifError(
            f"{name}: expected steps of a whole model, got a pipeline's stages; of what goes around these only "
            "distributed and zero:stage=1 are modelled (DeepSpeed's pipelines take no other stage of ZeRO)."
        )


class _Ends(NamedTuple):
    """One row per step of a stage, task ids: last backward work, the all-reduce after it, update, next forward work."""

    backward: Int64
    summed: Int64
    update: Int64
    forward: Int64


def with_gradient_bytes(graph: TaskGraph, gradient_mb: float | None, name: str) -> TaskGraph:
    """Return the pipeline with ``gradient_mb`` million bytes of gradients in total, divided among stages as before.

    Raises WhatifError unless that is above 0, or if the recording has nothing to divide them by.
    """
    if gradient_mb is None:
        return graph
    size_bytes = np.asarray(graph.attached[GRADIENTS], dtype=np.float64)
    total_bytes = checked_bytes(gradient_mb, name)
    _check_known(graph, name)
    steps = np.count_nonzero(size_bytes) / len(np.unique(ranks_of(graph)[size_bytes > 0]))
    scaled = size_bytes * (total_bytes * steps / size_bytes.sum())
    return graph.attach(**{GRADIENTS: np.rint(scaled).astype(np.int64)})


def _check_known(graph: TaskGraph, name: str) -> None:
    if not np.asarray(graph.attached[GRADIENTS]).any():
        raise WhatifError(
            f"{name}: {graph.info.path or 'this recording'} lacks the gradients of its layers, which the stages "
            "exchange; `whatif collect` records them."
        )


def exchange_of_stages(graph: TaskGraph, name: str, network: Network, *, sharded: bool = False) -> TaskGraph:
    """Return the pipeline as one of as many replicas as ``network`` has workers, which exchange gradients by stage.

    After its last backward pass a stage all-reduces its gradients, and then updates. ``sharded``: it reduce-scatters
    them, updates its part, and gathers the parameters, which its next step waits for. Raises WhatifError if the
    recording does not give the gradients.
    """
    _check_known(graph, name)
    graph = with_slowest(graph, network)
    size_bytes = np.asarray(graph.attached[GRADIENTS], dtype=np.int64)
    if sharded:
        update = (graph.phase == Phase.UPDATE) & (graph.kind == graph.kernel_kind)
        graph = graph.scale(update, 1 / network.workers)
    for stage in np.unique(ranks_of(graph)[size_bytes > 0]).tolist():
        ends = _ends(graph, stage)
        rows = _rows(graph, ends, np.asarray(graph.attached[GRADIENTS])[ends.backward], sharded=sharded)
        graph = exchange(graph, rows, network, CHANNEL.format(stage=stage), BUCKET_CALL)
    return graph


def sharded_stages(graph: TaskGraph, name: str, network: Network) -> TaskGraph:
    """Return the pipeline as one of as many replicas as ``network`` has workers, which share its state (ZeRO-1).

    Raises as ``exchange_of_stages``.
    """
    graph = exchange_of_stages(graph, name, network, sharded=True)
    found = [with_sharded_state(memory, network.workers) for memory in graph.info.stages]
    return with_workers(_with_stages(graph, name, found), network.workers)


def copied_stages(graph: TaskGraph, name: str, network: Network, gradient_mb: float | None) -> TaskGraph:
    """Return the pipeline as one of as many replicas as ``network`` has workers, with all-reduces of each stage.

    The memory of each stage includes a second copy of its gradients. Raises as ``with_gradient_bytes``.
    """
    graph = exchange_of_stages(with_gradient_bytes(graph, gradient_mb, name), name, network)
    size_bytes, ranks = np.asarray(graph.attached[GRADIENTS]), ranks_of(graph)
    found = [with_buckets(memory, int(size_bytes[ranks == k].max())) for k, memory in enumerate(graph.info.stages)]
    return with_workers(_with_stages(graph, name, found), network.workers).note(
        f"{name}: each stage all-reduces its gradients among {network.workers} copies of the pipeline after its last "
        f"backward pass, network: {network.described}; the batch is per copy"
    )


def _with_stages(graph: TaskGraph, name: str, found: list[Memory]) -> TaskGraph:
    """The graph with the memory of its stages, and a note if another one is then the fullest."""
    if not found:
        return graph
    before, now = (fullest(memories)[0] for memories in (graph.info.stages, found))
    graph = with_stages(graph, found)
    return graph if before == now else graph.note(f"{name}: `memory` reports stage {now}, now the fullest one")


def _ends(graph: TaskGraph, stage: int) -> _Ends:
    work = np.flatnonzero((ranks_of(graph) == stage) & (graph.kind == graph.kernel_kind))
    backward = work[np.asarray(graph.attached[GRADIENTS])[work] > 0]

    def next_of(phase: Phase, behind: Int64) -> Int64:
        tasks = work[graph.phase[work] == phase]
        place = np.searchsorted(tasks, behind)
        return np.append(tasks, -1)[np.minimum(place, len(tasks))].astype(np.int64)

    edges = graph.dependencies
    sums = of_activations(graph)[edges.target] & (ranks_of(graph)[edges.target] == stage)
    summed = np.full(len(graph), -1, dtype=np.int64)
    summed[edges.source[sums]] = edges.target[sums]
    return _Ends(backward, summed[backward], next_of(Phase.UPDATE, backward), next_of(Phase.FORWARD, backward))


def _rows(graph: TaskGraph, ends: _Ends, size_bytes: Int64, *, sharded: bool) -> list[Exchange]:
    rows: list[Exchange] = []
    for size, *tasks in zip(size_bytes.tolist(), *(column.tolist() for column in ends), strict=True):
        backward, summed, update, forward = tasks
        ready = (backward, summed) if summed >= 0 else (backward,)
        known = [task for task in (backward, update) if task >= 0]
        calls = calls_of(graph, np.array(known)).tolist() if graph.has_gpu else known
        if update >= 0:  # the backward pass's message to the stage before comes first
            calls[0] = int(task_before(graph, np.array(calls[-1:]))[0])
        waiting = (update,) if update >= 0 else ()
        operation = "reduce_scatter" if sharded else "all_reduce"
        rows.append(Exchange(operation, size, calls[0], Phase.BACKWARD, ready, waiting))
        if sharded and update >= 0:
            behind = (forward,) if forward >= 0 else ()
            rows.append(Exchange("all_gather", size, calls[-1], Phase.UPDATE, (update,), behind))
    return rows
