"""Images with their channels innermost (NHWC): what the other layout makes of convolutions and what lies between them.

Source: PyTorch, "Channels Last Memory Format" (tutorial); NVIDIA, "Convolutional Layers User's Guide" (tensor cores
compute in NHWC).
"""

from __future__ import annotations

import numpy as np

from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Phase, among
from whatif.models.durations.estimator import Source, put, scaled
from whatif.models.durations.measured import (
    form_ratio,
    has_form,
    scale_measured,
    with_form,
)

FORM = "channels_last"
# Without a measurement: cuDNN's NHWC kernels against its NCHW ones, our estimate from NVIDIA's guide (fp32 without
# tensor cores is faster in NCHW).
UNKNOWN_LOW, UNKNOWN_HIGH = 0.7, 1.2
# The families that work on 4-d tensors.
_FAMILIES = (KernelFamily.CONVOLUTION, KernelFamily.NORMALIZATION, KernelFamily.POOLING)


def images(graph: TaskGraph) -> Bool:
    """Return a mask (n_tasks,) of what works on images in the forward and the backward pass."""
    return _passes(graph) & among(graph.family, _FAMILIES)


def is_in_channels_last(graph: TaskGraph) -> bool:
    """Whether a what-if has put the model into this layout before."""
    return bool(has_form(graph, FORM).any())


def in_channels_last(graph: TaskGraph, name: str) -> TaskGraph:
    """Return the graph of the model in this layout; ``name`` is of the what-if that asks, for its note.

    Operators measured alone in both layouts take the ratio of the two times. Where none was, the time stays, the range
    tells what is not known, and the transposes around a GPU's convolutions go.
    """
    ratio, spread = form_ratio(graph, FORM)
    known = _passes(graph) & np.isfinite(ratio)
    if known.any():
        return with_form(scale_measured(graph, known, ratio, spread), known, FORM)
    chosen = images(graph)
    estimates = scaled(graph, chosen, 1.0, Source.ASSUMED, low=UNKNOWN_LOW, high=UNKNOWN_HIGH)
    graph = with_form(put(graph, chosen, estimates), chosen, FORM)
    layout = _passes(graph) & (graph.family == KernelFamily.LAYOUT)
    return graph.remove(layout & graph.on_gpu).note(
        f"{name}: this recording has no operators measured alone (whatif collect --measure-operators), so the range "
        "of what channels-last brings is wide"
    )


def _passes(graph: TaskGraph) -> Bool:
    return among(graph.phase, (Phase.FORWARD, Phase.BACKWARD))
