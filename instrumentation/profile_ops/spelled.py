"""Operators of the database as a recording spells calls: name, shapes, types and values, which can be replayed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from whatif.graph.described import DTYPE_BYTES, TWO_TENSORS, Described
from whatif.opdb.work import output_size

from ..operators.calls import NotReplayable

# What recordings call the number formats. TF32 is how a device multiplies fp32 tensors.
_TYPES = {
    "fp32": "float", "tf32": "float", "fp64": "double", "fp16": "c10::Half", "bf16": "c10::BFloat16",
    "int8": "signed char", "int": "long int",
}  # fmt: skip
# A number that neither changes nor overflows what it is applied to again and again.
_NUMBER = "1.0009765625"


class Spelled(NamedTuple):
    """One call in the words of a recording: "Input Dims", "Input type", "Concrete Inputs" and "Input Strides"."""

    name: str
    dims: list[Any]
    types: list[str]
    concrete: list[str]
    strides: list[Any] | None = None
    backward: bool = False


class _Inputs:
    """Collects the inputs of one call, in the order of its schema."""

    def __init__(self) -> None:
        self.dims: list[Any] = []
        self.types: list[str] = []
        self.concrete: list[str] = []
        self.strides: list[Any] = []

    def tensor(self, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None) -> _Inputs:
        return self._add(list(shape), dtype, "", list(strides) if strides else [])

    def value(self, text: str) -> _Inputs:
        return self._add([], "ScalarList" if text.startswith("[") else "Scalar", text, [])

    def absent(self) -> _Inputs:
        return self._add([], "", "", [])

    def _add(self, dims: list[int], kind: str, concrete: str, strides: list[int]) -> _Inputs:
        self.dims.append(dims)
        self.types.append(kind)
        self.concrete.append(concrete)
        self.strides.append(strides)
        return self

    def call(self, name: str, *, backward: bool = False) -> Spelled:
        return Spelled(f"aten::{name}", self.dims, self.types, self.concrete, self.strides, backward)


def spelled(what: Described) -> Spelled:
    """Return a call of the operator. Raises NotReplayable, with the reason, where torch has none that is known here."""
    if what.family == "other":
        return _as_recorded(what)
    if what.family == "collective":
        return _collective(what)
    rule = _RULES.get(what.family)
    dtype = _TYPES.get(what.dtype)
    if rule is None or dtype is None:
        raise NotReplayable(f"number format {what.dtype} is not measured")
    if what.phase not in (("fwd", "dgrad", "wgrad", "bwd") if what.family == "conv" else ("fwd",)):
        raise NotReplayable(f"phase {what.phase} of {what.name} is not measured alone")
    return rule(what.name, dtype, dict(what.integers), what.phase)


def _matmul(name: str, dtype: str, c: Mapping[str, int], phase: str) -> Spelled:
    b, m, n, k = c["batch"], c["m"], c["n"], c["k"]
    if name == "linear":
        # The weight lies as (n, k), and its transpose is multiplied with.
        inputs = _Inputs().tensor((n,), dtype).tensor((b * m, k), dtype).tensor((k, n), dtype, (1, k))
        return inputs.value("1").value("1").call("addmm")
    if b == 1 and name != "bmm":
        return _Inputs().tensor((m, k), dtype).tensor((k, n), dtype).call("mm")
    return _Inputs().tensor((b, m, k), dtype).tensor((b, k, n), dtype).call("bmm")


def _conv(name: str, dtype: str, c: Mapping[str, int], phase: str) -> Spelled:
    x = (c["batch"], c["in_channels"], c["in_h"], c["in_w"])
    weight = (c["out_channels"], c["in_channels"] // c["groups"], c["kernel_h"], c["kernel_w"])
    out_h, out_w = (int(output_size(c, axis)) for axis in "hw")  # type: ignore[arg-type]
    inputs = _Inputs()
    if phase == "fwd":
        inputs.tensor(x, dtype).tensor(weight, dtype).absent()
    else:
        out = (x[0], weight[0], out_h, out_w)
        inputs.tensor(out, dtype).tensor(x, dtype).tensor(weight, dtype).absent()
    for option in ("stride", "padding", "dilation"):
        inputs.value(f"[{c[f'{option}_h']}, {c[f'{option}_w']}]")
    inputs.value("False").value("[0, 0]").value(str(c["groups"]))
    if phase == "fwd":
        return inputs.call("convolution")
    wanted = {"dgrad": "[True, False, False]", "wgrad": "[False, True, False]", "bwd": "[True, True, False]"}
    return inputs.value(wanted[phase]).call("convolution_backward", backward=True)


def _elementwise(name: str, dtype: str, c: Mapping[str, int], phase: str) -> Spelled:
    shape = (c["elements"],)
    inputs = _Inputs().tensor(shape, dtype)
    base = name.removesuffix("_scalar")
    if base in TWO_TENSORS:
        inputs = inputs.value(_NUMBER) if base != name else inputs.tensor(shape, dtype)
        if base in ("add", "sub"):
            inputs.value("1")
        return inputs.call(base)
    if name == "gelu":
        inputs.absent()  # the approximation: torch's default
    if name == "copy":
        return _Inputs().tensor(shape, dtype).tensor(shape, dtype).value("False").call("copy_", backward=True)
    if name not in ("relu", "gelu", "tanh", "sigmoid", "silu", "exp"):
        raise NotReplayable(f"operator {name} is not known here")
    return inputs.call(name)


def _normalization(name: str, dtype: str, c: Mapping[str, int], phase: str) -> Spelled:
    rows, columns = c["rows"], c["columns"]
    inputs = _Inputs().tensor((rows, columns), dtype)
    if name in ("softmax", "log_softmax"):
        return inputs.value("-1").value("False").call(f"_{name}")
    if name == "layer_norm":
        # Autocast and mixed precision leave the weights of a normalization in fp32; a module in bf16 does not.
        inputs.value(f"[{columns}]").tensor((columns,), dtype).tensor((columns,), dtype).value("1e-05")
        return inputs.call("native_layer_norm")
    raise NotReplayable(f"operator {name} is not known here")


def _attention(name: str, dtype: str, c: Mapping[str, int], phase: str) -> Spelled:
    inputs = _Inputs()
    inputs.tensor((c["batch"], c["heads"], c["query_length"], c["head_size"]), dtype)
    for _ in range(2):
        inputs.tensor((c["batch"], c["kv_heads"], c["key_length"], c["head_size"]), dtype)
    inputs.absent().value("0.0").value("True" if c["causal"] else "False").absent()
    inputs.value("True" if c["heads"] != c["kv_heads"] else "False")
    return inputs.call("scaled_dot_product_attention")


def _collective(what: Described) -> Spelled:
    """The whole buffer, for the processes that run it; no operator of torch's."""
    c = dict(what.integers)
    dtype = _TYPES.get(what.dtype)
    if dtype is None:
        raise NotReplayable(f"number format {what.dtype} is not measured")
    if c["nodes"] != 1:
        raise NotReplayable("collectives over several hosts are not measured here")
    return Spelled(what.name, [[c["bytes"] // int(DTYPE_BYTES[what.dtype])]], [dtype], [""])


def _as_recorded(what: Described) -> Spelled:
    """The layout of the family "other" is what a recording said of the inputs, as JSON."""
    try:
        dims, types, concrete = json.loads(what.layout)
    except (ValueError, TypeError, RecursionError):
        raise NotReplayable("inputs not recorded") from None
    return Spelled(what.name, dims, types, concrete, None, "backward" in what.name)


_RULES: dict[str, Callable[[str, str, Mapping[str, int], str], Spelled]] = {
    "matmul": _matmul,
    "conv": _conv,
    "elementwise": _elementwise,
    "normalization": _normalization,
    "attention": _attention,
}
