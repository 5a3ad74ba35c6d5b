"""Collectives inserted into the steps of one worker, with their calls, predecessors and successors.

On a GPU a collective runs on a channel beside the kernels, in the order of the calls: NCCL runs the collectives of one
communicator one after the other. On a CPU (gloo) the calling thread waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from whatif.graph.insert import NewTasks, insert_all
from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    DependencyKind,
    Float64,
    Int32,
    Int64,
    Phase,
    TaskKind,
    among,
)
from whatif.hardware.cluster.collectives import Cost
from whatif.hardware.cluster.network import Network
from whatif.models.durations.estimator import mark, moving
from whatif.models.exchange import gloo
from whatif.models.exchange.collective_tasks import (
    ALL_REDUCE,
    FAMILY,
    add_channel,
    attach_model,
    estimated,
)
from whatif.models.exchange.more_passes import passes_represented
from whatif.models.layers.calls import calls_of, task_before, usual_launch_ns
from whatif.models.layers.columns import named
from whatif.simulation.transfers import ACTIVATIONS, Parts, grown_ns, of_activations, workers_of

ALL_GATHER, REDUCE_SCATTER = "all-gather of parameters", "reduce-scatter of gradients"
# Not named an all-reduce, so that what-ifs that decompose or compress gradients leave it alone.
SUM = "sum of activations"
COPY_IN, COPY_OUT = "copy gradients into their buffer", "copy parameters out of their buffer"
NAMES = {"all_gather": ALL_GATHER, "reduce_scatter": REDUCE_SCATTER, "all_reduce": ALL_REDUCE}
ACTIVATION_NAMES = {
    "all_gather": "gather of activations",
    "reduce_scatter": "scatter of activations",
    "all_reduce": SUM,
}


def tensor_workers(graph: TaskGraph) -> int:
    """Return the number of tensor parallel workers across which the model's blocks are split; 1 if they are not."""
    sums = of_activations(graph) & _called(graph, *ACTIVATION_NAMES.values())
    return int(workers_of(graph)[sums].max(initial=1))


def _called(graph: TaskGraph, *names: str) -> Bool:
    """A mask of the tasks with one of ``names``."""
    return among(graph.name, [code for code, name in enumerate(graph.names) if name in names])


def senders(graph: TaskGraph) -> int:
    """Return how many of those workers each send a part of an activation to another stage.

    1 if the model is not split, or if the activation itself is a part of the sequence.
    """
    parts = _called(graph, ACTIVATION_NAMES["all_gather"]).any()
    return 1 if parts else tensor_workers(graph)


def gathering_ns(graph: TaskGraph, part_bytes: Int64) -> Float64:
    """Return the time of those workers to gather an activation of which each got ``part_bytes``, ns, same shape.

    It is half of an all-reduce's time in the graph, whose ring scatters and then gathers; 0 with one of ``senders``.
    """
    sums = np.flatnonzero(of_activations(graph) & _called(graph, SUM) & (graph.size_bytes > 0))
    count = senders(graph)
    if not len(sums) or count == 1:
        return np.zeros(len(part_bytes))
    one = sums[:1]
    return (
        grown_ns(graph, one, graph.duration_ns[one].astype(np.float64), part_bytes * count / graph.size_bytes[one]) / 2
    )


class Exchange(NamedTuple):
    """One collective by the ids of the tasks around it, -1 for none.

    ``call``: the CPU task after which it is called. ``ready``: work that ends before it starts. ``waiting``: work that
    starts after it. ``copied_in``: the work after which its input is copied into a buffer; ``copied_out``: the work
    before which its output is copied out. ``buffer``: the position of an earlier exchange whose buffer this one's copy
    reuses, and so waits for.
    """

    operation: str
    size_bytes: int
    call: int
    phase: Phase
    ready: Sequence[int] = ()
    waiting: Sequence[int] = ()
    copied_in: int = -1
    copied_out: int = -1
    buffer: int = -1


class CallTime(NamedTuple):
    """The CPU time of a call, ns, with its range."""

    centre_ns: int
    low_ns: int
    high_ns: int


class _Copies(NamedTuple):
    """Copies around exchanges, shape (n,) each: the exchange of each, and its adjacent work."""

    of: Int64
    work: Int64


class _Put(NamedTuple):
    """The ids of the collectives, their calls, the copies into and out of buffers; the new id of each old task."""

    ids: Int32
    calls: Int32
    copied_in: Int32
    copied_out: Int32
    moved: Int32


def exchange(
    graph: TaskGraph, exchanges: Sequence[Exchange], network: Network, channel: str, call: CallTime,
    *, activations: bool = False,
) -> TaskGraph:  # fmt: skip
    """Return the graph with ``exchanges``, in the order of their calls, one at a time on a new channel.

    ``activations``: they are exchanged between the parts of one model.
    """
    if not exchanges:
        return graph
    rows, on_gpu = list(exchanges), graph.has_gpu
    # Calls keep the order of the list: without known launches their places are guessed.
    calls = np.maximum.accumulate(np.array([row.call for row in rows], dtype=np.int64))
    # The channel runs them in this order, so none is placed before an earlier one.
    behind = np.array([max([row.call, row.copied_in, *row.ready]) for row in rows], dtype=np.int64)
    behind = np.maximum.accumulate(behind)
    size = np.array([row.size_bytes for row in rows], dtype=np.int64)
    phase = np.array([row.phase for row in rows])
    # On a CPU the calling thread waits, so gloo's work passes within that time.
    sent = _sent(graph, [row.operation for row in rows], size, network)
    # A call in a pass that represents several is made in each of them.
    passes = np.maximum(passes_represented(graph)[calls], 1.0)
    cost = Cost(sent.cost.latency_ns * passes, sent.cost.transfer_ns * passes)
    size = np.rint(size * passes).astype(np.int64)
    times = estimated(cost)
    graph, code = add_channel(graph, channel, ordered=True)
    ins, outs = _copies_of([row.copied_in for row in rows]), _copies_of([row.copied_out for row in rows])
    before = launched_after = task_before(graph, outs.work)
    if on_gpu:
        launched_after = task_before(graph, calls_of(graph, outs.work))
        before = np.where(behind[outs.of] < outs.work, np.maximum(before, behind[outs.of]), before)
    # A copy's launch comes before the call of the collective that sends it.
    copied_in, collectives, copied_out = insert_all(
        graph,
        [
            _copies(graph, COPY_IN, ins, ins.work, calls[ins.of], size, phase),
            NewTasks(
                behind, ALL_GATHER, TaskKind.COMMUNICATION, times.duration_ns, thread=code, low_ns=times.low_ns,
                high_ns=times.high_ns, size_bytes=size, family=FAMILY, phase=phase, layer=graph.layer[calls],
                launched_after=calls, launch_name="call of a collective", launch_ns=call.centre_ns,
            ),
            _copies(graph, COPY_OUT, outs, before, launched_after, size, phase),
        ],
    )  # fmt: skip
    put = _Put(collectives.ids, collectives.launches, copied_in.ids, copied_out.ids, collectives.moved)
    names = ACTIVATION_NAMES if activations else NAMES
    parts = Parts(*(column * passes for column in sent.parts))
    changed = attach_model(named(collectives.graph, _ids_by_name(rows, put, names)), put.ids, parts, network.workers)
    changed = mark(changed, np.concatenate([put.copied_in, put.copied_out]), moving(graph, 0).source[0])
    centre, low, high = (time_ns * passes for time_ns in call)
    changed = changed.with_duration(put.calls, centre, low_ns=low, high_ns=high)
    if activations:
        column = of_activations(changed).copy()
        column[put.ids] = True
        changed = changed.attach(**{ACTIVATIONS: column})
    pairs = [(put.copied_in, put.ids[ins.of]), (put.ids[outs.of], put.copied_out)]
    pairs += _around(changed, rows, put, on_gpu=on_gpu) + _beside_copies(graph, rows, ins, outs, put)
    source, target = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return changed.add_dependencies(source, target, kind=DependencyKind.COMMUNICATION)


def _ids_by_name(rows: list[Exchange], put: _Put, names: dict[str, str]) -> dict[str, Int32]:
    operations = np.array([row.operation for row in rows])
    return {names[operation]: put.ids[operations == operation] for operation in dict.fromkeys(operations.tolist())}


def _copies_of(work: list[int]) -> _Copies:
    found = np.array(work, dtype=np.int64)
    return _Copies(np.flatnonzero(found >= 0), found[found >= 0])


def _pairs(pairs: list[tuple[int, int]]) -> Int64:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2).T


def _around(graph: TaskGraph, rows: list[Exchange], put: _Put, *, on_gpu: bool) -> list[tuple[Array, Array]]:
    """The predecessors and successors of each collective of the edited ``graph``, as pairs of ids."""
    ready, of = _pairs([(task, at) for at, row in enumerate(rows) for task in row.ready])
    waited, task = _pairs([(at, task) for at, row in enumerate(rows) for task in row.waiting])
    waiting = put.moved[task]
    if not on_gpu:  # the calling thread continues after it
        following = graph.neighbours[1][put.calls]
        waited = np.flatnonzero(following >= 0)
        waiting = following[waited]
    return [(put.moved[ready], put.ids[of]), (put.ids[waited], waiting)]


def _beside_copies(
    graph: TaskGraph, rows: list[Exchange], ins: _Copies, outs: _Copies, put: _Put
) -> list[tuple[Array, Array]]:
    """Copies into a reused buffer wait until it is sent; work on other streams waits for its copy."""
    copied_in, copied_out, stream = (np.full(len(rows), -1, dtype=np.int64) for _ in range(3))
    copied_in[ins.of], copied_out[outs.of], stream[outs.of] = put.copied_in, put.copied_out, graph.thread[outs.work]
    sent, at = _pairs([(row.buffer, at) for at, row in enumerate(rows) if row.buffer >= 0 and row.copied_in >= 0])
    waited, task = _pairs([(at, task) for at, row in enumerate(rows) for task in row.waiting if row.copied_out >= 0])
    elsewhere = stream[waited] != graph.thread[task]
    return [
        (put.ids[sent], copied_in[at]),
        (copied_out[waited[elsewhere]], put.moved[task[elsewhere]]),
    ]


def _sent(graph: TaskGraph, operations: list[str], size_bytes: Int64, network: Network) -> gloo.Sent:
    latency_ns, transfer_ns, work_ns, *parts = (np.zeros(len(size_bytes)) for _ in range(7))
    for operation in dict.fromkeys(operations):
        of_operation = np.array(operations) == operation
        cost, work_ns[of_operation], found = gloo.sent(graph, network, operation, size_bytes[of_operation])
        latency_ns[of_operation], transfer_ns[of_operation] = cost.latency_ns, cost.transfer_ns
        for column, values in zip(parts, found, strict=True):
            column[of_operation] = values
    return gloo.Sent(Cost(latency_ns, transfer_ns), work_ns, Parts(*parts))


def _copies(
    graph: TaskGraph, name: str, copies: _Copies, behind: Int64, calls: Int64, size_bytes: Int64, phase: Array
) -> NewTasks:
    """Copies on the threads of their adjacent work, each launched by its own call; operators on a CPU."""
    on_gpu = graph.has_gpu
    moved = 2 * size_bytes[copies.of]  # read and written
    times = moving(graph, moved)
    launch_ns = round(usual_launch_ns(graph, graph.on_gpu & (graph.kind == TaskKind.KERNEL))) if on_gpu else 0
    return NewTasks(
        behind, name, graph.kernel_kind, times.duration_ns,
        thread=graph.thread[copies.work], low_ns=times.low_ns, high_ns=times.high_ns, size_bytes=moved,
        family=int(KernelFamily.COPY), layer=graph.layer[copies.work], phase=phase[copies.of],
        launched_after=calls if on_gpu else None, launch_ns=launch_ns,
    )  # fmt: skip
