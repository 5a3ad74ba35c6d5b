"""Batch size: what if a step took more or fewer samples?

Source: Daydream (USENIX ATC 2020) §2 (kernels grow with the batch, their launches do not); our own power law.
Model:  every kernel of the forward and the backward pass has a fixed part (start-up, on a CPU the operator's call) and
        a part in proportion to the batch; where the recording has its operators measured alone at other batch sizes
        (`whatif collect --measure-operators`), the measured times decide instead. Loading and copying the batch are in
        proportion to it. What the CPU does to launch and the update stay, and so does, where operators tell it, the
        accumulation of gradients: a step that the CPU bounds gains throughput by a larger batch. Ignored: another
        kernel choice at another size (the range is a tenth of the change), and memory.
"""

import numpy as np
import numpy.typing as npt

from whatif import Phase, TaskGraph, WhatifError
from whatif.batch import batch_tasks, launches_kernels, with_batch_size, with_work
from whatif.measured import task_batch_ratio

# Of the change: products fill the machine better or worse at another size; our estimate.
SPREAD = 0.1
MOST_SAMPLES = 10**9


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
        if not 0 < size <= MOST_SAMPLES:
            raise WhatifError(f"batch_size: expected a size from 1 to {MOST_SAMPLES:,} samples, got {size}.")
        factor = size / graph.info.batch_size
    if factor is None or not 0 < factor < 1e6:
        raise WhatifError(f"batch_size: expected a factor above 0 and below a million, got {factor}.")
    tasks, fixed_ns = batch_tasks(graph)
    fixed_ns, measured = fixed_ns[tasks], task_batch_ratio(graph, factor)[tasks]

    def at_new_size(time_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        kept_ns = np.minimum(time_ns, fixed_ns)
        return np.where(np.isfinite(measured), time_ns * measured, kept_ns + (time_ns - kept_ns) * factor)

    new_ns, low_ns, high_ns = (
        at_new_size(time_ns[tasks]) for time_ns in (graph.duration_ns, graph.low_ns, graph.high_ns)
    )
    spread_ns = np.abs(new_ns - graph.duration_ns[tasks]) * SPREAD
    graph = graph.with_duration(tasks, new_ns, low_ns=np.maximum(low_ns - spread_ns, 0), high_ns=high_ns + spread_ns)
    graph = with_work(graph, tasks, factor)
    loading = graph.select(phase=Phase.DATA) & ~tasks & ~launches_kernels(graph)
    return with_batch_size(graph.scale(loading & graph.on_cpu, factor), factor)
