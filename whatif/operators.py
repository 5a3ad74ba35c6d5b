"""What kind of work an operator does on the CPU, from its name; the CPU's counterpart of ``whatif.kernels``."""

from __future__ import annotations

import re

from whatif.kernels import KernelFamily

# The first pattern that matches decides. Containers (aten::linear, aten::conv2d) have hardly any time of their own.
_RULES = (
    (KernelFamily.COMMUNICATION, r"^(c10d|gloo|nccl|mpi)(::|:)"),
    (KernelFamily.FUSED, r"^CompiledFunction(Backward)?$"),
    (KernelFamily.OPTIMIZER, r"_fused_(adam|adamw|sgd|adagrad)"),
    (KernelFamily.ATTENTION, r"scaled_dot_product|flash_attention|efficient_attention"),
    (KernelFamily.CONVOLUTION, r"conv(olution|_transpose|_depthwise)?\d?d?(_|$)|convolution|thnn_conv|slow_conv"),
    (KernelFamily.RNN, r"(lstm|gru|rnn)(_|$|cell)"),
    (KernelFamily.GEMM, r"^\w+::_?(addmm|mm|bmm|baddbmm|addmv|mv|addbmm|dot|matmul|linear|mkl\w*linear)"),
    (KernelFamily.LAYER_NORM, r"layer_norm|group_norm|rms_norm"),
    (KernelFamily.NORMALIZATION, r"(batch|instance)_norm"),
    (KernelFamily.SOFTMAX, r"softmax"),
    (KernelFamily.POOLING, r"pool\d?d?"),
    (KernelFamily.INDEXING, r"embedding|index|gather|scatter|masked_"),
    (KernelFamily.COPY, r"::(copy_|_to_copy|clone|contiguous|cat|stack|fill_|zero_|zeros|ones)$"),
    (
        KernelFamily.REDUCTION,
        r"::(sum|mean|norm|linalg_vector_norm|max|min|argmax|nll_loss\w*|cross_entropy\w*|var\w*)(_|$)",
    ),
    (
        KernelFamily.ELEMENTWISE,
        r"::_?(foreach_)?(add|sub|mul|div|sqrt|rsqrt|pow|exp|log|neg|abs|relu|gelu|silu|sigmoid|tanh|threshold|clamp\w*"
        r"|lerp|addcmul|addcdiv|where|dropout\w*|bernoulli|native_dropout\w*|maximum|minimum|eq|ne|lt|gt)(_backward)?_?$",
    ),
)  # fmt: skip
_COMPILED = tuple((family, re.compile(pattern)) for family, pattern in _RULES)


def classify_operator(name: str) -> KernelFamily:
    """Give the family of an operator ("aten::addmm"); ``OTHER`` where its name tells none."""
    for family, pattern in _COMPILED:
        if pattern.search(name):
            return family
    return KernelFamily.OTHER
