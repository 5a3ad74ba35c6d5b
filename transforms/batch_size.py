"""Batch size: change the number of samples per step.

Source: Daydream (USENIX ATC 2020) §2 (kernels grow with the batch, their launches do not); Williams et al.,
        "Roofline", CACM 2009; the recorded occupancy.
Model:  every kernel of the forward and the backward pass has a fixed part (start-up, on a CPU the operator's call) and
        a part proportional to the batch. A kernel that fills a share of the GPU, or takes far longer than its
        operations and bytes need, has a large fixed part (see whatif/models/kernels/batch.py). If the recording has its
        operators measured alone at other batch sizes (`whatif collect --measure-operators`), those times are used.
        Loading and copying the batch are proportional to it. Launches, the update and the accumulation of gradients (if
        operators show it) stay, but for an update with sparse gradients, which grows up to as much: a CPU-bound step
        gains throughput from a larger batch. Forward passes of few rows (decoding) read the weights of their products
        once for any batch: they take the longer of reading and computing (whatif/models/kernels/stored_weights.py), and
        attention, its cache and all activations grow. Ignored: another kernel choice at another size (the range is a
        tenth of the change).
Effort: small: the batch size of the data loader, and with it the learning rate.
"""

from whatif import Phase, TaskGraph, WhatifError
from whatif.models import (
    at_batch,
    batch_tasks,
    change_memory,
    launches_kernels,
    with_batch,
    with_batch_size,
    work_at_batch,
)
from whatif.models.durations.estimator import put
from whatif.models.kernels.stored_weights import check_sizes_known

PLACE = "batch"

MOST_SAMPLES = 10**9


def transform(graph: TaskGraph, *, factor: float | None = None, size: int | None = None) -> TaskGraph:
    """Scale the work that grows with the batch; `size`, in samples, requires the recorded batch size."""
    if (factor is None) == (size is None):
        raise WhatifError(
            "batch_size: expected either factor or size, as in batch_size:factor=2 or batch_size:size=64."
        )
    if size is not None:
        if not graph.info.batch_size:
            raise WhatifError("batch_size: the recording lacks its batch size; use batch_size:factor=2 instead.")
        if not 0 < size <= MOST_SAMPLES:
            raise WhatifError(f"batch_size: expected a size from 1 to {MOST_SAMPLES:,} samples, got {size}.")
        factor = size / graph.info.batch_size
    if factor is None or not 0 < factor < 1e6:
        raise WhatifError(f"batch_size: expected a factor above 0 and below a million, got {factor}.")
    check_sizes_known(graph, "batch_size")
    if factor == 1:
        return graph
    graph, tasks = change_memory(graph, lambda memory: with_batch(memory, factor)), batch_tasks(graph)
    graph = put(graph, tasks, at_batch(graph, tasks, factor))
    graph = work_at_batch(graph, tasks, factor)
    loading = graph.select(phase=Phase.DATA) & ~tasks & ~launches_kernels(graph)
    return with_batch_size(graph.scale(loading & graph.on_cpu, factor), factor, wider=True)
