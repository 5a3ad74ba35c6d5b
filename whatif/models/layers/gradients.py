"""The gradients of a step: their number, sizes, and the cost of adding them up over several passes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whatif.graph.insert import NewTasks
from whatif.graph.kernels import KernelFamily
from whatif.graph.order import each_once
from whatif.graph.structure_cache import of_columns
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Float64, Int64, Phase
from whatif.models.durations.estimator import Source, device, shortest_kernel_ns
from whatif.models.durations.memory_rate import memory_gbyte_s
from whatif.models.layers.calls import calls_of, last_gpu_before, launches_of, operator_cost_ns, put_in
from whatif.models.layers.layer_facts import layer_codes

ADD_NAME = "add gradients (accumulation)"
# Gradients stay fp32 under autocast, and as large as the parameters for any batch, like the optimizer's traffic.
FAMILY = int(KernelFamily.OPTIMIZER)
# Accesses per byte of a gradient added to another: two reads and a write. On a CPU the rate counts the bytes that a
# copy writes, which reads, fetches the overwritten line, and writes: the same traffic.
GPU_ACCESSES, CPU_ACCESSES = 3, 1
# Uncertainty up and down: gradients may still be in a cache, or their addition wait for memory. Our estimate.
SPREAD = 2.0


class Gradients(NamedTuple):
    """Number of the parameter tensors that get a gradient, and bytes of all gradients."""

    tensors: int
    size_bytes: int


def gradients(graph: TaskGraph) -> Gradients | None:
    """Return the number of parameter tensors with a gradient, and the bytes; None if the recording lists none."""
    known = [row.size_bytes for row in graph.info.recorded.gradients if row.size_bytes is not None]
    return Gradients(len(known), sum(known)) if known else None


class ReadyGradients(NamedTuple):
    """One row per step and parameter, shape (n,) each, by step and then in the order of completion."""

    step: Int64
    row: Int64  # in the recorder's list of gradients
    task: Int64  # the last task of the layer's backward work: a kernel, on a CPU an operator
    size_bytes: Int64


def ready_gradients(graph: TaskGraph) -> ReadyGradients:
    """Return when each parameter's gradient is ready: with the last backward work of its layer.

    A gradient whose layer has no backward work in a step is ready with the one before it in the recorder's list. Empty
    if the recording has no such list (``whatif collect`` records it) or no backward work.
    """
    return _ready_in_parts(graph, np.where(graph.on_device.mask, graph.step, -1).astype(np.int64))


def _ready_in_parts(graph: TaskGraph, part: Int64) -> ReadyGradients:
    """The same for parts of the backward work: the number of each task's part in place of its step; -1 for none."""
    code = layer_codes(graph)
    tasks = np.flatnonzero((graph.phase == Phase.BACKWARD) & (part >= 0))
    key = part[tasks] * len(graph.layers) + graph.layer[tasks]
    # The last task of each part and layer: the first in reverse order.
    keys, place = np.unique(key[::-1], return_index=True)
    last = dict(zip(keys.tolist(), tasks[::-1][place].tolist(), strict=True))
    found: list[tuple[int, int, int, int]] = []
    for number in each_once(part[tasks]).tolist():
        ready = -1
        waiting: list[tuple[int, int]] = []
        for place_in_list, row in enumerate(graph.info.recorded.gradients):
            layer_end = last.get(number * len(graph.layers) + code.get(row.layer, 0), -1)
            ready = max(ready, layer_end) if layer_end >= 0 else ready
            waiting.append((place_in_list, row.size_bytes or 0))
            if ready >= 0:
                found += [(number, in_list, ready, bytes_) for in_list, bytes_ in waiting]
                waiting.clear()
    columns = np.array(found, dtype=np.int64).reshape(-1, 4).T
    return ReadyGradients(columns[0], columns[1], columns[2], columns[3])


@of_columns("phase", "in_optimizer")
def superseded(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the backward work of passes whose gradients are not exchanged.

    Those are passes after which another one follows in the same step without an optimizer's step in between (gradient
    accumulation, SAM): DDP exchanges the gradients of the last one. A pass inside an optimizer's step is its closure.
    """
    forward, backward = (graph.phase == phase for phase in (Phase.FORWARD, Phase.BACKWARD))
    ids = np.flatnonzero(graph.on_cpu & (forward | backward | graph.in_optimizer))
    of_thread = np.array([thread.rank for thread in graph.threads], dtype=np.int64)
    if len(set(of_thread.tolist())) > 1:  # one rank after the other
        ids = ids[np.argsort(of_thread[graph.thread[ids]], kind="stable")]
    forwards, backwards, optimizer = (np.flatnonzero(mask[ids]) for mask in (forward, backward, graph.in_optimizer))
    # A pass is backward work without forward work in between.
    n_forward = np.cumsum(forward[ids], dtype=np.int32)[backwards]
    begins = np.append(True, n_forward[1:] > n_forward[:-1])[: len(backwards)]
    begin = np.flatnonzero(begins)
    before, last = backwards[begin[1:] - 1], np.append(backwards[begin[1:] - 1], backwards[-1:])[1:]
    updated = np.searchsorted(optimizer, [before, forwards[np.searchsorted(forwards, before)], last])
    separate = (updated[0] < updated[1]) & (updated[1] == updated[2])
    first = ids[backwards[begin]]
    step, rank = graph.step[first], of_thread[graph.thread[first]]
    followed = (step[1:] == step[:-1]) & (step[1:] >= 0) & (rank[1:] == rank[:-1]) & ~separate
    found = np.zeros(len(graph), dtype=np.bool_)
    if not followed.any():
        return found
    found[ids[backwards]] = np.append(followed, False)[np.cumsum(begins) - 1]
    launch = graph.launch_of
    return np.where(launch >= 0, found[launch], found)


def step_of(graph: TaskGraph) -> Int64:
    """Return the step of each task, shape (n_tasks,); a recording without step marks is one step."""
    steps = graph.step.astype(np.int64)
    return steps if bool((steps >= 0).any()) else np.zeros(len(graph), dtype=np.int64)


def backward_ends(graph: TaskGraph) -> Int64:
    """Return the id of the last CPU task of the backward pass of each step that has one, shape (n,)."""
    return _last_of_steps(graph, graph.on_cpu.mask)


def _last_of_steps(graph: TaskGraph, chosen: Bool) -> Int64:
    """The last of the chosen tasks in the backward pass of each step, shape (n,)."""
    steps = step_of(graph)
    tasks = np.flatnonzero(chosen & (graph.phase == Phase.BACKWARD) & (steps >= 0))
    _, last = np.unique(steps[tasks][::-1], return_index=True)
    return tasks[::-1][last]


def additions(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the tasks inserted by ``add_gradients``, launches included."""
    named = np.array([name == ADD_NAME for name in graph.names], dtype=np.bool_)
    added = named.take(graph.name) & (graph.start_ns < 0)
    calls = launches_of(graph, added & graph.on_gpu) & ~launches_of(graph, graph.on_gpu & ~added)
    return np.asarray(added | calls, dtype=np.bool_)


def adding_ns(
    graph: TaskGraph, tensors: npt.ArrayLike, size_bytes: npt.ArrayLike, costs_of: TaskGraph | None = None
) -> tuple[Float64, Float64]:
    """Return the time to add gradients once, and to launch that on a GPU, ns, shape (n,): of n groups of tensors.

    ``costs_of``: the graph with the times of small kernels and operators.
    """
    costs_of = costs_of or graph
    count, size = np.asarray(tensors, dtype=np.float64), np.asarray(size_bytes, dtype=np.float64)
    rate = memory_gbyte_s(graph, device(graph))  # 1 GB/s is 1 byte/ns
    if not graph.has_gpu:
        return size * CPU_ACCESSES / rate + count * shortest_kernel_ns(costs_of), np.zeros_like(count)
    each_ns = np.maximum(size / np.maximum(count, 1) * GPU_ACCESSES / rate, shortest_kernel_ns(costs_of))
    launch_ns = 0.0 if len(_captured_ends(graph)) else operator_cost_ns(costs_of)
    return count * each_ns, count * launch_ns


def _captured_ends(graph: TaskGraph) -> Int64:
    """Return the last kernel of each step's backward pass that is in a CUDA graph, shape (n,)."""
    ends = _last_of_steps(graph, graph.kind == graph.kernel_kind)
    launches = np.bincount(graph.launch_of[graph.launch_of >= 0], minlength=len(graph))
    call = graph.launch_of[ends]
    return ends[(call >= 0) & (launches[call] > 1)]


def add_gradients(graph: TaskGraph, times: int, *, costs_of: TaskGraph | None = None) -> TaskGraph:
    """Return the graph in which each step adds its gradients to the existing ones, ``times`` times more.

    The additions run at the end of the backward pass, at the memory rate of the device: two reads and a write of each
    gradient; inside a CUDA graph if that pass is in one. The times of a call and of a kernel's start come from
    ``costs_of``, by default this graph. Adds only a note if the recording does not list its gradients.
    """
    ends, found = backward_ends(graph), gradients(graph)
    if found is None:
        return graph.note("the recording lacks its gradients (whatif collect records them), so adding them is free")
    captured = _captured_ends(graph)
    after = captured if len(captured) else last_gpu_before(graph, ends) if graph.has_gpu else ends
    return _with_additions(graph, after, ends, times * found.tensors, times * found.size_bytes, costs_of)


def add_in_passes(graph: TaskGraph, run: Int64, times: Float64, costs_of: TaskGraph) -> TaskGraph:
    """Return the graph in which each pass adds its gradients to the existing ones, where each is ready.

    As AccumulateGrad does: after the last backward work of the gradient's layer. ``run`` (n_tasks,) is the number of
    each task's pass, -1 outside of all; a pass adds its gradients ``times`` (n_passes,). Where no layer is known, they
    are added at the end of the step's backward work.
    """
    steps = step_of(graph)
    inside = (graph.kind == graph.kernel_kind) & (steps >= 0) & (run >= 0)
    found = _ready_in_parts(graph, np.where(inside, steps * len(times) + run, -1))
    size, often = found.size_bytes, times[found.step % len(times)]
    if not size.any():
        return add_gradients(graph, round(float(times.sum())), costs_of=costs_of)
    after, place = np.unique(found.task, return_inverse=True)
    tensors, size_bytes = (np.bincount(place, weights=often * column) for column in (size > 0, size))
    kept = tensors > 0
    after = after[kept]
    calls = calls_of(graph, after) if graph.has_gpu else after
    return _with_additions(graph, after, calls, tensors[kept], size_bytes[kept], costs_of)


def _with_additions(
    graph: TaskGraph, after: Int64, launched_after: Int64, tensors: npt.ArrayLike, size_bytes: npt.ArrayLike,
    costs_of: TaskGraph | None,
) -> TaskGraph:  # fmt: skip
    """Insert an addition of ``tensors`` after each task, launched after a call or by the CUDA graph that it is in."""
    gpu, on_gpu = device(graph), graph.has_gpu
    work_ns, launch_ns = adding_ns(graph, tensors, size_bytes, costs_of)
    by_graph = on_gpu and len(_captured_ends(graph)) > 0
    tasks = NewTasks(
        after, ADD_NAME, graph.kernel_kind,
        work_ns, low_ns=None if on_gpu else work_ns / SPREAD, high_ns=work_ns * SPREAD, phase=Phase.BACKWARD,
        family=FAMILY, launched_after=launched_after if on_gpu and not by_graph else None,
        launched_by=calls_of(graph, after) if by_graph else None, launch_ns=launch_ns,
    )  # fmt: skip
    return put_in(graph, [(tasks, Source.ROOFLINE if gpu or not on_gpu else Source.ASSUMED)])
