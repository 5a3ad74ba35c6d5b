"""Substitutes for operators without measurements: the same work under another name, and the error that adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from whatif.graph.types import Bool, Float64
from whatif.opdb.rows import Operators, Texts

# The same product under another function's name, and functions of one or two inputs that cost only
# their memory traffic. In the order of preference.
STAND_INS = {
    "mm": ("linear",), "matmul": ("linear", "bmm"), "linear": ("mm",), "bmm": (),
    "sub": ("add",), "add": ("sub",), "mul": ("add",), "div": ("add",), "pow": ("div",),
    "sub_scalar": ("add_scalar",), "add_scalar": ("mul_scalar",), "mul_scalar": ("add_scalar",),
    "div_scalar": ("mul_scalar",), "pow_scalar": ("mul_scalar",),
    "sigmoid": ("tanh", "relu"), "silu": ("gelu", "relu"), "exp": ("tanh", "relu"), "copy": ("relu", "mul_scalar"),
    "gelu": ("silu",), "tanh": ("sigmoid",), "relu": ("mul_scalar",),
    "log_softmax": ("softmax",), "rms_norm": ("layer_norm",),
}  # fmt: skip
# Formats that the same units multiply at the same rate (fp16 and bf16: all data sheets since Ampere).
_DTYPES = {"fp16": ("bf16",), "bf16": ("fp16",)}
# Memory-bound operators: elements of half the size count as half as many. (The halved size; rows of a normalization.)
_MOVERS = {"elementwise": "elements", "normalization": "rows"}
_HALF_AS_LONG = {"fp16": ("bf16", "fp32"), "bf16": ("fp16", "fp32")}
# Added to the half-width of the range by each substitution, log. Our estimate: NeuSight's elementwise operators of as
# many tensors differ by 1 to 3 % of one another, gradients of convolutions from the forward pass by 10 to 40 %.
_NAME_WIDTH, _DTYPE_WIDTH, _PHASE_WIDTH = 0.05, 0.1, 0.4


def stand_ins(
    ops: Operators, names: Sequence[str], dtype: str, phase: str, layouts: Sequence[str]
) -> tuple[Bool, Operators, Float64]:
    """Replace n operators by those that a model covers: a mask (n,), the substitutes, and the addition to the range.

    Gradients of convolutions become a forward pass of as many FLOPs: that of the input swaps the channels.
    Memory-bound operators on two-byte elements become ones on half as many four-byte elements.
    """
    extra = np.zeros(len(ops))
    names_table = [_first(name, names, STAND_INS) for name in ops.texts["name"].table]
    substitutes = _HALF_AS_LONG if ops.family in _MOVERS else _DTYPES
    dtype_table = [_first(given, (dtype,), substitutes) for given in ops.texts["dtype"].table]
    phase_table = [given if given == phase else (phase if ops.family == "conv" and given in ("dgrad", "wgrad") else "")
                   for given in ops.texts["phase"].table]  # fmt: skip
    # A recording does not contain layouts: the usual one is assumed.
    layout_table = [given in layouts or not given for given in ops.texts["layout"].table]
    tables = {"name": names_table, "dtype": dtype_table, "phase": phase_table}
    known = np.array(layout_table or [False])[ops.texts["layout"].codes]
    texts = dict(ops.texts)
    for column, width in (("name", _NAME_WIDTH), ("dtype", _DTYPE_WIDTH), ("phase", _PHASE_WIDTH)):
        table, codes = tables[column], ops.texts[column].codes
        same = [new == old for new, old in zip(table, ops.texts[column].table, strict=True)]
        known &= np.array([bool(new) for new in table] or [False])[codes]
        extra += np.where(np.array(same or [True])[codes], 0.0, width)
        # Values that the model does not cover stay: they are masked out.
        covered = tuple(new or old for new, old in zip(table, ops.texts[column].table, strict=True))
        texts[column] = Texts(codes, covered)
    integers = dict(ops.integers)
    if ops.family == "conv" and "dgrad" in ops.texts["phase"].table:
        strided = (ops.integers["stride_h"] > 1) | (ops.integers["stride_w"] > 1)
        swap = ops.texts["phase"].among("dgrad") & ~strided
        for channel, swapped in (("in_channels", "out_channels"), ("out_channels", "in_channels")):
            integers[channel] = np.where(swap, ops.integers[swapped], ops.integers[channel])
    if ops.family in _MOVERS and dtype == "fp32":
        size = _MOVERS[ops.family]
        half = (integers[size] + 1) // 2
        integers[size] = np.where(ops.texts["dtype"].among(*_HALF_AS_LONG), half, integers[size])
    return known, replace(ops, texts=texts, integers=integers), extra


def _first(value: str, wanted: Sequence[str], substitutes: Mapping[str, tuple[str, ...]]) -> str:
    """The first of a value and its substitutes that is in ``wanted``; "" if none is."""
    return next((candidate for candidate in (value, *substitutes.get(value, ())) if candidate in wanted), "")
