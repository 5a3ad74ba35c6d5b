"""CUDA graph launches that a recording contains as one task each, with unknown kernels."""

from __future__ import annotations

from whatif.graph.task_graph import TaskGraph
from whatif.ingest.execution import WHOLE_GRAPH
from whatif.runtime.errors import WhatifError

# With this share of the GPU's time in them, the other kernels are too little for a what-if.
MOST = 0.5


def check_kernels_known(graph: TaskGraph, what_if: str) -> None:
    """Raise WhatifError if most of the GPU's time is in graphs with unknown kernels."""
    if "cuda_graph" not in graph.info.execution:
        return
    graph_launches = graph.on_gpu.mask & graph.select(name=f"^{WHOLE_GRAPH.pattern}$").mask
    share = int(graph.duration_ns[graph_launches].sum()) / max(int(graph.duration_ns[graph.on_gpu.mask].sum()), 1)
    if share > MOST:
        raise WhatifError(
            f"{what_if}: expected the GPU's kernels, got CUDA graphs recorded as one task each, {100 * share:.0f} % of "
            f"the GPU time in {graph.info.path or 'this recording'}; record with "
            "`nsys profile --cuda-graph-trace=node`."
        )
