"""Restructured batch normalization: fuse it with the surrounding convolutions and the next activation.

Source: Daydream (USENIX ATC 2020) §5.1 and Algorithm 5; Jung et al., "Restructuring Batch Normalization to Accelerate
        CNN Training", MLSys 2019.
Model:  the kernels of a ReLU that directly follows a batch normalization are removed, forward and backward, with their
        launches (on a CPU its operators); batch normalization takes half of its time, because half of its input is
        loaded. Algorithm 5 removes every ReLU, also one after an addition or a convolution, which has no normalization
        to be fused with: `activations=all` does the same. The range covers Daydream §6.4's results for DenseNet-121:
        12.7 % predicted, 17.5 % claimed by the authors of the method, 7 % measured, because of new kernels, copies and
        allocations. Ignored: slower convolutions because of the fused work (within the range), and memory.
Effort: large: custom convolution kernels that normalize their input and accumulate statistics of their output.
"""

from typing import Literal

import numpy as np

from whatif import Phase, TaskGraph
from whatif.models import CallRole, KernelFamily, layer_calls, not_modelled
from whatif.models.durations.estimator import Estimates, Source, put
from whatif.models.kernels.fusion import without_norms

PLACE = "kernels"

NORM_RATIO = 1 / 2
# The measured and the claimed gain over the predicted one (Daydream §6.4).
LEAST, MOST = 7 / 12.7, 17.5 / 12.7
DONE = "restructured batch normalization"


def transform(graph: TaskGraph, *, activations: Literal["after_norm", "all"] = "after_norm") -> TaskGraph:
    """Remove the activations, halve the normalization."""
    worker = graph.on_device
    passes = graph.select(phase=Phase.FORWARD) | graph.select(phase=Phase.BACKWARD)
    norm = worker & passes & (graph.family == KernelFamily.NORMALIZATION)
    if not norm.any():
        return without_norms(graph, "rebatchnorm")
    if DONE in graph.attached:
        return graph.unchanged("rebatchnorm: the batch normalization is restructured already; nothing changes")
    calls = layer_calls(graph)
    relu = (calls.role == CallRole.ACTIVATION) & ~calls.backward
    behind_norm = relu & (np.append(calls.role, -1)[calls.before] == CallRole.NORMALIZATION)
    gone = calls.tasks(relu if activations == "all" else behind_norm)

    # If the removal gains less, its normalization takes that much longer.
    doubt_ns = np.zeros(len(graph))
    for ends, time_ns in zip((calls.last, calls.backward_tasks()[1]), calls.times_ns(graph), strict=True):
        norm_end = ends[calls.before[behind_norm]]
        np.add.at(doubt_ns, norm_end[norm_end >= 0], (1 - LEAST) * time_ns[behind_norm][norm_end >= 0])
    duration_ns, low_ns, high_ns = (column[norm] for column in (graph.duration_ns, graph.low_ns, graph.high_ns))
    saved = 1 - NORM_RATIO
    high_ns = high_ns * (1 - saved * LEAST) + doubt_ns[norm]
    estimates = Estimates.of(duration_ns * NORM_RATIO, Source.PAPER, low_ns * (1 - saved * MOST), high_ns)
    graph = not_modelled(put(graph, norm, estimates).attach(**{DONE: norm}).remove(gone), "rebatchnorm")
    return graph.note(f"rebatchnorm: {behind_norm.sum()} of {relu.sum()} activations directly follow a normalization")
