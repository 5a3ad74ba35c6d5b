"""What is known of a transfer that a what-if made: its latency and its number of workers, as attached columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whatif.graph.order import each_once
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Bool, Float64, Int64, TaskKind

# The part of a duration that no bandwidth shortens, and how many workers exchange.
LATENCY, WORKERS = "latency ns", "workers"
# What a transfer takes the CPU that sends it, which no network shortens, and of that what is the same for any bytes.
CPU_WORK, CPU_MESSAGES = "CPU work ns", "CPU messages ns"
# What the network alone takes for one that a CPU sends, latency included.
NETWORK = "network ns"
ON_CPU = (CPU_WORK, CPU_MESSAGES, NETWORK)
# Where the network needs longer than the CPU, threads are woken for every few packets, and a byte costs half as much
# again (whatif.models.exchange.gloo).
WOKEN = 1.5
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


def cpu_work_of(graph: TaskGraph) -> tuple[Int64, Int64]:
    """Return each transfer's work on the CPU, and its part for messages, ns, shape (n_tasks,) each; 0 if not set."""
    work, messages = (
        np.asarray(graph.attached.get(name, np.zeros(len(graph), dtype=np.int64)), dtype=np.int64)
        for name in (CPU_WORK, CPU_MESSAGES)
    )
    return work, messages


class Parts(NamedTuple):
    """What transfers take the network, ``latency_ns`` of it for any bytes, and the CPU, ns, shape (n,) each.

    The CPU's work is ``messages_ns`` for any bytes; 0 where no CPU sends.
    """

    latency_ns: Float64
    network_ns: Float64
    work_ns: Float64
    messages_ns: Float64

    @classmethod
    def of_network(cls, latency_ns: npt.ArrayLike) -> Parts:
        """What no CPU sends, of which the latency alone is told: the rest of a duration is the network's."""
        latency = np.array(latency_ns, dtype=np.float64)
        return cls(latency, latency.copy(), np.zeros_like(latency), np.zeros_like(latency))

    @property
    def woken_ns(self) -> Float64:
        """The CPU's work where the network needs longer."""
        return self.messages_ns + WOKEN * (self.work_ns - self.messages_ns)

    @property
    def duration_ns(self) -> Float64:
        """What they take together: none is shorter than the CPU's work, whatever the network."""
        waits = self.network_ns > self.work_ns
        return np.where(waits, np.maximum(self.network_ns, self.woken_ns), self.work_ns).astype(np.float64)

    def over(self, factor: float) -> Parts:
        """The same over ``factor`` times the bandwidth."""
        return self._replace(network_ns=self.latency_ns + (self.network_ns - self.latency_ns) / factor)

    def grown(self, factor: float | Float64) -> Parts:
        """The same with ``factor`` times the bytes."""
        copies_ns = (self.work_ns - self.messages_ns) * factor
        network_ns = self.latency_ns + (self.network_ns - self.latency_ns) * factor
        return Parts(self.latency_ns, network_ns, self.messages_ns + copies_ns, self.messages_ns)

    def in_steps(self, factor: float) -> Parts:
        """The same in ``factor`` times the steps and messages."""
        latency_ns, messages_ns = self.latency_ns * factor, self.messages_ns * factor
        network_ns = self.network_ns - self.latency_ns + latency_ns
        return Parts(latency_ns, network_ns, self.work_ns - self.messages_ns + messages_ns, messages_ns)

    def waiting(self, wait_ns: Float64 | Int64) -> Parts:
        """The same with so much more that passes before they start, which neither bytes nor bandwidth change."""
        on_cpu_ns = wait_ns * (self.work_ns > 0)
        latency_ns = np.maximum(self.latency_ns + wait_ns, 0)
        return Parts(latency_ns, self.network_ns + wait_ns, self.work_ns + on_cpu_ns, self.messages_ns + on_cpu_ns)


def parts_of(graph: TaskGraph, transfers: Array) -> Parts:
    """Return the parts of ``transfers`` (ids or a mask); where no CPU sends, the network takes their duration."""
    work_ns, messages_ns = (column[transfers].astype(np.float64) for column in cpu_work_of(graph))
    told_ns = graph.attached.get(NETWORK, np.zeros(len(graph)))[transfers]
    network_ns = np.where(work_ns > 0, told_ns, graph.duration_ns[transfers]).astype(np.float64)
    return Parts(latency_of(graph)[transfers].astype(np.float64), network_ns, work_ns, messages_ns)


def with_parts(graph: TaskGraph, transfers: Array, parts: Parts) -> TaskGraph:
    """Return the graph that knows those ``parts`` of ``transfers`` (ids or a mask), but for their latency."""
    if CPU_WORK not in graph.attached and not np.any(parts.work_ns):
        return graph
    columns = {name: np.array(graph.attached.get(name, np.zeros(len(graph), dtype=np.int64))) for name in ON_CPU}
    network_ns = np.where(parts.work_ns > 0, parts.network_ns, 0)
    for column, values in zip(columns.values(), (parts.work_ns, parts.messages_ns, network_ns), strict=True):
        column[transfers] = np.rint(values)
    return graph.attach(**columns)


def grown_ns(graph: TaskGraph, transfers: Array, time_ns: Float64, factor: float | Float64) -> Float64:
    """Return the ``time_ns`` of ``transfers`` (ids or a mask), shape (n,), with ``factor`` times the bytes.

    The latency of the network stays, and so do the messages that the CPU sends.
    """
    parts = parts_of(graph, transfers)
    latency_ns = np.minimum(parts.latency_ns, time_ns)
    by_network = latency_ns + (time_ns - latency_ns) * factor
    by_cpu = time_ns * parts.grown(factor).duration_ns / np.maximum(parts.duration_ns, 1)
    return np.asarray(np.where(parts.work_ns > 0, by_cpu, by_network), dtype=np.float64)


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
