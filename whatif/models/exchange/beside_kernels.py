"""The slowdown of kernels beside a collective: NCCL's kernels take multiprocessors and memory bandwidth from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from whatif.graph.insert import NewTasks
from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Phase, TaskKind
from whatif.models.durations.estimator import mark, moving
from whatif.models.exchange.collective_tasks import all_reduces
from whatif.simulation.transfers import hidden_ns, of_activations, workers_of

BESIDE = "kernels slowed by a collective"
# Bytes of memory traffic per byte of an all-reduce, without DDP's copies; half for reduce-scatter and all-gather.
# Fitted to NVIDIA's weak-scaling tables, leaving out each model in turn (benchmarks/published/weak_scaling.py).
TRAFFIC = 5.0


def slow_kernels_beside(graph: TaskGraph, *, activations: bool = False) -> TaskGraph:
    """Return the graph with the time that kernels lose to each collective of gradients that a what-if inserted.

    ``activations``: instead to collectives between the parts of a model that overlap kernels.

    Each loss is a task on the compute stream, after the collective's predecessor or before its successor. It depends on
    the bytes, not on the transfer's time: NCCL moves as many over a slow link. Collectives after the update overlap no
    kernels. On a CPU nothing changes (``gloo`` models the work of its threads).
    """
    put_in = (graph.kind == TaskKind.COMMUNICATION) & (workers_of(graph) > 1) & (of_activations(graph) == activations)
    tasks = np.flatnonzero(put_in & (graph.phase != Phase.UPDATE) & (graph.size_bytes > 0))
    if activations:
        tasks = tasks[hidden_ns(graph, tasks, graph.duration_ns.astype(np.float64)) > 0]
    if not graph.has_gpu or not len(tasks) or not TRAFFIC:
        return graph
    work, edges = graph.on_gpu & (graph.kind == TaskKind.KERNEL), graph.dependencies
    behind = np.full(len(graph), -1, dtype=np.int64)
    into = work[edges.source]
    np.maximum.at(behind, edges.target[into], edges.source[into])
    ahead = np.full(len(graph), -1, dtype=np.int64)
    out = work[edges.target]
    ahead[edges.source[out]] = edges.target[out]
    before = np.where(ahead[tasks] >= 0, graph.neighbours[0][ahead[tasks]], -1)
    place = np.where(behind[tasks] >= 0, behind[tasks], before)
    tasks, place = tasks[place >= 0], place[place >= 0]
    all_reduce = all_reduces(graph)[tasks]
    moved = _traffic_bytes(all_reduce, graph.size_bytes[tasks], workers_of(graph)[tasks])
    times = moving(graph, moved)
    inserted = graph.insert(
        NewTasks(
            place, BESIDE, TaskKind.KERNEL, times.duration_ns, low_ns=np.zeros(len(place), dtype=np.int64),
            high_ns=2 * times.duration_ns, size_bytes=moved.astype(np.int64),
            # The size of gradients does not depend on the batch.
            family=int(KernelFamily.COPY if activations else KernelFamily.OPTIMIZER),
        )
    )  # fmt: skip
    return mark(inserted.graph, inserted.ids, times.source)


def traffic_ns(graph: TaskGraph, operation: str, size_bytes: npt.ArrayLike, workers: int) -> npt.NDArray[np.float64]:
    """Return the time that a GPU's kernels lose to overlapping collectives of ``size_bytes``, ns, shape (n,)."""
    all_reduce = np.array(operation == "all_reduce")
    return np.asarray(moving(graph, _traffic_bytes(all_reduce, np.atleast_1d(size_bytes), workers)).duration_ns)


def _traffic_bytes(all_reduce: Bool, size_bytes: npt.ArrayLike, workers: npt.ArrayLike) -> npt.NDArray[np.float64]:
    count = np.asarray(workers, dtype=np.float64)
    return np.asarray(TRAFFIC * (count - 1) / count * np.asarray(size_bytes) * np.where(all_reduce, 1.0, 0.5))


def scale_traffic(graph: TaskGraph, share: float) -> TaskGraph:
    """Return the graph with that loss scaled to ``share``: the collectives are compressed."""
    named = np.array([name == BESIDE for name in graph.names], dtype=np.bool_).take(graph.name)
    return graph.scale(named, share) if named.any() else graph
