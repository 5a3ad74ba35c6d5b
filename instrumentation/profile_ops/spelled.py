"""Operators of the database as calls in a recording's format: name, shapes, types and values, for replay."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from whatif.graph.described import DTYPE_BYTES, TWO_TENSORS, Described
from whatif.opdb.work import output_size

from ..operators.calls import NotReplayable, RecordedCall

# Names of the dtypes in recordings. TF32 is a way to multiply fp32 tensors.
_TYPES = {
    "fp32": "float", "tf32": "float", "fp64": "double", "fp16": "c10::Half", "bf16": "c10::BFloat16",
    "int8": "signed char", "int": "long int",
}  # fmt: skip
# A scalar under whose repeated application values hardly change and do not overflow.
_NUMBER = "1.0009765625"


# One input of a call: its dims, type, value and strides.
_Input = tuple[list[int], str, str, list[int]]
_ABSENT: _Input = ([], "", "", [])


def _tensor(shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] = ()) -> _Input:
    return list(shape), dtype, "", list(strides)


def _value(text: str) -> _Input:
    return [], "ScalarList" if text.startswith("[") else "Scalar", text, []


def _call(name: str, *inputs: _Input, backward: bool = False) -> RecordedCall:
    dims, types, concrete, strides = (list(column) for column in zip(*inputs, strict=True))
    return RecordedCall(f"aten::{name}", dims, types, concrete, strides, backward)


def spelled(operator: Described) -> RecordedCall:
    """Return a call of the operator. Raises NotReplayable, with the reason, if none is known here."""
    if operator.family == "other":
        return _as_recorded(operator)
    if operator.family == "collective":
        return _collective(operator)
    rule = _RULES.get(operator.family)
    dtype = _TYPES.get(operator.dtype)
    if rule is None or dtype is None:
        raise NotReplayable(f"number format {operator.dtype} is not measured")
    if operator.phase not in (("fwd", "dgrad", "wgrad", "bwd") if operator.family == "conv" else ("fwd",)):
        raise NotReplayable(f"phase {operator.phase} of {operator.name} is not measured alone")
    return rule(operator.name, dtype, dict(operator.integers), operator.phase)


def _matmul(name: str, dtype: str, c: Mapping[str, int], phase: str) -> RecordedCall:
    b, m, n, k = c["batch"], c["m"], c["n"], c["k"]
    if name == "linear":
        # The weight is stored as (n, k); the product uses its transpose.
        weight = _tensor((k, n), dtype, (1, k))
        return _call("addmm", _tensor((n,), dtype), _tensor((b * m, k), dtype), weight, _value("1"), _value("1"))
    if b == 1 and name != "bmm":
        return _call("mm", _tensor((m, k), dtype), _tensor((k, n), dtype))
    return _call("bmm", _tensor((b, m, k), dtype), _tensor((b, k, n), dtype))


def _conv(name: str, dtype: str, c: Mapping[str, int], phase: str) -> RecordedCall:
    x = (c["batch"], c["in_channels"], c["in_h"], c["in_w"])
    weight = (c["out_channels"], c["in_channels"] // c["groups"], c["kernel_h"], c["kernel_w"])
    out_h, out_w = (int(output_size(c, axis)) for axis in "hw")  # type: ignore[arg-type]
    tensors = [_tensor(x, dtype), _tensor(weight, dtype), _ABSENT]
    options = [_value(f"[{c[f'{name}_h']}, {c[f'{name}_w']}]") for name in ("stride", "padding", "dilation")]
    options += [_value("False"), _value("[0, 0]"), _value(str(c["groups"]))]
    if phase == "fwd":
        return _call("convolution", *tensors, *options)
    gradient = _tensor((x[0], weight[0], out_h, out_w), dtype)
    output_mask = {"dgrad": "[True, False, False]", "wgrad": "[False, True, False]", "bwd": "[True, True, False]"}
    return _call("convolution_backward", gradient, *tensors, *options, _value(output_mask[phase]), backward=True)


def _elementwise(name: str, dtype: str, c: Mapping[str, int], phase: str) -> RecordedCall:
    tensor = _tensor((c["elements"],), dtype)
    base = name.removesuffix("_scalar")
    if base in TWO_TENSORS:
        scale = [_value("1")] if base in ("add", "sub") else []
        return _call(base, tensor, tensor if base == name else _value(_NUMBER), *scale)
    if name == "copy":
        return _call("copy_", tensor, tensor, _value("False"), backward=True)
    if name == "gelu":
        return _call(name, tensor, _ABSENT)  # the approximation: torch's default
    if name not in ("relu", "tanh", "sigmoid", "silu", "exp"):
        raise NotReplayable(f"operator {name} is not known here")
    return _call(name, tensor)


def _normalization(name: str, dtype: str, c: Mapping[str, int], phase: str) -> RecordedCall:
    rows, columns = c["rows"], c["columns"]
    x = _tensor((rows, columns), dtype)
    if name in ("softmax", "log_softmax"):
        return _call(f"_{name}", x, _value("-1"), _value("False"))
    if name == "layer_norm":
        # Weights in the input's dtype, as in a bf16 module; autocast and mixed precision keep them in fp32.
        weight = _tensor((columns,), dtype)
        return _call("native_layer_norm", x, _value(f"[{columns}]"), weight, weight, _value("1e-05"))
    raise NotReplayable(f"operator {name} is not known here")


def _attention(name: str, dtype: str, c: Mapping[str, int], phase: str) -> RecordedCall:
    query = _tensor((c["batch"], c["heads"], c["query_length"], c["head_size"]), dtype)
    key = _tensor((c["batch"], c["kv_heads"], c["key_length"], c["head_size"]), dtype)
    causal, grouped = _value(str(bool(c["causal"]))), _value(str(c["heads"] != c["kv_heads"]))
    return _call("scaled_dot_product_attention", query, key, key, _ABSENT, _value("0.0"), causal, _ABSENT, grouped)


def _collective(operator: Described) -> RecordedCall:
    """Return the full buffer, for the processes that run the collective; not a torch operator."""
    c = dict(operator.integers)
    dtype = _TYPES.get(operator.dtype)
    if dtype is None:
        raise NotReplayable(f"number format {operator.dtype} is not measured")
    if c["nodes"] != 1:
        raise NotReplayable("collectives over several hosts are not measured here")
    return RecordedCall(operator.name, [[c["bytes"] // int(DTYPE_BYTES[operator.dtype])]], [dtype], [""])


def _as_recorded(operator: Described) -> RecordedCall:
    """Return the call in the layout of the family "other": the recorded inputs as JSON."""
    try:
        dims, types, concrete = json.loads(operator.layout)
    except (ValueError, TypeError, RecursionError):
        raise NotReplayable("inputs not recorded") from None
    return RecordedCall(operator.name, dims, types, concrete, None, "backward" in operator.name)


_RULES: dict[str, Callable[[str, str, Mapping[str, int], str], RecordedCall]] = {
    "matmul": _matmul,
    "conv": _conv,
    "elementwise": _elementwise,
    "normalization": _normalization,
    "attention": _attention,
}
