"""Launches of CUDA graphs that a recording holds as one task each: which kernels they ran is not known."""

from __future__ import annotations

from whatif.graph.task_graph import TaskGraph
from whatif.ingest.execution import WHOLE_GRAPH
from whatif.runtime.errors import WhatifError

# With this share of the GPU's time in them, a what-if that knows the other kernels alone knows too little.
MOST = 0.5


def check_kernels_known(graph: TaskGraph, what_if: str) -> None:
    """Raise WhatifError, one sentence, where most of the GPU's time lies in graphs without their kernels."""
    if "cuda_graph" not in graph.info.execution:
        return
    whole = graph.on_gpu.mask & graph.select(name=f"^{WHOLE_GRAPH.pattern}$").mask
    share = int(graph.duration_ns[whole].sum()) / max(int(graph.duration_ns[graph.on_gpu.mask].sum()), 1)
    if share > MOST:
        raise WhatifError(
            f"{what_if}: expected the GPU's kernels, got CUDA graphs recorded as one task each, {100 * share:.0f} % of "
            f"the GPU time in {graph.info.path or 'this recording'}; record with "
            "`nsys profile --cuda-graph-trace=node`."
        )
