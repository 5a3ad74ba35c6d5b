"""Channels-last: store 4-d activations and weights with the channels innermost (NHWC).

Source: PyTorch, "Channels Last Memory Format" (the tutorial's `model.to(memory_format=torch.channels_last)`); NVIDIA,
        "Convolutional Layers User's Guide" (tensor cores compute in NHWC).
Model:  where the recording has its operators measured alone (`whatif collect --measure-operators`), each operator of
        the forward and the backward pass by the ratio of its two measurements. Elsewhere only what is certain: the
        layout transposes that cuDNN puts around a convolution on tensor cores go, and the range tells what is not
        known, how much faster or slower the kernels of the other layout are. The model and its input are converted
        before the run. Ignored: operators that fall back to the old layout in the middle of the model.
Effort: small: model.to(memory_format=torch.channels_last), and the input likewise.
"""

import numpy as np

from whatif import Phase, TaskGraph
from whatif.kernels import KernelFamily
from whatif.models.estimator import Source, put, scaled
from whatif.models.measured import form_ratio, has_form, scale_measured, with_form

# Without a measurement: cuDNN's NHWC kernels against its NCHW ones, our estimate from NVIDIA's guide (fp32 without
# tensor cores is faster in NCHW).
UNKNOWN_LOW, UNKNOWN_HIGH = 0.7, 1.2
# The families that work on 4-d tensors.
FAMILIES = (KernelFamily.CONVOLUTION, KernelFamily.NORMALIZATION, KernelFamily.POOLING)


def transform(graph: TaskGraph) -> TaskGraph:
    """Change the layout of every convolution, normalization and pooling, and of what lies between them."""
    passes = graph.select(phase=Phase.FORWARD) | graph.select(phase=Phase.BACKWARD)
    images = passes & np.isin(graph.family, FAMILIES)
    if not images.any():
        return graph.note("channels_last: the recording has no convolution or pooling; nothing changes")
    if has_form(graph, "channels_last").any():
        return graph.note("channels_last: the model is in channels-last already; nothing changes")
    ratio, spread = form_ratio(graph, "channels_last")
    known = passes & np.isfinite(ratio)
    if known.any():
        return with_form(scale_measured(graph, known, ratio, spread), known, "channels_last")
    layout = passes & (graph.family == KernelFamily.LAYOUT)
    estimates = scaled(graph, images, 1.0, Source.ASSUMED, low=UNKNOWN_LOW, high=UNKNOWN_HIGH)
    graph = with_form(put(graph, images, estimates), images, "channels_last")
    return graph.remove(layout & graph.on_gpu).note(
        "channels_last: this recording has no operators measured alone (whatif collect --measure-operators), so the "
        "range is wide"
    )
