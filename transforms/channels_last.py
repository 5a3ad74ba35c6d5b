"""Channels-last: store 4-d activations and weights with channels innermost (NHWC).

Source: PyTorch, "Channels Last Memory Format" (the tutorial's `model.to(memory_format=torch.channels_last)`); NVIDIA,
        "Convolutional Layers User's Guide" (tensor cores compute in NHWC).
Model:  if the recording has its operators measured alone (`whatif collect --measure-operators`), each operator of the
        forward and the backward pass by the ratio of its two measurements. Else, on a GPU, each convolution by the
        ratio of the op database's times in both layouts (whatif/opdb/tensor_convolutions.py): cuDNN's transposes around
        a convolution on tensor cores are removed, some grouped and large depthwise kernels are many times slower, and
        so are group norms and other libraries' operators that support only NCHW. Pooling and batch norm keep their
        time. The model and its input are converted before the run. Ignored: copies if a model changes the layout
        itself.
Effort: small: model.to(memory_format=torch.channels_last), and the input likewise.
"""

from whatif import TaskGraph
from whatif.models.kernels.channels_last import images, in_channels_last, is_in_channels_last

PLACE = "layouts"


def transform(graph: TaskGraph) -> TaskGraph:
    """Change the layout of every convolution, normalization and pooling, and of the operators between them."""
    if not images(graph).any():
        return graph.unchanged("channels_last: the recording has no convolution or pooling; nothing changes")
    if is_in_channels_last(graph):
        return graph.unchanged("channels_last: the model is in channels-last already; nothing changes")
    return in_channels_last(graph, "channels_last")
