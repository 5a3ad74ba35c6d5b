"""CUDA graphs: the launches of a step that one graph launch can replace, and the remaining CPU work.

Sources: NVIDIA, "Getting Started with CUDA Graphs" (2019) and "Constant Time Launch for Straight-Line CUDA Graphs"
(2024); PyTorch, "Accelerating PyTorch with CUDA Graphs" (2021) and the notes on torch.cuda.CUDAGraph: nothing that
waits for the GPU can be captured, and inputs are copied into the graph's buffers before it is launched.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from whatif.graph.edit import as_mask
from whatif.graph.order import before_on_thread, each_once
from whatif.graph.remove import STAYS, contracted
from whatif.graph.task_graph import TaskGraph, matching
from whatif.graph.types import (
    HANDOFF_NAME,
    Array,
    Bool,
    DependencyKind,
    Int64,
    Phase,
    TaskKind,
    ThreadKind,
    among,
)
from whatif.hardware.roofline import graph_gap_ns
from whatif.models.durations.estimator import Estimates, Source, device, put
from whatif.models.kernels.capturable import with_capturable_update
from whatif.models.layers.columns import named, with_values
from whatif.simulation.steps import MIN_STEPS

GRAPH_LAUNCH_NAME = "cudaGraphLaunch (captured)"
# The call: about 10 us from Python (NVIDIA, "CUDA Graph Best Practice for PyTorch"); 2.5 us in C, and 15 us on a slow
# driver (WSL).
CALL_NS = (10_000, 2_500, 20_000)
# Each further node: 200 ns before CUDA 12.6, 1 ns for a straight line since (NVIDIA, "Constant Time Launch ..."). The
# recording's driver is unknown: the middle.
NODE_NS = (100, 1, 200)
# An operator takes some tens of microseconds to launch its work. Longer ones do something else: loading a library, a
# first allocation, a tuner's search, another program. In warm recordings by others that is up to a quarter of the CPU
# time in both passes, in cold ones three quarters and more. The limits are our estimate.
LONG_NS, COLD_SHARE = 1_000_000, 0.5


def graph_launches(n_nodes: npt.ArrayLike) -> Estimates:
    """Estimate the CPU calls that launch graphs of ``n_nodes`` kernels and copies each, shape (n,)."""
    nodes = np.atleast_1d(np.asarray(n_nodes, dtype=np.float64))
    centre, low, high = (call + node * nodes for call, node in zip(CALL_NS, NODE_NS, strict=True))
    return Estimates.of(centre, Source.PAPER, low, high)


class Captured(Struct, frozen=True):
    """The numbers of captured calls, of graph launches and of steps."""

    calls: int
    launches: int
    steps: int
    start_up_ns: int  # calls and gaps of counted steps that count as start-up work and stay
    uneven: bool  # the steady steps launch different numbers of tasks, so one graph does not fit all


def waiting_tasks(graph: TaskGraph) -> Int64:
    """Return the tasks at which a CPU thread waits for the GPU, by position or by an explicit dependency, in order."""
    synced = graph.dependencies.target[graph.dependencies.kind == DependencyKind.SYNC]
    return each_once(np.concatenate([graph.waits.task, synced])).astype(np.int64)


def launching_threads(graph: TaskGraph) -> Bool:
    """Return a mask of the threads that launch GPU work, shape (n_threads,)."""
    launch = graph.launch_of
    mask = np.zeros(len(graph.threads), dtype=np.bool_)
    mask[graph.thread[launch[np.flatnonzero(launch >= 0)]]] = True
    return mask


def stays_outside(graph: TaskGraph) -> Bool:
    """Return a mask of the CPU calls that cannot be captured, shape (n_tasks,).

    Those after which the CPU waits, and those that copy a step's input from the host before its first kernel.
    """
    mask = np.zeros(len(graph), dtype=np.bool_)
    waiting = waiting_tasks(graph)
    calls = before_on_thread(graph, waiting)
    mask[waiting] = True
    mask[calls[calls >= 0]] = True
    kernels = np.flatnonzero(graph.kind == TaskKind.KERNEL)
    first = first_of(graph.step[kernels] + 1, kernels, int(graph.step.max(initial=-1)) + 2, len(graph))
    copies = np.flatnonzero((graph.kind == TaskKind.MEMCPY) & (graph.launch_of >= 0))
    host = matching(graph.names, r"(?i)HtoD|HostToDevice|host to device")[graph.name[copies]]
    inputs = copies[host & (copies < first[graph.step[copies] + 1])]
    mask[graph.launch_of[inputs]] = True
    return mask


def start_up(graph: TaskGraph, tasks: Bool) -> Bool:
    """Return those of the CPU ``tasks`` (a mask) that are start-up work, in steps that mostly consist of it.

    Recordings of the first steps contain it. Neither a compiler nor a CUDA graph removes it.
    """
    found = np.zeros(len(graph), dtype=np.bool_)
    long = np.flatnonzero(tasks & (graph.duration_ns > LONG_NS))
    if not len(long):
        return found
    count = int(graph.step.max(initial=-1)) + 2
    all_ns, long_ns = (
        np.bincount(graph.step[ids] + 1, weights=graph.duration_ns[ids], minlength=count)
        for ids in (np.flatnonzero(tasks), long)
    )
    found[long] = (long_ns > COLD_SHARE * all_ns)[graph.step[long] + 1]
    return found


def _among_calls(graph: TaskGraph, calls: Array) -> Bool:
    """The tasks from the first to the last of the launching ``calls`` (ids) of their step."""
    calls, count = each_once(calls).astype(np.int64), int(graph.step.max(initial=-1)) + 2
    first, last = first_of(graph.step[calls] + 1, calls, count, len(graph)), np.full(count, -1)
    last[graph.step[calls] + 1] = calls  # the last of several wins
    ids = np.arange(len(graph))
    return np.asarray((ids >= first[graph.step + 1]) & (ids <= last[graph.step + 1]), dtype=np.bool_)


def counted_ns(graph: TaskGraph, staying: Bool) -> int:
    """Return the time of a mask's tasks in the steps that a report counts, ns: the steady ones, if there are any."""
    first, last = graph.info.steady
    counted = (graph.step >= first) & (graph.step < last) if graph.info.n_steps >= MIN_STEPS else staying
    return int(graph.duration_ns[staying & counted].sum())


def with_doubt_in_start_up(graph: TaskGraph, staying: Bool) -> TaskGraph:
    """Extend the range of start-up work down to 0."""
    return graph.scale(staying, 1.0, low=0.0) if staying.any() else graph


def note_start_up(graph: TaskGraph, name: str, start_up_ns: int) -> TaskGraph:
    """Return the graph with a note on the CPU time, in ns, that the what-if ``name`` counted as start-up work."""
    if not start_up_ns:
        return graph
    return graph.note(
        f"{name}: {start_up_ns / 1e6:,.1f} ms of the recording are single calls or gaps of over "
        f"{LONG_NS / 1e6:.0f} ms, typical of library loading and first allocations; they stay, except in the lower "
        "end of the range; record steps after warm-up"
    )


def first_of(key: Array, tasks: Int64, n_keys: int, none: int) -> Int64:
    """Return the first of ``tasks`` (ascending) with each key, shape (n_keys,); ``none`` if a key has no task."""
    first = np.full(n_keys, none, dtype=np.int64)
    first[key[::-1]] = tasks[::-1]  # the last write wins
    return first


def capture(graph: TaskGraph, phases: Collection[Phase], *, apart: bool = False) -> tuple[TaskGraph, Captured]:
    """Return the graph with the launches of ``phases`` captured in CUDA graphs, and a count of what was captured.

    Between two waits of the CPU for the GPU (or start-up work, which stays) all launches become one (``apart``: one per
    phase), at the first task that it replaces. The work of the same threads between the first and the last launch is
    removed, and so is their work for the model's layers, the backward pass and the optimizer. GPU tasks, their order
    and their streams stay, and so does every other CPU task; an Adam in a graph gets capturable=True. Segments of a
    single call stay; the same graph if there is no other.
    """
    launch = graph.launch_of
    outside = stays_outside(graph)
    in_phase = among(graph.phase, phases)
    launched = np.flatnonzero((graph.on_gpu & in_phase & (launch >= 0)).mask)
    nodes = launched[~outside[launch[launched]]]
    goes = _cpu_work(graph, in_phase & ~outside)
    staying = start_up(graph, goes)
    if staying.any():
        staying = staying & _among_calls(graph, launch[nodes])
        outside, goes = outside | staying, goes & ~staying
        nodes = nodes[~outside[launch[nodes]]]
    segment, n_segments = stretches(graph, by_phase=apart, breaks=staying)
    is_call = np.zeros(len(graph), dtype=np.bool_)
    is_call[launch[nodes]] = True
    calls = np.flatnonzero(is_call)
    n_calls = np.bincount(segment[calls], minlength=n_segments)
    n_nodes = np.bincount(segment[launch[nodes]], minlength=n_segments)
    chosen = n_calls >= 2
    first, last = first_of(segment[calls], calls, n_segments, len(graph)), np.full(n_segments, -1)
    last[segment[calls]] = calls  # the last of several wins
    tasks = np.flatnonzero(goes)
    key = segment[tasks]
    between = (tasks >= first[key]) & (tasks <= last[key])
    of_model = (graph.layer[tasks] > 0) | graph.in_optimizer[tasks] | (graph.phase[tasks] == Phase.BACKWARD)
    inside = np.flatnonzero(chosen[key] & (between | of_model))
    tasks, key = tasks[inside], key[inside]
    if not len(tasks):
        return graph, Captured(0, 0, 0, 0, False)

    head = first_of(key, tasks, n_segments, len(graph))
    fate = np.full(len(graph), STAYS, dtype=np.int64)
    fate[tasks] = head[key]
    heads = each_once(head[chosen & (head < len(graph))])
    fate[heads] = STAYS
    steps = each_once(graph.step[heads])
    captured = Captured(
        calls=int(n_calls[segment[heads]].sum()), launches=len(heads), steps=len(steps),
        start_up_ns=counted_ns(graph, staying), uneven=_uneven(graph, nodes),
    )  # fmt: skip
    inside = nodes[chosen[segment[launch[nodes]]]]
    kind = graph.kind.copy()
    kind[heads] = TaskKind.RUNTIME
    graph, place = contracted(_with_graph_lags(graph.replace(kind=kind), inside), fate)
    # The rest is a fraction of the recording, and faster to write to.
    graph = _as_graph_launches(graph, place[heads].astype(np.int64), n_nodes[segment[heads]])
    graph = with_doubt_in_start_up(graph, as_mask(graph, place[staying]))
    graph = _with_gaps(graph, place[inside].astype(np.int64))
    ways = tuple(way for way in graph.info.execution if way not in ("eager", "cuda_graph"))
    graph = graph.replace(info=replace(graph.info, execution=(*ways, "cuda_graph")))
    return with_capturable_update(graph) if Phase.UPDATE in phases else graph, captured


def stretches(graph: TaskGraph, *, by_phase: bool, breaks: Bool | None = None) -> tuple[Int64, int]:
    """Return each task's stretch, by its step and the waits (and ``breaks``) before it, and the number of stretches.

    Within a stretch no thread waits for the GPU: while one captures, none may (torch.cuda.graph's global mode).
    ``by_phase``: each phase is a separate stretch.
    """
    waiting = waiting_tasks(graph)
    ahead = np.zeros(len(graph), dtype=np.int64) if breaks is None else breaks.astype(np.int64)
    ahead[waiting] = 1
    passed = np.cumsum(ahead)
    per_step = int(passed[-1]) + 1
    number = passed + (graph.step.astype(np.int64) + 1) * per_step
    count = (int(graph.step.max(initial=-1)) + 2) * per_step
    return (number * len(Phase) + graph.phase, count * len(Phase)) if by_phase else (number, count)


def _cpu_work(graph: TaskGraph, allowed: Bool) -> Bool:
    """The work of launching threads, including their waits for each other."""
    named = np.array([name.startswith(HANDOFF_NAME) for name in graph.names], dtype=np.bool_)
    handoff = (graph.kind == TaskKind.WAIT) & named.take(graph.name)
    threads = launching_threads(graph) & np.array([t.kind == ThreadKind.CPU for t in graph.threads])
    work: Bool = allowed & (graph.on_cpu.mask | handoff) & threads.take(graph.thread)
    return work


def _as_graph_launches(graph: TaskGraph, heads: Int64, n_nodes: Array) -> TaskGraph:
    """Turn ``heads`` into graph launches of ``n_nodes`` tasks each, shape (n,)."""
    graph = with_values(named(graph, {GRAPH_LAUNCH_NAME: heads}), heads, profiler_events=0, profiler_ns=0)
    return put(graph, heads, graph_launches(n_nodes))


def _with_graph_lags(graph: TaskGraph, nodes: Int64) -> TaskGraph:
    """Use a graph's lag between tasks on streams that mostly run its nodes."""
    centre, _, _ = graph_gap_ns(device(graph))
    count = np.bincount(graph.thread, minlength=len(graph.threads))
    mostly = 2 * np.bincount(graph.thread[nodes], minlength=len(graph.threads)) > count
    return graph.replace(
        threads=tuple(
            replace(thread, lag_ns=min(thread.lag_ns, int(centre))) if captured else thread
            for thread, captured in zip(graph.threads, mostly.tolist(), strict=True)
        )
    )


def _with_gaps(graph: TaskGraph, nodes: Int64) -> TaskGraph:
    """Include the uncertainty of the gaps between a graph's nodes in the ranges."""
    _, least, most = graph_gap_ns(device(graph))
    gap_ns = graph.thread_lag_ns[graph.thread[nodes]]
    return graph.with_duration(
        nodes, graph.duration_ns[nodes],
        low_ns=np.maximum(graph.low_ns[nodes] - np.maximum(gap_ns - least, 0), 0),
        high_ns=graph.high_ns[nodes] + np.maximum(most - gap_ns, 0),
    )  # fmt: skip


def _uneven(graph: TaskGraph, nodes: Int64) -> bool:
    """Whether the steady steps launch different numbers of tasks."""
    first, last = graph.info.steady
    counts = np.bincount(graph.step[nodes] + 1, minlength=last + 1)[1:][first:last]
    return len(each_once(counts)) > 1
