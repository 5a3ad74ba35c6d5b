"""Batch norm in eval mode: normalize with running instead of batch statistics (frozen batch norm).

Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015, §3.1 (inference normalizes with fixed statistics);
        torch.nn.BatchNorm2d.eval().
Model:  if the recording has its operators measured alone (`whatif collect --measure-operators`), each batch
        normalization by the ratio of its two measurements. Else by accesses of one value per activation: forward
        training reads twice and writes once, eval reads and writes once; backward training reads input and gradient
        twice and writes once, eval reads both once and the gradient again and writes once. The range, from the square
        of that ratio to no gain, is our estimate. Ignored: the batch counter, a small operator per layer that eval
        omits.
Effort: medium: eval() of the batch normalizations after train(); then check that the model still converges.
"""

import numpy as np

from whatif import Phase, TaskGraph
from whatif.models import KernelFamily
from whatif.models.durations.estimator import Source, put, scaled
from whatif.models.durations.measured import (
    form_ratio,
    has_form,
    scale_measured,
    with_form,
)
from whatif.models.kernels.fusion import without_norms

PLACE = "kernels"

FORWARD_RATIO, BACKWARD_RATIO = 2 / 3, 4 / 5


def transform(graph: TaskGraph) -> TaskGraph:
    """Shorten every batch normalization of the forward and the backward pass."""
    norm = (graph.family == KernelFamily.NORMALIZATION) & ~graph.select(phase=Phase.UPDATE)
    ratio, spread = form_ratio(graph, "eval")
    known = np.isfinite(ratio) & ~graph.select(phase=Phase.UPDATE)
    if not (norm | known).any():
        return without_norms(graph, "batch_norm_eval")
    if has_form(graph, "eval").any():
        return graph.unchanged("batch_norm_eval: the batch normalization is in eval mode already; nothing changes")
    graph = scale_measured(graph, known, ratio, spread)
    for phase, by in ((Phase.FORWARD, FORWARD_RATIO), (Phase.BACKWARD, BACKWARD_RATIO)):
        tasks = norm & ~known & graph.select(phase=phase)
        graph = put(graph, tasks, scaled(graph, tasks, by, Source.ROOFLINE, low=by**2, high=1.0))
    return with_form(graph, norm | known, "eval")
