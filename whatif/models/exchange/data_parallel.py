"""Data parallel training inserted into the steps of one worker: bucket copies, all-reduces, and dependencies.

Follows DistributedDataParallel (torch/csrc/distributed/c10d/reducer.cpp): each finished gradient is divided and copied
into its bucket, full buckets are all-reduced in order, and at the end of the backward pass each sum is waited for and
copied back. On a CPU gloo's threads take time from the core of the step (``whatif.models.exchange.gloo``), and the
forward pass begins with a broadcast of the buffers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import structs

from whatif.graph.columns import concatenated
from whatif.graph.edit import add_dependencies
from whatif.graph.insert import NewTasks
from whatif.graph.kernels import KernelFamily
from whatif.graph.memory import Memory
from whatif.graph.selection import Selection
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Anchor,
    Array,
    Dependencies,
    DependencyKind,
    Int32,
    Int64,
    Phase,
    TaskKind,
)
from whatif.hardware.cluster.collectives import Cost
from whatif.hardware.cluster.links import GLOO_MESSAGE_NS
from whatif.hardware.cluster.network import Network
from whatif.models.durations.estimator import SYNC_CALL_NS, Estimates, Source, later, mark, moving
from whatif.models.exchange import gloo
from whatif.models.exchange.beside_kernels import slow_kernels_beside
from whatif.models.exchange.buckets import StepGradients
from whatif.models.exchange.collective_tasks import (
    ALL_REDUCE,
    CALL_LOW_NS,
    CALL_NS,
    FAMILY,
    OVERLAPPED,
    SYNCHRONISED,
    add_channel,
    attach_model,
    estimated,
    with_workers,
)
from whatif.models.exchange.stragglers import with_slowest
from whatif.models.layers.calls import calls_of, usual_launch_ns
from whatif.models.layers.columns import named
from whatif.models.layers.gradients import step_of
from whatif.models.layers.memory_effects import change_memory
from whatif.simulation.transfers import Parts

COPY_IN, COPY_OUT = "copy gradient into bucket", "copy bucket into gradient"
CALL, LAUNCH, CHANNEL = "c10d::allreduce_", "cudaLaunchKernel", "network"
FORWARD, BROADCAST = "DistributedDataParallel.forward", "broadcast of buffers"

# The CPU time of DDP's copies over that of their launch: 4.7 and 3.7 us for launches of 3.3 and 3.0 us in the recording
# of a ResNet under DDP on an MI300X (TraceLens).
COPY_CALL = 1.3


class _Ends(NamedTuple):
    """The last CPU task and the last work (on the GPU if there is one) of each step's backward pass, by step number."""

    cpu: Int64
    work: Int64


class _Buckets(NamedTuple):
    """One row per step and bucket, shape (n,) each, in the order of sending."""

    step: Int64
    size_bytes: Int64
    low_bytes: Int64
    high_bytes: Int64
    first: Int64  # position of its first gradient among those sorted by step, bucket and task
    ready: Int64  # the task that fills the last of it and all earlier buckets


def all_reduce_buckets(
    graph: TaskGraph,
    gradients: StepGradients,
    bucket: Int64,
    network: Network,
    *,
    overlap: bool,
    synchronised: bool,
    bucket_view: bool,
) -> TaskGraph:
    """Return the graph of one worker of ``network`` whose steps all-reduce their gradients, bucket by bucket.

    ``bucket`` (n,): the bucket of each row of ``gradients``, in the order of sending. ``overlap``: a bucket is sent
    when it is full, else all after the backward pass. ``synchronised``: the CPU waits for the stream before each
    all-reduce. ``bucket_view``: gradients live in their buckets, so that none is copied back.
    """
    graph = with_slowest(graph, network)
    order = np.lexsort((gradients.row, gradients.task, bucket, gradients.step))
    gradients = StepGradients(*(column[order] for column in gradients))
    buckets, ends = _buckets(gradients, bucket[order]), _backward_ends(graph)
    if not overlap:
        buckets = buckets._replace(ready=np.maximum(buckets.ready, ends.work[buckets.step]))
    graph, channel = add_channel(graph, CHANNEL, ordered=True)
    sent = gloo.sent(graph, network, "all_reduce", buckets.size_bytes)
    cost, work_ns = sent.cost, sent.work_ns
    times = _as_certain(estimated(cost, SYNCHRONISED if synchronised else OVERLAPPED), buckets, network)
    waiting = _first_behind(graph, ends, buckets)

    new = _put_in(graph, gradients, buckets, ends, times, work_ns, channel, bucket_view)
    changed, moved = attach_model(new.graph, new.reduced, sent.parts, network.workers), new.moved
    changed = _handed_off_later(changed, moved[ends.cpu], new.cpu_end)
    last_copy = _in_order(np.maximum.reduceat(new.copies, buckets.first), buckets.step)
    if not overlap:
        every_copy = np.zeros(len(ends.cpu), dtype=np.int64)
        np.maximum.at(every_copy, buckets.step, last_copy)
        last_copy = every_copy[buckets.step]
    last_sum = np.full(len(ends.cpu), -1, dtype=np.int64)
    np.maximum.at(last_sum, buckets.step, new.reduced)
    sums = buckets.first[: len(new.back)]  # none if nothing is copied back
    exchanged = Dependencies.of(
        np.concatenate([last_copy, new.reduced[: len(sums)], last_sum[waiting.step]]),
        np.concatenate([new.reduced, new.back[sums], moved[waiting.task]]),
        DependencyKind.COMMUNICATION,
    )
    changed = add_dependencies(changed, Dependencies.concatenate([new.launches, exchanged]))
    if not graph.has_gpu:
        changed = _with_forward(changed, network, channel)
    changed = slow_kernels_beside(changed) if overlap else changed
    return _synchronised(changed) if synchronised else changed


def as_workers(graph: TaskGraph, workers: int, bucket_bytes: int, *, bucket_view: bool = False) -> TaskGraph:
    """Return the graph as one of ``workers``, with DDP's buckets kept in memory from step to step.

    With ``bucket_view`` a layer's separate gradient lives until it is copied into its bucket.
    """

    def changed(memory: Memory) -> Memory:
        with_space = with_buckets(memory, bucket_bytes)
        return replace(with_space, gradients_leave=True, gradients_in_forward=False) if bucket_view else with_space

    return with_workers(change_memory(graph, changed), workers)


def with_buckets(memory: Memory, bucket_bytes: int) -> Memory:
    """Return the memory with DDP's buckets, which stay from step to step."""
    return replace(memory, inputs=memory.inputs + bucket_bytes, buffers=memory.buffers + bucket_bytes)


def _buckets(gradients: StepGradients, bucket: Int64) -> _Buckets:
    first = np.flatnonzero(np.append(True, (np.diff(gradients.step) != 0) | (np.diff(bucket) != 0)))
    step = gradients.step[first]
    ready = _in_order(np.maximum.reduceat(gradients.task, first), step)
    size, low, high = (
        np.add.reduceat(column, first) for column in (gradients.size_bytes, gradients.low_bytes, gradients.high_bytes)
    )
    return _Buckets(step, size, low, high, first, ready)


def _as_certain(times: Estimates, buckets: _Buckets, network: Network) -> Estimates:
    """The times with the range of the buckets' sizes."""
    known, low, high = (
        np.maximum(network.cost("all_reduce", size).total_ns, 1)
        for size in (buckets.size_bytes, buckets.low_bytes, buckets.high_bytes)
    )
    low_ns, high_ns = times.low_ns * np.minimum(low / known, 1), times.high_ns * np.maximum(high / known, 1)
    return structs.replace(times, low_ns=low_ns, high_ns=high_ns)


def _in_order(ids: Array, step: Int64) -> Int64:
    """Send each bucket of a step no earlier than the one before it."""
    result = ids.astype(np.int64)
    for part in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(step)) + 1):
        result[part] = np.maximum.accumulate(result[part])
    return result


def _backward_ends(graph: TaskGraph) -> _Ends:
    steps = step_of(graph)
    backward = (graph.phase == Phase.BACKWARD) & (steps >= 0)

    def last(tasks: Selection) -> Int64:
        ids = (tasks & backward).ids
        found = np.zeros(int(steps.max()) + 1, dtype=np.int64)
        np.maximum.at(found, steps[ids], ids)
        return found

    cpu = last(graph.on_cpu)
    return _Ends(cpu, last(graph.on_gpu) if graph.has_gpu else cpu)


def _calls(graph: TaskGraph, tasks: Int64) -> Int64:
    """The call that launched each GPU task, or a later call that launched a task before it."""
    distinct, place = np.unique(tasks, return_inverse=True)
    return np.asarray(np.maximum.accumulate(calls_of(graph, distinct))[place], dtype=np.int64)


class _New(NamedTuple):
    """The graph with the new tasks; the ids of the copies, the all-reduces and the copies back (if any).

    ``launches``: call -> new task. ``moved``: the new id of each old task. ``cpu_end``: the last CPU
    task of each step's backward pass, by its number.
    """

    graph: TaskGraph
    copies: Int32
    reduced: Int32
    back: Int32
    launches: Dependencies
    moved: Int32
    cpu_end: Int64


def _put_in(
    graph: TaskGraph,
    gradients: StepGradients,
    buckets: _Buckets,
    ends: _Ends,
    times: Estimates,
    work_ns: npt.NDArray[np.float64],
    channel: int,
    bucket_view: bool,
) -> _New:
    """Insert all tasks and calls at once: those after the same task keep the order of these rows."""
    on_gpu = graph.has_gpu
    n, b, back = len(gradients.task), len(buckets.step), 0 if bucket_view else len(gradients.task)
    # Read and written once; independent of batch and format, like the optimizer's traffic.
    copying = moving(graph, 2 * gradients.size_bytes)
    copied_in = copying if on_gpu else later(copying, gloo.HOOK_NS, gloo.SPREAD)
    every = concatenated([copied_in, times, *([] if bucket_view else [copying])])
    end, cpu_end = ends.work.copy(), ends.cpu.copy()
    np.maximum.at(end, buckets.step, buckets.ready)
    behind = np.concatenate([gradients.task, buckets.ready])
    calls = _calls(graph, behind) if on_gpu else behind
    np.maximum.at(cpu_end, buckets.step, calls[n:])
    behind = np.concatenate([behind, (end if on_gpu else cpu_end)[gradients.step][:back]])
    calls = np.concatenate([calls, cpu_end[gradients.step][:back]])
    called = np.ones(n + b + back, dtype=np.bool_)
    called[:n] = called[n + b :] = on_gpu  # on a CPU a copy is an operator without a call

    def column(copy: int, reduce: int) -> Int64:
        return np.repeat([copy, reduce, copy], [n, b, back])

    # After a task come its copies, then the calls, then what these start; copies back run where the work ended.
    backward = graph.on_gpu & (graph.phase == Phase.BACKWARD)
    copy_call_ns = round(COPY_CALL * usual_launch_ns(graph, backward)) if on_gpu else 0
    call_ns, call_low_ns = (column(copy_call_ns, reduce_ns)[called] for reduce_ns in (CALL_NS, CALL_LOW_NS))
    if not on_gpu:
        # The time of gloo's threads on this core comes right after the call: it delays the rest of this thread, or
        # passes during its wait if nothing is left.
        call_ns, call_low_ns = call_ns + work_ns.astype(np.int64), call_low_ns + work_ns.astype(np.int64)
    streams = np.concatenate([graph.thread[behind[:n]], np.full(b, channel), graph.thread[behind[n + b :]]])
    size = np.concatenate([2 * gradients.size_bytes, buckets.size_bytes, 2 * gradients.size_bytes[:back]])
    kind = column(graph.kernel_kind, TaskKind.COMMUNICATION)
    order = np.concatenate([np.arange(n), np.arange(len(call_ns)) + n + b + back, np.arange(n, n + b + back)])

    def rows(of_tasks: Array, of_calls: npt.ArrayLike) -> Array:
        both = np.concatenate([of_tasks, np.broadcast_to(np.asarray(of_calls), call_ns.shape)])
        return np.asarray(both[order])

    inserted = graph.insert(
        NewTasks(
            rows(np.maximum(behind, calls), calls[called]), ALL_REDUCE, rows(kind, int(TaskKind.RUNTIME)),
            rows(every.duration_ns, call_ns), thread=rows(streams, graph.thread[calls[called]]),
            low_ns=rows(every.low_ns, call_low_ns), high_ns=rows(every.high_ns, call_ns), phase=Phase.BACKWARD,
            size_bytes=rows(size, -1), family=rows(column(int(KernelFamily.OPTIMIZER), FAMILY), -1),
        )
    )  # fmt: skip
    found = np.empty_like(inserted.ids)
    found[order] = inserted.ids
    ids, starts = found[: n + b + back], found[n + b + back :]
    is_sum = column(0, 1) == 1
    names = {LAUNCH: starts, CALL: starts[is_sum[called]], COPY_IN: ids[:n], COPY_OUT: ids[n + b :]}
    changed = mark(named(inserted.graph, names), ids, every.source)
    new_end = inserted.moved[ends.cpu].astype(np.int64)
    step = np.concatenate([gradients.step, buckets.step, gradients.step[:back]])
    np.maximum.at(new_end, step[called], starts)
    if not on_gpu:
        np.maximum.at(new_end, step[~is_sum], ids[~is_sum])
    launches = Dependencies.of(starts, ids[called], DependencyKind.LAUNCH, graph.info.launch_lag_ns)
    if not on_gpu:
        launches = Dependencies.of(starts, ids[called], DependencyKind.COMMUNICATION, CALL_NS, Anchor.START)
    return _New(changed, ids[:n], ids[n : n + b], ids[n + b :], launches, inserted.moved, new_end)


def _with_forward(graph: TaskGraph, network: Network, channel: int) -> TaskGraph:
    """Start each forward pass on a CPU with DDP's work and the wait for rank 0's buffers."""
    steps = step_of(graph)
    tasks = np.flatnonzero(graph.on_cpu & (graph.phase == Phase.FORWARD) & (steps >= 0))
    first = tasks[np.unique(steps[tasks], return_index=True)[1]]
    if not len(first):
        return graph
    count, size_bytes = gloo.buffers(graph)
    ddp_ns = float(gloo.STEP_NS + count * gloo.BUFFER_NS)
    inserted = graph.insert(
        NewTasks(
            first, FORWARD, TaskKind.CPU_OP, ddp_ns, low_ns=ddp_ns / gloo.SPREAD, high_ns=ddp_ns * gloo.SPREAD,
            phase=Phase.FORWARD,
        )
    )  # fmt: skip
    graph, work = mark(inserted.graph, inserted.ids, Source.ASSUMED), inserted.ids
    following = graph.neighbours[1][work]
    if not count or (following < 0).any():
        return graph
    cost = network.cost("broadcast", size_bytes)
    # One message for the numbers and one for the counts of batches.
    cost, work_ns = Cost(2 * cost.latency_ns, cost.transfer_ns), np.full(1, 2.0 * GLOO_MESSAGE_NS)
    times = estimated(gloo.bounded_by_cpu(cost, work_ns))
    sent = graph.insert(
        NewTasks(
            work, BROADCAST, TaskKind.COMMUNICATION, times.duration_ns[0], thread=channel, high_ns=times.high_ns[0],
            size_bytes=size_bytes, family=FAMILY, phase=Phase.FORWARD,
        )
    )  # fmt: skip
    graph = attach_model(sent.graph, sent.ids, Parts(cost.latency_ns, cost.total_ns, work_ns, work_ns), network.workers)
    return graph.add_dependencies(
        np.concatenate([sent.moved[work], sent.ids]), np.concatenate([sent.ids, sent.moved[following]]),
        kind=DependencyKind.COMMUNICATION,
    )  # fmt: skip


def _first_behind(graph: TaskGraph, ends: _Ends, buckets: _Buckets) -> _Waiting:
    """The work that waits for the sums: the successors of the backward pass, and the update on every stream."""
    steps = np.unique(buckets.step)
    following = graph.neighbours[1][ends.work[steps]].astype(np.int64)
    number = step_of(graph)
    update = np.flatnonzero(graph.on_gpu & (graph.phase == Phase.UPDATE) & (number >= 0))
    update = update[(update > ends.work[number[update]]) & np.isin(number[update], steps)]
    _, place = np.unique(number[update] * len(graph.threads) + graph.thread[update], return_index=True)
    first = update[place]
    step, task = np.append(steps, number[first]), np.append(following, first)
    return _Waiting(step[task >= 0], task[task >= 0])


class _Waiting(NamedTuple):
    step: Int64
    task: Int64


def _handed_off_later(graph: TaskGraph, recorded: Int32, behind: Int64) -> TaskGraph:
    """Make waits for the backward pass's thread also wait for the tasks inserted at its end."""
    later = np.arange(len(graph), dtype=np.int32)
    same = graph.thread[recorded] == graph.thread[behind]
    later[recorded[same]] = behind[same]
    old = graph.dependencies
    source = np.where(old.kind == DependencyKind.HANDOFF, later[old.source], old.source)
    return graph.replace(dependencies=replace(old, source=source))


def _synchronised(graph: TaskGraph) -> TaskGraph:
    """Let the CPU wait for the stream of the copies before every call of an all-reduce."""
    calls = np.flatnonzero(graph.select(name=f"^{CALL}$") & (graph.start_ns < 0))
    stream = int(graph.thread[np.flatnonzero(graph.select(name=f"^{COPY_IN}$"))[0]])
    before = graph.neighbours[0][calls]
    return graph.synchronize(before[before >= 0], call_ns=SYNC_CALL_NS, stream=stream)
