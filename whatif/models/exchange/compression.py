"""Gradients compressed before and decompressed after they are exchanged: work around every all-reduce."""

from __future__ import annotations

import numpy as np

from whatif.graph.insert import Inserted, NewTasks
from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    DependencyKind,
    Int64,
    Phase,
    ThreadKind,
)
from whatif.hardware.cluster.network import Network
from whatif.models.durations.estimator import mark, moving, put
from whatif.models.exchange import gloo
from whatif.models.exchange.beside_kernels import scale_traffic
from whatif.models.exchange.collective_tasks import all_reduces, attach_model, estimated
from whatif.models.exchange.stragglers import waiting_for_peers
from whatif.models.layers.calls import calls_of, last_gpu_before, operator_cost_ns, task_before
from whatif.models.layers.columns import named, with_values
from whatif.models.layers.gradients import step_of
from whatif.simulation.transfers import parts_of, workers_of

COMPRESS, DECOMPRESS, EXCHANGE = "compress gradients", "decompress gradients", "sparse all-gather"
TO_HALF, FROM_HALF = "cast bucket to fp16", "cast bucket from fp16"
# DDP's fp16_compress_hook casts a bucket (4 bytes read, 2 written), divides it (2 and 2), and copies the sum back (2
# and 4); of the size of the fp32 bucket.
TO_HALF_ACCESSES, FROM_HALF_ACCESSES = 2.5, 1.5
# DGC: u = m u + g and v = v + u: three reads and two writes; a sample; mask: a read and a byte; pack: a read and that
# byte; clearing u and v: two reads and two writes if masked, and the mask. Rounded up to whole accesses.
ACCESSES, KERNELS = 11.0, 10
ENTRY_BYTES = 8
# Our estimate for unmeasured kernels: fused passes, or twice as many as counted.
LOW, HIGH = 0.6, 2.0


def exchange_sparse(graph: TaskGraph, tasks: Int64, workers: int, share: float) -> TaskGraph:
    """Return the graph in which ring all-reduces ``tasks`` (ids, of known size) gather ``share`` of the values instead.

    Every worker sends its values with their indices, ``ENTRY_BYTES`` for each value of 4 bytes, to all others.
    ``KERNELS`` kernels before it read and write ``ACCESSES`` times the gradients' bytes; two after it clear the buffer
    and add up the entries of all workers.
    """
    # Collectives called before the recording begins stay unchanged.
    tasks = tasks[tasks > int(np.argmax(graph.on_cpu))]
    size = graph.size_bytes[tasks]
    sources, users = _neighbours_of(graph, tasks)
    stream = graph.thread[np.where(graph.on_cpu[sources] & graph.has_gpu, tasks, sources)]
    before = _inserted(graph, COMPRESS, sources, stream, ACCESSES * size, KERNELS)
    graph, tasks = before.graph, before.moved[tasks].astype(np.int64)
    users = np.where(users >= 0, before.moved[users], -1)
    graph = _as_gather(graph, tasks, workers, share)
    # Clear (one access), then read each entry, and read and write its value.
    gathered_bytes = size * (1 + share * workers * (ENTRY_BYTES / 4 + 2))
    return _with_unpacked(graph, DECOMPRESS, tasks, before.ids, users, gathered_bytes, 2)


def exchange_cast(graph: TaskGraph, network: Network) -> TaskGraph:
    """Return the graph whose all-reduces, inserted by ``distributed`` on ``network``, send fp16 instead of fp32.

    Each bucket is cast before and after it, as DDP's fp16_compress_hook does.
    """
    tasks = np.flatnonzero(all_reduces(graph) & (workers_of(graph) > 0))
    size = graph.size_bytes[tasks]
    sources, users = _neighbours_of(graph, tasks)
    before = _inserted(graph, TO_HALF, sources, graph.thread[sources], TO_HALF_ACCESSES * size, 2, low=1, high=1)
    graph, tasks = before.graph, before.moved[tasks].astype(np.int64)
    half = size // 2
    sent = gloo.sent(graph, network, "all_reduce", half)
    times = estimated(sent.cost, float(np.max(graph.high_ns[tasks] / np.maximum(graph.duration_ns[tasks], 1))))
    graph = put(with_values(graph, tasks, size_bytes=half), tasks, times)
    graph = scale_traffic(attach_model(graph, tasks, sent.parts, network.workers), 0.5)
    # The first task that waits for a sum casts it back; those that wait for the stream need no copy.
    users = np.where(users >= 0, before.moved[users], -1)
    return _with_unpacked(graph, FROM_HALF, tasks, before.ids, users, FROM_HALF_ACCESSES * size, 1, low=1, high=1)


def _with_unpacked(
    graph: TaskGraph, name: str, tasks: Int64, packed: Array, users: Int64, size_bytes: Array, kernels: int, *,
    low: float = LOW, high: float = HIGH,
) -> TaskGraph:  # fmt: skip
    """Insert the unpacking of each of ``tasks`` before its user (-1: none); it waits for its ``packed``."""
    needed = users >= 0
    places = task_before(graph, users[needed])
    behind = _inserted(graph, name, places, graph.thread[places], size_bytes[needed], kernels, low=low, high=high)
    moved = behind.moved
    return behind.graph.add_dependencies(
        np.concatenate([moved[packed], moved[tasks[needed]]]),
        np.concatenate([moved[tasks], behind.ids]),
        kind=DependencyKind.COMMUNICATION,
    )


def _neighbours_of(graph: TaskGraph, tasks: Int64) -> tuple[Int64, Int64]:
    """For each collective the last task that it waits for, and the first that waits for it (-1 if none)."""
    d = graph.dependencies
    worker = graph.gpu_work if graph.has_gpu else graph.on_cpu
    source = np.full(len(graph), -1, dtype=np.int64)
    into, out = (d.kind != DependencyKind.LAUNCH) & worker[d.source], worker[d.target]
    np.maximum.at(source, d.target[into], d.source[into])
    user = np.full(len(graph), len(graph), dtype=np.int64)
    np.minimum.at(user, d.source[out], d.target[out])
    # A collective on the compute stream waits for the task before it, and the task after waits for it.
    ahead, following = (beside[tasks].astype(np.int64) for beside in graph.neighbours)
    sources = np.maximum(source[tasks], np.where((ahead >= 0) & worker[ahead], ahead, -1))
    users = np.minimum(user[tasks], np.where((following >= 0) & worker[following], following, len(graph)))
    users = _of_later(graph, tasks, users)
    if (sources < 0).any():
        calls = calls_of(graph, tasks)
        latest = last_gpu_before(graph, calls) if graph.has_gpu else calls
        # Without a predecessor, the call itself: the kernels come after it, on the collective's stream.
        sources = np.where(sources >= 0, sources, np.where((latest < tasks) & worker[latest], latest, calls))
    return sources, np.where(users < len(graph), users, -1)


def _of_later(graph: TaskGraph, tasks: Int64, users: Int64) -> Int64:
    """The first successor of each collective, or of a later one of its step and ordered channel if it has none.

    This is the case if gradients live in their buckets: only the last sum of a step is waited for directly.
    """
    channels = np.array([thread.kind == ThreadKind.CHANNEL and thread.ordered for thread in graph.threads])
    users = users.copy()
    group = step_of(graph)[tasks] * len(graph.threads) + graph.thread[tasks]
    for key in np.unique(group[channels[graph.thread[tasks]]]).tolist():
        members = np.flatnonzero(group == key)
        users[members] = np.minimum.accumulate(users[members][::-1])[::-1]
    return users


def _inserted(
    graph: TaskGraph, name: str, after: Int64, thread: Array, size_bytes: Array, kernels: int, *,
    low: float = LOW, high: float = HIGH,
) -> Inserted:  # fmt: skip
    times = moving(graph, size_bytes)
    on_gpu = graph.has_gpu
    inserted = graph.insert(
        NewTasks(
            after, name, graph.kernel_kind, times.duration_ns,
            thread=thread, low_ns=times.low_ns * low, high_ns=times.high_ns * high, phase=Phase.BACKWARD,
            size_bytes=np.asarray(size_bytes, dtype=np.int64), family=int(KernelFamily.OPTIMIZER),
            launched_after=calls_of(graph, after) if on_gpu else None,
            launch_ns=kernels * operator_cost_ns(graph) if on_gpu else 0,
        )
    )  # fmt: skip
    return inserted._replace(graph=mark(inserted.graph, inserted.ids, times.source))


def _as_gather(graph: TaskGraph, tasks: Int64, workers: int, share: float) -> TaskGraph:
    """Replace all-reduces, which send 2 (n - 1) / n of the buffer in 2 (n - 1) steps, by gathers: n - 1 lists in n - 1.

    The time that a recorded one waited for other workers stays: at the upper end all of it.
    """
    waits_ns, ratio = waiting_for_peers(graph)[tasks], workers / 2 * share * ENTRY_BYTES / 4
    parts = parts_of(graph, tasks).waiting(-waits_ns).grown(ratio).in_steps(1 / 2).waiting(waits_ns)
    duration_ns = parts.duration_ns
    higher_ns = duration_ns * graph.high_ns[tasks] / np.maximum(graph.duration_ns[tasks], 1)
    waited_ns = np.where(workers_of(graph)[tasks] > 0, 0, graph.duration_ns[tasks])
    graph = graph.with_duration(tasks, duration_ns, low_ns=duration_ns, high_ns=np.maximum(higher_ns, waited_ns))
    graph = with_values(graph, tasks, size_bytes=np.rint(graph.size_bytes[tasks] * share * workers * ENTRY_BYTES / 4))
    return scale_traffic(attach_model(named(graph, {EXCHANGE: tasks}), tasks, parts, workers), min(ratio, 1.0))
