"""Gradient accumulation: run several forward and backward passes for each update.

Source: PyTorch's AccumulateGrad: the first gradient of a parameter in a step is kept as it is, every later one is
        added to it; Pei et al., "Iteration Time Prediction for CNN in Multi-GPU Platform", §III (a step is its passes
        and one update).
Model:  loading, forward and backward pass happen `passes` times, each with a whole recorded batch; sums of gradients
        among workers and the update happen once, in the last pass and after it (DDP's no_sync). A pass begins on the
        CPU after the previous backward pass. Every pass but the first adds its gradients to the existing ones, a
        layer's after its backward work: two reads and one write of each, at the machine's memory rate, one operator per
        parameter tensor. Passes are run one by one, up to 200,000 tasks per recording: beyond that one represents
        several.
Effort: small: several backward passes before optimizer.step(), the loss divided by their number.
"""

from whatif import Phase, TaskGraph, WhatifError
from whatif.models import accumulated, backward_ends, change_memory, with_batch_size
from whatif.models.exchange.more_passes import with_passes

# Passes are split as the model is, and gradients are exchanged in the last of them.
AXIS = "passes"


def transform(graph: TaskGraph, *, passes: int = 4) -> TaskGraph:
    """Repeat the passes of each step, and add up their gradients."""
    if not 1 <= passes <= 10_000:
        raise WhatifError(f"gradient_accumulation: expected from 1 to 10,000 passes, got {passes}.")
    backward = graph.select(phase=Phase.BACKWARD)
    if not len(backward_ends(graph)):
        got = "none"
        if backward.any():
            got = "one inside of CUDA graphs; name gradient_accumulation before cuda_graph, or record without graphs"
        raise WhatifError(f"gradient_accumulation: expected a recording whose steps have a backward pass, got {got}.")
    if passes == 1:
        return graph
    return with_batch_size(change_memory(with_passes(graph, passes), accumulated), passes)
