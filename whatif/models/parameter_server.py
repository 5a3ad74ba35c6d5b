"""Parameter servers put into the steps of one worker: slices are pushed when finished, and pulled before they are used.

A machine of the cluster has a link that sends and one that receives. With a server beside every worker (MXNet's usual
set-up, and that of Daydream §6.6) this worker's machine pushes the slices of the other servers and pulls them; of its
own server's slices it receives the pushes of all other workers and sends the sum to each. Either way that is
2 (n - 1) / n of the gradients over each link, as for a ring. With k servers on machines of their own a slice shares its
server's link with the n workers, so that it takes max(1, n / k) times as long.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from whatif.cluster.collectives import Cost, send
from whatif.cluster.links import Link
from whatif.errors import WhatifError
from whatif.graph import TaskGraph
from whatif.insert import NewTasks
from whatif.models.buckets import StepGradients, at_share, step_of
from whatif.models.collective_tasks import FAMILY, add_channel, estimated, named, tell
from whatif.models.priority import PRIORITY
from whatif.types import Bool, DependencyKind, Int64, Phase, TaskKind

PUSH, PULL = "push", "pull"
SEND_CHANNEL, RECEIVE_CHANNEL = "network, send", "network, receive"
# MXNet's MXNET_KVSTORE_BIGARRAY_BOUND: a larger array is split over all servers, a smaller one lies on one of them.
BIG_BYTES = 1_000_000 * 4
MOST_SLICES = 500_000


class Slices(NamedTuple):
    """One row a step and slice, shape (n,) each: the gradient it is cut from, its bytes, and the server that has it."""

    gradient: Int64
    size_bytes: Int64
    server: Int64


def server_slices(gradients: StepGradients, slice_bytes: int, servers: int) -> Slices:
    """Cut every gradient into slices of at most ``slice_bytes``, and deal them round the servers (P3)."""
    counts = np.maximum(-(-gradients.size_bytes // slice_bytes), 1)
    index, part = _repeated(counts)
    size = np.minimum(gradients.size_bytes[index] - part * slice_bytes, slice_bytes)
    return Slices(index, size, _dealt(gradients.step[index]) % servers)


def server_arrays(gradients: StepGradients, servers: int) -> Slices:
    """Leave every gradient whole on one of the servers, in turn, but split the big ones over all (MXNet's KVStore)."""
    big = gradients.size_bytes > BIG_BYTES
    index, part = _repeated(np.where(big, servers, 1))
    size = gradients.size_bytes[index]
    whole, rest = np.where(big[index], size // servers, size), np.where(big[index], size % servers, 0)
    return Slices(index, whole + (part < rest), np.where(big[index], part, gradients.row[index] % servers))


def _repeated(counts: Int64) -> tuple[Int64, Int64]:
    """The row of each of its parts, and the number of the part within the row."""
    if int(counts.sum()) > MOST_SLICES:
        raise WhatifError(
            f"p3: expected at most {MOST_SLICES:,} slices in all steps, got {int(counts.sum()):,}; say a larger slice."
        )
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def _dealt(step: Int64) -> Int64:
    """The number of each row within its step."""
    first = np.append(True, np.diff(step) != 0)
    return np.arange(len(step)) - np.maximum.accumulate(np.where(first, np.arange(len(step)), 0))


def without_update(graph: TaskGraph) -> TaskGraph:
    """Give the graph whose steps leave the update of the weights to the servers."""
    steps = step_of(graph)
    backward = np.flatnonzero((graph.phase == Phase.BACKWARD) & (steps >= 0))
    last = np.full(int(steps.max(initial=0)) + 2, len(graph), dtype=np.int64)
    last[np.unique(steps[backward]) + 1] = -1
    np.maximum.at(last, steps[backward] + 1, backward)
    update: Bool = (graph.phase == Phase.UPDATE) & (graph.on_gpu | graph.on_cpu)
    update = update & graph.in_optimizer if (update & graph.in_optimizer).any() else update
    update = update & (np.arange(len(graph)) > last[steps + 1])
    return graph.remove(update) if update.any() else graph


def push_and_pull(
    graph: TaskGraph,
    gradients: StepGradients,
    slices: Slices,
    workers: int,
    servers: int | None,
    link: Link,
    *,
    prioritised: bool,
) -> TaskGraph:
    """Give the graph in which every slice is pushed when its gradient is finished and pulled before its next use.

    A pull follows its push, and the first forward work of the layer in the next step follows the pull. ``servers`` is
    None for one beside each worker. ``prioritised``: the layers that are used first go first; else all are equal.
    """
    graph, sending = add_channel(graph, SEND_CHANNEL, ordered=False)
    graph, receiving = add_channel(graph, RECEIVE_CHANNEL, ordered=False)
    own = slices.server == 0 if servers is None else np.zeros(len(slices.server), dtype=np.bool_)
    shared = np.where(own, workers - 1, 1.0) if servers is None else max(1.0, workers / servers)
    cost = send(slices.size_bytes, link)
    cost = Cost(cost.latency_ns, cost.transfer_ns * shared)
    row = gradients.row[slices.gradient]
    used, rank = _first_use(graph, gradients)
    finished = gradients.task[slices.gradient]
    # The servers that are elsewhere are pushed to and pulled from; to the own one the others do so.
    channel = [np.where(own, receiving, sending), np.where(own, sending, receiving)]
    cost = Cost(*(np.tile(part, 2) for part in cost))
    # At the lower end messages are under way while others are sent, so that none holds the link up by its latency.
    times = estimated(cost)
    inserted = graph.insert(
        NewTasks(
            np.tile(finished, 2), PUSH, TaskKind.COMMUNICATION, times.duration_ns, thread=np.concatenate(channel),
            low_ns=cost.transfer_ns, high_ns=times.high_ns, size_bytes=np.tile(slices.size_bytes, 2), family=FAMILY,
            phase=Phase.BACKWARD,
        )
    )  # fmt: skip
    moved, (pushes, pulls) = inserted.moved, np.split(inserted.ids, 2)
    urgency = np.zeros(len(inserted.graph), dtype=np.int64)
    urgency[pushes] = urgency[pulls] = -rank[row] if prioritised else 0
    graph = named(inserted.graph, {PULL: pulls})
    graph = tell(graph, inserted.ids, cost.latency_ns, workers).attach(**{PRIORITY: urgency})

    # Used in the step behind that of the gradient; the last step has none.
    place = np.searchsorted(np.unique(gradients.step), gradients.step[slices.gradient]) + 1
    target = np.concatenate([used, np.full((1, used.shape[1]), -1)])[place, row]
    known = target >= 0
    return graph.add_dependencies(
        np.concatenate([moved[finished], pushes, pulls[known]]),
        np.concatenate([pushes, pulls, moved[target[known]]]),
        kind=DependencyKind.COMMUNICATION,
    )


def _first_use(graph: TaskGraph, gradients: StepGradients) -> tuple[Int64, Int64]:
    """The first forward task that needs each parameter, shape (n_steps, n_gradients), -1 where none does; their order.

    A layer without forward work of its own is needed when the forward pass begins. Where no layers are known the k-th
    gradient from the end of n belongs to what runs from k / n of the time of the forward pass on.
    """
    worker = graph.on_gpu if graph.on_gpu.any() else graph.on_cpu
    forward = worker & (graph.phase == Phase.FORWARD)
    number = step_of(graph)
    count = int(gradients.row.max()) + 1
    layer = np.full(count, -1, dtype=np.int64)
    layer[gradients.row] = gradients.layer
    steps = np.unique(gradients.step)
    used = np.full((len(steps), count), -1, dtype=np.int64)
    for place, step in enumerate(steps.tolist()):
        tasks = np.flatnonzero(forward & (number == step))
        if not len(tasks):
            continue
        if (layer < 0).all():
            share = np.arange(count)[::-1] / count
            used[place] = tasks[at_share(graph.duration_ns[tasks], share)]
            continue
        first = np.full(len(graph.layers) + 1, tasks[0], dtype=np.int64)  # the last entry is that of no layer
        present, at = np.unique(graph.layer[tasks], return_index=True)
        first[present] = tasks[at]
        used[place] = first[layer]
    complete = np.flatnonzero((used >= 0).all(axis=1))
    rank = np.unique(used[complete[0]], return_inverse=True)[1] if len(complete) else np.zeros(count)
    return used, np.asarray(rank, dtype=np.int64)
