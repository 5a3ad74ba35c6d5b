"""Optimizer in the backward pass: update each parameter when its gradient is ready, and free the gradient.

Source: PyTorch, "How to save memory by fusing an optimizer step into the backward pass" (tutorial, 2023), with
        torch.Tensor.register_post_accumulate_grad_hook; Lv et al., "Full Parameter Fine-tuning for Large Language
        Models with Limited Resources" (LOMO), ACL 2024, §3.
Model:  every parameter has a separate optimizer. The update's kernels move after the last backward work of the
        parameter's layer, with their share of the recorded time by bytes of gradients (a fifth up and down); a foreach
        update works on each tensor alone, with one start and one launch per operation. A call of such an optimizer
        takes 110 us (50 to 200) more CPU time per parameter, on the thread that runs the backward pass. Gradients no
        longer exist all at once, which lowers the peak. Ignored: caches.
Effort: small: a hook on each parameter that steps and clears; no clipping by global norm, no GradScaler.
"""

from whatif import Change, TaskGraph, TaskKind, WhatifError
from whatif.models import (
    change_memory,
    gradients,
    needs_all_gradients,
    step_kernels,
    update_in_pieces,
    updated_in_backward,
)

PLACE = "backward"


def transform(graph: TaskGraph) -> TaskGraph:
    """Move the update of every step into its backward pass."""
    if Change.UPDATES_IN_BACKWARD in graph.info.changes:
        return graph.unchanged("optimizer_in_backward: the update runs in the backward pass already; nothing changes")
    where = graph.info.path or "this recording"
    if gradients(graph) is None:
        raise WhatifError(
            f"optimizer_in_backward: expected a recording with its gradients, got {where} without; record it "
            "with `whatif collect`."
        )
    if not step_kernels(graph).any():
        raise WhatifError(f"optimizer_in_backward: expected an update, got {where} without one; is it inference?")
    if graph.select(kind=TaskKind.COMMUNICATION).any():
        raise WhatifError(
            f"optimizer_in_backward: expected training on one device, got collectives in {where}: a gradient that "
            "other ranks add to is not ready with its layer; leave out what exchanges gradients."
        )
    if needs_all_gradients(graph):
        raise WhatifError(
            f"optimizer_in_backward: expected updates that need one gradient each, got {where}, which clips by a norm "
            "of all gradients or scales the loss; record it without, or leave the update where it is."
        )
    changed, n_pieces = update_in_pieces(graph)
    if changed is graph:
        return graph.unchanged("optimizer_in_backward: no step has both gradients and an update; nothing changes")
    changed = change_memory(changed, updated_in_backward)
    return changed.note(f"optimizer_in_backward: the update becomes {n_pieces} pieces of the backward pass")
