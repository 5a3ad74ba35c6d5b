"""Batch size: what if a step took more or fewer samples?

Source: Daydream (USENIX ATC 2020) §2 (kernels grow with the batch, their launches do not); our own power law.
Model:  every kernel of the forward and the backward pass has a fixed part (start-up, on a CPU the operator's call) and
        a part in proportion to the batch; where the recording has its operators measured alone at other batch sizes
        (`whatif collect --measure-operators`), the measured times decide instead. Loading and copying the batch are in
        proportion to it. What the CPU does to launch, the update and the gradients' accumulation stay: a step that the
        CPU bounds gains throughput by a larger batch. Ignored: another kernel choice at another size (the range is a
        tenth of the change), and memory.
"""

import numpy as np

from whatif import Phase, TaskGraph, WhatifError
from whatif.batch import batch_tasks, with_batch_size
from whatif.measured import task_batch_ratio

# Of the change: products fill the machine better or worse at another size; our estimate.
SPREAD = 0.1


def transform(graph: TaskGraph, *, factor: float | None = None, size: int | None = None) -> TaskGraph:
    """Scale what grows with the batch; `size` in samples needs the recording to know its own."""
    if (factor is None) == (size is None):
        raise WhatifError(
            "batch_size: expected either factor or size, as in batch_size:factor=2 or batch_size:size=64."
        )
    if size is not None:
        if not graph.info.batch_size:
            raise WhatifError(
                "batch_size: the recording does not know its batch size; say batch_size:factor=2 instead."
            )
        factor = size / graph.info.batch_size
    if factor is None or not 0 < factor < 1e6:
        raise WhatifError(f"batch_size: expected a factor above 0, got {factor}.")
    tasks, fixed_ns = batch_tasks(graph)
    now_ns = graph.duration_ns[tasks]
    fixed_ns = np.minimum(now_ns, fixed_ns[tasks])
    new_ns = fixed_ns + (now_ns - fixed_ns) * factor
    measured = task_batch_ratio(graph, factor)[tasks]
    new_ns = np.where(np.isfinite(measured), now_ns * measured, new_ns)
    spread_ns = np.abs(new_ns - now_ns) * SPREAD
    graph = graph.with_duration(tasks, new_ns, low_ns=new_ns - spread_ns, high_ns=new_ns + spread_ns)
    loading = graph.select(phase=Phase.DATA) & ~tasks
    return with_batch_size(graph.scale(loading & graph.on_cpu, factor), factor)
