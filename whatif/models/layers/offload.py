"""Feature maps offloaded to host memory until their backward work: copied out, and prefetched. Used by ``vdnn``.

Source: Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design",
MICRO 2016, §3; Daydream (USENIX ATC 2020), Algorithm 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from whatif.graph.edit import add_dependencies, add_thread
from whatif.graph.insert import NewTasks, insert_all
from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Anchor,
    Array,
    Bool,
    Dependencies,
    DependencyKind,
    Int64,
    Phase,
    TaskKind,
    Thread,
    ThreadKind,
)
from whatif.models.durations.estimator import host_copies, mark
from whatif.models.layers.calls import operator_cost_ns, task_before
from whatif.models.layers.layer_calls import CallRole, Calls

OFFLOAD_NAME, PREFETCH_NAME = "Memcpy DtoH (vDNN offload)", "Memcpy HtoD (vDNN prefetch)"
# An attached column: n at the first backward task of a layer that prefetches for another layer, -n at the prefetching
# copy.
PREFETCH = "prefetch (vDNN)"


class Plan(NamedTuple):
    """Rows of calls, shape (n,) each: the call of an offloaded feature map, its size, the call that fetches it back."""

    call: Int64
    size_bytes: Int64
    fetched_by: Int64

    def __len__(self) -> int:
        return len(self.call)


def plan(graph: TaskGraph, calls: Calls, chosen: Bool, size_bytes: Int64) -> Plan:
    """Decide which of the ``chosen`` forward calls are offloaded, and the layer whose backward work fetches each.

    A call needs a known size, a launch and backward work, and a later layer whose backward work can fetch its feature
    map: a map that is needed at once stays on the GPU.
    """
    first, _ = calls.backward_tasks()
    launched = np.append(graph.launch_of >= 0, False)  # the last entry: task -1
    usable = ~calls.backward & launched[calls.first] & launched[first]
    wanted = chosen & usable & (size_bytes > 0)
    is_conv = calls.role == CallRole.CONVOLUTION
    found: list[tuple[int, int, int]] = []
    rows = np.flatnonzero(~calls.backward)
    for layers in np.split(rows, np.flatnonzero(np.diff(calls.run[rows])) + 1):
        if not wanted[layers].any():
            continue
        begins, waiting, convolutions = first[layers].tolist(), wanted[layers].tolist(), is_conv[layers].tolist()
        in_backward_order = np.argsort(first[layers], kind="stable")
        left = sum(waiting)
        for current in in_backward_order[usable[layers][in_backward_order]].tolist():
            other = find_prefetch_layer(current, waiting, convolutions) if left else -1
            if other >= 0 and begins[other] > begins[current]:
                waiting[other] = False
                left -= 1
                found.append((int(layers[other]), int(size_bytes[layers[other]]), int(layers[current])))
    columns = np.array(sorted(found), dtype=np.int64).reshape(-1, 3).T
    return Plan(columns[0], columns[1], columns[2])


def find_prefetch_layer(current: int, waiting: Sequence[bool], is_convolution: Sequence[bool]) -> int:
    """Return the nearest layer before ``current`` whose feature map is still in host memory, -1 if none is.

    The search ends at the first convolution, so that nothing is fetched too early (vDNN §3.3, findPrefetchLayer).
    """
    for layer in range(current - 1, -1, -1):
        if waiting[layer]:
            return layer
        if is_convolution[layer]:
            return -1
    return -1


def offload(graph: TaskGraph, calls: Calls, plan: Plan, *, wait: bool) -> TaskGraph:
    """Return the graph with the copies of ``plan`` on a separate stream, each with the call that launches it.

    A copy to the host starts with the forward work of its call, which only reads the map. A copy back starts with the
    backward work that fetches it, and the backward work of its call waits for it. With ``wait`` the work after a layer
    waits for the copies that the layer started.
    """
    first, last = calls.backward_tasks()
    reads, needs, fetches = calls.first[plan.call], first[plan.call], first[plan.fetched_by]
    estimates, cost_ns = host_copies(graph, plan.size_bytes), operator_cost_ns(graph)
    compute = graph.threads[graph.thread[reads[0]]]
    copies = Thread("copies (vDNN)", ThreadKind.STREAM, compute.device, lag_ns=compute.lag_ns)
    graph, stream = add_thread(graph, copies)

    def launched(name: str, phase: Phase, after: Array, launched_after: Array) -> NewTasks:
        return NewTasks(
            after, name, TaskKind.MEMCPY, estimates.duration_ns, thread=stream, low_ns=estimates.low_ns,
            high_ns=estimates.high_ns, layer=calls.layer[plan.call], phase=phase, size_bytes=plan.size_bytes,
            family=int(KernelFamily.COPY), launched_after=launched_after, launch_name="cudaMemcpyAsync",
            launch_ns=cost_ns,
        )  # fmt: skip

    behind = graph.neighbours[1]
    ahead = task_before(graph, graph.launch_of[fetches])
    out, back = insert_all(
        graph,
        [
            launched(OFFLOAD_NAME, Phase.FORWARD, reads, graph.launch_of[reads]),
            launched(PREFETCH_NAME, Phase.BACKWARD, fetches, ahead),
        ],
    )
    moved = np.append(out.moved, -1)  # the last entry: the new id of -1
    column = np.zeros(len(out.graph), dtype=np.int32)
    column[moved[fetches]] = np.arange(1, len(plan) + 1)
    column[back.ids] = -np.arange(1, len(plan) + 1)
    ids = np.concatenate([out.ids, back.ids])
    graph = mark(out.graph.attach(**{PREFETCH: column}), ids, np.tile(estimates.source, 2))
    parts = [
        Dependencies.of(moved[reads], out.ids, DependencyKind.EVENT, anchor=Anchor.START),
        Dependencies.of(moved[fetches], back.ids, DependencyKind.EVENT, anchor=Anchor.START),
        Dependencies.of(back.ids, moved[needs], DependencyKind.EVENT),
    ]
    layer_ends = [(out.ids, calls.last[plan.call]), (back.ids, last[plan.fetched_by])]
    for started, ends in layer_ends if wait else ():
        waiting = moved[behind[ends]]
        parts.append(Dependencies.of(started[waiting >= 0], waiting[waiting >= 0], DependencyKind.EVENT))
    return add_dependencies(graph, Dependencies.concatenate(parts))
