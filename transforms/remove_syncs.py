"""Remove synchronizations: what if the CPU did not wait for the GPU inside a step?

Source: PyTorch, "Performance Tuning Guide", "Avoid unnecessary CPU-GPU synchronization": print(tensor), tensor.item(),
        tensor.cpu(), tensor.nonzero(), memory copies and control flow that depends on results wait for the GPU.
Model:  calls that wait for the GPU inside a step return at once; their work and the copies that they start stay. A
        blocking copy to the GPU (from pageable memory) still waits, unless `inputs=true`: pinned memory and
        non_blocking=True remove that wait. Then the CPU runs ahead as far as the launch queue allows. Ignored: results
        that the program needs at once (the size of nonzero, an early stop), whose wait cannot be removed, and the
        memory of batches in flight. `whatif explain --by line` names the lines that wait.
Effort: small: keep losses on the GPU and read them every hundredth step; do not print or index with tensors of the GPU.
"""

import numpy as np

from whatif import DependencyKind, Phase, TaskGraph, TaskKind, WhatifError

PLACE = "waits"


def transform(graph: TaskGraph, *, inputs: bool = False) -> TaskGraph:
    """Let the calls inside steps that wait for the GPU return at once."""
    if not graph.has_gpu:
        raise WhatifError(
            f"remove_syncs: expected a recording of GPU work, got {graph.info.path or 'one'} of a CPU, which waits for "
            "no GPU; record the run on a GPU."
        )
    waiting = np.zeros(len(graph), dtype=np.bool_)
    waiting[graph.waits.task] = True
    sync = graph.dependencies.kind == DependencyKind.SYNC
    source, target = graph.dependencies.source[sync], graph.dependencies.target[sync]
    waiting[target] = True
    if not inputs:
        to_gpu = graph.select(kind=TaskKind.MEMCPY, name="HtoD").mask
        waiting[target[to_gpu[source]]] = False
    # Waits outside the steps belong to the end of the profiler or the script.
    waiting &= (graph.kind == TaskKind.WAIT) & (graph.step >= 0)
    steps = max(graph.info.n_steps, 1)
    if not waiting.any():
        return graph.unchanged("remove_syncs: no call inside a step waits for the GPU; nothing changes")
    if (waiting & (graph.phase == Phase.DATA)).any():
        graph = graph.note("remove_syncs: some of the waits are part of data loading")
    return graph.without_waits(waiting).note(
        f"remove_syncs: {int(waiting.sum()) / steps:.3g} waits a step are gone; a recording does not show what "
        "needs their result at once"
    )
