"""Collectives as tasks: their model columns, the range of their times, and the CPU time of a call.

A transfer that a what-if inserted or replaced has two attached columns: ``LATENCY``, the part of its duration that no
bandwidth shortens, and ``WORKERS``, the number of participants. Later what-ifs derive the duration's model from them.
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
    Anchor,
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
# The CPU work of the exchange with parameter servers, on the core of a CPU's step.
SOCKETS = "sending and receiving"
# What-ifs that reissue the collectives of a recording of several workers for another number of workers.
FROM_MANY = ("distributed", "zero", "fsdp")
FAMILY = int(KernelFamily.COMMUNICATION)
# Daydream §6.5 and figure 9: NCCL's all-reduces took 34 % more than theory on average beside other kernels, and about
# the theoretical time alone; a synchronisation before each recovered 22.8 % of their time.
OVERLAPPED, SYNCHRONISED = 1.34, 1.34 * (1 - 0.228)
# The median c10d::allreduce_ in the recording of a ResNet under DDP on an MI300X (TraceLens), profiler included.
CALL_NS = 55_000
# Without the profiler, on a faster CPU: our estimate.
CALL_LOW_NS = 20_000


def estimated(cost: Cost, slowest: float = OVERLAPPED) -> Estimates:
    """Return the durations of collectives: theory, with an upper end of ``slowest`` times that."""
    return Estimates.of(cost.total_ns, Source.PAPER, cost.total_ns, cost.total_ns * slowest)


def add_channel(graph: TaskGraph, name: str, *, ordered: bool) -> tuple[TaskGraph, int]:
    """Return the graph with a channel ``name``, and its code; unless ``ordered``, it runs tasks as they get ready."""
    return add_thread(graph, Thread(name, ThreadKind.CHANNEL, ordered=ordered))


def attach_model(graph: TaskGraph, tasks: npt.NDArray[Any], parts: Parts, workers: int) -> TaskGraph:
    """Attach the model of the durations of the transfers ``tasks`` (ids)."""
    latency, count = (column.copy() for column in (latency_of(graph), workers_of(graph)))
    source = sources(graph).copy()
    latency[tasks], count[tasks], source[tasks] = np.rint(parts.latency_ns).astype(np.int64), workers, int(Source.PAPER)
    columns: dict[str, npt.NDArray[Any]] = {LATENCY: latency, WORKERS: count, ESTIMATED: source}
    return with_parts(graph.attach(**columns), tasks, parts)


def with_workers(graph: TaskGraph, workers: int) -> TaskGraph:
    """Return the graph as that of one of ``workers`` replicas of the model, each with its batch."""
    return graph.replace(info=replace(graph.info, workers=workers))


def exchanging(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the communication among workers: all but that of activations."""
    return np.asarray((graph.kind == TaskKind.COMMUNICATION) & ~of_activations(graph), dtype=np.bool_)


def exchange_tasks(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the exchange among workers: collectives, pushes and pulls.

    On a CPU also the CPU time that sending and receiving takes from the step, in calls such as "c10d::allreduce_": it
    can be longer than the network's. Not the activations that devices pass on, launches on a GPU, and copies into and
    out of buckets.
    """
    found = exchanging(graph)
    if not graph.has_gpu:
        d = graph.dependencies
        found[d.source[(d.anchor == Anchor.START) & found[d.target]]] = True
        found |= graph.select(name=f"^{SOCKETS}$").mask
    return found


def communicates(graph: TaskGraph) -> bool:
    """Return whether the steps exchange gradients: by their tasks, or on a CPU by the recorder's metadata."""
    return bool(exchanging(graph).any()) or _reported_workers(graph) is not None


def check_exchanges_nothing(graph: TaskGraph, name: str, *, updates: bool = True) -> None:
    """Raise WhatifError if the steps exchange gradients: the what-if ``name`` needs those of one worker.

    ``updates``: also if the update is not after the backward pass, so that it could not wait for an exchange.
    """
    if updates and Change.UPDATES_IN_BACKWARD in graph.info.changes:
        raise WhatifError(
            f"{name}: expected an update after the backward pass, got that of optimizer_in_backward inside of it, "
            "which is modelled for one device; leave one of the two out."
        )
    if communicates(graph):
        # With several ranks the recorded collectives have workers, too.
        put_in = bool(((workers_of(graph) > 0) & (graph.start_ns < 0)).any())
        remedy = "name it before the what-if that added this" if put_in else "record one worker"
        if not put_in and name in FROM_MANY:
            several = bool((graph.kind == TaskKind.COMMUNICATION).any())
            remedy += ", or " + ("set the number of workers (workers=8)" if several else "name the files of all ranks")
        raise WhatifError(f"{name}: expected steps that exchange no gradients yet, got some that do; {remedy}.")


def recorded_workers(graph: TaskGraph) -> int | None:
    """Return the number of workers of a recording of data parallel training; None if it is not recorded."""
    several = graph.info.workers if (graph.info.workers or 0) > 1 else None
    return _reported_workers(graph) or several


def _reported_workers(graph: TaskGraph) -> int | None:
    ddp = graph.info.recorded.ddp
    return ddp.world_size if ddp is not None else None


def all_reduces(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the all-reduces: recorded kernels, and those inserted by ``distributed``."""
    named = np.array([collective_of(name, "") == "all_reduce" for name in graph.names], dtype=np.bool_)
    return np.asarray((graph.kind == TaskKind.COMMUNICATION) & named.take(graph.name), dtype=np.bool_)
