"""Collectives as tasks: what is known of each one, how certain its time is, and what calling it costs the CPU.

A transfer that a what-if put in or replaced carries two attached columns: ``LATENCY``, the part of its duration that no
bandwidth shortens, and ``WORKERS``, how many exchange. By them a later what-if knows the model behind the duration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from whatif.graph.edit import add_thread
from whatif.graph.kernels import KernelFamily, collective_of
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Bool,
    Change,
    TaskKind,
    Thread,
    ThreadKind,
)
from whatif.hardware.cluster.collectives import Cost
from whatif.models.durations.estimator import (
    ESTIMATED,
    Estimates,
    Source,
    sources,
)
from whatif.runtime.errors import WhatifError
from whatif.simulation.transfers import LATENCY, WORKERS, Parts, latency_of, of_activations, with_parts, workers_of

ALL_REDUCE = "all-reduce"
# What-ifs that issue the collectives of a recording of several workers again for another number of them.
FROM_MANY = ("distributed", "zero", "fsdp")
FAMILY = int(KernelFamily.COMMUNICATION)
# Daydream §6.5 and figure 9: NCCL's all-reduces took 34 % more than theory on average beside other kernels, and next
# to theory alone; a synchronisation before each recovered 22.8 % of their time.
OVERLAPPED, SYNCHRONISED = 1.34, 1.34 * (1 - 0.228)
# The median c10d::allreduce_ in the recording of a ResNet under DDP on an MI300X (TraceLens), profiler included.
CALL_NS = 55_000
# Without the profiler, on a faster CPU: our estimate.
CALL_LOW_NS = 20_000


def estimated(cost: Cost, slowest: float = OVERLAPPED) -> Estimates:
    """Return the durations of collectives: theory, and ``slowest`` times as much at the upper end."""
    return Estimates.of(cost.total_ns, Source.PAPER, cost.total_ns, cost.total_ns * slowest)


def add_channel(graph: TaskGraph, name: str, *, ordered: bool) -> tuple[TaskGraph, int]:
    """Return the graph with a channel of that name, and its code; without a fixed order it runs what is ready first."""
    return add_thread(graph, Thread(name, ThreadKind.CHANNEL, ordered=ordered))


def tell(graph: TaskGraph, tasks: npt.NDArray[Any], parts: Parts, workers: int) -> TaskGraph:
    """Remember the model behind the durations of the transfers ``tasks`` (ids)."""
    latency, count = (column.copy() for column in (latency_of(graph), workers_of(graph)))
    source = sources(graph).copy()
    latency[tasks], count[tasks], source[tasks] = np.rint(parts.latency_ns).astype(np.int64), workers, int(Source.PAPER)
    columns: dict[str, npt.NDArray[Any]] = {LATENCY: latency, WORKERS: count, ESTIMATED: source}
    return with_parts(graph.attach(**columns), tasks, parts)


def with_workers(graph: TaskGraph, workers: int) -> TaskGraph:
    """Return the graph as that of one of ``workers`` copies of the model, each with a batch of its own."""
    return graph.replace(info=replace(graph.info, workers=workers))


def communicates(graph: TaskGraph) -> bool:
    """Say whether the steps exchange gradients: by their tasks, or, where a CPU sends beside them, by the recorder."""
    exchanged = (graph.kind == TaskKind.COMMUNICATION) & ~of_activations(graph)
    return bool(exchanged.any()) or _told_workers(graph) is not None


def check_exchanges_nothing(graph: TaskGraph, name: str, *, updates: bool = True) -> None:
    """Raise WhatifError where the steps exchange gradients: the what-if ``name`` needs those of one worker.

    ``updates``: also where the update is not after the backward pass, so that it could not wait for an exchange.
    """
    if updates and Change.UPDATES_IN_BACKWARD in graph.info.changes:
        raise WhatifError(
            f"{name}: expected an update after the backward pass, got that of optimizer_in_backward inside of it, "
            "which is modelled for one device; leave one of the two out."
        )
    if communicates(graph):
        # Of several ranks the recorded collectives know their workers, too.
        put_in = bool(((workers_of(graph) > 0) & (graph.start_ns < 0)).any())
        told = "name it before the what-if that added this" if put_in else "record one worker"
        if not put_in and name in FROM_MANY:
            exchanged = bool((graph.kind == TaskKind.COMMUNICATION).any())
            told += ", or " + ("set the number of workers (workers=8)" if exchanged else "name the files of all ranks")
        raise WhatifError(f"{name}: expected steps that exchange no gradients yet, got some that do; {told}.")


def recorded_workers(graph: TaskGraph) -> int | None:
    """Return the number of workers of a recording of data parallel training; None where it does not tell."""
    several = graph.info.workers if (graph.info.workers or 0) > 1 else None
    return _told_workers(graph) or several


def _told_workers(graph: TaskGraph) -> int | None:
    ddp = graph.info.recorded.ddp
    return ddp.world_size if ddp is not None else None


def all_reduces(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the all-reduces: recorded kernels, and those that ``distributed`` put in."""
    named = np.array([collective_of(name, "") == "all_reduce" for name in graph.names], dtype=np.bool_)
    return np.asarray((graph.kind == TaskKind.COMMUNICATION) & named.take(graph.name), dtype=np.bool_)
