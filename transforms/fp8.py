"""FP8: multiply the operands of linear layers in 8 bits, as Transformer Engine does.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; NVIDIA Transformer Engine, "Using FP8 with
        Transformer Engine" (linear layers only, delayed scaling).
Model:  the products of the forward and the backward pass, except those of an attention, by the ratio of the data
        sheet's times in fp8 and as recorded (whatif/models/durations/forms.py), from fp32, TF32, fp16 or bf16; results
        stay half. Added, with launches: casts of input and weight before each forward product, of the gradient before
        every other backward one, each of a third of the product's traffic, and once a pass the update of the scales
        (whatif/models/kernels/fp8.py). Decoding (forward passes of few rows) stores the weights cast and casts inputs
        only. All else stays, so from fp32 compose `amp` before this one for the other layers. Ignored: shapes that are
        no multiple of 16, which fp8 cannot multiply; the memory that fp8 results would save.
Effort: medium: Transformer Engine's layers in place of torch.nn's, under its fp8 autocast, and a check of the loss.
"""

from whatif import TaskGraph, WhatifError
from whatif.graph.kernels import DTYPES
from whatif.models import not_modelled
from whatif.models.durations.estimator import check_units, put
from whatif.models.durations.precision import gets_faster, in_precision, with_dtype
from whatif.models.kernels.fp8 import add_fp8_casts, linear_products, operand_bytes

PLACE = "casts"


def transform(graph: TaskGraph) -> TaskGraph:
    """Switch the linear layers to fp8 and add the casts of their operands."""
    if not graph.has_gpu:
        raise WhatifError("fp8: expected the recording of a GPU, got one of a CPU, which has no fp8 units.")
    check_units(graph, "fp8_tensor_tflops", "fp8", "fp8 tensor cores (Ada, Hopper or later, MI300)")
    products = linear_products(graph)
    if not products.any():
        raise WhatifError(
            f"fp8: expected products of linear layers, got none in {graph.info.path or 'this recording'}."
        )
    estimates = in_precision(graph, products, "fp8")
    faster = gets_faster(graph, products, estimates)
    if not faster.any():
        already = (graph.dtype[products] == DTYPES.index("fp8")).any()
        why = "the linear layers run in it already" if already else "no product gets faster"
        return graph.unchanged(f"fp8: {why}; nothing changes")
    read = operand_bytes(graph)
    changed = add_fp8_casts(with_dtype(put(graph, products, estimates), faster, "fp8"), faster, read)
    return not_modelled(changed, "fp8")
