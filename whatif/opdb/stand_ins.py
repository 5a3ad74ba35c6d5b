"""Which measured operator stands in for one that was not: the same work under another name, and how that may err."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from whatif.graph.types import Bool, Float64
from whatif.opdb.rows import Operators, Texts

# The same product as another function of the library calls it; and functions of one input or two that cost what their
# memory traffic does. In the order of preference.
STAND_INS = {
    "mm": ("linear",), "matmul": ("linear", "bmm"), "linear": ("mm",), "bmm": (),
    "sub": ("add",), "add": ("sub",), "mul": ("add",), "div": ("add",), "pow": ("div",),
    "sub_scalar": ("add_scalar",), "add_scalar": ("mul_scalar",), "mul_scalar": ("add_scalar",),
    "div_scalar": ("mul_scalar",), "pow_scalar": ("mul_scalar",),
    "sigmoid": ("tanh", "relu"), "silu": ("gelu", "relu"), "exp": ("tanh", "relu"), "copy": ("relu", "mul_scalar"),
    "gelu": ("silu",), "tanh": ("sigmoid",), "relu": ("mul_scalar",),
    "log_softmax": ("softmax",), "rms_norm": ("layer_norm",),
}  # fmt: skip
# Formats that the same units multiply at the same rate (fp16 and bf16: every data sheet since Ampere).
_DTYPES = {"fp16": ("bf16",), "bf16": ("fp16",)}
# Operators that cost what they move: half of the elements of twice the size. (Halved; rows of a normalization.)
_MOVERS = {"elementwise": "elements", "normalization": "rows"}
_HALF_AS_LONG = {"fp16": ("bf16", "fp32"), "bf16": ("fp16", "fp32")}
# What each substitution adds to the half-width of the range, log. Our estimate: NeuSight's elementwise operators of as
# many tensors differ by 1 to 3 % of one another, gradients of convolutions from the forward pass by 10 to 40 %.
_NAME_WIDTH, _DTYPE_WIDTH, _PHASE_WIDTH = 0.05, 0.1, 0.4


def stand_ins(
    ops: Operators, names: Sequence[str], dtype: str, phase: str, layouts: Sequence[str]
) -> tuple[Bool, Operators, Float64]:
    """Say n operators in the words of a model: which it has words for (n,), in which, and what that adds to ranges.

    Convolutions' gradients are said as a forward pass of as many FLOPs: that of the input swaps the channels. What
    moves memory in two bytes an element is said as half of the elements in four.
    """
    extra = np.zeros(len(ops))
    names_table = [_first(name, names, STAND_INS) for name in ops.texts["name"].table]
    kin = _HALF_AS_LONG if ops.family in _MOVERS else _DTYPES
    dtype_table = [_first(own, (dtype,), kin) for own in ops.texts["dtype"].table]
    phase_table = [own if own == phase else (phase if ops.family == "conv" and own in ("dgrad", "wgrad") else "")
                   for own in ops.texts["phase"].table]  # fmt: skip
    # A recording does not tell a layout: it is taken for the usual one.
    layout_table = [own in layouts or not own for own in ops.texts["layout"].table]
    tables = {"name": names_table, "dtype": dtype_table, "phase": phase_table}
    known = np.array(layout_table or [False])[ops.texts["layout"].codes]
    texts = dict(ops.texts)
    for column, width in (("name", _NAME_WIDTH), ("dtype", _DTYPE_WIDTH), ("phase", _PHASE_WIDTH)):
        table, codes = tables[column], ops.texts[column].codes
        same = [new == old for new, old in zip(table, ops.texts[column].table, strict=True)]
        known &= np.array([bool(new) for new in table] or [False])[codes]
        extra += np.where(np.array(same or [True])[codes], 0.0, width)
        # What the model has no word for keeps its own: it is not asked about.
        spoken = tuple(new or old for new, old in zip(table, ops.texts[column].table, strict=True))
        texts[column] = Texts(codes, spoken)
    integers = dict(ops.integers)
    if ops.family == "conv" and "dgrad" in ops.texts["phase"].table:
        is_dgrad = np.array([own == "dgrad" for own in ops.texts["phase"].table])[ops.texts["phase"].codes]
        strided = (ops.integers["stride_h"] > 1) | (ops.integers["stride_w"] > 1)
        swap = is_dgrad & ~strided
        for one, other in (("in_channels", "out_channels"), ("out_channels", "in_channels")):
            integers[one] = np.where(swap, ops.integers[other], ops.integers[one])
    if ops.family in _MOVERS and dtype == "fp32":
        size = _MOVERS[ops.family]
        halved = np.array([own in _HALF_AS_LONG for own in ops.texts["dtype"].table] or [False])
        half = (integers[size] + 1) // 2
        integers[size] = np.where(halved[ops.texts["dtype"].codes], half, integers[size])
    return known, replace(ops, texts=texts, integers=integers), extra


def _first(own: str, wanted: Sequence[str], kin: Mapping[str, tuple[str, ...]]) -> str:
    """The word of ``wanted`` for what is given; "" where there is none."""
    return next((word for word in (own, *kin.get(own, ())) if word in wanted), "")
