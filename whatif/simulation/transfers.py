"""The model of a what-if's transfers: latency, number of workers and CPU work, as attached columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whatif.graph.order import each_once
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Bool, Float64, Int64

# The part of a duration that no bandwidth shortens, and how many workers exchange.
LATENCY, WORKERS = "latency ns", "workers"
# The CPU time of a transfer sent by a CPU, which no network shortens, and the part independent of the bytes.
CPU_WORK, CPU_MESSAGES = "CPU work ns", "CPU messages ns"
# The network's time of a transfer sent by a CPU, latency included.
NETWORK = "network ns"
ON_CPU = (CPU_WORK, CPU_MESSAGES, NETWORK)
# If the network is slower than the CPU, threads are woken for every few packets, and a byte costs half as much again
# (whatif.models.exchange.gloo).
WOKEN = 1.5
# Marks transfers between the parts of one model: these are no exchange of gradients, which may still be inserted.
ACTIVATIONS = "exchanges activations"
# The bytes of a pipeline stage's gradients, at the task that completes them.
GRADIENTS = "gradients of a stage"


def latency_of(graph: TaskGraph) -> Int64:
    """Return the part of each task's duration that is latency, ns, shape (n_tasks,); 0 if no what-if set it."""
    return np.asarray(graph.attached.get(LATENCY, np.zeros(len(graph), dtype=np.int64)), dtype=np.int64)


def of_activations(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the transfers between the parts of one model, inserted by what-ifs."""
    return np.asarray(graph.attached.get(ACTIVATIONS, np.zeros(len(graph), dtype=np.bool_)), dtype=np.bool_)


def workers_of(graph: TaskGraph) -> Int64:
    """Return the number of workers of each what-if's transfer, shape (n_tasks,); 0 for all other tasks."""
    return np.asarray(graph.attached.get(WORKERS, np.zeros(len(graph), dtype=np.int64)), dtype=np.int64)


def cpu_work_of(graph: TaskGraph) -> tuple[Int64, Int64]:
    """Return each transfer's work on the CPU, and its part for messages, ns, shape (n_tasks,) each; 0 if not set."""
    work, messages = (
        np.asarray(graph.attached.get(name, np.zeros(len(graph), dtype=np.int64)), dtype=np.int64)
        for name in (CPU_WORK, CPU_MESSAGES)
    )
    return work, messages


class Parts(NamedTuple):
    """Times of transfers on the network (``latency_ns`` for any bytes) and on the CPU, ns, shape (n,) each.

    ``messages_ns`` is the CPU's work for any bytes; 0 if no CPU sends.
    """

    latency_ns: Float64
    network_ns: Float64
    work_ns: Float64
    messages_ns: Float64

    @classmethod
    def of_network(cls, latency_ns: npt.ArrayLike) -> Parts:
        """Transfers not sent by a CPU, by latency alone: the rest of a duration is the network's."""
        latency = np.array(latency_ns, dtype=np.float64)
        return cls(latency, latency.copy(), np.zeros_like(latency), np.zeros_like(latency))

    @property
    def woken_ns(self) -> Float64:
        """The CPU's work if the network takes longer."""
        return self.messages_ns + WOKEN * (self.work_ns - self.messages_ns)

    @property
    def duration_ns(self) -> Float64:
        """Total durations: none is shorter than the CPU's work."""
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
        """The same with an added wait before the start, which neither bytes nor bandwidth change."""
        on_cpu_ns = wait_ns * (self.work_ns > 0)
        latency_ns = np.maximum(self.latency_ns + wait_ns, 0)
        return Parts(latency_ns, self.network_ns + wait_ns, self.work_ns + on_cpu_ns, self.messages_ns + on_cpu_ns)


def parts_of(graph: TaskGraph, transfers: Array) -> Parts:
    """Return the parts of ``transfers`` (ids or a mask); if no CPU sends, their duration is the network's."""
    work_ns, messages_ns = (column[transfers].astype(np.float64) for column in cpu_work_of(graph))
    stored_ns = graph.attached.get(NETWORK, np.zeros(len(graph)))[transfers]
    network_ns = np.where(work_ns > 0, stored_ns, graph.duration_ns[transfers]).astype(np.float64)
    return Parts(latency_of(graph)[transfers].astype(np.float64), network_ns, work_ns, messages_ns)


def with_parts(graph: TaskGraph, transfers: Array, parts: Parts) -> TaskGraph:
    """Return the graph with the ``parts`` of ``transfers`` (ids or a mask) attached, except their latency."""
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
    """Return the GPU's work, ns, between the predecessor and the successor of each of ``transfers`` (ids), shape (n,).

    ``duration_ns`` (n_tasks,): of each task. 0 if nothing lies between, and on a CPU.
    """
    place = np.full(len(graph), -1, dtype=np.int64)
    place[transfers] = np.arange(len(transfers))
    edges, work = graph.dependencies, graph.gpu_work.mask
    before, after = np.full(len(transfers), -1, dtype=np.int64), np.full(len(transfers), len(graph), dtype=np.int64)
    into, out = (place[edges.target] >= 0) & work[edges.source], (place[edges.source] >= 0) & work[edges.target]
    np.maximum.at(before, place[edges.target[into]], edges.source[into])
    np.minimum.at(after, place[edges.source[out]], edges.target[out])
    found = np.zeros(len(transfers))
    between = (before >= 0) & (after < len(graph))
    for stream in each_once(graph.thread[before[between]]):
        done_ns = np.append(0.0, np.cumsum(np.where(work & (graph.thread == stream), duration_ns, 0.0)))
        on_stream = between & (graph.thread[before] == stream)
        found[on_stream] = np.maximum(done_ns[after[on_stream]] - done_ns[before[on_stream] + 1], 0.0)
    return found
