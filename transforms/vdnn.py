"""vDNN: keep feature maps in host memory until the backward pass, so that a larger batch fits.

Source: Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design",
        MICRO 2016; Daydream (USENIX ATC 2020) §5.1 and Algorithm 10.
Model:  the input of each chosen layer (conv, all, or a regular expression for whole layer names) is copied to the host
        while the layer's forward work reads it, and back in time for its backward work, on one copy stream. The copy
        back starts with the backward work of the layer for which vDNN's findPrefetchLayer names it (the search ends at
        the next convolution). With `sync` the work after a layer waits for the copies that it started, as vDNN does to
        free memory. Errors in the paper: it copies to the device first, inverts the test for -1, and starts a copy
        after the layer, while vDNN overlaps both; a map that is needed at once stays. Ignored: contention between
        copies and kernels, and the time of freeing and allocating.
Effort: medium: torch.autograd.graph.saved_tensors_hooks with pinned buffers and a separate stream.
"""

import numpy as np

from whatif import TaskGraph, WhatifError
from whatif.graph.task_graph import matching
from whatif.models import CallRole, layer_calls
from whatif.models.layers.feature_maps import input_bytes, keep_less, keeps_input
from whatif.models.layers.offload import (
    PREFETCH,
    offload,
    plan,
)

PLACE = "maps"

MOST_MB = 1e6


def transform(graph: TaskGraph, *, layers: str = "conv", sync: bool = True, mb: float | None = None) -> TaskGraph:
    """Offload and prefetch; `mb` is the size of each feature map if the recording lacks it."""
    if not graph.has_gpu:
        raise WhatifError("vdnn: expected a recording of a GPU, got one of a CPU, which uses host memory already.")
    if PREFETCH in graph.attached:
        return graph.unchanged("vdnn: feature maps are offloaded already; nothing changes")
    if mb is not None and not 0 < mb <= MOST_MB:
        raise WhatifError(f"vdnn: expected mb above 0 and up to {MOST_MB:,.0f}, got {mb}.")
    calls = layer_calls(graph)
    if layers in ("conv", "all"):
        chosen = keeps_input(graph, calls) & ((calls.role == CallRole.CONVOLUTION) | (layers == "all"))
    else:
        chosen = ~calls.backward & matching(graph.layers, rf"^(?:{layers})$").take(calls.layer) & (calls.layer > 0)
    if not chosen.any():
        raise WhatifError(
            f"vdnn: expected forward work of layers {layers!r}, got none of that kind in {len(graph.layers) - 1} named "
            "layers; use vdnn:layers=all, or name some."
        )
    size_bytes = input_bytes(graph, calls) if mb is None else np.full(len(calls), int(mb * 1e6))
    copies = plan(graph, calls, chosen, size_bytes)
    if not len(copies):
        raise WhatifError(
            "vdnn: expected layers with backward work and feature maps of known size, got none; record with shapes "
            "(whatif collect does), or give the size of each, as in vdnn:mb=50."
        )
    passes = len(np.unique(calls.run[copies.call]))
    graph = keep_less(graph, calls, copies.call, copies.size_bytes, 0 * copies.size_bytes, copies.fetched_by)
    return offload(graph, calls, copies, wait=sync).note(
        f"vdnn: {len(copies) / passes:.0f} feature maps, {copies.size_bytes.sum() / passes / 1e6:.0f} MB in a pass, go "
        f"to the host and back; {(chosen.sum() - len(copies)) / passes:.0f} stay"
    )
