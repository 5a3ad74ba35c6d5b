"""The work of operators, for whole tables: FLOPs (a multiply-add counts two) and compulsory bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from whatif.graph.described import DTYPE_BYTES
from whatif.graph.types import Float64
from whatif.opdb.rows import Operators

_Columns = Mapping[str, Float64]


def work(ops: Operators) -> tuple[Float64, Float64]:
    """Return the FLOPs and bytes of each operator, shape (n,) both; 0 if an operator has none or it is unknown.

    Every input is read once and the output written once. An unknown number format counts four bytes. The
    arrays are cached on the operators, since every source needs them, and are read-only.
    """
    cached: tuple[Float64, Float64] | None = ops.__dict__.get("work")
    if cached is None:
        cached = ops.__dict__["work"] = _work(ops)
        for column in cached:
            column.flags.writeable = False
    return cached


def _work(ops: Operators) -> tuple[Float64, Float64]:
    columns = ops.floats
    sizes = np.array([DTYPE_BYTES.get(dtype, 4.0) for dtype in ops.texts["dtype"].table] or [4.0])
    element_bytes = sizes[ops.texts["dtype"].codes]
    if ops.family == "other":
        return np.zeros(len(ops)), np.zeros(len(ops))
    if ops.family == "collective":
        return np.zeros(len(ops)), columns["bytes"]
    flops, elements = _RULES[ops.family](columns)
    if ops.family == "conv":
        # Computing both gradients is two products that share the output's gradient.
        is_both = ops.texts["phase"].among("bwd")
        flops, elements = flops * (1 + is_both), elements * (1 + is_both)
    return flops, elements * element_bytes


def output_size(c: _Columns, axis: str) -> Float64:
    """Return the size of a convolution's output along ``axis`` ("h" or "w"), shape (n,); never negative."""
    reach = c[f"dilation_{axis}"] * (c[f"kernel_{axis}"] - 1) + 1
    room = c[f"in_{axis}"] + 2 * c[f"padding_{axis}"] - reach
    return np.asarray(np.maximum(np.floor(room / np.maximum(c[f"stride_{axis}"], 1)) + 1, 0))


def _matmul(c: _Columns) -> tuple[Float64, Float64]:
    b, m, n, k = c["batch"], c["m"], c["n"], c["k"]
    return 2 * b * m * n * k, b * (m * k + k * n + m * n)


def _conv(c: _Columns) -> tuple[Float64, Float64]:
    out = c["batch"] * c["out_channels"] * output_size(c, "h") * output_size(c, "w")
    weights = c["out_channels"] * c["in_channels"] / np.maximum(c["groups"], 1) * c["kernel_h"] * c["kernel_w"]
    products = out * weights / np.maximum(c["out_channels"], 1)
    return 2 * products, c["batch"] * c["in_channels"] * c["in_h"] * c["in_w"] + weights + out


def _elementwise(c: _Columns) -> tuple[Float64, Float64]:
    return np.zeros(len(c["elements"])), c["elements"] * (c["tensors"] + 1)


def _normalization(c: _Columns) -> tuple[Float64, Float64]:
    return np.zeros(len(c["rows"])), 2 * c["rows"] * c["columns"]


def _attention(c: _Columns) -> tuple[Float64, Float64]:
    pairs = c["batch"] * c["heads"] * c["query_length"] * c["key_length"]
    # A causal mask leaves half of the scores if there are as many queries as keys.
    share = np.where((c["causal"] > 0) & (c["query_length"] == c["key_length"]), 0.5, 1.0)
    moved = c["batch"] * c["head_size"] * 2 * (c["heads"] * c["query_length"] + c["kv_heads"] * c["key_length"])
    return 4 * pairs * c["head_size"] * share, moved


_RULES: dict[str, Callable[[_Columns], tuple[Float64, Float64]]] = {
    "matmul": _matmul,
    "conv": _conv,
    "elementwise": _elementwise,
    "normalization": _normalization,
    "attention": _attention,
}
