"""The extra kernels of an optimizer in a CUDA graph: its step counters are on the GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from msgspec import structs

from whatif.graph.insert import NewTasks
from whatif.graph.kernels import KernelFamily
from whatif.graph.order import each_once
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import TaskKind
from whatif.hardware.roofline import kernel_floor_ns
from whatif.models.durations.estimator import device
from whatif.models.layers.columns import with_values
from whatif.models.layers.update_tasks import implementation, step_kernels

# torch/optim/adam.py of PyTorch 2.13, `_single_tensor_adam` (AdamW's is the same): with capturable=True a tensor's
# counter is incremented (1 kernel), both bias corrections (2 each), the step size (2) and its negative (1), the root of
# the second correction (1), its product (1) and epsilon's quotient (2) are computed on the GPU, each of one element.
SCALAR_KERNELS = 12
SCALAR_NAME = "one element of a capturable step"
ADAMS = ("Adam", "AdamW")


def with_capturable_update(graph: TaskGraph) -> TaskGraph:
    """Return the graph in which a for-loop Adam has the one-element kernels of capturable=True, with a note.

    The update's graph launches launch them, spread over the update. The same graph if the recording shows no such
    optimizer, or a capturable one; a fused or foreach one has too few of them to matter.
    """
    optimizer = graph.info.recorded.optimizer
    if optimizer is None or optimizer.type not in ADAMS or optimizer.capturable is not False:
        return graph
    update = np.flatnonzero(step_kernels(graph) & graph.on_gpu & (graph.launch_of >= 0))
    tensors, steps = optimizer.parameter_tensors or 0, len(each_once(graph.step[update]))
    if len(update) < tensors * steps or not tensors or implementation(graph) != "for_loop":
        return graph
    behind = update[np.arange(tensors * steps) * len(update) // (tensors * steps)]
    after = np.repeat(behind, SCALAR_KERNELS)
    recorded = structs.replace(graph.info.recorded, optimizer=structs.replace(optimizer, capturable=True))
    new = NewTasks(
        after, SCALAR_NAME, TaskKind.KERNEL, kernel_floor_ns(device(graph)), launched_by=graph.launch_of[after],
        family=int(KernelFamily.OPTIMIZER),
    )  # fmt: skip
    in_optimizer = graph.in_optimizer[after]
    added = graph.insert(new)
    graph = with_values(added.graph, added.ids, in_optimizer=in_optimizer)
    graph = graph.replace(info=replace(graph.info, recorded=recorded))
    return graph.note(
        f"cuda_graph: {optimizer.type} needs capturable=True, which keeps step counters on the GPU: {SCALAR_KERNELS} "
        f"kernels of one element for each of {tensors} tensors; fused=True has none"
    )
