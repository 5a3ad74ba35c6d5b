"""Parameter servers inserted into the steps of one worker: slices are pushed when ready and pulled before use.

A machine of the cluster has a link that sends and one that receives. With a server beside every worker (MXNet's usual
set-up, and that of Daydream §6.6) this worker's machine sends gradients to the other servers, and the sums of its
server to all others: together 2 (n - 1) / n of the gradients over each link, as for a ring. So every slice sends that
multiple of its bytes, whichever server has it: all servers count as equally busy. With k servers on separate machines a
slice shares its server's link with the n workers, so that it takes max(1, n / k) times as long.

A server's CPU may add up a slice of all workers and update the weights: one slice after the other, on a channel that
represents the CPU. On a GPU gradients and weights are copied over the host's link (``Copies``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from whatif.graph.columns import concatenated
from whatif.graph.insert import NewTasks
from whatif.graph.order import each_once
from whatif.graph.structure_cache import of_graph
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Bool,
    DependencyKind,
    Int64,
    Phase,
    TaskKind,
)
from whatif.hardware.cluster.collectives import Cost
from whatif.hardware.cluster.network import Network
from whatif.models.durations.estimator import (
    Estimates,
    Source,
    host_copies,
    mark,
)
from whatif.models.durations.memory_rate import CPU_COPY_GBYTE_S, memory_gbyte_s
from whatif.models.exchange import gloo
from whatif.models.exchange.buckets import StepGradients, at_share
from whatif.models.exchange.collective_tasks import (
    FAMILY,
    SOCKETS,
    add_channel,
    attach_model,
    estimated,
)
from whatif.models.exchange.next_step import with_next_step
from whatif.models.exchange.priority import PRIORITY
from whatif.models.exchange.stragglers import with_slowest
from whatif.models.layers.columns import named
from whatif.models.layers.gradients import step_of
from whatif.runtime.errors import WhatifError
from whatif.simulation.transfers import Parts

PUSH, PULL, REDUCE = "push", "pull", "reduce and update"
TO_HOST, TO_GPU = "Memcpy DtoH (gradients, what-if)", "Memcpy HtoD (weights, what-if)"
SERVER_CHANNEL = "parameter server, CPU"
SEND_CHANNEL, RECEIVE_CHANNEL = "network, send", "network, receive"
# MXNet's MXNET_KVSTORE_BIGARRAY_BOUND: a larger array is split over all servers, a smaller one lies on one of them.
BIG_BYTES = 1_000_000 * 4
MOST_SLICES = 500_000


class Slices(NamedTuple):
    """One row per step and slice, shape (n,) each: the gradient it is cut from, and its bytes."""

    gradient: Int64
    size_bytes: Int64


def server_slices(gradients: StepGradients, slice_bytes: int) -> Slices:
    """Cut every gradient into slices of at most ``slice_bytes`` (P3)."""
    counts = np.maximum(-(-gradients.size_bytes // slice_bytes), 1)
    index, part = _repeated(counts)
    return Slices(index, np.minimum(gradients.size_bytes[index] - part * slice_bytes, slice_bytes))


def server_arrays(gradients: StepGradients, servers: int) -> Slices:
    """Split large gradients over all servers and leave the others whole (MXNet's KVStore)."""
    big = gradients.size_bytes > BIG_BYTES
    index, part = _repeated(np.where(big, servers, 1))
    size = gradients.size_bytes[index]
    whole, rest = np.where(big[index], size // servers, size), np.where(big[index], size % servers, 0)
    return Slices(index, whole + (part < rest))


def _repeated(counts: Int64) -> tuple[Int64, Int64]:
    """The row of each part, and the part's number within the row."""
    if int(counts.sum()) > MOST_SLICES:
        raise WhatifError(
            f"parameter server: expected at most {MOST_SLICES:,} slices in all steps, got {int(counts.sum()):,}; say a "
            "larger slice_size, or fewer servers."
        )
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


@of_graph
def updated_by_servers(graph: TaskGraph) -> TaskGraph:
    """Return the graph whose weights are updated by the servers.

    A recording of one step becomes two: the servers' transfers decide when the next step can continue.
    """
    steps = step_of(graph)
    backward = np.flatnonzero((graph.phase == Phase.BACKWARD) & (steps >= 0))
    last = np.full(int(steps.max(initial=0)) + 2, len(graph), dtype=np.int64)
    last[steps[backward] + 1] = backward  # the last write wins if a step has several tasks
    update: Bool = (graph.phase == Phase.UPDATE) & (graph.on_gpu | graph.on_cpu)
    update = update & graph.in_optimizer if (update & graph.in_optimizer).any() else update
    update = update & (np.arange(len(graph)) > last[steps + 1])
    return with_next_step(graph.remove(update) if update.any() else graph)


def push_and_pull(
    graph: TaskGraph,
    gradients: StepGradients,
    slices: Slices,
    network: Network,
    servers: int | None,
    *,
    prioritised: bool,
    reduced: bool = False,
    link_share: int = 0,
    waited_for: bool = True,
) -> TaskGraph:
    """Return the graph in which every slice is pushed when its gradient is ready and pulled before its next use.

    A pull follows its push, and the first forward work of the layer in the next step follows the pull. ``servers``:
    None for one beside each worker. ``prioritised``: layers used first are sent first; else all are equal. ``reduced``:
    a server's CPU adds up and updates between push and pull. ``link_share``: on a GPU, the number of workers that share
    the link to the host over which gradients and weights are copied; 0 omits these copies. ``waited_for``: if not, the
    forward work of the next step uses older weights, and the step after it waits.
    """
    workers, graph = network.workers, with_slowest(graph, network)
    if not graph.has_gpu:
        through = 1.0 if servers else 2 * (workers - 1) / workers
        graph, gradients = _with_sockets(graph, gradients, through)
    graph, sending = add_channel(graph, SEND_CHANNEL, ordered=False)
    graph, receiving = add_channel(graph, RECEIVE_CHANNEL, ordered=False)
    shared = 2 * (workers - 1) / workers if servers is None else max(1.0, workers / servers)
    cost = network.cost("send", slices.size_bytes)
    cost = Cost(cost.latency_ns, cost.transfer_ns * shared)
    row = gradients.row[slices.gradient]
    used, rank = _first_use(graph, gradients)
    finished = gradients.task[slices.gradient]
    channel = [np.full(len(row), one) for one in (sending, receiving)]
    # At the lower end messages overlap, so that their latency does not occupy the link.
    times = estimated(cost)
    times = Estimates.of(times.duration_ns, times.source, cost.transfer_ns, times.high_ns)
    stages = [_Stage(PUSH, channel[0], times, cost), _Stage(PULL, channel[1], times, cost)]
    if reduced:
        graph, cpu = add_channel(graph, SERVER_CHANNEL, ordered=False)
        stages.insert(1, _Stage(REDUCE, np.full(len(row), cpu), _reducing(graph, slices, workers, servers), None))
    if link_share and graph.has_gpu:
        graph, out = add_channel(graph, TO_HOST, ordered=False)
        graph, back = add_channel(graph, TO_GPU, ordered=False)
        copies = host_copies(graph, slices.size_bytes * link_share)
        stages = [_Stage(TO_HOST, np.full(len(row), out), copies, None), *stages]
        stages.append(_Stage(TO_GPU, np.full(len(row), back), copies, None))

    # Used in the step after the gradient's; the last step has none.
    place = np.searchsorted(each_once(gradients.step), gradients.step[slices.gradient]) + (1 if waited_for else 2)
    target = np.concatenate([used, np.full((2, used.shape[1]), -1)])[place, row]
    urgency = -rank[row] if prioritised else np.zeros(len(row), dtype=np.int64)
    return _in_stages(graph, stages, slices, finished, target, urgency, workers)


def _with_sockets(graph: TaskGraph, gradients: StepGradients, through: float) -> tuple[TaskGraph, StepGradients]:
    """Add the CPU time of sending and receiving to the core of the step, where each gradient is completed.

    ``through`` times the gradients pass the worker's machine in each direction, including those of its server.
    """
    time_ns = gloo.passing_ns(graph, gradients.size_bytes * through)
    inserted = graph.insert(
        NewTasks(
            gradients.task, SOCKETS, TaskKind.CPU_OP, time_ns, phase=Phase.BACKWARD,
            low_ns=time_ns / gloo.SPREAD, high_ns=time_ns * gloo.SPREAD,
        )
    )  # fmt: skip
    task = inserted.moved[gradients.task].astype(np.int64)
    return mark(inserted.graph, inserted.ids, Source.ASSUMED), gradients._replace(task=task)


class _Stage(NamedTuple):
    """A stage of every slice: its name, each slice's channel and time, and the cost if it is a transfer."""

    name: str
    channel: Int64
    times: Estimates
    cost: Cost | None


def _in_stages(
    graph: TaskGraph, stages: list[_Stage], slices: Slices, finished: Int64, target: Int64, urgency: Int64, workers: int
) -> TaskGraph:
    """Insert all stages of all slices: each follows the previous, the first its gradient, and ``target`` the last."""
    count = len(finished)
    times = concatenated([stage.times for stage in stages])
    inserted = graph.insert(
        NewTasks(
            np.tile(finished, len(stages)), stages[0].name, TaskKind.COMMUNICATION, times.duration_ns,
            thread=np.concatenate([stage.channel for stage in stages]), low_ns=times.low_ns, high_ns=times.high_ns,
            size_bytes=np.tile(slices.size_bytes, len(stages)), family=FAMILY, phase=Phase.BACKWARD,
        )
    )  # fmt: skip
    moved, ids = inserted.moved, inserted.ids.reshape(len(stages), count)
    priority = np.zeros(len(inserted.graph), dtype=np.int64)
    priority[ids] = urgency
    graph = named(inserted.graph, {stage.name: ids[number] for number, stage in enumerate(stages)})
    for number, stage in enumerate(stages):
        # Work other than transfers counts as latency: no network bandwidth shortens it.
        latency_ns = stage.times.duration_ns if stage.cost is None else stage.cost.latency_ns
        graph = attach_model(graph, ids[number], Parts.of_network(latency_ns), workers)
    graph = graph.attach(**{PRIORITY: priority})
    known = target >= 0
    return graph.add_dependencies(
        np.concatenate([moved[finished], ids[:-1].ravel(), ids[-1][known]]),
        np.concatenate([ids[0], ids[1:].ravel(), moved[target[known]]]),
        kind=DependencyKind.COMMUNICATION,
    )


# Plain SGD reads a weight and writes it; our count.
UPDATE_ACCESSES = 2


def _reducing(graph: TaskGraph, slices: Slices, workers: int, servers: int | None) -> Estimates:
    """A server's CPU time for a slice: it reads all workers' gradients and writes their sum, then updates.

    (Pei et al., §III D.) At the rate of a copy, which reads, fetches and writes. Servers share the slices, so that this
    worker's slices meet one that is busy with its share alone.
    """
    rate = CPU_COPY_GBYTE_S if graph.has_gpu else memory_gbyte_s(graph, None)
    machines = workers if servers is None else servers
    time_ns = slices.size_bytes * (workers + 1 + UPDATE_ACCESSES) / 3 / rate / machines
    return Estimates.of(time_ns, Source.ASSUMED, time_ns / 2, time_ns * 2)


def _first_use(graph: TaskGraph, gradients: StepGradients) -> tuple[Int64, Int64]:
    """The first forward task that needs each parameter, shape (n_steps, n_gradients), -1 if none; their order.

    A layer without forward work is needed when the forward pass begins. Without known layers the k-th of n gradients
    from the end belongs to the work from k / n of the forward pass's time on.
    """
    worker = graph.on_device
    forward = worker & (graph.phase == Phase.FORWARD)
    number = step_of(graph)
    count = int(gradients.row.max()) + 1
    layer = np.full(count, -1, dtype=np.int64)
    layer[gradients.row] = gradients.layer
    steps = each_once(gradients.step)
    used = np.full((len(steps), count), -1, dtype=np.int64)
    for place, step in enumerate(steps.tolist()):
        tasks = np.flatnonzero(forward & (number == step))
        if not len(tasks):
            continue
        if (layer < 0).all():
            share = np.arange(count)[::-1] / count
            used[place] = tasks[at_share(graph.duration_ns[tasks], share)]
            continue
        first = np.full(len(graph.layers) + 1, tasks[0], dtype=np.int64)  # the last entry: no layer
        present, at = np.unique(graph.layer[tasks], return_index=True)
        first[present] = tasks[at]
        used[place] = first[layer]
    complete = np.flatnonzero((used >= 0).all(axis=1))
    rank = np.unique(used[complete[0]], return_inverse=True)[1] if len(complete) else np.zeros(count)
    return used, np.asarray(rank, dtype=np.int64)
