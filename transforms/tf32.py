"""TF32: multiply fp32 matrices on tensor cores, with 10 bits of mantissa.

Source: NVIDIA, "A100 Tensor Core GPU Architecture" (TF32 reads and writes fp32); PyTorch, "CUDA semantics", section
        TensorFloat-32 on Ampere and later devices (convolutions use it by default, matrix products do not).
Model:  fp32 products, convolutions and recurrent layers of the forward and the backward pass by the ratio of the op
        database's times in TF32 and in fp32 (whatif/models/durations/forms.py): their operands stay 4 bytes, so that
        memory bounds them as before. A convolution whose kernel name does not contain fp32 already runs in TF32 on a
        device that has it, cuDNN's default. Kernels that would take longer keep fp32: PyTorch allows TF32, and the
        library chooses. Nothing else changes, no cast is added. Ignored: another kernel choice.
Effort: small: torch.set_float32_matmul_precision("high"), and torch.backends.cudnn.allow_tf32 if it was turned off.
"""

from whatif import Phase, TaskGraph, WhatifError
from whatif.models.durations.estimator import check_units, put
from whatif.models.durations.precision import (
    gets_faster,
    in_precision,
    no_longer,
    note_without_shapes,
    with_dtype,
    with_reported_precision,
)

PLACE = "formats"


def transform(graph: TaskGraph) -> TaskGraph:
    """Let every fp32 matrix kernel multiply in TF32."""
    if not graph.has_gpu:
        raise WhatifError("tf32: expected the recording of a GPU, got one of a CPU, which has no TF32 units.")
    check_units(graph, "tf32_tensor_tflops", "tf32", "TF32 tensor cores (NVIDIA Ampere or later)")
    work = graph.on_gpu & ~graph.select(phase=Phase.UPDATE)
    estimates = in_precision(graph, work, "tf32")
    faster = gets_faster(graph, work, estimates)
    if not faster.any():
        return graph.unchanged("tf32: no fp32 matrix kernel gets faster; nothing changes")
    graph = note_without_shapes(graph, faster, "tf32")
    graph = with_reported_precision(graph, matmul="tf32", conv="tf32")
    estimates = no_longer(graph, faster, estimates.take(faster[work]))
    return with_dtype(put(graph, faster, estimates), faster, "tf32")
