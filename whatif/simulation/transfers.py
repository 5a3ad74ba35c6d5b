"""What is known of a transfer that a what-if made: its latency and its number of workers, as attached columns."""

from __future__ import annotations

import numpy as np

from whatif.graph.order import each_once
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Float64, Int64, TaskKind

# The part of a duration that no bandwidth shortens, and how many workers exchange.
LATENCY, WORKERS = "latency ns", "workers"
# Of transfers between the parts of one model: they are no exchange of gradients, which may still be put in.
ACTIVATIONS = "exchanges activations"
# The bytes of a pipeline stage's gradients, beside the task with which they are finished.
GRADIENTS = "gradients of a stage"


def latency_of(graph: TaskGraph) -> Int64:
    """Return the part of each task's duration that is latency, ns, shape (n_tasks,); 0 where no what-if set it."""
    return np.asarray(graph.attached.get(LATENCY, np.zeros(len(graph), dtype=np.int64)), dtype=np.int64)


def of_activations(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the transfers between the parts of one model that a what-if put in."""
    return np.asarray(graph.attached.get(ACTIVATIONS, np.zeros(len(graph), dtype=np.bool_)), dtype=np.bool_)


def workers_of(graph: TaskGraph) -> Int64:
    """Return how many workers each transfer of a what-if is between, shape (n_tasks,); 0 for all other tasks."""
    return np.asarray(graph.attached.get(WORKERS, np.zeros(len(graph), dtype=np.int64)), dtype=np.int64)


def grown_ns(time_ns: Float64, latency_ns: Int64, factor: float) -> Float64:
    """Return the times of transfers, ns, of ``factor`` times the bytes: their latency stays."""
    return np.minimum(latency_ns, time_ns) + np.maximum(time_ns - latency_ns, 0) * factor


def hidden_ns(graph: TaskGraph, transfers: Int64, duration_ns: Float64) -> Float64:
    """Return the GPU's work, ns, between what each of ``transfers`` (ids) waits for and what waits for it, shape (n,).

    ``duration_ns`` (n_tasks,): of each task. 0 where nothing lies between, and on a CPU.
    """
    place = np.full(len(graph), -1, dtype=np.int64)
    place[transfers] = np.arange(len(transfers))
    edges, work = graph.dependencies, (graph.on_gpu & (graph.kind != TaskKind.COMMUNICATION)).mask
    behind, ahead = np.full(len(transfers), -1, dtype=np.int64), np.full(len(transfers), len(graph), dtype=np.int64)
    into, out = (place[edges.target] >= 0) & work[edges.source], (place[edges.source] >= 0) & work[edges.target]
    np.maximum.at(behind, place[edges.target[into]], edges.source[into])
    np.minimum.at(ahead, place[edges.source[out]], edges.target[out])
    found = np.zeros(len(transfers))
    between = (behind >= 0) & (ahead < len(graph))
    for stream in each_once(graph.thread[behind[between]]):
        done_ns = np.append(0.0, np.cumsum(np.where(work & (graph.thread == stream), duration_ns, 0.0)))
        mine = between & (graph.thread[behind] == stream)
        found[mine] = np.maximum(done_ns[ahead[mine]] - done_ns[behind[mine] + 1], 0.0)
    return found
