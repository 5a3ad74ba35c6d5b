"""FLOPs and bytes of a PyTorch operator, from the shapes and types that a trace records for it.

FLOPs count a multiply-add as two. Bytes are compulsory traffic: each input once and the output once, as if nothing
were cached between operators and nothing re-read within one. What the shapes do not determine is None, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

from msgspec import Struct

# Type names of recordings (c10::ScalarType and TypeMeta spellings) -> our number format and bytes per element.
_TYPES: dict[str, tuple[str, int]] = {
    "float": ("fp32", 4),
    "double": ("fp64", 8),
    "c10::half": ("fp16", 2),
    "c10::bfloat16": ("bf16", 2),
    "c10::float8_e4m3fn": ("fp8", 1),
    "c10::float8_e5m2": ("fp8", 1),
    "c10::float8_e4m3fnuz": ("fp8", 1),
    "c10::float8_e5m2fnuz": ("fp8", 1),
    "long int": ("int", 8),
    "long": ("int", 8),
    "int": ("int", 4),
    "short int": ("int", 2),
    "signed char": ("int", 1),
    "unsigned char": ("int", 1),
    "bool": ("int", 1),
}
_NO_TYPE = ("", None)
# Products with a sparse matrix, and what the plain products (aten::mm) call if one operand is sparse: their shapes do
# not show how many elements are stored.
OF_SPARSE = ("aten::_sparse_", "aten::sparse_")

# cudnnRNNMode_t: gates of ReLU, tanh, LSTM and GRU cells.
RNN_GATES = {0: 1, 1: 1, 2: 4, 3: 3}

# No device holds a tensor of 2**44 elements, no operator of a step does 2**62 operations: larger numbers are damage
# or malice.
_MOST_ELEMENTS = 2**44
_MOST_WORK = 2**62
_MOST_DIMENSIONS = 16
_MOST_INPUTS = 1000


class OpCost(Struct, frozen=True):
    """Work of one operator call: `flops` and `bytes` are None, and `dtype` "", if shapes and types do not give them."""

    flops: int | None
    bytes: int | None
    dtype: str


class Tensor(NamedTuple):
    """A tensor among an operator's inputs; ``element_bytes`` is None if its type is not known."""

    shape: tuple[int, ...]
    dtype: str
    element_bytes: int | None

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """All elements, bytes; 4 each if the type is not known."""
        return self.elements * (self.element_bytes or 4)


# None is an input that is not a tensor.
Inputs = Sequence[Tensor | None]
# Called with the operator's name, its inputs and its concrete inputs; raises if these are not the operator's shapes.
_Rule = Callable[[str, Inputs, list[Any]], OpCost | None]


def op_cost(op_name: Any, input_dims: Any, input_types: Any, concrete_inputs: Any = None) -> OpCost | None:
    """Return the work of one call of `op_name` ("aten::mm"), or None for an operator or shapes that it does not know.

    `input_dims`, `input_types` and `concrete_inputs` are "Input Dims", "Input type" and "Concrete Inputs" of a trace
    event as decoded JSON of any type; nothing raises. A forward convolution needs the concrete
    stride and padding to know its output; a backward one does not, and without its output mask it counts both
    gradients. Causal attention of as many queries as keys counts half of the score matrix: kernels skip the rest.
    """
    if not isinstance(op_name, str):
        return None
    name = op_name.removeprefix("aten::")
    rule = _RULES.get(name) or (_RULES.get(name[:-1]) if name.endswith("_") else None)
    if rule is None or (inputs := input_tensors(input_dims, input_types)) is None:
        return None
    concrete = concrete_inputs if isinstance(concrete_inputs, list) else []
    try:
        return rule(name, inputs, concrete)
    except (IndexError, TypeError, ValueError, ZeroDivisionError):
        # The shapes are not those of this operator: another version, or damage.
        return None


def input_dtype(input_dims: Any, input_types: Any) -> str:
    """Return the dtype of the first floating-point tensor among an operator's inputs, "" if there is none."""
    tensors = input_tensors(input_dims, input_types) or []
    return next((tensor.dtype for tensor in tensors if tensor and tensor.dtype not in ("", "int")), "")


def input_tensors(dims: Any, types: Any) -> Inputs | None:
    """Return the inputs of an operator as tensors, None for one that is no tensor; None alone for damaged ones."""
    if not isinstance(dims, list) or len(dims) > _MOST_INPUTS:
        return None
    types = types if isinstance(types, list) else []
    inputs: list[Tensor | None] = []
    for shape, type_name in zip_longest(dims, types[: len(dims)]):
        if not shape and not type_name:
            inputs.append(None)
            continue
        dtype, element_bytes = _TYPES.get(type_name.lower(), _NO_TYPE) if isinstance(type_name, str) else _NO_TYPE
        # A scalar, a list or nothing has no dimensions: a tensor without any has a type.
        if not isinstance(shape, list) or not (_is_shape(shape) if shape else dtype):
            inputs.append(None)
        elif prod(shape) > _MOST_ELEMENTS:
            return None
        else:
            inputs.append(Tensor(tuple(shape), dtype, element_bytes))
    return inputs


def _is_shape(shape: list[Any]) -> bool:
    return len(shape) <= _MOST_DIMENSIONS and {*map(type, shape)} == {int} and min(shape) >= 0


def _cost(flops: int | None, read: Sequence[Tensor], written: tuple[int, ...] | None, like: Tensor) -> OpCost | None:
    """Sum the bytes of all of `read` and of one output of shape `written` with the elements of `like`."""
    size: int | None = None
    if (
        written is not None
        and like.element_bytes is not None
        and all(tensor.element_bytes is not None for tensor in read)
    ):
        size = (
            sum(tensor.elements * (tensor.element_bytes or 0) for tensor in read) + prod(written) * like.element_bytes
        )
    if (flops is None and size is None) or max(flops or 0, size or 0) > _MOST_WORK:
        return None
    return OpCost(flops, size, like.dtype)


def _need(inputs: Inputs, *positions: int) -> list[Tensor]:
    found = [inputs[position] for position in positions]
    tensors = [tensor for tensor in found if tensor is not None]
    if len(tensors) != len(positions):
        raise ValueError("not a tensor")
    return tensors


def _present(inputs: Inputs) -> list[Tensor]:
    return [tensor for tensor in inputs if tensor is not None]


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    out = []
    for sizes in zip(*padded, strict=True):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            raise ValueError("shapes do not broadcast")
        out.append(wide.pop() if wide else 1)
    return tuple(out)


def _matmul(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    """mm, bmm, matmul (a, b); addmm, baddbmm (c, a, b); linear (x, w, bias)."""
    added = name.rstrip("_") in ("addmm", "baddbmm", "addbmm")
    a, b = _need(inputs, 1, 2) if added else _need(inputs, 0, 1)
    left, right = a.shape, b.shape
    if name == "linear":
        right = right[::-1] if len(right) == 2 else (right[0], 1)
    if len(left) == 1:
        left = (1, *left)
    if len(right) == 1:
        right = (*right, 1)
    if left[-1] != right[-2]:
        raise ValueError("inner dimensions differ")
    batch = _broadcast(left[:-2] or (1,), right[:-2] or (1,))
    out = (*batch, left[-2], right[-1])
    return _cost(2 * prod(out) * left[-1], _present(inputs), out, a)


def _grouped_matmul(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    """_grouped_mm(a, b, offs): every row of a is multiplied by the matrix of one expert, whichever that is."""
    a, b = _need(inputs, 0, 1)
    rows, inner, columns = prod(a.shape[:-1]), a.shape[-1], b.shape[-1]
    groups = a.shape[0] if len(a.shape) == len(b.shape) == 3 else 1
    if len(a.shape) == 3 and len(b.shape) == 2:  # the columns of b belong to one expert each
        rows = a.shape[-2]
    out = (groups, rows // groups, columns)
    return _cost(2 * rows * inner * columns, [a, b], out, a)


# Where stride, padding and dilation stand among an operator's concrete inputs: native_functions.yaml of PyTorch.
CONVOLUTION_OPTIONS = {
    "cudnn_convolution": (3, 2, 4),
    "miopen_convolution": (4, 3, 5),
    "miopen_depthwise_convolution": (4, 3, 5),
    "mkldnn_convolution": (4, 3, 5),
    "convolution_backward": (4, 5, 6),
}


def text_of(concrete: list[Any], position: int) -> str:
    """Return a concrete input as the trace has it; "" if it is no text."""
    text = concrete[position] if position < len(concrete) else ""
    return text if isinstance(text, str) else ""


def integers_of(concrete: list[Any], position: int, rank: int) -> tuple[int, ...]:
    """Return a concrete input of ``rank`` integers; a single one is repeated. Raises ValueError if it is none."""
    return _integers(text_of(concrete, position), rank)


@lru_cache(1000)
def _integers(text: str, rank: int) -> tuple[int, ...]:
    if not re.fullmatch(r"\[\d{1,9}(, \d{1,9})*\]", text, re.ASCII):
        raise ValueError("no list of integers")
    values = tuple(int(value) for value in re.findall(r"\d+", text))
    values = values * rank if len(values) == 1 else values
    if len(values) != rank:
        raise ValueError("another number of axes")
    return values


def _convolution(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    x, weight = _need(inputs, 0, 1)
    rank = len(weight.shape) - 2
    if rank < 1 or len(x.shape) != rank + 2:
        return None
    places = CONVOLUTION_OPTIONS.get(name, (3, 4, 5))
    stride, padding, dilation = (integers_of(concrete, position, rank) for position in places)
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    if name in ("convolution", "_convolution") and text_of(concrete, 6) == "True":  # transposed
        groups = int(text_of(concrete, 8))
        if x.shape[1] != weight.shape[0] or groups < 1:
            return None
        added = integers_of(concrete, 7, rank)
        spatial = [
            (size - 1) * step - 2 * pad + spread * (kernel - 1) + 1 + more
            for (size, kernel, step, pad, spread), more in zip(sizes, added, strict=True)
        ]
        out = (x.shape[0], groups * weight.shape[1], *spatial)
        products = x.elements * prod(weight.shape[1:])
    else:
        if x.shape[1] % weight.shape[1]:
            return None
        spatial = [
            (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, spread in sizes
        ]
        out = (x.shape[0], weight.shape[0], *spatial)
        products = prod(out) * prod(weight.shape[1:])
    return _cost(2 * products, _present(inputs), out, x) if min(spatial) >= 0 else None


def _convolution_backward(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    if name == "cudnn_convolution_backward":
        x, grad, weight = _need(inputs, 0, 1, 2)
    else:
        grad, x, weight = _need(inputs, 0, 1, 2)
    if len(weight.shape) < 3 or grad.shape[0] != x.shape[0]:
        return None
    if grad.shape[1] == weight.shape[0] and x.shape[1] % weight.shape[1] == 0:
        products = grad.elements * prod(weight.shape[1:])
    elif x.shape[1] == weight.shape[0] and grad.shape[1] % weight.shape[1] == 0:  # transposed
        products = x.elements * prod(weight.shape[1:])
    else:
        return None
    mask = text_of(concrete, 10) if name == "convolution_backward" else ""
    wanted = [flag == "True" for flag in re.findall("True|False", mask)[:2]]
    if len(wanted) != 2:
        wanted = [True, True]
    if not any(wanted):
        return None
    # The output gradient is read for each gradient; besides it, the input's needs the weight and the weight's needs
    # the input.
    moved = [grad, weight] * wanted[0] + [grad, x] * wanted[1]
    written = x.elements * wanted[0] + weight.elements * wanted[1]
    return _cost(2 * products * sum(wanted), moved, (written,), x)


def _convolution_backward_input(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    """cudnn_convolution_backward_input(input_size, grad, weight): the size of the written gradient is not a tensor."""
    grad, weight = _need(inputs, 1, 2)
    if len(weight.shape) < 3 or grad.shape[1] != weight.shape[0]:
        return None
    return _cost(2 * grad.elements * prod(weight.shape[1:]), [grad, weight], None, grad)


# The boolean argument by which an attention is causal, if it is not the first one; and the place of the integer
# argument, if it is one (native_functions.yaml of PyTorch: compute_log_sumexp, custom_mask_type).
_CAUSAL_TRUTH = {"_scaled_dot_product_efficient_attention": 1, "_scaled_dot_product_cudnn_attention": 1}
_CAUSAL_NUMBER = {"_efficient_attention_forward": 9, "_efficient_attention_backward": 14}


def is_causal(op_name: str, concrete: list[Any]) -> bool:
    """Whether an attention operator's concrete inputs make it leave out the keys after each query."""
    name = op_name.removeprefix("aten::")
    if name in _CAUSAL_NUMBER:
        return text_of(concrete, _CAUSAL_NUMBER[name]) not in ("", "0")
    truths = [text for text in concrete if text in ("True", "False")]
    place = _CAUSAL_TRUTH.get(name, 0)
    return truths[place : place + 1] == ["True"]


def _attention_flops(name: str, q: Tensor, k: Tensor, v: Tensor, concrete: list[Any]) -> tuple[int, int]:
    """Multiply-adds of the score product and of the value product."""
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4:
        raise ValueError("packed sequences: their lengths are not in the shapes")
    # The `_scaled_dot_product_*` level has (batch, head, row, column), the kernels below it (batch, row, head, column).
    row, head = (2, 1) if "scaled_dot_product" in name else (1, 2)
    pairs = q.shape[0] * q.shape[head] * q.shape[row] * k.shape[row]
    if q.shape[3] != k.shape[3] or k.shape[row] != v.shape[row]:
        raise ValueError("not an attention")
    share = 2 if is_causal(name, concrete) and q.shape[row] == k.shape[row] else 1
    return pairs * q.shape[3] // share, pairs * v.shape[3] // share


def _attention(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    q, k, v = _need(inputs, 0, 1, 2)
    score, value = _attention_flops(name, q, k, v, concrete)
    return _cost(2 * (score + value), [q, k, v], (*q.shape[:-1], v.shape[-1]), q)


def _attention_backward(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    """(grad_out, q, k, v, ...): recomputes the scores, then two products per forward one (FlashAttention, alg. 4)."""
    grad, q, k, v = _need(inputs, 0, 1, 2, 3)
    score, value = _attention_flops(name, q, k, v, concrete)
    # The forward output is read once more, it is shaped like its gradient; the gradients of q, k and v are written.
    written = q.elements + k.elements + v.elements
    return _cost(2 * (3 * score + 2 * value), [grad, grad, q, k, v], (written,), q)


def _recurrent(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    """cuDNN's layers, directions and steps: the gates of inputs and states; backward both gradients of each product.

    Packed sequences have all their rows in one dimension. Bytes depend on what stays in registers.
    """
    (inputs_of_layer,), (mode, hidden, projection, layers, directions) = _need(inputs, 0), rnn_sizes(name, concrete)
    *outer, width = inputs_of_layer.shape
    if not outer or min(hidden, layers) < 1:
        raise ValueError("not a recurrent layer")
    state = projection or hidden
    widths = width + (layers - 1) * directions * state
    of_a_row = directions * (RNN_GATES[mode] * hidden * (widths + layers * state) + layers * projection * hidden)
    return _cost(2 * prod(outer) * of_a_row * (1 + name.endswith("backward")), [], None, inputs_of_layer)


def rnn_settings_at(name: str) -> int:
    """Return the place of the mode among the inputs of `_cudnn_rnn` or `_cudnn_rnn_backward`; other settings follow."""
    return 10 if name.endswith("backward") else 6


def rnn_sizes(name: str, concrete: Sequence[Any]) -> tuple[int, int, int, int, int]:
    """Return mode, hidden size, projected size (0: none), layers and directions. Raises ValueError, IndexError."""
    at = rnn_settings_at(name)
    mode, hidden, projection, layers = (int(value) for value in concrete[at : at + 4])
    if mode not in RNN_GATES:
        raise ValueError(f"no recurrent layer of cuDNN: mode {mode}")
    return mode, hidden, projection, layers, 1 + (str(concrete[at + 7]) == "True")


def _pointwise(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    read = _present(inputs)
    out = _broadcast(*(tensor.shape for tensor in read))
    # PyTorch promotes to the widest floating-point operand that has dimensions.
    like = max(read, key=lambda tensor: (bool(tensor.shape), tensor.dtype != "int", tensor.element_bytes or 0))
    return _cost(None, read, out, like)


def _unary(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    """Operators of one tensor; a second one is an `out` argument, which is written and not read."""
    (x,) = _need(inputs, 0)
    return _cost(None, [x], x.shape, x)


def _overwrite(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    """copy_(target, source), fill_(target), zero_(target): the target is written, not read."""
    (target,) = _need(inputs, 0)
    sources = _need(inputs, 1) if name == "copy_" else []
    return _cost(None, sources, target.shape, target)


def _like_first(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    """Operators whose output is shaped like their first input: normalizations, softmax, and the backward of both."""
    (first,) = _need(inputs, 0)
    return _cost(None, _present(inputs), first.shape, first)


def _dropout(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    """native_dropout(x): writes the output and a mask of one byte an element."""
    (x,) = _need(inputs, 0)
    cost = _cost(None, [x], x.shape, x)
    return None if cost is None or cost.bytes is None else OpCost(None, cost.bytes + x.elements, cost.dtype)


def _pool_backward(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    """(grad, input, ..., indices): reads the gradient and the indices, writes a gradient shaped like the input."""
    grad, x, *rest = _present(inputs)
    return _cost(None, [grad, *(tensor for tensor in rest if tensor.dtype == "int")], x.shape, x)


def _embedding(name: str, inputs: Inputs, concrete: list[Any]) -> OpCost | None:
    """embedding(weight, indices): reads one row of the weight for each index, and the indices."""
    weight, indices = _need(inputs, 0, 1)
    rows = (*indices.shape, weight.shape[1])
    return _cost(None, [indices, Tensor(rows, weight.dtype, weight.element_bytes)], rows, weight)


def _table(rule: _Rule, names: str) -> dict[str, _Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES = {
    **_table(_matmul, "mm bmm matmul addmm baddbmm linear"),
    **_table(_grouped_matmul, "_grouped_mm"),
    **_table(_convolution, "convolution _convolution conv1d conv2d conv3d cudnn_convolution miopen_convolution"),
    **_table(_convolution_backward, "convolution_backward cudnn_convolution_backward"),
    **_table(_convolution_backward_input, "cudnn_convolution_backward_input"),
    **_table(
        _attention,
        "scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu"
        " _flash_attention_forward _efficient_attention_forward",
    ),
    **_table(
        _attention_backward,
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward"
        " _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward"
        " _flash_attention_backward _efficient_attention_backward",
    ),
    **_table(_recurrent, "_cudnn_rnn _cudnn_rnn_backward"),
    **_table(
        _pointwise,
        "add sub rsub mul div lerp addcmul addcdiv masked_fill threshold_backward gelu_backward silu_backward"
        " sigmoid_backward tanh_backward leaky_relu_backward hardtanh_backward native_dropout_backward",
    ),
    **_table(
        _unary,
        "neg abs exp log sqrt rsqrt reciprocal sigmoid tanh relu gelu silu leaky_relu hardtanh hardswish elu"
        " clamp clamp_min clamp_max threshold sin cos erf clone",
    ),
    **_table(_overwrite, "copy_ fill_ zero_"),
    **_table(
        _like_first,
        "batch_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index"
        " native_batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward layer_norm"
        " native_layer_norm native_layer_norm_backward group_norm native_group_norm native_group_norm_backward"
        " rms_norm _fused_rms_norm softmax _softmax _softmax_backward_data log_softmax _log_softmax"
        " _log_softmax_backward_data",
    ),
    **_table(_dropout, "native_dropout"),
    **_table(_pool_backward, "max_pool2d_with_indices_backward"),
    **_table(_embedding, "embedding"),
}
