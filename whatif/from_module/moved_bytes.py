"""The bytes that an operation moves, and the elementwise operator of the database that moves as many.

The rule of NeuSight, section 4, for operators without a predictor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from whatif.from_module.operations import (
    ELEMENT_BYTES,
    FORMATS,
    Operation,
    tensors_of,
)
from whatif.graph.described import DTYPE_BYTES, Described

# Operators whose first input is written and not read.
_OVERWRITES = frozenset(
    ("copy", "fill", "zero", "uniform", "normal", "bernoulli", "random", "exponential", "arange", "zeros_like",
     "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full")
)  # fmt: skip
# Operators that read every input once and write every output once: elementwise, reductions, copies and look-ups.
_MOVES_ONCE = re.compile(
    r"add|sub|rsub|mul|div|pow|sqrt|rsqrt|reciprocal|exp|expm1|log|log1p|log2|neg|abs|sign|sin|cos|erf|floor|ceil|round|"
    r"maximum|minimum|eq|ne|lt|gt|le|ge|logical_\w+|bitwise_\w+|where|masked_fill|clamp\w*|relu6?|gelu\w*|silu\w*|elu\w*|"
    r"leaky_relu\w*|mish\w*|softplus\w*|hardtanh\w*|hardswish\w*|hardsigmoid\w*|sigmoid\w*|tanh\w*|threshold\w*|lerp|"
    r"addcmul|addcdiv|native_dropout\w*|bernoulli|uniform|normal|random|exponential|fill|zero|zeros?\w*|ones?\w*|full\w*|"
    r"new_(zeros|ones|full)|arange|scalar_tensor|copy|_to_copy|clone|cat|stack|repeat|roll|flip|tri[lu]|"
    r"sum|mean|amax|amin|max|min|prod|norm|linalg_vector_norm|var\w*|std\w*|any|all|argmax|argmin|cumsum|nll_loss\w*|"
    r"mse_loss\w*|smooth_l1_loss\w*|binary_cross_entropy\w*|\w*softmax\w*|\w*pool\w*|upsample\w*|glu\w*|prelu\w*|"
    r"_weight_norm\w*|rand\w*|isnan|isinf|isfinite|nan_to_num|polar|complex|index_select|gather|"
    r"unfold_backward|squeeze|_cast\w*|_prelu_kernel\w*|rrelu\w*|log_sigmoid\w*|logit\w*|"
    r"huber_loss\w*|square|sgn|trunc|frac|fmod|remainder|tan|a?(sin|cos|tan)h|a(sin|cos|tan)2?|erfc|erfinv|exp2|log10|"
    r"logaddexp\w*|xlogy|logsumexp|cumprod|logcumsumexp|mv|addmv|dot|vdot|addr|eye|tri[lu]_indices|"
    r"(reflection|replication)_pad\dd\w*|pixel_(un)?shuffle|channel_shuffle|im2col|col2im"
)


def moves_once(name: str) -> bool:
    """Whether the cost of the operator ("aten::sum") is known to be moving its inputs and outputs once."""
    return _MOVES_ONCE.fullmatch(name.removeprefix("aten::").rstrip("_")) is not None


def bytes_of(tensors: Sequence[tuple[tuple[int, ...], str]]) -> int:
    """Return the total bytes of tensors, given as (shape, type)."""
    return sum(prod(shape) * ELEMENT_BYTES.get(kind, 4) for shape, kind in tensors)


def format_of(operation: Operation) -> str:
    """The number format of an operation: that of the first floating-point output, else input."""
    for _, kind in (*operation.outputs, *tensors_of(operation)):
        if kind in FORMATS:
            return FORMATS[kind]
    return "fp32"


def traffic(read_bytes: float, written_bytes: float, dtype: str) -> Described:
    """Return the elementwise operator that moves the given bytes: of one input if about as much is read as written."""
    size = DTYPE_BYTES.get(dtype, 4.0)
    two = read_bytes > 1.5 * written_bytes
    name, tensors = ("add", 2) if two else ("relu", 1)
    elements = max(1, round((read_bytes + written_bytes) / size / (tensors + 1)))
    return Described("elementwise", name, dtype, (("elements", elements), ("tensors", tensors)))


def moved_bytes(operation: Operation, name: str) -> tuple[int, int]:
    """Return the bytes that an operation reads and writes, each tensor once."""
    inputs = tensors_of(operation)
    return bytes_of(inputs[1:] if name in _OVERWRITES else inputs), bytes_of(operation.outputs)


def kind_of(name: str) -> str:
    """Return the part of a kernel's name that assigns a memory-bound operator to its kernel family."""
    if re.match(
        r"(sum|mean|amax|amin|max|min|prod|norm|linalg|var|std|any|all|argm|nll_loss|cumsum)(_|$|x$|in$)", name
    ):
        return "reduce"
    if "pool" in name:
        return "pool"
    if "softmax" in name:
        return "softmax"
    return "index" if re.search(r"index|gather|scatter|embedding|sort|topk|unique", name) else "elementwise"
