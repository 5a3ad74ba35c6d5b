"""The weight update of a step: its tasks, and its implementation."""

from __future__ import annotations

import numpy as np

from whatif.graph.kernels import KernelFamily
from whatif.graph.selection import Selection
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Phase, TaskKind, among

# Names of optimizer kernels that are already fused: torch's fused=True, Apex, DeepSpeed, and ours.
FUSED_NAMES = r"(?i)fused_?(adamw?|sgd|lamb|adagrad)|FusedOptimizer|multi_tensor_adam"
# Kernels that work on lists of tensors (foreach=True).
FOREACH_NAMES = r"_foreach_|multi_tensor_apply"
_ARITHMETIC = (KernelFamily.ELEMENTWISE, KernelFamily.OPTIMIZER, KernelFamily.REDUCTION, KernelFamily.FUSED,
               KernelFamily.CAST)  # fmt: skip


def step_kernels(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the GPU tasks of the weight update (CPU operators without a GPU).

    Tasks inside the optimizer's marks; in a trace without marks, the tasks of the update phase after the backward pass,
    which then include gradient clipping.
    """
    worker = graph.on_gpu if graph.has_gpu else graph.select(kind=TaskKind.CPU_OP)
    update = worker & graph.select(phase=Phase.UPDATE) & among(graph.family, _ARITHMETIC)
    if graph.in_optimizer.any():
        return np.asarray(update & graph.in_optimizer, dtype=np.bool_)
    # Zeroing gradients is an update as well, but before the backward pass.
    backward = np.flatnonzero(worker & (graph.phase == Phase.BACKWARD))
    last_backward = np.full(int(graph.step.max(initial=0)) + 2, -1, dtype=np.int64)
    np.maximum.at(last_backward, graph.step[backward] + 1, backward)
    return np.asarray(update & (np.arange(len(graph)) > last_backward[graph.step + 1]), dtype=np.bool_)


def update_in_marks(graph: TaskGraph) -> Selection:
    """Return the CPU work inside the optimizer's marks, without a closure's passes; empty without marks."""
    return graph.on_cpu & graph.in_optimizer & graph.select(phase=Phase.UPDATE)


def implementation(graph: TaskGraph) -> str:
    """Return how the recorded update runs: "fused", "foreach" (on lists of tensors) or "for_loop"."""
    for found, pattern in (("fused", FUSED_NAMES), ("foreach", FOREACH_NAMES)):
        if (step_kernels(graph) & graph.select(name=pattern)).any():
            return found
    return "for_loop"
