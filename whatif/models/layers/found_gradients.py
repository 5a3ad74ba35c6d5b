"""The gradients of a step in a recording without a list: derived from its operators, kernels and memory.

Autograd's operator ``AccumulateGrad`` runs once for each gradient, when it is complete; shapes give its size. Without
shapes the optimizer gives it: each thread block of its kernels works on a fixed number of elements.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.graph.order import each_once
from whatif.graph.structure_cache import of_graph
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Float64, Int64, Phase
from whatif.ingest.marks import ACCUMULATE
from whatif.models.layers.calls import last_gpu_before
from whatif.models.layers.gradients import step_of, superseded
from whatif.models.layers.update_tasks import step_kernels

# Elements per chunk of torch's foreach and fused optimizers (ATen/native/cuda/MultiTensorApply.cuh: kChunkSize,
# kBlockSize of 512 threads) and of apex's (2048 x 32 elements in the calls of its optimizers).
CHUNK, CHUNK_WARPS, MULTI_TENSOR = 65_536, 16, "multi_tensor"
# Operators on one tensor: a thread of the kernel works on 4 elements (ATen: thread_work_size, CUDALoops.cuh).
WARP_ELEMENTS = 32 * 4
BLOCKS = "the thread blocks of the optimizer's kernels"
# A tensor's last chunk is half full on average, and hardly filled for biases and weights of norms, half of the tensors:
# our estimate. Errors on recordings with shapes: -0.1 to +1.2 %, -3.2 % if sizes are powers of two.
EMPTY_SHARE = 0.75
# The uncertainty, up and down, of sizes from the memory of a step: our estimate.
MEMORY_SPREAD = 1.1
_ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp64": 8}


class FoundGradients(NamedTuple):
    """Gradients of a step in the order of completion; ``low`` and ``high`` are factors of their sizes."""

    size_bytes: Int64  # shape (n,); equal ones, or one, if only their sum is known
    low: float
    high: float
    source: str  # a description of the source


@of_graph
def found_gradients(graph: TaskGraph) -> FoundGradients | None:
    """Return the gradients of a step by shapes, else by the optimizer's kernels or memory; None without any."""
    if graph.info.gradient_bytes:
        sizes = np.array(graph.info.gradient_bytes, dtype=np.int64)
        return FoundGradients(sizes, 1.0, 1.0, f"the shapes of {len(sizes):,} AccumulateGrad operators")
    return _by_optimizer(graph) or _by_memory(graph)


def finished(graph: TaskGraph, steps: Int64, work: Bool, count: int) -> dict[int, Int64] | None:
    """Return for each step the task that completes each of its ``count`` gradients, shape (count,).

    That is the last of ``work`` launched before its AccumulateGrad; on a CPU that operator itself. If a step has more
    or fewer of them, gradients are spread evenly over those. None if no step has any.
    """
    operators = accumulations(graph, steps)
    if not len(operators):
        return None
    ready = operators
    if graph.has_gpu:
        ready = last_gpu_before(graph, operators)
        # The last work of the backward pass at or before that task: copies in between do not count.
        tasks = np.flatnonzero(work)
        ready = tasks[np.maximum(np.searchsorted(tasks, ready, side="right") - 1, 0)]
    found = {}
    for step in each_once(steps[operators]).tolist():
        of_step = np.maximum.accumulate(ready[steps[operators] == step])
        of_step = of_step[steps[of_step] == step]
        if len(of_step):
            found[step] = of_step[np.ceil(np.arange(1, count + 1) / count * len(of_step)).astype(np.int64) - 1]
    return found or None


def accumulations(graph: TaskGraph, steps: Int64) -> Int64:
    """Return the AccumulateGrad operators of the last backward pass before each update, in order of time (ids)."""
    codes = [code for code, name in enumerate(graph.names) if name == ACCUMULATE]
    return np.flatnonzero(np.isin(graph.name, codes) & (steps >= 0) & ~superseded(graph))


def _middle(graph: TaskGraph, tasks: Int64) -> Int64:
    """The ``tasks`` of the middle step among the steps that have any."""
    numbers = each_once(graph.step[tasks])
    return tasks[graph.step[tasks] == numbers[len(numbers) // 2]] if len(numbers) else tasks


def _by_optimizer(graph: TaskGraph) -> FoundGradients | None:
    known = graph.on_gpu & (graph.warps > 0)
    kernels = _middle(graph, np.flatnonzero(step_kernels(graph) & known))
    if not len(kernels):  # the begin of the update is unknown
        kernels = _middle(graph, np.flatnonzero((graph.family == KernelFamily.OPTIMIZER) & known))
    steps = step_of(graph)
    operators = accumulations(graph, steps)
    numbers, counts = np.unique(steps[operators], return_counts=True)
    tensors = int(np.median(counts)) if len(numbers) else 0
    multi_tensor = np.array([MULTI_TENSOR in name for name in graph.names], dtype=np.bool_)[graph.name[kernels]]
    if multi_tensor.any():
        return _by_chunks(graph, kernels[multi_tensor], tensors)
    return _by_tensor(graph, kernels, tensors)


def _by_chunks(graph: TaskGraph, kernels: Int64, tensors: int) -> FoundGradients:
    """Each operation of the optimizer processes all parameters once, in chunks; some run twice."""
    _, operation = np.unique(graph.name[kernels], return_inverse=True)
    warps = np.bincount(operation, weights=graph.warps[kernels].astype(np.float64))
    values, times = np.unique(warps, return_counts=True)
    chunks = float(values[np.argmax(times)]) / CHUNK_WARPS
    count = tensors or max(round(chunks / 2), 1)
    empty = min(count, chunks)
    least, most = max(chunks - empty, 1 / CHUNK), chunks
    likely = max(chunks - EMPTY_SHARE * empty, 1 / CHUNK)
    element = _element_bytes(graph, kernels)
    sizes = np.full(count, round(likely * CHUNK * element / count), dtype=np.int64)
    return FoundGradients(sizes, least / likely, most / likely, BLOCKS)


def _by_tensor(graph: TaskGraph, kernels: Int64, tensors: int) -> FoundGradients | None:
    """One kernel of each operation for each parameter, in the order in which the model lists them."""
    if not tensors:
        return None
    for code in each_once(graph.name[kernels]).tolist():
        of_operation = kernels[graph.name[kernels] == code]
        if len(of_operation) % tensors == 0:
            # The order is by tensor or by operation: the numbers of warps decide.
            warps = graph.warps[of_operation].astype(np.float64)
            rows = _repeated(warps, len(of_operation) // tensors)
            sizes = rows[::-1] * WARP_ELEMENTS * _element_bytes(graph, of_operation)
            low = 1 - len(rows) * WARP_ELEMENTS * 4 / max(float(rows.sum()) * WARP_ELEMENTS, 1)
            return FoundGradients(sizes.astype(np.int64), max(low, 0.5), 1.0, BLOCKS)
    return None


def _repeated(warps: Float64, times: int) -> Float64:
    """One of each ``times`` equal numbers: neighbours, else the first part."""
    rows = warps.reshape(-1, times)
    if bool((rows == rows[:, :1]).all()):
        return np.asarray(rows[:, 0])
    return np.asarray(warps[: len(warps) // times])


def _element_bytes(graph: TaskGraph, kernels: Int64) -> int:
    codes, counts = np.unique(graph.dtype[kernels], return_counts=True)
    return _ELEMENT_BYTES.get(DTYPES[int(codes[np.argmax(counts)])], 4)


def _by_memory(graph: TaskGraph) -> FoundGradients | None:
    memory = graph.info.memory
    if memory is None or not memory.gradients or not bool((graph.phase == Phase.BACKWARD).any()):
        return None
    sizes = np.array([memory.gradients], dtype=np.int64)
    return FoundGradients(sizes, 1 / MEMORY_SPREAD, MEMORY_SPREAD, "the memory of a step")
