"""All-reduces decomposed into stages over groups of workers (BlueConnect), each on a separate channel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from whatif.graph.insert import NewTasks
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    DependencyKind,
    Float64,
    Int64,
    TaskKind,
    among,
)
from whatif.models.exchange.collective_tasks import (
    CALL_LOW_NS,
    CALL_NS,
    FAMILY,
    OVERLAPPED,
    add_channel,
    attach_model,
)
from whatif.models.layers.columns import named, with_values
from whatif.runtime.errors import WhatifError
from whatif.simulation.transfers import Parts, parts_of
from whatif.units import Bandwidth

SCATTER, GATHER = "reduce-scatter", "all-gather"


def flat_byte_s(graph: TaskGraph, tasks: Int64, workers: int, bandwidth: Bandwidth | None) -> Float64:
    """Return the links' rate by size and time of ring all-reduces, bytes/s; ``bandwidth`` if no size is known.

    Raises WhatifError if neither is known.
    """
    parts = parts_of(graph, tasks)
    transfer_ns = np.maximum(parts.network_ns - parts.latency_ns, 1)
    size = np.where(graph.size_bytes[tasks] >= 0, np.maximum(graph.size_bytes[tasks], 1), np.nan)
    rate = np.asarray(2 * (workers - 1) / workers * size / transfer_ns * 1e9, dtype=np.float64)
    if np.isnan(rate).any() and bandwidth is None:
        raise WhatifError(
            "blueconnect: this recording lacks the sizes of its all-reduces, so their links are unknown; "
            "say the bandwidth of the slowest one, as in blueconnect:bandwidth=25Gbps."
        )
    return rate if bandwidth is None else np.where(np.isnan(rate), bandwidth.byte_s, rate)


def decompose(
    graph: TaskGraph, tasks: Int64, factors: list[int], faster: Sequence[Float64 | float], *, shared: Sequence[bool]
) -> TaskGraph:
    """Return the graph in which each ring all-reduce of ``tasks`` (ids) goes through groups of ``factors`` workers.

    Stage i reduce-scatters the output of stage i - 1 among p workers on its channel, leaving 1 / p of it; then as many
    stages gather, in reverse. ``faster``: the rate of each factor's links relative to the flat ring, one number or one
    per task. ``shared``, for each factor: the workers below a stage share its links, which then carry as much as if
    nothing had been scattered.
    """
    workers, n, k = math.prod(factors), len(tasks), len(factors)
    levels = [*range(k), *reversed(range(k))]
    parts, size = _costs(graph, tasks, factors, faster, shared=shared)
    parts, size = Parts(*(column[levels] for column in parts)), size[levels]
    duration_ns = parts.duration_ns
    channels = []
    for level, factor in enumerate(factors):
        graph, channel = add_channel(graph, f"network, stage {level + 1} of {factor} workers", ordered=False)
        channels.append(channel)
    thread = np.array(channels)[levels]

    # The first stage takes the place of the all-reduce and keeps its predecessors. On its stream it also waited for the
    # task before it, and non-collectives after it waited for it.
    launch = graph.launch_of[tasks]
    ahead, following = (beside[tasks].astype(np.int64) for beside in graph.neighbours)
    held_back = (ahead >= 0) & (graph.kind[ahead] != TaskKind.COMMUNICATION)
    holds_back = (following >= 0) & ~among(graph.kind[following], (TaskKind.COMMUNICATION, TaskKind.WAIT))
    more = 2 * k - 1
    inserted = graph.insert(
        NewTasks(
            np.repeat(tasks, more), GATHER, TaskKind.COMMUNICATION, duration_ns[1:].T.ravel(),
            thread=np.tile(thread[1:], n), size_bytes=size[1:].T.ravel(), family=FAMILY,
            launched_after=np.repeat(launch, more) if (launch >= 0).all() else None,
            launch_name="stage of an all-reduce", launch_ns=CALL_NS,
        )
    )  # fmt: skip
    calls, first = inserted.launches, inserted.moved[tasks]
    graph = inserted.graph.with_duration(calls, CALL_NS, low_ns=CALL_LOW_NS)
    stage_ids = np.concatenate([first[:, None], inserted.ids.reshape(n, more)], axis=1)
    names = {f"{SCATTER} among {p}": stage_ids[:, [i for i in range(k) if factors[i] == p]] for p in factors}
    names |= {
        f"{GATHER} among {p}": stage_ids[:, [2 * k - 1 - i for i in range(k) if factors[i] == p]] for p in factors
    }
    # The former all-reduces are the first stage.
    graph = with_values(named(graph, names), first, thread=channels[0], size_bytes=size[0])
    graph = graph.with_duration(stage_ids.T, duration_ns, low_ns=duration_ns, high_ns=duration_ns * OVERLAPPED)
    graph = attach_model(graph, stage_ids.T, parts, workers)
    last = np.arange(len(graph), dtype=np.int32)
    last[first] = stage_ids[:, -1]
    graph = graph.replace(dependencies=replace(graph.dependencies, source=last[graph.dependencies.source]))
    moved = inserted.moved
    return graph.add_dependencies(
        np.concatenate([stage_ids[:, :-1].ravel(), moved[ahead[held_back]], stage_ids[holds_back, -1]]),
        np.concatenate([stage_ids[:, 1:].ravel(), first[held_back], moved[following[holds_back]]]),
        kind=DependencyKind.COMMUNICATION,
    )


def _costs(
    graph: TaskGraph, tasks: Int64, factors: list[int], faster: Sequence[Float64 | float], *, shared: Sequence[bool]
) -> tuple[Parts, Int64]:
    """The cost of each factor's stage, and the bytes that its group begins with, (n_factors, n)."""
    workers = math.prod(factors)
    flat = parts_of(graph, tasks)
    # A ring of all takes 2 (n - 1) hops, and its transfer takes 2 (n - 1) / n of the time of the whole buffer on one
    # link; the same holds for the CPU's messages and copies.
    below = [math.prod(factors[:level]) for level in range(len(factors))]
    hops = np.array([p - 1 for p in factors])[:, None] / (2 * (workers - 1))
    carried = np.array([(p - 1) / p / parts for p, parts in zip(factors, below, strict=True)])[:, None]
    carried = carried * workers / (2 * (workers - 1))
    times = np.stack([
        (parts if together else 1) / np.broadcast_to(rate, len(tasks))
        for parts, rate, together in zip(below, faster, shared, strict=True)
    ])  # fmt: skip
    latency_ns, messages_ns = hops * flat.latency_ns, hops * flat.messages_ns
    network_ns = latency_ns + carried * times * (flat.network_ns - flat.latency_ns)
    work_ns = messages_ns + carried * (flat.work_ns - flat.messages_ns)
    size = graph.size_bytes[tasks]
    return (
        Parts(latency_ns, network_ns, work_ns, messages_ns),
        np.stack([np.where(size >= 0, size // parts, -1) for parts in below]),
    )
