"""FusedAdam: update all parameters with one kernel instead of many.

Source: Daydream (USENIX ATC 2020) §5.1 and Algorithm 4; NVIDIA Apex FusedAdam; torch.optim with fused=True.
Model:  the kernels inside the optimizer's marks and their launches are removed (Daydream sums *compute-intensive* ones
        in §5.1 and all of them in Algorithm 4; here all but memsets). The fused kernel moves each parameter, gradient
        and moment once: its time is that of the removed kernels above their start-up floor, times the ratio of memory
        accesses, counted in PyTorch's _single_tensor_adam (18 fp32 accesses a parameter against 7) and
        _single_tensor_sgd with momentum and weight decay (11 against 5); SGD that is one addition keeps its traffic.
        The range is a factor of 1.5 up and down. The Python loop that collects the parameters stays; on a CPU the
        Python between the operators shrinks by the same ratio as they do. With `to=foreach` each operation becomes one
        kernel for all parameters with the same traffic. On a CPU whose update was measured alone in every form (`whatif
        collect --measure-operators`) that ratio is used.
Effort: small: fused=True (or foreach=True) where the optimizer is made.
"""

from typing import Literal

from whatif import Change, TaskGraph, WhatifError
from whatif.models import change_memory, implementation, step_kernels, updated_as
from whatif.models.durations.estimator import Source
from whatif.models.kernels.optimizer import (
    batch_update,
    fuse_update,
    measured_update_ratio,
    n_operations,
    scale_update,
)

PLACE = "update"

# Accesses of one value per parameter: fused, one kernel an operation; fresh temporaries on a CPU are read before they
# are written (write allocation), two more for Adam's square root and quotient.
ACCESSES = {"adam": (7, 18, 20), "adamw": (7, 18, 20), "sgd": (5, 11, 11)}

# Optimizers of torch.optim that take foreach=True (torch 2.13).
FOREACH = frozenset((
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop",
    "sgd",
))  # fmt: skip


def transform(
    graph: TaskGraph, *, to: Literal["fused", "foreach"] = "fused", speedup: float | None = None
) -> TaskGraph:
    """Replace the update phase of every step; `speedup` of the kernels, if known, instead of the traffic model."""
    if Change.UPDATES_IN_BACKWARD in graph.info.changes:
        return graph.unchanged(
            "fused_adam: put it before optimizer_in_backward, which has split the update; nothing changes"
        )
    if speedup is not None:
        if not speedup > 0:
            raise WhatifError(f"fused_adam: expected a speedup above 0, got {speedup}.")
        return fuse_update(graph, 1 / speedup, low=1 / speedup, high=1 / speedup, source=Source.RECORDED)
    measured = measured_update_ratio(graph, to)
    if measured is not None and implementation(graph) != to and step_kernels(graph).any():
        return scale_update(graph, measured, to).note(
            f"fused_adam: {to} takes {measured:.2f} of the update's time, both measured alone"
        )
    optimizer = (graph.info.optimizer or "Adam").lower().removeprefix("fused")
    if to == "foreach":
        if optimizer not in FOREACH:
            raise WhatifError(
                f"fused_adam: expected an optimizer of torch.optim that takes foreach=True, got {graph.info.optimizer}."
            )
        if graph.has_gpu or implementation(graph) != "for_loop":
            return batch_update(graph)
        graph = change_memory(graph, lambda memory: updated_as(memory, optimizer, to))
        return graph.note("fused_adam: what to=foreach saves on a CPU needs `whatif collect --measure-operators`")
    if optimizer not in ACCESSES:
        raise WhatifError(
            f"fused_adam: expected Adam, AdamW or SGD, got {graph.info.optimizer}, whose traffic is not modelled; "
            "set how much faster its kernels would get, as in fused_adam:speedup=2."
        )
    fused, unfused, unfused_cpu = ACCESSES[optimizer]
    ratio = fused / (unfused if graph.has_gpu else unfused_cpu)
    if optimizer == "sgd":
        graph = graph.note("fused_adam: the recorded optimizer is SGD, so this is the fused SGD (fused=True)")
        ratio = 1.0 if n_operations(graph) == 1 else ratio
    return fuse_update(graph, ratio, low=ratio / 1.5, high=min(ratio * 1.5, 1.0))
