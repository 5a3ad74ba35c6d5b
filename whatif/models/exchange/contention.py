"""Contention: collectives and kernels that slow one another, transfers on one link, communication on a CPU core.

A what-if says here who uses what (``whatif.simulation.sharing``); the simulator does the rest
(``whatif.simulation.rate_sharing``), wherever the tasks come to lie. Recorded work that ran beside a recorded
collective is slow already: it is set to what it takes alone first, so that it comes out as recorded where nothing moves
(``whatif.models.exchange.recorded_overlap``).

Sources: Tianshu §3.3 (16 multiprocessors for an all-reduce, virtual operations); Pei et al., equation 31 (compute times
sm / (sm - 1) while an all-reduce holds one); Daydream §6.5 (NCCL takes 34 % longer beside kernels, next to theory
alone) and §7.5 (concurrent kernels).
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
from whatif.models.exchange.beside_kernels import send_less
from whatif.models.exchange.collective_tasks import OVERLAPPED, all_reduces, recorded_workers
from whatif.models.exchange.recorded_overlap import set_to_alone
from whatif.runtime.errors import WhatifError
from whatif.simulation.sharing import USES, Role, uses_of
from whatif.simulation.transfers import parts_of, workers_of

# What an all-reduce occupies by default (Tianshu §3.3, after NVIDIA's documentation): 20 % of its V100s.
SMS = 16
# An unknown device counts as a V100.
UNKNOWN_SM_COUNT = 80
# What a device reads and writes of its memory for each byte that it sends: the byte and, in a reduction, what it is
# added to, and the sum. Our estimate.
MEMORY_BYTES_PER_SENT = 2.0
# Kernels of these families compute; the others are bound by memory where a recording does not show both. What is
# unknown counts as computing, as all work does in the papers.
_COMPUTING = (*MATRIX_FAMILIES, KernelFamily.OTHER)
# Connections that share a link at a time; more are no longer a matter of fair sharing.
MOST_AT_ONCE = 256


def occupy(
    graph: TaskGraph,
    tasks: npt.NDArray[Any],
    sms: int = SMS,
    *,
    gamma: float = OVERLAPPED,
    sm_count: int | None = None,
) -> TaskGraph:
    """Let the collectives ``tasks`` (a mask or ids) hold ``sms`` of the GPU's multiprocessors while they run.

    Beside them kernels that compute proceed at (SM - sms) / SM of their rate, or at half of it where they fill the
    device with one wave of blocks and no longer fit; kernels bound by memory at what the collective leaves of the
    bandwidth (docs/contention.md compares that with recordings). Collectives that a what-if put in take ``gamma`` times
    as long while other kernels run (Daydream §6.5 by default), and the upper end of their range no longer counts that;
    recorded ones last as long as recorded. ``sm_count`` is for a device that ``whatif/hardware/gpus`` does not know,
    which otherwise counts as a V100, with a note. Raises WhatifError on a recording of a CPU (``occupy_cpu``), and
    where ``sms`` are not less than the GPU has.
    """
    chosen = as_mask(graph, tasks)
    if not chosen.any():
        return graph
    _check_on_gpu(graph)
    if not 1 <= gamma <= 100:
        raise WhatifError(f"contention: expected gamma from 1 to 100, got {gamma}.")
    share = sm_share(graph, sms, sm_count)
    uses = uses_of(graph)
    role = uses["role"].copy()  # one field by itself is read much faster than among the others
    new = np.flatnonzero(chosen & (role != Role.HOLDS))
    on_device = _device_of(graph, new)
    kernels = np.flatnonzero(_kernels(graph, on_device) & ~chosen & (role == Role.NONE))
    graph = send_less(graph, 0.0)  # the simulation shows what they lose
    uses["device"][new], uses["role"][new], uses["compute"][new] = on_device, Role.HOLDS, share
    uses["memory"][new] = _memory_of_collectives(graph, new)
    inserted = new[graph.start_ns[new] < 0]
    uses["slowed"][inserted] = gamma
    uses["device"][kernels], uses["role"][kernels] = _devices(graph)[graph.thread[kernels]], Role.YIELDS
    uses["compute"][kernels], uses["memory"][kernels] = _kernel_shares(graph, kernels, share)
    graph = _unknown_device(graph, sms, sm_count)
    # The upper end of a new collective's range is what it takes beside kernels: the simulation shows that now.
    high_ns = graph.high_ns.copy()
    high_ns[inserted] = np.maximum(graph.duration_ns[inserted], np.rint(high_ns[inserted] / gamma).astype(np.int64))
    return set_to_alone(graph.replace(high_ns=high_ns), uses)


def _check_on_gpu(graph: TaskGraph) -> None:
    if not graph.has_gpu:
        raise WhatifError("contention: expected a recording of a GPU, got one of a CPU; there a core is occupied.")


def share_streams(graph: TaskGraph) -> TaskGraph:
    """Let kernels of several streams that run at once share the multiprocessors of their GPU, fairly.

    Each asks for as much of the device as its blocks fill, or for all of it where the recording does not tell
    (Daydream §7.5 leaves this open). What a collective holds is not theirs to share. Raises WhatifError without a GPU.
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
    """Let the transfers ``tasks`` (a mask or ids) that are under way at one time share their channel's link, fairly.

    Instead of one after the other, up to ``at_once`` go at a time (all of a step where None; gloo has two threads), in
    turn, each on a channel of its own. The latency that a what-if gave a transfer uses no link. Raises WhatifError
    on tasks that are on no channel, and on more than 256 at once.
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

    What a parameter server is sent goes by the CPU and is none.
    """
    named = np.array([collective_of(name, "") != "" for name in graph.names], dtype=np.bool_)
    on_streams = _of_threads(graph, ThreadKind.STREAM)
    return np.asarray((graph.kind == TaskKind.COMMUNICATION) & (on_streams | named.take(graph.name)), dtype=np.bool_)


def on_channels(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the transfers that a what-if put on channels."""
    on_channel = _of_threads(graph, ThreadKind.CHANNEL)
    return np.asarray(on_channel & (graph.kind == TaskKind.COMMUNICATION), dtype=np.bool_)


def _of_threads(graph: TaskGraph, kind: ThreadKind) -> Bool:
    return np.array([thread.kind == kind for thread in graph.threads], dtype=np.bool_).take(graph.thread)


def occupy_cpu(graph: TaskGraph, tasks: npt.NDArray[Any], share: float) -> TaskGraph:
    """Let the transfers ``tasks`` (a mask or ids) take ``share`` of the core on which the CPU threads of the step run.

    While they are under way the CPU's work proceeds at 1 - share. Recorded CPU work is as it was without them. Raises
    WhatifError on a share outside 0 to 1.
    """
    if not 0 <= share < 1:
        raise WhatifError(f"contention: expected a share of a core from 0 to below 1, got {share}.")
    chosen = as_mask(graph, tasks)
    uses = uses_of(graph)
    # The thing that stands for the core of each rank: its first CPU thread. 0 where a rank has none.
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
    """Put Tianshu's virtual operations in: for each collective of ``tasks`` (a mask or ids) work on the GPU's stream.

    Together the ``n`` of a collective last sms / SM of its duration. They are ready when it is and take turns with the
    computation: the first stands after the work that the collective waits for, each further one a kernel later
    (Tianshu §3.3; its N is taken for the number of pieces, of which the paper does not tell how many). Recorded
    collectives get none: the computation beside them is slow already. Raises WhatifError as ``occupy`` does.
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
    graph = send_less(_unknown_device(graph, sms, sm_count), 0.0)
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
    """Return the share of the recorded GPU that ``sms`` multiprocessors are. Raises WhatifError if it has no more."""
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
    """By the code of each thread the thing that stands for its GPU: 1 + the code of its first stream; 0 for none."""
    first: dict[tuple[int, int], int] = {}
    things = []
    for code, thread in enumerate(graph.threads):
        is_stream = thread.kind == ThreadKind.STREAM
        things.append(1 + first.setdefault((thread.rank, thread.device), code) if is_stream else 0)
    return np.array(things, dtype=np.int64)


def _device_of(graph: TaskGraph, ids: Int64) -> Int64:
    """The GPU of each collective: its stream's, its rank's, that of the work it waits for, or the busiest."""
    of_thread = _devices(graph)
    of_rank: dict[int, set[int]] = {}
    for thread, thing in zip(graph.threads, of_thread.tolist(), strict=True):
        of_rank.setdefault(thread.rank, set()).update([thing] if thing else [])
    # A channel has the GPU of its rank, where that is one.
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
    """The kernels on streams of some devices; of all where None. Copies run on engines of their own."""
    of_thread = _devices(graph)
    concerned = of_thread > 0 if devices is None else (of_thread > 0) & np.isin(of_thread, devices)
    return np.asarray(
        among(graph.kind, [TaskKind.KERNEL, TaskKind.MEMSET]) & concerned.take(graph.thread), dtype=np.bool_
    )


def _filled(graph: TaskGraph, kernels: Int64) -> Array:
    """The share of the device that each kernel asks for: what its blocks fill, or all where that is unknown."""
    return np.minimum(np.nan_to_num(filled(graph, device(graph), kernels), nan=1.0), 1.0)


def _kernel_shares(graph: TaskGraph, kernels: Int64, held: float) -> tuple[Array, Array]:
    """What kernels use of the multiprocessors and of the memory bandwidth: those that compute, and those that move.

    By the roofline where operations and bytes are known, else by their family. ``held`` is the share of a collective.
    """
    gpu = device(graph)
    fills = filled(graph, gpu, kernels)  # NaN where it is unknown, which compares as false
    size, duration = np.maximum(graph.size_bytes[kernels], 0), np.maximum(graph.duration_ns[kernels], 1)
    moves = ~among(graph.family[kernels], _COMPUTING) & (graph.family[kernels] >= 0)
    memory = np.zeros(len(kernels))
    if gpu is not None:
        compute_ns = np.maximum(graph.flops[kernels], 0) / matrix_flops_per_ns(graph.dtype[kernels], gpu)
        memory_ns = size / (gpu.memory_gbyte_s * memory_share(gpu).high)  # 1 GB/s is 1 byte/ns
        known = (compute_ns > 0) & (memory_ns > 0)
        moves = np.where(known, memory_ns > compute_ns, moves)
        memory = np.minimum(memory_ns / duration, 1.0)
    # What fills the GPU with one wave of blocks needs a second one, once a collective holds the place of some.
    wave = (fills > 1.0 - held) & (fills <= 1.0)
    compute = np.where(wave, 2.0 * (1.0 - held), 1.0)
    # What a kernel that is bound by memory uses of the bandwidth that the best ones reach, which is what is shared.
    mover = memory_share(gpu).centre / memory_share(gpu).high
    return np.where(moves, 0.0, compute), np.where(moves, mover, memory)


def _memory_of_collectives(graph: TaskGraph, tasks: Int64) -> Array:
    """The share of the memory bandwidth that collectives use alone; 0 where their size is not known."""
    gpu = device(graph)
    peak = (gpu.memory_gbyte_s if gpu else UNKNOWN_MEMORY_GBYTE_S) * memory_share(gpu).high
    known = workers_of(graph)[tasks]
    workers = np.where(known > 1, known, recorded_workers(graph) or 2)
    sent = np.maximum(graph.size_bytes[tasks], 0) * (workers - 1) / workers
    sent = np.where(all_reduces(graph)[tasks], 2 * sent, sent)
    moved = sent * MEMORY_BYTES_PER_SENT / np.maximum(graph.duration_ns[tasks], 1)
    return np.asarray(np.minimum(moved / peak, 0.9))


def _waited_for(graph: TaskGraph, ids: Int64) -> tuple[Int64, Bool]:
    """The last work of a stream that each collective waits for, and for which of them there is one."""
    d = graph.dependencies
    last = np.full(len(graph), -1, dtype=np.int64)
    on_stream = _of_threads(graph, ThreadKind.STREAM)[d.source]
    np.maximum.at(last, d.target[on_stream], d.source[on_stream])
    return last[ids][last[ids] >= 0], last[ids] >= 0
