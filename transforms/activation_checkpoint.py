"""Activation checkpointing: keep no activations of some layers; recompute them in the backward pass.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, §3; torch.utils.checkpoint with
        use_reentrant=False.
Model:  before the backward work of each segment its forward work is repeated, with all its kernels, launches and
        Python; a segment is a layer that `layers` matches, by default every repeated block of the model. All-reduces of
        `tensor_parallel` in a segment are repeated too. Ignored: the end of a segment that no activation depends on
        (PyTorch stops early), the hooks that replace saving, recorded collectives inside a segment.
Effort: small: torch.utils.checkpoint.checkpoint(layer, input, use_reentrant=False) around each repeated layer.
"""

from whatif import Change, TaskGraph, WhatifError
from whatif.models import are_classes, change_memory, checkpointed, recompute, segments

AXIS = "passes"


def transform(graph: TaskGraph, *, layers: str | None = None) -> TaskGraph:
    """Recompute the segments; `layers` is a regular expression for full layer names."""
    chosen = segments(graph, layers)
    if not chosen:
        wanted = "repeated blocks" if layers is None else f"layers named {layers!r}"
        raise WhatifError(
            f"activation_checkpoint: expected {wanted} in the recording, got {len(graph.layers) - 1} layers; name "
            "some as in activation_checkpoint:layers=encoder.layer.[0-9]+ (`whatif collect` records layers)."
        )
    changed = recompute(graph, chosen)
    if changed is graph:
        if "cuda_graph" in graph.info.execution and Change.RECOMPUTES not in graph.info.changes:
            raise WhatifError(
                "activation_checkpoint: expected passes that the CPU launches kernel by kernel, got CUDA graphs; name "
                "activation_checkpoint before cuda_graph, or record without graphs."
            )
        return graph.unchanged(
            "activation_checkpoint: no step has forward and backward work of these layers that is not recomputed yet; "
            "nothing changes"
        )
    changed = change_memory(changed, lambda memory: checkpointed(memory, chosen))
    if are_classes(graph):
        changed = changed.note(
            "activation_checkpoint: this recording names layers by class, not by path, so layers inside of those named "
            "are not recomputed; name them as well"
        )
    return changed.note(f"activation_checkpoint: {len(chosen)} segments, {chosen[0]} … {chosen[-1]}")
