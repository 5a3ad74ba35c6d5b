"""FlashAttention: replace the separate kernels of each attention by one fused kernel.

Source: Dao et al., "FlashAttention", NeurIPS 2022; Dao, "FlashAttention-2", 2023 (50 to 73 % of the A100's peak);
        torch.nn.functional.scaled_dot_product_attention.
Model:  a product, a softmax and a product, with elementwise kernels between them, become one kernel, and so do the four
        products around the softmax of the backward pass; their launches are removed. The kernel's time is that of the
        recorded FLOPs (a fourth more backward, to recompute the scores) at the share of the peak that the papers
        report, half-way to that of the recorded products if these are slower, as small ones are
        (whatif/models/kernels/attention.py). In fp32 PyTorch runs another fused kernel, whose products keep their time:
        compose `amp` before this one for FlashAttention. `causal`: the half that a causal mask hides is omitted. Memory
        excludes the scores. Ignored: the largest supported head, copies that change the operands' layout.
Effort: small: scaled_dot_product_attention in the model, or attn_implementation="sdpa" if a library offers it.
"""

from whatif import TaskGraph, WhatifError
from whatif.models import KernelFamily, change_memory, without_scores
from whatif.models.durations.half_precision import is_half
from whatif.models.kernels.attention import fuse, fused_attention, unfused_attention

PLACE = "kernels"


def transform(graph: TaskGraph, *, causal: bool = False) -> TaskGraph:
    """Fuse every attention of the recording that runs as separate kernels."""
    found = unfused_attention(graph)
    if not found:
        if (graph.family == KernelFamily.ATTENTION).any():
            return graph.unchanged("flash_attention: the attention is fused already; nothing changes")
        compiled = "compiled" in graph.info.execution
        raise WhatifError(
            "flash_attention: expected GPU kernels of an attention (product, softmax, product), got none in "
            f"{graph.info.path or 'this recording'}"
            + (", which is compiled: put flash_attention before compile." if compiled else ".")
        )
    half = all(is_half(graph.dtype[attention.products]).all() for attention in found)
    replaced = sum(len(attention.kernels) for attention in found)
    graph = change_memory(fuse(graph, found, fused_attention(graph, found, causal=causal)), without_scores)
    if not half:
        graph = graph.note(
            "flash_attention: the products are not in half precision, which FlashAttention needs, so this is PyTorch's "
            "memory-efficient kernel; `whatif apply amp flash_attention` predicts FlashAttention itself"
        )
    return graph.note(f"flash_attention: {len(found)} kernel{'s' * (len(found) != 1)} instead of {replaced}")
