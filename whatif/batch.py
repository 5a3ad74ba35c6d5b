"""What of a step grows with the batch, and what is the same for any number of samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from whatif.graph import TaskGraph
from whatif.kernels import KERNEL_FLOOR_NS, KernelFamily
from whatif.types import Bool, Int64, Phase, TaskKind, among

# Operators of the backward pass that work on parameters and their gradients, whatever the batch.
_PARAMETER_WORK = r"AccumulateGrad|aten::detach|ToCopyBackward0"
# What a small operator takes on a CPU beside its arithmetic (dispatch, allocation): the operators of the CPU
# recordings in traces/ that touch a few elements take 1 to 4 us.
CPU_OPERATOR_NS = 2_000
# Fits in an int64 with room for sums.
MOST_WORK = 2**60


def batch_tasks(graph: TaskGraph) -> tuple[Bool, Int64]:
    """Give the mask of the tasks that grow with the batch and each task's part that does not, ns; shape (n_tasks,)."""
    passes = among(graph.phase, [Phase.FORWARD, Phase.BACKWARD])
    fixed = graph.select(name=_PARAMETER_WORK) | (graph.family == KernelFamily.OPTIMIZER)
    if graph.on_gpu.any():
        work = graph.on_gpu & ~among(graph.kind, [TaskKind.MEMSET, TaskKind.COMMUNICATION])
        passes = passes | graph.select(phase=Phase.DATA)
        floor_ns = np.full(len(graph), KERNEL_FLOOR_NS, dtype=np.int64)
    else:
        work = graph.select(kind=TaskKind.CPU_OP)
        floor_ns = np.full(len(graph), CPU_OPERATOR_NS, dtype=np.int64)
    return passes & work & ~fixed, floor_ns


def launches_kernels(graph: TaskGraph) -> Bool:
    """Give the mask, shape (n_tasks,), of the calls that launch kernels: they take what they take for any batch."""
    launches = np.zeros(len(graph), dtype=np.bool_)
    launch = graph.launch_of[graph.kind == TaskKind.KERNEL]
    launches[launch[launch >= 0]] = True
    return launches


def with_work(graph: TaskGraph, tasks: Bool, factor: float) -> TaskGraph:
    """Let ``tasks`` do ``factor`` times as many operations and move as many bytes, where these are known."""

    def grown(column: Int64) -> Int64:
        known = tasks & (column >= 0)
        return np.where(known, np.minimum(np.rint(column * float(factor)), MOST_WORK), column).astype(np.int64)

    return graph.replace(flops=grown(graph.flops), size_bytes=grown(graph.size_bytes))


def with_batch_size(graph: TaskGraph, factor: float) -> TaskGraph:
    """Remember the new number of samples of a step, where the old one is known."""
    if not graph.info.batch_size:
        return graph
    return graph.replace(info=replace(graph.info, batch_size=max(round(graph.info.batch_size * factor), 1)))
