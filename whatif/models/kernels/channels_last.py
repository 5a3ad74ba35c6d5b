"""Images with their channels innermost (NHWC): what the other layout makes of convolutions and what lies between them.

Source: PyTorch, "Channels Last Memory Format" (tutorial); NVIDIA, "Convolutional Layers User's Guide" (tensor cores
compute in NHWC).
"""

from __future__ import annotations

import msgspec
import numpy as np

from whatif.graph.kernels import KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Float64, Phase, among
from whatif.models.durations import forms
from whatif.models.durations.estimator import Source, put, scaled
from whatif.models.durations.measured import (
    form_ratio,
    has_form,
    scale_measured,
    with_form,
)
from whatif.models.durations.precision import matrix_dtype
from whatif.opdb.tensor_convolutions import CUSTOM_NHWC, GROUP_NORM_NHWC, NHWC

# What else works on images: cuDNN's and PyTorch's kernels of either layout move the same bytes. Our estimate.
UNKNOWN_LOW, UNKNOWN_HIGH = 0.7, 1.2
# The families that work on 4-d tensors.
_FAMILIES = (KernelFamily.CONVOLUTION, KernelFamily.NORMALIZATION, KernelFamily.POOLING)
# Either way of a factor for kernels without one for the layout: our estimate.
_FALLBACK_SPREAD = 2.0


def images(graph: TaskGraph) -> Bool:
    """Return a mask (n_tasks,) of what works on images in the forward and the backward pass."""
    return _passes(graph) & (among(graph.family, _FAMILIES) | forms.of_convolutions(graph))


def is_in_channels_last(graph: TaskGraph) -> bool:
    """Whether a what-if has put the model into this layout before, or its convolutions are recorded in it."""
    told = np.array([what.layout == NHWC for what in graph.info.operators] + [False])[graph.called]
    convolves = _passes(graph) & forms.of_convolutions(graph)
    recorded = bool(convolves.any()) and bool(told[convolves].all())
    return recorded or bool(has_form(graph, forms.FORM).any())


def in_channels_last(graph: TaskGraph, name: str) -> TaskGraph:
    """Return the graph of the model in this layout; ``name`` is of the what-if that asks, for its note.

    Operators measured alone in both layouts take the ratio of the two times. Else convolutions take the ratio of the op
    database's answers in both, transposes around them go, and what has no kernel for the layout is slower.
    """
    ratio, spread = form_ratio(graph, forms.FORM)
    known = _passes(graph) & np.isfinite(ratio)
    if known.any():
        return with_form(scale_measured(graph, known, ratio, spread), known, forms.FORM)
    chosen = images(graph)
    if not graph.has_gpu:
        estimates = scaled(graph, chosen, 1.0, Source.ASSUMED, low=UNKNOWN_LOW, high=UNKNOWN_HIGH)
        return with_form(put(graph, chosen, estimates), chosen, forms.FORM).note(
            f"{name}: this recording has no operators measured alone (whatif collect --measure-operators), so the "
            "range of what channels-last brings is wide"
        )
    return _on_gpu(graph, chosen)


def _on_gpu(graph: TaskGraph, chosen: Bool) -> TaskGraph:
    formats, transposes = matrix_dtype(graph), _passes(graph) & (graph.family == KernelFamily.LAYOUT)
    convolves = chosen & forms.of_convolutions(graph) & ~_reshaped(graph)
    ids = np.flatnonzero(convolves)
    told = forms.in_form(graph, ids, formats, layout=NHWC)
    unknown = ~told.known
    usual = forms.usual(graph, ids[unknown], formats, layout=NHWC, changes_apart=bool(transposes.any()))
    graph = put(graph, ids, forms.estimates(graph, ids, [(told.known, told.take(told.known)), (unknown, usual)]))
    others = np.flatnonzero(chosen & ~convolves)
    graph = put(graph, others, scaled(graph, others, 1.0, Source.ASSUMED, low=UNKNOWN_LOW, high=UNKNOWN_HIGH))
    factor = _fallback(graph)
    slower = np.flatnonzero(_passes(graph) & (factor > 1))
    by = factor[slower]
    estimates = scaled(graph, slower, by, Source.ASSUMED, low=by / _FALLBACK_SPREAD, high=by * _FALLBACK_SPREAD)
    graph = with_form(put(graph, slower, estimates), chosen, forms.FORM)
    return graph.remove(transposes & graph.on_gpu & ~_reshaped(graph))


def _reshaped(graph: TaskGraph) -> Bool:
    """Mask of convolutions over a batch that was reshaped into the channels of one image, shape (n_tasks,).

    The reshaping copies into NCHW: convolutions with weights of each sample (Yang et al., "CondConv", 2019).
    """
    one = [what.family == "conv" and dict(what.integers)["batch"] == 1 for what in graph.info.operators] + [False]
    batch = graph.info.batch_size or 1
    return np.asarray(np.array(one)[graph.called] & (batch > 1), dtype=np.bool_)


def _fallback(graph: TaskGraph) -> Float64:
    """How much longer kernels take that know NCHW alone, shape (n_tasks,): group norms, and others' own operators."""
    by_operator = [1.0] * (len(graph.info.operators) + 1)
    for row, what in enumerate(graph.info.operators):
        if what.name.startswith("aten::native_group_norm"):
            by_operator[row] = GROUP_NORM_NHWC
        elif what.family == "other" and not what.name.startswith("aten::") and _takes_image(what.layout):
            by_operator[row] = CUSTOM_NHWC
    return np.array(by_operator)[graph.called]


def _takes_image(said: str) -> bool:
    dims = msgspec.json.decode(said)[0]
    return isinstance(dims, list) and any(isinstance(shape, list) and len(shape) == 4 for shape in dims)


def _passes(graph: TaskGraph) -> Bool:
    return among(graph.phase, (Phase.FORWARD, Phase.BACKWARD))
