"""Describe PyTorch's operators as the op database does, from their recorded shapes and types."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

import msgspec

from whatif.graph.described import LARGEST_ATTRIBUTE, LONGEST_TEXT, Described
from whatif.ingest.op_cost import CONVOLUTION_OPTIONS, integers_of, is_causal, text_of

# Type names of recordings (c10::ScalarType and TypeMeta spellings).
_TYPES = {
    "float": "fp32", "double": "fp64", "c10::half": "fp16", "c10::bfloat16": "bf16", "c10::float8_e4m3fn": "fp8",
    "c10::float8_e5m2": "fp8", "signed char": "int8", "long int": "int", "long": "int", "int": "int",
}  # fmt: skip

# Replaces the empty value of a tensor whose channels are innermost in memory.
CHANNELS_LAST = "channels_last"


def with_layouts(dims: Any, concrete: Any, strides: Any) -> Any:
    """Return "Concrete Inputs" with `CHANNELS_LAST` for each image that has this layout by "Input Strides".

    Images of one channel or one pixel get no layout: they have both. The arguments may be of any type.
    """
    if not all(isinstance(column, list) for column in (dims, concrete, strides)) or len(dims) != len(strides):
        return concrete
    images = [
        place
        for place, (shape, steps, text) in enumerate(zip(dims, strides, concrete, strict=False))
        if text == "" and _channels_innermost(shape, steps)
    ]
    return [CHANNELS_LAST if place in images else text for place, text in enumerate(concrete)] if images else concrete


def without_layouts(concrete: Any) -> Any:
    """Return "Concrete Inputs" as the profiler wrote them."""
    return ["" if text == CHANNELS_LAST else text for text in concrete] if isinstance(concrete, list) else concrete


def _channels_innermost(shape: Any, strides: Any) -> bool:
    if not all(
        isinstance(row, list) and len(row) == 4 and all(type(n) is int for n in row) for row in (shape, strides)
    ):
        return False
    _, channels, height, width = shape
    if channels < 2 or height * width < 2:
        return False
    return bool(strides[1:] == [1, width * channels, channels])


class _Call:
    """The recorded inputs of one call; a look-up of an absent or unexpected input raises."""

    def __init__(self, dims: Any, types: Any, concrete: Any) -> None:
        self.dims = dims if isinstance(dims, list) else []
        self.types = types if isinstance(types, list) else []
        self.concrete = concrete if isinstance(concrete, list) else []

    def shape(self, place: int) -> tuple[int, ...]:
        shape = self.dims[place]
        if not isinstance(shape, list) or not all(type(s) is int and 0 < s <= LARGEST_ATTRIBUTE for s in shape):
            raise ValueError("no tensor")
        if not shape and self.dtype(place) == "unknown":
            raise ValueError("no tensor")
        return tuple(shape)

    def dtype(self, place: int) -> str:
        name = self.types[place] if place < len(self.types) else ""
        return _TYPES.get(name.lower(), "unknown") if isinstance(name, str) else "unknown"

    def text(self, place: int) -> str:
        return text_of(self.concrete, place)

    def integers(self, place: int, size: int) -> tuple[int, ...]:
        return integers_of(self.concrete, place, size)


_Rule = Callable[[str, _Call], Described | None]


def describe(op_name: Any, dims: Any, types: Any, concrete: Any) -> Described | None:
    """Return the operator that a call of ``op_name`` runs, or None if its family or its shape is not known.

    The arguments are "Input Dims", "Input type" and "Concrete Inputs" of a trace as decoded JSON, of any type.
    """
    if not isinstance(op_name, str) or not op_name.startswith("aten::"):
        return None
    name = op_name.removeprefix("aten::")
    rule = _RULES.get(name) or _RULES.get(name.removesuffix("_"))
    if rule is None:
        return None
    try:
        return rule(name, _Call(dims, types, concrete))
    except (IndexError, TypeError, ValueError, ZeroDivisionError):
        return None


def describe_other(op_name: Any, dims: Any, types: Any, concrete: Any) -> Described | None:
    """Return any other operator, identified by all recorded inputs; None if these are too long."""
    try:
        layout = msgspec.json.encode([dims, types, without_layouts(concrete)]).decode()
    except (TypeError, ValueError, RecursionError):
        return None
    if not isinstance(op_name, str) or not 0 < len(op_name) <= 200 or len(layout) > LONGEST_TEXT:
        return None
    call = _Call(dims, types, concrete)
    dtypes = [call.dtype(place) for place in range(len(call.types))]
    return Described(
        "other", op_name, next((d for d in dtypes if d not in ("unknown", "int")), "unknown"), (), layout=layout
    )


def attention_of(op_name: str, dims: Any, dtype: str, concrete: Any) -> Described | None:
    """Return the forward pass of an attention operator, or of a backward one; None for other operators.

    Recorded attention is measured as any other operator (``describe_other``); this description prices its work.
    """
    if "attention" not in op_name:
        return None
    first = 1 if "backward" in op_name else 0  # after the output's gradient
    q, k = dims[first : first + 2]
    if len(q) != 4 or len(k) != 4:
        return None
    # The `_scaled_dot_product_*` level has (batch, head, row, column), the kernels below it (batch, row, head, column).
    heads, rows = (1, 2) if "scaled_dot_product" in op_name else (2, 1)
    sizes = (
        ("batch", q[0]), ("query_length", q[rows]), ("key_length", k[rows]), ("heads", q[heads]),
        ("kv_heads", k[heads]), ("head_size", q[3]), ("causal", int(is_causal(op_name, concrete))),
    )  # fmt: skip
    return Described("attention", "attention", dtype, sizes)


def as_attention(operator: Described) -> Described:
    """Return an attention operator described by its forward pass (``attention_of``), any other operator unchanged."""
    if operator.family != "other" or "attention" not in operator.name:
        return operator
    try:
        dims, _, concrete = msgspec.json.decode(operator.layout)
        return attention_of(operator.name, dims, operator.dtype, concrete) or operator
    except (msgspec.DecodeError, TypeError, ValueError, IndexError):
        return operator


def _matmul(name: str, call: _Call) -> Described | None:
    first = 1 if name in ("addmm", "baddbmm") else 0
    left, right = call.shape(first), call.shape(first + 1)
    if name == "linear":
        if len(right) != 2:
            return None
        right = right[::-1]
        left = (prod(left[:-1]), left[-1])
    if len(left) != len(right) or len(left) not in (2, 3) or left[-1] != right[-2] or left[:-2] != right[:-2]:
        return None
    sizes = (("batch", left[0] if len(left) == 3 else 1), ("m", left[-2]), ("n", right[-1]), ("k", left[-1]))
    return Described("matmul", {"addmm": "linear", "baddbmm": "bmm"}.get(name, name), call.dtype(first), sizes)


def _grouped(name: str, call: _Call) -> Described | None:
    """A product for each expert: their rows concatenated (two dimensions) or in a batch (three).

    The number of rows per expert is not recorded and taken to be equal.
    """
    left, right, ends = call.shape(0), call.shape(1), call.shape(2)
    groups = next((shape[0] for shape in (left, right) if len(shape) == 3), ends[0])
    m, k, n = left[-2], left[-1], right[-1]
    if (len(left), len(right)) == (2, 3):
        m = max(m // groups, 1)
    elif (len(left), len(right)) == (3, 2):
        n = max(n // groups, 1)
    elif (len(left), len(right)) == (2, 2):
        k = max(k // groups, 1)
    return Described("matmul", "bmm", call.dtype(0), (("batch", groups), ("m", m), ("n", n), ("k", k)))


def _convolution(name: str, call: _Call) -> Described | None:
    backward = name == "convolution_backward"
    x, weight = (call.shape(1), call.shape(2)) if backward else (call.shape(0), call.shape(1))
    if len(x) != 4 or len(weight) != 4 or x[1] % weight[1]:
        return None
    transposed = {"convolution": 6, "_convolution": 6, "convolution_backward": 7}.get(name)
    if transposed is not None and call.text(transposed) != "False":
        return None
    stride, padding, dilation = (call.integers(place, 2) for place in CONVOLUTION_OPTIONS.get(name, (3, 4, 5)))
    phase = "fwd"
    if backward:
        mask = re.findall("True|False", call.text(10))[:2]
        phase = {("True", "True"): "bwd", ("True", "False"): "dgrad", ("False", "True"): "wgrad"}[mask[0], mask[1]]
    integers = (
        ("batch", x[0]), ("in_channels", x[1]), ("out_channels", weight[0]), ("in_h", x[2]), ("in_w", x[3]),
        ("kernel_h", weight[2]), ("kernel_w", weight[3]), ("stride_h", stride[0]), ("stride_w", stride[1]),
        ("padding_h", padding[0]), ("padding_w", padding[1]), ("dilation_h", dilation[0]), ("dilation_w", dilation[1]),
        ("groups", x[1] // weight[1]),
    )  # fmt: skip
    # cuDNN and PyTorch use the layout of image and weight; a gradient is converted to it.
    images = (1, 2) if backward else (0, 1)
    layout = "nhwc" if any(call.text(place) == CHANNELS_LAST for place in images) else ""
    return Described("conv", "conv2d", call.dtype(1 if backward else 0), integers, phase, layout)


def _binary(name: str, call: _Call) -> Described | None:
    left = call.shape(0)
    try:
        right = call.shape(1)
    except ValueError:
        right = ()  # a number
    name = name.removesuffix("_")
    if not right:
        return Described("elementwise", f"{name}_scalar", call.dtype(0), (("elements", prod(left)), ("tensors", 1)))
    if left != right or call.dtype(0) != call.dtype(1):
        return None
    return Described("elementwise", name, call.dtype(0), (("elements", prod(left)), ("tensors", 2)))


def _unary(name: str, call: _Call) -> Described | None:
    name = {"clamp_min": "relu"}.get(name.removesuffix("_"), name.removesuffix("_"))
    return Described("elementwise", name, call.dtype(0), (("elements", prod(call.shape(0))), ("tensors", 1)))


def _softmax(name: str, call: _Call) -> Described | None:
    x = call.shape(0)
    if not x or int(call.text(1)) not in (-1, len(x) - 1):
        return None
    sizes = (("rows", prod(x[:-1])), ("columns", x[-1]))
    return Described("normalization", name.removeprefix("_"), call.dtype(0), sizes)


def _layer_norm(name: str, call: _Call) -> Described | None:
    x, normalized = call.shape(0), re.findall(r"\d+", call.text(1)) or [str(s) for s in call.shape(2)]
    columns = prod(map(int, normalized))
    if prod(x) % columns:
        return None
    return Described("normalization", "layer_norm", call.dtype(0), (("rows", prod(x) // columns), ("columns", columns)))


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "linear"), _matmul),
    "_grouped_mm": _grouped,
    **dict.fromkeys(
        ("convolution", "_convolution", "conv2d", "cudnn_convolution", "miopen_convolution", "mkldnn_convolution",
         "convolution_backward"),
        _convolution,
    ),
    **dict.fromkeys(("add", "sub", "mul", "div"), _binary),
    **dict.fromkeys(("relu", "clamp_min", "gelu", "tanh", "sigmoid", "silu", "exp"), _unary),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    "native_layer_norm": _layer_norm,
}  # fmt: skip
