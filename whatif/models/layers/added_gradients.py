"""The cost of adding the gradients of several passes up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from whatif.graph.insert import NewTasks
from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Float64, Int64, Phase
from whatif.models.durations.estimator import Source, device, shortest_kernel_ns
from whatif.models.durations.memory_rate import memory_gbyte_s
from whatif.models.layers.calls import calls_of, last_gpu_before, launches_of, operator_cost_ns, put_in
from whatif.models.layers.found_gradients import found_gradients
from whatif.models.layers.gradients import Gradients, backward_ends, gradients, last_of_steps, ready_in_parts, step_of

ADD_NAME = "add gradients (accumulation)"
# Gradients stay fp32 under autocast, and as large as the parameters for any batch, like the optimizer's traffic.
FAMILY = int(KernelFamily.OPTIMIZER)
# Accesses per byte of a gradient added to another: two reads and a write. On a CPU the rate counts the bytes that a
# copy writes, which reads, fetches the overwritten line, and writes: the same traffic.
GPU_ACCESSES, CPU_ACCESSES = 3, 1
# Uncertainty up and down: gradients may still be in a cache, or their addition wait for memory. Our estimate.
SPREAD = 2.0


def summed_gradients(graph: TaskGraph) -> Gradients | None:
    """Return the gradients that a second pass adds up: listed ones, else those found in the trace; None without any."""
    if (listed := gradients(graph)) is not None:
        return listed
    found = found_gradients(graph)
    return None if found is None else Gradients(len(found.size_bytes), int(found.size_bytes.sum()))


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
    ends = last_of_steps(graph, graph.kind == graph.kernel_kind)
    launches = np.bincount(graph.launch_of[graph.launch_of >= 0], minlength=len(graph))
    call = graph.launch_of[ends]
    return ends[(call >= 0) & (launches[call] > 1)]


def add_gradients(graph: TaskGraph, times: int, *, costs_of: TaskGraph | None = None) -> TaskGraph:
    """Return the graph in which each step adds its gradients to the existing ones, ``times`` times more.

    The additions run at the end of the backward pass, at the memory rate of the device: two reads and a write of each
    gradient; inside a CUDA graph if that pass is in one. The times of a call and of a kernel's start come from
    ``costs_of``, by default this graph. Adds only a note if no gradients are known.
    """
    ends, found = backward_ends(graph), summed_gradients(graph)
    if found is None:
        return graph.note("the recording lacks its gradients (whatif collect records them), so adding them is free")
    if gradients(graph) is None and (traced := found_gradients(graph)):
        graph = graph.note(f"{found.size_bytes / 1e6:,.1f} MB of gradients are added up (by {traced.source})")
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
    found = ready_in_parts(graph, np.where(inside, steps * len(times) + run, -1))
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
