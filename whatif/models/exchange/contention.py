"""Contention: collectives and kernels that slow each other, transfers on one link, communication on a CPU core.

What-ifs declare here which task uses which resource (``whatif.simulation.sharing``); the simulator
(``whatif.simulation.rate_sharing``) derives the rates from the actual overlap. Work recorded beside a collective is
already slow: it is first set to its time alone, so that an unchanged schedule reproduces the recording
(``whatif.models.exchange.recorded_overlap``).

Sources: Tianshu §3.3 (16 multiprocessors for an all-reduce, virtual operations); Pei et al., equation 31 (compute times
sm / (sm - 1) while an all-reduce holds one); Daydream §6.5 (NCCL takes 34 % longer beside kernels, about the
theoretical time alone) and §7.5 (concurrent kernels).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from whatif.graph.edit import add_thread, as_mask
from whatif.graph.insert import NewTasks
from whatif.graph.kernels import MATRIX_FAMILIES, KernelFamily, collective_of
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    Int64,
    TaskKind,
    ThreadKind,
    among,
)
from whatif.hardware.roofline import memory_share
from whatif.models.durations.estimator import (
    Source,
    device,
    mark,
)
from whatif.models.durations.memory_rate import UNKNOWN_MEMORY_GBYTE_S
from whatif.models.durations.occupancy import filled, matrix_flops_per_ns
from whatif.models.exchange.beside_kernels import scale_traffic
from whatif.models.exchange.collective_tasks import OVERLAPPED, all_reduces, recorded_workers
from whatif.models.exchange.recorded_overlap import set_to_alone
from whatif.runtime.errors import WhatifError
from whatif.simulation.sharing import USES, Role, uses_of
from whatif.simulation.transfers import parts_of, workers_of

# Multiprocessors of an all-reduce by default (Tianshu §3.3, after NVIDIA's documentation): 20 % of its V100s.
SMS = 16
# An unknown device counts as a V100.
UNKNOWN_SM_COUNT = 80
# Memory accesses of a device per byte that it sends: the byte and, in a reduction, the other operand and the sum. Our
# estimate.
MEMORY_BYTES_PER_SENT = 2.0
# Kernels of these families are compute-bound, the others memory-bound, unless both FLOPs and bytes are recorded.
# Unknown kernels count as compute-bound, like all work in the papers.
_COMPUTING = (*MATRIX_FAMILIES, KernelFamily.OTHER)
# The most connections that share a link at once: beyond this, fair sharing is no longer realistic.
MOST_AT_ONCE = 256


def occupy(
    graph: TaskGraph,
    tasks: npt.NDArray[Any],
    sms: int = SMS,
    *,
    gamma: float = OVERLAPPED,
    sm_count: int | None = None,
) -> TaskGraph:
    """Let the collectives ``tasks`` (a mask or ids) occupy ``sms`` of the GPU's multiprocessors while they run.

    Compute-bound kernels beside them run at (SM - sms) / SM of their rate, or at half of it if they fill the device
    with one wave of blocks and no longer fit; memory-bound kernels at the bandwidth that the collective leaves
    (docs/contention.md compares this with recordings). Inserted collectives take ``gamma`` times as long while other
    kernels run (Daydream §6.5 by default), which their range then no longer includes; recorded ones keep their
    duration. ``sm_count`` is for a device that is not in ``whatif/hardware/gpus``; by default it counts as a V100, with
    a note. Raises WhatifError on a recording of a CPU (``occupy_cpu``), and if ``sms`` is not below the GPU's number.
    """
    chosen = as_mask(graph, tasks)
    if not chosen.any():
        return graph
    _check_on_gpu(graph)
    if not 1 <= gamma <= 100:
        raise WhatifError(f"contention: expected gamma from 1 to 100, got {gamma}.")
    share = sm_share(graph, sms, sm_count)
    uses = uses_of(graph)
    role = uses["role"].copy()  # a separate field is read much faster than a struct's
    new = np.flatnonzero(chosen & (role != Role.HOLDS))
    on_device = _device_of(graph, new)
    kernels = np.flatnonzero(_kernels(graph, on_device) & ~chosen & (role == Role.NONE))
    graph = scale_traffic(graph, 0.0)  # the simulation computes the loss
    uses["device"][new], uses["role"][new], uses["compute"][new] = on_device, Role.HOLDS, share
    uses["memory"][new] = _memory_of_collectives(graph, new)
    inserted = new[graph.start_ns[new] < 0]
    uses["slowed"][inserted] = gamma
    rows = uses.take(kernels)
    rows["device"], rows["role"] = _devices(graph)[graph.thread[kernels]], Role.YIELDS
    rows["compute"], rows["memory"] = _kernel_shares(graph, kernels, share)
    np.put(uses, kernels, rows)
    graph = _unknown_device(graph, sms, sm_count)
    # The upper end of a new collective's range is its time beside kernels, which the simulation now computes.
    high_ns = graph.high_ns.copy()
    high_ns[inserted] = np.maximum(graph.duration_ns[inserted], np.rint(high_ns[inserted] / gamma).astype(np.int64))
    return set_to_alone(graph.replace(high_ns=high_ns), uses)


def _check_on_gpu(graph: TaskGraph) -> None:
    if not graph.has_gpu:
        raise WhatifError("contention: expected a recording of a GPU, got one of a CPU; there a core is occupied.")


def share_streams(graph: TaskGraph) -> TaskGraph:
    """Let concurrent kernels of several streams share the multiprocessors of their GPU fairly.

    Each demands the share of the device that its blocks fill, or all of it if unknown (Daydream §7.5 leaves this open).
    A collective's multiprocessors are not shared. Raises WhatifError without a GPU.
    """
    _check_on_gpu(graph)
    uses = uses_of(graph)
    kernels = np.flatnonzero(_kernels(graph, None) & (uses["role"] != Role.HOLDS))
    new = kernels[uses["role"][kernels] == Role.NONE]
    uses["device"][kernels] = _devices(graph)[graph.thread[kernels]]
    _, uses["memory"][new] = _kernel_shares(graph, new, 0.0)
    uses["compute"][kernels], uses["role"][kernels] = _filled(graph, kernels), Role.SHARES
    return set_to_alone(graph, uses)


def share_link(graph: TaskGraph, tasks: npt.NDArray[Any], at_once: int | None = None) -> TaskGraph:
    """Let concurrent transfers ``tasks`` (a mask or ids) share their channel's link fairly.

    Instead of one after the other, up to ``at_once`` run at a time (None: all of a step; gloo has two threads), round
    robin, each on a separate channel. The latency that a what-if gave a transfer uses no link. Raises WhatifError on
    tasks that are on no channel, and on more than 256 at once.
    """
    ids = np.flatnonzero(as_mask(graph, tasks))
    if not len(ids):
        return graph
    if not _of_threads(graph, ThreadKind.CHANNEL)[ids].all():
        raise WhatifError("contention: expected transfers on channels to share a link, got tasks of a stream or a CPU.")
    group = graph.thread[ids].astype(np.int64) * (int(graph.step.max()) + 2) + graph.step[ids]
    order = np.argsort(group, kind="stable")
    first = np.flatnonzero(np.append(True, np.diff(group[order]) != 0))
    place = np.empty(len(ids), dtype=np.int64)
    place[order] = np.arange(len(ids)) - np.repeat(first, np.diff(np.append(first, len(ids))))
    most = int(place.max()) + 1 if at_once is None else at_once
    if not 1 <= most <= MOST_AT_ONCE:
        raise WhatifError(f"contention: expected 1 to {MOST_AT_ONCE} transfers at once on a link, got {most}.")
    uses, thread = uses_of(graph), graph.thread.copy()
    uses["link"][ids], uses["link_share"][ids] = 1 + graph.thread[ids], 1.0
    parts = parts_of(graph, ids)  # the CPU's work takes no link either
    uses["lead_ns"][ids] = np.maximum(graph.duration_ns[ids] - parts.network_ns, 0) + parts.latency_ns
    for code in np.unique(graph.thread[ids]).tolist():
        like = graph.threads[code]
        on_it = graph.thread[ids] == code
        for turn in range(1, min(most, int(place[on_it].max()) + 1)):
            graph, new = add_thread(graph, replace(like, name=f"{like.name} {turn + 1}"))
            thread[ids[on_it & (place % most == turn)]] = new
    return graph.replace(thread=thread).attach(**{USES: uses})


def on_gpus(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the collectives that are kernels of a GPU: recorded ones and new ones.

    Transfers to a parameter server pass the CPU and do not count.
    """
    named = np.array([collective_of(name, "") != "" for name in graph.names], dtype=np.bool_)
    on_streams = _of_threads(graph, ThreadKind.STREAM)
    return np.asarray((graph.kind == TaskKind.COMMUNICATION) & (on_streams | named.take(graph.name)), dtype=np.bool_)


def on_channels(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the transfers that what-ifs inserted on channels.

    Recorded ones, gloo's on its threads, shared their link when they were recorded.
    """
    on_channel = _of_threads(graph, ThreadKind.CHANNEL)
    return np.asarray(on_channel & (graph.kind == TaskKind.COMMUNICATION) & (graph.start_ns < 0), dtype=np.bool_)


def _of_threads(graph: TaskGraph, kind: ThreadKind) -> Bool:
    return np.array([thread.kind == kind for thread in graph.threads], dtype=np.bool_).take(graph.thread)


def occupy_cpu(graph: TaskGraph, tasks: npt.NDArray[Any], share: float) -> TaskGraph:
    """Let the transfers ``tasks`` (a mask or ids) take ``share`` of the core on which the CPU threads of the step run.

    During the transfers the CPU's work runs at 1 - share of its rate; recorded CPU work counts as without them. Raises
    WhatifError on a share outside 0 to 1.
    """
    if not 0 <= share < 1:
        raise WhatifError(f"contention: expected a share of a core from 0 to below 1, got {share}.")
    chosen = as_mask(graph, tasks)
    uses = uses_of(graph)
    # The core of each rank is represented by its first CPU thread; 0 if a rank has none.
    first: dict[int, int] = {}
    for code, thread in enumerate(graph.threads):
        if thread.kind == ThreadKind.CPU:
            first.setdefault(thread.rank, 1 + code)
    core = np.array([first.get(thread.rank, 0) for thread in graph.threads], dtype=np.int64).take(graph.thread)
    chosen = chosen & (core > 0)
    if not chosen.any():
        return graph
    work = graph.on_cpu & ~chosen & np.isin(core, core[chosen])
    uses["device"][chosen | work] = core[chosen | work]
    uses["role"][chosen], uses["compute"][chosen], uses["slowed"][chosen] = Role.HOLDS, share, 1.0
    uses["role"][work], uses["compute"][work] = Role.YIELDS, 1.0
    return graph.attach(**{USES: uses})


def virtual_operations(
    graph: TaskGraph, tasks: npt.NDArray[Any], n: int = 1, sms: int = SMS, *, sm_count: int | None = None
) -> TaskGraph:
    """Insert Tianshu's virtual operations: work on the GPU's stream for each collective of ``tasks`` (a mask or ids).

    A collective's ``n`` operations together last sms / SM of its duration. They alternate with the computation: the
    first follows the work that the collective waits for, each further one comes a kernel later (Tianshu §3.3; its N is
    taken as the number of pieces, which the paper does not give). Recorded collectives get none: the computation beside
    them is already slow. Raises WhatifError as ``occupy`` does.
    """
    ids = np.flatnonzero(as_mask(graph, tasks) & (graph.start_ns < 0))
    if not 1 <= n <= 1000:
        raise WhatifError(f"contention: expected from 1 to 1,000 virtual operations, got {n}.")
    if not graph.has_gpu:
        raise WhatifError("contention: expected a recording of a GPU for virtual operations, got one of a CPU.")
    share = sm_share(graph, sms, sm_count)
    behind, kept = _waited_for(graph, ids)
    ids = ids[kept]
    if not len(ids):
        return graph
    graph = scale_traffic(_unknown_device(graph, sms, sm_count), 0.0)
    after = behind[:, None] + np.zeros((1, n), dtype=np.int64)
    following = graph.neighbours[1]
    for turn in range(1, n):
        later = following[after[:, turn - 1]]
        after[:, turn] = np.where(later >= 0, later, after[:, turn - 1])
    low, centre, high = (
        np.repeat(column[ids] * share / n, n) for column in (graph.low_ns, graph.duration_ns, graph.high_ns)
    )
    inserted = graph.insert(
        NewTasks(after.ravel(), "virtual operation", TaskKind.KERNEL, centre, low_ns=low, high_ns=high)
    )
    return mark(inserted.graph, inserted.ids, int(Source.PAPER))


def sm_share(graph: TaskGraph, sms: int, sm_count: int | None = None) -> float:
    """Return ``sms`` as a share of the recorded GPU's multiprocessors. Raises WhatifError if it has no more."""
    gpu = device(graph)
    count = sm_count or (gpu.sm_count if gpu else UNKNOWN_SM_COUNT)
    if not 1 <= sms < count:
        raise WhatifError(f"contention: expected sms from 1 to {count - 1}, below the GPU's {count}, got {sms}.")
    return sms / count


def _unknown_device(graph: TaskGraph, sms: int, sm_count: int | None) -> TaskGraph:
    if sm_count or device(graph):
        return graph
    return graph.note(
        f"contention: {graph.info.gpu or 'the GPU'} is not in whatif/hardware/gpus, so {sms} multiprocessors are "
        f"assumed to be {100 * sms / UNKNOWN_SM_COUNT:.0f} % of it, as on a V100; sm_count sets the total"
    )


def _devices(graph: TaskGraph) -> Int64:
    """The GPU of each thread, by code, represented by 1 + the code of its first stream; 0 for none."""
    first: dict[tuple[int, int], int] = {}
    devices = []
    for code, thread in enumerate(graph.threads):
        is_stream = thread.kind == ThreadKind.STREAM
        devices.append(1 + first.setdefault((thread.rank, thread.device), code) if is_stream else 0)
    return np.array(devices, dtype=np.int64)


def _device_of(graph: TaskGraph, ids: Int64) -> Int64:
    """The GPU of each collective: of its stream, its rank, the work that it waits for, or else the busiest."""
    of_thread = _devices(graph)
    of_rank: dict[int, set[int]] = {}
    for thread, gpu in zip(graph.threads, of_thread.tolist(), strict=True):
        of_rank.setdefault(thread.rank, set()).update([gpu] if gpu else [])
    # A channel has the GPU of its rank, if there is exactly one.
    only = [next(iter(of_rank[thread.rank])) if len(of_rank[thread.rank]) == 1 else 0 for thread in graph.threads]
    found = np.where(of_thread > 0, of_thread, only)[graph.thread[ids]]
    if (found > 0).all():
        return found
    work = of_thread[graph.thread[graph.on_gpu]]
    busiest = int(np.bincount(work[work > 0]).argmax())
    source = np.zeros(len(graph), dtype=np.int64)
    d = graph.dependencies
    source[d.target] = np.maximum(source[d.target], of_thread[graph.thread[d.source]])
    found = np.where(found > 0, found, source[ids])
    return np.where(found > 0, found, busiest)


def _kernels(graph: TaskGraph, devices: Int64 | None) -> Bool:
    """The kernels on streams of the given devices; None: of all. Copies run on separate engines."""
    of_thread = _devices(graph)
    concerned = of_thread > 0 if devices is None else (of_thread > 0) & np.isin(of_thread, devices)
    return np.asarray(
        among(graph.kind, [TaskKind.KERNEL, TaskKind.MEMSET]) & concerned.take(graph.thread), dtype=np.bool_
    )


def _filled(graph: TaskGraph, kernels: Int64) -> Array:
    """The share of the device that each kernel demands: what its blocks fill, or all if unknown."""
    return np.minimum(np.nan_to_num(filled(graph, device(graph), kernels), nan=1.0), 1.0)


def _kernel_shares(graph: TaskGraph, kernels: Int64, taken: float) -> tuple[Array, Array]:
    """The shares of multiprocessors and of memory bandwidth that compute-bound and memory-bound kernels use.

    By the roofline if operations and bytes are known, else by family. ``taken`` is a collective's share.
    """
    gpu = device(graph)
    fills = filled(graph, gpu, kernels)  # NaN (compares as false) if unknown
    size, duration = np.maximum(graph.size_bytes[kernels], 0), np.maximum(graph.duration_ns[kernels], 1)
    moves = ~among(graph.family[kernels], _COMPUTING) & (graph.family[kernels] >= 0)
    memory = np.zeros(len(kernels))
    if gpu is not None:
        compute_ns = np.maximum(graph.flops[kernels], 0) / matrix_flops_per_ns(graph.dtype[kernels], gpu)
        memory_ns = size / (gpu.memory_gbyte_s * memory_share(gpu).high)  # 1 GB/s is 1 byte/ns
        known = (compute_ns > 0) & (memory_ns > 0)
        moves = np.where(known, memory_ns > compute_ns, moves)
        memory = np.minimum(memory_ns / duration, 1.0)
    # A kernel of exactly one wave of blocks needs a second wave if a collective occupies some of the places.
    wave = (fills > 1.0 - taken) & (fills <= 1.0)
    compute = np.where(wave, 2.0 * (1.0 - taken), 1.0)
    # A memory-bound kernel's use of the bandwidth that the best kernels reach, which is what is shared.
    mover = memory_share(gpu).centre / memory_share(gpu).high
    return np.where(moves, 0.0, compute), np.where(moves, mover, memory)


def _memory_of_collectives(graph: TaskGraph, tasks: Int64) -> Array:
    """The share of the memory bandwidth that collectives use alone; 0 if their size is unknown."""
    gpu = device(graph)
    peak = (gpu.memory_gbyte_s if gpu else UNKNOWN_MEMORY_GBYTE_S) * memory_share(gpu).high
    known = workers_of(graph)[tasks]
    workers = np.where(known > 1, known, recorded_workers(graph) or 2)
    sent = np.maximum(graph.size_bytes[tasks], 0) * (workers - 1) / workers
    sent = np.where(all_reduces(graph)[tasks], 2 * sent, sent)
    moved = sent * MEMORY_BYTES_PER_SENT / np.maximum(graph.duration_ns[tasks], 1)
    return np.asarray(np.minimum(moved / peak, 0.9))


def _waited_for(graph: TaskGraph, ids: Int64) -> tuple[Int64, Bool]:
    """The last task of a stream that each collective waits for, and a mask of the collectives that have one."""
    d = graph.dependencies
    last = np.full(len(graph), -1, dtype=np.int64)
    on_stream = _of_threads(graph, ThreadKind.STREAM)[d.source]
    np.maximum.at(last, d.target[on_stream], d.source[on_stream])
    return last[ids][last[ids] >= 0], last[ids] >= 0
