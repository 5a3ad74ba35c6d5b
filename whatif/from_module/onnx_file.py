"""Read an ONNX model: the operators of its forward pass, as PyTorch operators. ONNX does not describe training."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from whatif.from_module.operations import Operation, OperatorGraph
from whatif.graph.types import Phase
from whatif.runtime.errors import WhatifError

# ONNX's numbers of element types (onnx.proto, TensorProto.DataType), by the names of PyTorch's profiler.
_TYPES = {
    1: "float", 2: "unsigned char", 3: "signed char", 5: "short int", 6: "int", 7: "long int", 9: "bool",
    10: "c10::Half", 11: "double", 16: "c10::BFloat16",
}  # fmt: skip
_Tensor = tuple[tuple[int, ...], str]
_Made = tuple[str, list[Any], list[str], list[str]]
_Rule = Callable[[Sequence[_Tensor | None], dict[str, Any]], _Made]


def read_onnx(path: Path) -> OperatorGraph:
    """Return the forward pass of an ONNX model as operators: an inference step.

    Shapes are inferred from its inputs, which must be fixed. Raises WhatifError without the package
    onnx, for a damaged file, and if shapes are unknown.
    """
    if importlib.util.find_spec("onnx") is None:
        raise WhatifError(f"{path}: expected the package onnx, got none; install it with `pip install onnx`.")
    onnx: Any = importlib.import_module("onnx")
    try:
        # Weights in separate files are not needed.
        model = onnx.shape_inference.infer_shapes(onnx.load(str(path), load_external_data=False), data_prop=True)
    except FileNotFoundError:
        raise WhatifError(f"{path}: expected an ONNX model, got no such file.") from None
    except Exception as error:  # protobuf's and onnx's errors have no common base
        reason = " ".join(str(error).split())[:200]
        raise WhatifError(f"{path}: expected an ONNX model, got a file that onnx cannot read: {reason}") from error
    graph = model.graph
    if not graph.node:
        raise WhatifError(f"{path}: expected an ONNX model with operators, got none.")
    known = _shapes(graph)
    operations = []
    for node in graph.node:
        operation = _operation(path, onnx, node, known)
        if operation is not None:
            operations.append(operation)
    weights = {tensor.name for tensor in graph.initializer}
    first = next((known[i.name] for i in graph.input if i.name not in weights and i.name in known), None)
    metadata = {"version": 1, "batch_size": first[0][0] if first and first[0] else None}
    notes = ("an ONNX file contains the forward pass only: this is inference",)
    return OperatorGraph(str(path), operations, metadata=metadata, notes=notes)


def _shapes(graph: Any) -> dict[str, _Tensor]:
    """Shape and type of every tensor with known sizes."""
    known = {t.name: (tuple(int(d) for d in t.dims), _TYPES.get(t.data_type, "float")) for t in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        sizes = tuple(int(d.dim_value) for d in tensor.shape.dim)
        if tensor.HasField("shape") and all(d.HasField("dim_value") for d in tensor.shape.dim):
            known.setdefault(value.name, (sizes, _TYPES.get(tensor.elem_type, "float")))
    return known


def _operation(path: Path, onnx: Any, node: Any, known: dict[str, _Tensor]) -> Operation | None:
    if node.op_type in _NO_WORK:
        return None
    missing = next((name for name in (*node.input, *node.output[:1]) if name and name not in known), None)
    if missing is not None:
        raise WhatifError(
            f"{path}: expected fixed shapes, got none for {missing!r} of {node.op_type} {node.name!r}; export "
            "the model with fixed sizes (onnx.tools.update_model_dims)."
        )
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    inputs = [known[name] if name else None for name in node.input]
    outputs = tuple(known[name] for name in node.output if name in known)
    try:
        made = _RULES[node.op_type](inputs, attributes)
    except (IndexError, KeyError, TypeError, ValueError):
        # By its name in lower case: it has a kernel rule, or is estimated from its bytes.
        tensors = [tensor for tensor in inputs if tensor is not None]
        name = f"aten::{_NAMES.get(node.op_type, node.op_type.lower())}"
        made = name, [list(s) for s, _ in tensors], [t for _, t in tensors], [""] * len(tensors)
    return Operation(*made, Phase.FORWARD, outputs)


def _need(inputs: Sequence[_Tensor | None], place: int) -> _Tensor:
    tensor = inputs[place]
    if tensor is None:
        raise ValueError("no tensor")
    return tensor


def _matmul(inputs: Sequence[_Tensor | None], attributes: dict[str, Any]) -> _Made:
    """(..., m, k) times (..., k, n), or times a single (k, n): a product, or a batch of products."""
    (left, kind), (right, _) = _need(inputs, 0), _need(inputs, 1)
    if len(right) == 2:
        return "aten::mm", [[prod(left[:-1]), left[-1]], list(right)], [kind] * 2, [""] * 2
    batch = max(prod(left[:-2]), prod(right[:-2]))
    return "aten::bmm", [[batch, *left[-2:]], [batch, *right[-2:]]], [kind] * 2, [""] * 2


def _gemm(inputs: Sequence[_Tensor | None], attributes: dict[str, Any]) -> _Made:
    (left, kind), (right, _) = _need(inputs, 0), _need(inputs, 1)
    left = left[::-1] if attributes.get("transA") else left
    right = right[::-1] if attributes.get("transB") else right
    if len(inputs) > 2 and inputs[2] is not None:
        return "aten::addmm", [[right[1]], list(left), list(right)], [kind] * 3, [""] * 3
    return "aten::mm", [list(left), list(right)], [kind] * 2, [""] * 2


def _convolution(inputs: Sequence[_Tensor | None], attributes: dict[str, Any]) -> _Made:
    (x, kind), (weight, _) = _need(inputs, 0), _need(inputs, 1)
    axes = len(weight) - 2
    padding = attributes.get("pads", [0] * 2 * axes)
    if attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID") or padding[:axes] != padding[axes:]:
        raise ValueError("padding that no PyTorch operator has")
    biased = len(inputs) > 2 and inputs[2] is not None
    numbers = (attributes.get("strides", [1] * axes), padding[:axes], attributes.get("dilations", [1] * axes))
    return (
        "aten::convolution",
        [list(x), list(weight), [weight[0]] if biased else [], [], [], [], [], [], []],
        [kind, kind, kind if biased else "", *["ScalarList"] * 3, "Scalar", "ScalarList", "Scalar"],
        ["", "", "", *(str(list(n)) for n in numbers), "False", str([0] * axes), str(attributes.get("group", 1))],
    )


def _softmax(inputs: Sequence[_Tensor | None], attributes: dict[str, Any]) -> _Made:
    x, kind = _need(inputs, 0)
    return (
        "aten::_softmax",
        [list(x), [], []],
        [kind, "Scalar", "Scalar"],
        ["", str(attributes.get("axis", -1)), "False"],
    )


def _layer_norm(inputs: Sequence[_Tensor | None], attributes: dict[str, Any]) -> _Made:
    x, kind = _need(inputs, 0)
    normalized = list(x[attributes.get("axis", -1) :])
    types = [kind, "ScalarList", kind, kind, "Scalar"]
    return (
        "aten::native_layer_norm", [list(x), [], normalized, normalized, []], types,
        ["", str(normalized), "", "", "1e-05"],
    )  # fmt: skip


def _batch_norm(inputs: Sequence[_Tensor | None], attributes: dict[str, Any]) -> _Made:
    x, kind = _need(inputs, 0)
    sizes = [list(x), *[[x[1]]] * 4, []]
    return "aten::native_batch_norm", sizes, [kind] * 5 + ["Scalar"], [""] * 5 + ["False"]


def _look_up(inputs: Sequence[_Tensor | None], attributes: dict[str, Any]) -> _Made:
    (table, kind), (indices, index_kind) = _need(inputs, 0), _need(inputs, 1)
    if attributes.get("axis", 0) != 0 or len(table) != 2:
        return "aten::index_select", [list(table), list(indices)], [kind, index_kind], ["", ""]
    return "aten::embedding", [list(table), list(indices)], [kind, index_kind], ["", ""]


# Shapes, constants, and operators that a runtime fuses into their neighbours.
_NO_WORK = frozenset(
    ("Constant", "ConstantOfShape", "Shape", "Size", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity",
     "Dropout", "Range")
)  # fmt: skip
_NAMES = {
    "GlobalAveragePool": "adaptive_avg_pool2d", "AveragePool": "avg_pool2d", "MaxPool": "max_pool2d_with_indices",
    "ReduceMean": "mean", "ReduceSum": "sum", "ReduceMax": "amax", "Concat": "cat", "Transpose": "clone", "Cast":
    "_to_copy", "Clip": "clamp", "Erf": "erf", "Sqrt": "sqrt", "Slice": "clone", "Split": "clone", "Expand": "clone",
    "LeakyRelu": "leaky_relu", "HardSwish": "hardswish", "HardSigmoid": "hardsigmoid", "PRelu": "prelu",
    "Less": "lt", "Greater": "gt", "Equal": "eq", "Not": "logical_not", "And": "logical_and", "Or": "logical_or",
    "Pad": "constant_pad_nd", "Trilu": "tril", "Resize": "upsample", "ArgMax": "argmax", "CumSum": "cumsum",
    "Reciprocal": "reciprocal", "Where": "where",
}  # fmt: skip
_RULES: dict[str, _Rule] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _convolution,
    "Softmax": _softmax,
    "LayerNormalization": _layer_norm,
    "BatchNormalization": _batch_norm,
    "Gather": _look_up,
}
