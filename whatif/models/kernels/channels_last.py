"""Images in channels-last layout (NHWC): the effect on convolutions and the kernels between them.

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

# Other kernels on images: cuDNN's and PyTorch's kernels of either layout move the same bytes. Our estimate.
UNKNOWN_LOW, UNKNOWN_HIGH = 0.7, 1.2
# The families that work on 4-d tensors.
_FAMILIES = (KernelFamily.CONVOLUTION, KernelFamily.NORMALIZATION, KernelFamily.POOLING)
# The uncertainty of the factors of kernels that lack the layout: our estimate.
_FALLBACK_SPREAD = 2.0


def images(graph: TaskGraph) -> Bool:
    """Return a mask (n_tasks,) of the work on images in the forward and the backward pass."""
    return _passes(graph) & (among(graph.family, _FAMILIES) | forms.of_convolutions(graph))


def is_in_channels_last(graph: TaskGraph) -> bool:
    """Whether an earlier what-if has put the model into this layout, or its convolutions are recorded in it."""
    nhwc = np.array([op.layout == NHWC for op in graph.info.operators] + [False])[graph.called]
    convolves = _passes(graph) & forms.of_convolutions(graph)
    recorded = bool(convolves.any()) and bool(nhwc[convolves].all())
    return recorded or bool(has_form(graph, forms.FORM).any())


def in_channels_last(graph: TaskGraph, name: str) -> TaskGraph:
    """Return the graph of the model in this layout; ``name`` is the what-if's, for its note.

    Operators measured alone in both layouts take the ratio of the two times. Else convolutions take the op database's
    ratio, transposes around them are removed, and operators without a kernel for the layout are slower.
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
    found = forms.in_form(graph, ids, formats, layout=NHWC)
    unknown = ~found.known
    usual = forms.usual(graph, ids[unknown], formats, layout=NHWC, changes_apart=bool(transposes.any()))
    graph = put(graph, ids, forms.estimates(graph, ids, [(found.known, found.take(found.known)), (unknown, usual)]))
    others = np.flatnonzero(chosen & ~convolves)
    graph = put(graph, others, scaled(graph, others, 1.0, Source.ASSUMED, low=UNKNOWN_LOW, high=UNKNOWN_HIGH))
    factor = _fallback(graph)
    slower = np.flatnonzero(_passes(graph) & (factor > 1))
    by = factor[slower]
    estimates = scaled(graph, slower, by, Source.ASSUMED, low=by / _FALLBACK_SPREAD, high=by * _FALLBACK_SPREAD)
    graph = with_form(put(graph, slower, estimates), chosen, forms.FORM)
    return graph.remove(transposes & graph.on_gpu & ~_reshaped(graph))


def _reshaped(graph: TaskGraph) -> Bool:
    """Mask of convolutions over a batch reshaped into the channels of one image, shape (n_tasks,).

    Reshaping copies to NCHW: convolutions with weights per sample (Yang et al., "CondConv", 2019).
    """
    batch_is_one = [op.family == "conv" and dict(op.integers)["batch"] == 1 for op in graph.info.operators] + [False]
    batch = graph.info.batch_size or 1
    return np.asarray(np.array(batch_is_one)[graph.called] & (batch > 1), dtype=np.bool_)


def _fallback(graph: TaskGraph) -> Float64:
    """The slowdown of kernels that support only NCHW, shape (n_tasks,): group norms and custom operators."""
    by_operator = [1.0] * (len(graph.info.operators) + 1)
    for row, op in enumerate(graph.info.operators):
        if op.name.startswith("aten::native_group_norm"):
            by_operator[row] = GROUP_NORM_NHWC
        elif op.family == "other" and not op.name.startswith("aten::") and _takes_image(op.layout):
            by_operator[row] = CUSTOM_NHWC
    return np.array(by_operator)[graph.called]


def _takes_image(layout: str) -> bool:
    dims = msgspec.json.decode(layout)[0]
    return isinstance(dims, list) and any(isinstance(shape, list) and len(shape) == 4 for shape in dims)


def _passes(graph: TaskGraph) -> Bool:
    return among(graph.phase, (Phase.FORWARD, Phase.BACKWARD))
