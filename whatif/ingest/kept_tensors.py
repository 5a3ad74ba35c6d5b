"""Which tensors operators keep for the backward pass, and how large: the rules of torch's autograd.

Source: derivatives.yaml of PyTorch (what each formula of a derivative reads); the sizes are those of recorded inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from whatif.ingest.op_cost import Inputs, Tensor, input_tensors, op_cost


class Kept(Struct, frozen=True):
    """The tensors that one call of an operator makes, and those that it keeps for the backward pass, bytes.

    ``inputs`` are kept inputs, ``own`` is kept besides (masks, indices, statistics). ``output`` is made, and kept if
    ``keeps_output``; an in-place operator makes none. ``weight`` is the parameter that it uses.
    """

    inputs: tuple[int, ...] = ()
    own: int = 0
    output: int = 0
    keeps_output: bool = False
    in_place: bool = False
    weight: int = 0
    weight_element: int = 0  # bytes of one of its elements
    table: int = 0  # a parameter that is an embedding table
    # Gradients that the backward work makes for its inputs.
    input_gradients: int = 0
    # The size of the input that gives the output its type, if autocast does not.
    source: int = 0
    # The number of equal parts of its input that it returns, as views.
    parts: int = 0
    # Tensors that it reads and does not keep.
    reads: tuple[int, ...] = ()
    # A sum of two tensors, in full precision if one of them is.
    adds: bool = False
    # Old profilers record no stride: then the output's size is unknown, and ``own`` only as a multiple of it.
    unknown: bool = False
    own_share: int = 0
    # Whether autocast would run it in 16 bits; None: in the type of its input.
    half: bool | None = None
    # Whether its result may be the scores of an attention: a softmax of a matrix for each head.
    scores: bool = False


_Rule = Callable[[str, list[Tensor], Any], Kept]


def has_rule(name: str) -> bool:
    """Whether ``kept_by`` knows an operator."""
    plain = name.removeprefix("aten::")
    return plain in _RULES or (plain.endswith("_") and plain[:-1] in _RULES)


def kept_by(name: str, dims: Any, types: Any, concrete: Any) -> Kept | None:
    """Return what one call of the operator ``name`` ("aten::mm") keeps; None if no rule fits the shapes."""
    plain = name.removeprefix("aten::")
    in_place = plain.endswith("_") and not plain.endswith("__")
    rule = _RULES.get(plain) or (_RULES.get(plain[:-1]) if in_place else None)
    if rule is None:
        return None
    inputs = _flat(dims, types) if plain in _LISTS else input_tensors(dims, types)
    if inputs is None:
        return None
    tensors = [tensor for tensor in inputs if tensor is not None]
    if not any(tensor.shape for tensor in tensors):  # counters and factors
        return None
    try:
        found = rule(plain.rstrip("_") if in_place else plain, tensors, (name, dims, types, concrete))
        found = replace(found, source=tensors[0].size_bytes)
    except (IndexError, TypeError, ValueError):
        return None
    return replace(found, output=0, in_place=True) if in_place else found


def _flat(dims: Any, types: Any) -> Inputs | None:
    """The tensors of the first input, a list of tensors."""
    if not isinstance(dims, list) or not dims or not isinstance(dims[0], list):
        return None
    return input_tensors(dims[0], ["float"] * len(dims[0]))


def _written(call: Any, read: Sequence[Tensor]) -> int:
    """The output's bytes: what the operator moves beyond its inputs."""
    cost = op_cost(*call)
    if cost is None or cost.bytes is None:
        return 0
    return max(cost.bytes - sum(tensor.size_bytes for tensor in read), 0)


def _product(name: str, tensors: list[Tensor], call: Any) -> Kept:
    """mm (x, weight), addmm (bias, x, weight); old profilers give their factors as tensors without dimensions."""
    x, weight = [tensor for tensor in tensors if tensor.shape][-2:]
    if len(x.shape) != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[0]:
        raise ValueError("not a product of matrices")
    out = x.shape[0] * weight.shape[-1] * (x.element_bytes or 4)
    return _with_weight(x, weight, out)


def _with_weight(x: Tensor, weight: Tensor, out: int) -> Kept:
    size, element = weight.size_bytes, weight.element_bytes or 0
    return Kept(
        (x.size_bytes,), output=out, weight=size, weight_element=element, input_gradients=x.size_bytes, half=True,
        unknown=not out,
    )  # fmt: skip


def _batched_product(name: str, tensors: list[Tensor], call: Any) -> Kept:
    a, b = [tensor for tensor in tensors if tensor.shape][-2:]
    out = a.shape[0] * a.shape[1] * b.shape[2] * (a.element_bytes or 4)
    input_bytes = a.size_bytes + b.size_bytes
    return Kept((a.size_bytes, b.size_bytes), output=out, input_gradients=input_bytes, half=True)


def _convolution(name: str, tensors: list[Tensor], call: Any) -> Kept:
    x, weight = tensors[0], tensors[1]
    return _with_weight(x, weight, _written(call, tensors))


def _batch_norm(name: str, tensors: list[Tensor], call: Any) -> Kept:
    x = tensors[0]
    size = x.size_bytes
    return Kept((size,), own=8 * x.shape[1], output=size, input_gradients=size)


def _layer_norm(name: str, tensors: list[Tensor], call: Any) -> Kept:
    x, weight = tensors[0], tensors[1] if len(tensors) > 1 else None
    rows = x.elements // max(weight.elements, 1) if weight else 0
    return Kept((x.size_bytes,), own=8 * rows, output=x.size_bytes, input_gradients=x.size_bytes, half=False)


def _keeps_input(name: str, tensors: list[Tensor], call: Any) -> Kept:
    size = tensors[0].size_bytes
    return Kept((size,), output=size, input_gradients=size)


def _keeps_output(name: str, tensors: list[Tensor], call: Any) -> Kept:
    size = tensors[0].size_bytes
    return Kept(
        output=size, keeps_output=True, input_gradients=size, half=False if "softmax" in name else None,
        scores=name in ("_softmax", "_safe_softmax") and len(tensors[0].shape) > 2,  # the softmax of a router has two
    )  # fmt: skip


def _keeps_both(name: str, tensors: list[Tensor], call: Any) -> Kept:
    """mul, div of two tensors; of a tensor and a number nothing is kept."""
    large = [tensor for tensor in tensors if tensor.shape]
    out = max((tensor.size_bytes for tensor in large), default=0)
    kept = tuple(tensor.size_bytes for tensor in large) if len(large) > 1 else ()
    return Kept(kept, output=out, input_gradients=sum(kept) or out)


def _makes(name: str, tensors: list[Tensor], call: Any) -> Kept:
    """Copies: the backward pass needs nothing of them."""
    sizes = tuple(tensor.size_bytes for tensor in tensors)
    return Kept(output=max(sizes, default=0), reads=sizes[:1])


def _casts(name: str, tensors: list[Tensor], call: Any) -> Kept:
    """A copy in another type, whose number in c10::ScalarType is the second input."""
    x = tensors[0]
    concrete = call[3] if isinstance(call[3], list) else []
    element = _SCALAR_TYPE_BYTES.get(str(concrete[1]) if len(concrete) > 1 else "", x.element_bytes or 4)
    return Kept(output=x.elements * element, reads=(x.size_bytes,))


def _adds(name: str, tensors: list[Tensor], call: Any) -> Kept:
    """Sums: nothing is kept. The residual sums of transformers stay in full precision, like their first term."""
    large = [tensor for tensor in tensors if tensor.shape]
    out = max((tensor.size_bytes for tensor in large), default=0)
    return Kept(output=out, reads=tuple(tensor.size_bytes for tensor in large), adds=len(large) > 1)


def _joins(name: str, tensors: list[Tensor], call: Any) -> Kept:
    out = sum(tensor.size_bytes for tensor in tensors)
    return Kept(output=out, reads=tuple(tensor.size_bytes for tensor in tensors), input_gradients=out)


def _attention(name: str, tensors: list[Tensor], call: Any) -> Kept:
    """Queries, keys, values, the output and the logarithm of each row's sum, in fp32."""
    q, k, v = tensors[:3]
    out = q.elements // max(q.shape[-1], 1) * v.shape[-1] * (q.element_bytes or 4)
    rows = q.elements // max(q.shape[-1], 1)
    sizes = (q.size_bytes, k.size_bytes, v.size_bytes)
    return Kept(sizes, own=4 * rows, output=out, keeps_output=True, input_gradients=sum(sizes), half=True)


def _pool(name: str, tensors: list[Tensor], call: Any) -> Kept:
    """The input, and the index of each output's maximum (int64)."""
    x = tensors[0]
    kernel, stride, padding = (_pair(call[3], position) for position in (1, 2, 3))
    if kernel is None:
        share = 8 // (x.element_bytes or 4) if "indices" in name else 0
        return Kept((x.size_bytes,), input_gradients=x.size_bytes, unknown=True, own_share=share)
    stride, padding = stride or kernel, padding or (0, 0)
    height, width = (
        (size + 2 * pad - window) // max(step, 1) + 1
        for size, window, step, pad in zip(x.shape[-2:], kernel, stride, padding, strict=True)
    )
    elements = x.elements // max(x.shape[-1] * x.shape[-2], 1) * max(height, 0) * max(width, 0)
    out = elements * (x.element_bytes or 4)
    own = 8 * elements if "indices" in name else 0
    return Kept((x.size_bytes,), own=own, output=out, input_gradients=x.size_bytes)


def _pair(concrete: Any, position: int) -> tuple[int, int] | None:
    text = concrete[position] if isinstance(concrete, list) and position < len(concrete) else ""
    numbers = [int(found) for found in re.findall(r"\d{1,9}", text)] if isinstance(text, str) else []
    return (numbers[0], numbers[-1]) if numbers else None


def _parts(name: str, tensors: list[Tensor], call: Any) -> Kept:
    """split, unsafe_split (x, size, dim), unbind (x, dim): the parts share the memory of the whole."""
    x = tensors[0]
    numbers = [int(text) for text in call[3][1:] if re.fullmatch(r"-?\d{1,9}", str(text))]
    part, dim = (numbers[0], numbers[1]) if name != "unbind" else (1, numbers[0])
    return Kept((x.size_bytes,), parts=x.shape[dim] // max(part, 1))


def _dropout(name: str, tensors: list[Tensor], call: Any) -> Kept:
    x = tensors[0]
    return Kept(own=x.elements, output=x.size_bytes, input_gradients=x.size_bytes)


def _cpu_dropout(name: str, tensors: list[Tensor], call: Any) -> Kept:
    """Dropout on a CPU multiplies by noise as large as its input; without dropping it returns its input."""
    concrete = call[3] if isinstance(call[3], list) else []
    if len(concrete) < 3 or concrete[2] != "True" or concrete[1] in ("0.", "0", "0.0"):
        return Kept()
    return Kept(own=tensors[0].size_bytes, output=tensors[0].size_bytes, input_gradients=tensors[0].size_bytes)


def _embedding(name: str, tensors: list[Tensor], call: Any) -> Kept:
    weight, index = tensors[0], tensors[1]
    out = index.elements * weight.shape[1] * (weight.element_bytes or 4)
    return Kept(output=out, table=weight.size_bytes, half=False)


def _nll_loss(name: str, tensors: list[Tensor], call: Any) -> Kept:
    return Kept((tensors[0].size_bytes,), own=4, output=4, input_gradients=tensors[0].size_bytes, half=False)


def _rnn(name: str, tensors: list[Tensor], call: Any) -> Kept:
    """One layer in one direction, (input, two weights, two biases, states); its backward shows the workspace."""
    x, hidden = tensors[0], tensors[2].shape[-1]
    out = x.elements // max(x.shape[-1], 1) * hidden * (x.element_bytes or 4)
    states = 4 * x.shape[1] * hidden * (x.element_bytes or 4)
    weight = tensors[1].size_bytes + tensors[2].size_bytes
    return Kept(
        (x.size_bytes,), own=states, output=out, keeps_output=True, weight=weight, input_gradients=x.size_bytes,
        half=True,
    )  # fmt: skip


_SCALAR_TYPE_BYTES = {"0": 1, "1": 1, "2": 2, "3": 4, "4": 8, "5": 2, "6": 4, "7": 8, "11": 1, "15": 2}
_LISTS = frozenset(("cat", "stack"))
_NAMES: dict[_Rule, str] = {
    _product: "mm addmm",
    _batched_product: "bmm baddbmm",
    _convolution: "convolution",
    _batch_norm: "native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_with_update",
    _layer_norm: "native_layer_norm _fused_rms_norm native_group_norm",
    _keeps_input: (
        "gelu silu mish hardswish elu leaky_relu log log1p abs sin cos pow clamp clamp_min clamp_max hardtanh"
        " log_sigmoid_forward softplus"
    ),
    _keeps_output: "relu sigmoid tanh exp sqrt rsqrt reciprocal _softmax _safe_softmax _log_softmax threshold",
    _keeps_both: "mul div",
    _adds: "add sub rsub",
    _makes: "neg clone where masked_fill",
    _casts: "_to_copy",
    _joins: "cat stack",
    _attention: (
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"
        " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
        " _scaled_dot_product_fused_attention_overrideable _flash_attention_forward _efficient_attention_forward"
    ),
    _pool: "max_pool2d_with_indices avg_pool2d",
    _parts: "split unsafe_split unbind",
    _dropout: "native_dropout",
    _cpu_dropout: "dropout",
    _embedding: "embedding",
    _nll_loss: "nll_loss_forward nll_loss2d_forward",
    _rnn: "mkldnn_rnn_layer",
}
_RULES = {name: rule for rule, names in _NAMES.items() for name in names.split()}
