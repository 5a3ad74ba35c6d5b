"""The kernels that a GPU runs for an operation, and the database operator that represents each of them.

Memory-bound operators are represented by an elementwise operator that moves as many bytes
(``moved_bytes``). So are operators without a rule, which are marked by ``known``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from math import prod

import numpy as np
from msgspec.structs import replace

from whatif.from_module.convolutions import over_images
from whatif.from_module.kernel import Kernel, named
from whatif.from_module.moved_bytes import (
    bytes_of,
    format_of,
    kind_of,
    moved_bytes,
    moves_once,
    traffic,
)
from whatif.from_module.multi_tensor import launches_of
from whatif.from_module.operations import (
    ELEMENT_BYTES,
    FORMATS,
    Operation,
    tensors_of,
)
from whatif.from_module.recurrent import cudnn_kernels
from whatif.graph.described import Described
from whatif.ingest.operator_calls import attention_of, describe


def kernels_of(operation: Operation) -> list[Kernel]:
    """Return the kernels that an operation runs on a GPU, in order; none for views and for work on the host."""
    name = operation.name.removeprefix("aten::").rstrip("_")
    if not operation.on_device or name in _NO_WORK or (operation.name.endswith("_") and name in _VIEWS):
        return []
    rule = _RULES.get(name)
    if rule is None and name.startswith(("_foreach", "_fused")):
        return _lists(name, operation)
    if not operation.outputs or not any(prod(shape) for shape, _ in operation.outputs):
        return []
    if rule is None:
        return _elementwise(name, operation) if moves_once(name) else _unknown(name, operation)
    with contextlib.suppress(IndexError, TypeError, ValueError):  # a foreign file may have impossible inputs
        return rule(name, operation)
    return _unknown(name, operation)


# Views, shapes and allocations: no kernel.
_NO_WORK = frozenset(
    ("view", "_unsafe_view", "_reshape_alias", "alias", "expand", "as_strided", "detach", "lift_fresh", "empty",
     "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set", "resize", "permute", "select", "slice",
     "split", "split_with_sizes", "chunk", "unbind", "narrow", "diagonal", "real", "view_as_real", "view_as_complex",
     "reshape", "flatten", "contiguous", "_local_scalar_dense", "item", "is_nonzero", "unsafe_split",
     "unsafe_split_with_sizes", "unsafe_chunk", "record_stream", "_nested_view")
)  # fmt: skip
_VIEWS = frozenset(("t", "transpose", "squeeze", "unsqueeze", "swapaxes", "swapdims"))


def _as_operator(operation: Operation) -> Described | None:
    return describe(operation.name, operation.dims, operation.types, operation.concrete)


def _elementwise(name: str, operation: Operation) -> list[Kernel]:
    operator = _as_operator(operation)
    if operator is None or operator.family != "elementwise":
        operator = traffic(*moved_bytes(operation, name), format_of(operation))
    return [named(kind_of(name), name, operator)]


def _product(name: str, operation: Operation) -> list[Kernel]:
    operator = _as_operator(operation)
    return [named("gemm", name, operator)] if operator is not None else _unknown(name, operation)


def _unknown(name: str, operation: Operation) -> list[Kernel]:
    return [replace(kernel, known=False) for kernel in _elementwise(name, operation)]


def _convolution(name: str, operation: Operation) -> list[Kernel]:
    operator = _as_operator(over_images(operation))
    if operator is None:
        return _unknown(name, operation)
    found = [named("conv_fprop", name, operator)]
    if len(operation.types) > 2 and operation.types[2] in ELEMENT_BYTES:  # a separate kernel adds the bias
        out = bytes_of(operation.outputs)
        found.append(named("elementwise_bias", name, traffic(out, out, operator.dtype)))
    return found


def _convolution_backward(name: str, operation: Operation) -> list[Kernel]:
    mask = re.findall("True|False", operation.concrete[10])
    found = []
    for kind, place, asked in (("dgrad", 0, "[True, False, False]"), ("wgrad", 1, "[False, True, False]")):
        if mask[place] == "True":
            half = replace(operation, concrete=[*operation.concrete[:10], asked])
            operator = _as_operator(over_images(half))
            found += [named(f"conv_{kind}", name, operator)] if operator is not None else _unknown(name, operation)[:1]
    if mask[2:3] == ["True"]:
        gradient = bytes_of(tensors_of(operation)[:1])
        found.append(named("reduce", "bias_gradient", traffic(gradient, 0, format_of(operation))))
    return found


# Time over that of moving as many bytes: 1.17 forward and 1.27 backward for ResNet-50 on a V100 (a recording of
# docs/accuracy.md).
BATCH_NORM, BATCH_NORM_BACKWARD = 1.17, 1.27


def _batch_norm(name: str, operation: Operation) -> list[Kernel]:
    """One kernel: statistics and normalization each read the input; backward reads input and gradient twice each."""
    x = bytes_of(tensors_of(operation)[:1])
    trains = "True" in operation.concrete
    backward = name.endswith("backward")
    reads = (2 if trains else 1) * (2 if backward else 1)
    operator = traffic(2 * x, x, format_of(operation))
    share = (BATCH_NORM_BACKWARD if backward else BATCH_NORM) * (reads + 1) / 3
    return [named("batch_norm_bw" if backward else "batch_norm_fw", name, operator, share)]


# Time over that of moving as many bytes: windows overlap, and the backward pass searches for each window's largest one.
# VGG-13's on an H100: 1.4 and 3.1; ResNet-50's on a V100 backward: 1.9 (recordings of docs/accuracy.md).
MAX_POOL, MAX_POOL_BACKWARD = 1.4, 2.4


def _max_pool(name: str, operation: Operation) -> list[Kernel]:
    share = MAX_POOL_BACKWARD if name.endswith("backward") else MAX_POOL
    return [replace(kernel, share=share) for kernel in _elementwise(name, operation)]


# Gradients over the forward kernel's time: a V100's in NeuSight's training cells, less 10 us of launch (layer
# norm: 1.4, 1.6 and 2.1 for 4, 5 and 17 MB, in two kernels; softmax: 2.6 to 2.8 of rows of 512 and 1,024).
LAYER_NORM_INPUT, LAYER_NORM_WEIGHTS = 1.2, 0.6
SOFTMAX_BACKWARD = 2.7
# Shorter rows stay in one warp's registers, so few warps hide the memory latency; longer ones are read by a
# block, and are memory-bound (PyTorch, PersistentSoftmax.cuh).
_LONGEST_IN_A_WARP = 1024


def _layer_norm(name: str, operation: Operation) -> list[Kernel]:
    x, dtype = bytes_of(tensors_of(operation)[:1]), format_of(operation)
    if not name.endswith("backward"):
        operator = _as_operator(operation)
        return [named("layer_norm", name, operator or traffic(x, x, dtype))]
    if name == "native_layer_norm_backward":
        columns = prod(map(int, re.findall(r"\d+", operation.concrete[2])))
        sizes = (("rows", prod(operation.dims[1]) // columns), ("columns", columns))
        forward = Described("normalization", "layer_norm", dtype, sizes)
        return [
            named("layer_norm", name, forward, LAYER_NORM_INPUT),
            named("layer_norm_gammabeta", name, forward, LAYER_NORM_WEIGHTS),
        ]
    return [
        named("layer_norm", name, traffic(2 * x, x, dtype)),
        named("layer_norm_gammabeta", name, traffic(2 * x, 0, dtype)),
    ]


def _softmax(name: str, operation: Operation) -> list[Kernel]:
    operator = _as_operator(operation)
    return [named("softmax", name, operator)] if operator is not None else _elementwise(name, operation)


def _softmax_backward(name: str, operation: Operation) -> list[Kernel]:
    shape = operation.dims[0]
    if int(operation.concrete[2]) % len(shape) != len(shape) - 1 or shape[-1] > _LONGEST_IN_A_WARP:
        return _elementwise(name, operation)
    sizes = (("rows", prod(shape[:-1])), ("columns", shape[-1]))
    operator = Described("normalization", "softmax", format_of(operation), sizes)
    return [named("softmax", name, operator, SOFTMAX_BACKWARD)]


def as_they_lie(kernel: Kernel) -> Kernel:
    """Return the kernel of a linear layer whose weights are not transposed (GPT-2's): a batch of one such product.

    On a P4 a transposed operand takes two to three times as long (NeuSight's `linear` and `bmm`).
    """
    if kernel.what.family != "matmul" or kernel.what.name != "linear":
        return kernel
    return replace(kernel, also=replace(kernel.what, name="bmm"))


def _embedding_backward(name: str, operation: Operation) -> list[Kernel]:
    """Set the gradient of the whole table to zero, then accumulate rows."""
    gradient, table, dtype = bytes_of(tensors_of(operation)[:1]), bytes_of(operation.outputs), format_of(operation)
    return [
        named("elementwise_fill", name, traffic(0, table, dtype)),
        named("embedding", name, traffic(gradient, gradient, dtype)),
    ]


def _rows_taken(name: str, operation: Operation) -> list[Kernel]:
    out = bytes_of(operation.outputs)
    kind = "embedding" if name == "embedding" else "index"
    return [named(kind, name, traffic(out, out, format_of(operation)))]


def _rows_put(name: str, operation: Operation) -> list[Kernel]:
    """Write the values, and no other element; out of place, copy the whole tensor first.

    Where values are added in an order that sorting finds, as in the gradient of an index, the bytes tell little.
    """
    (shape, kind), *others = tensors_of(operation)
    whole, dtype = bytes_of([(shape, kind)]), format_of(operation)
    put = min(_elements_put(name, operation) * ELEMENT_BYTES.get(kind, 4), whole)
    found = [] if operation.name.endswith("_") else [named("elementwise_copy", name, traffic(whole, whole, dtype))]
    sorts = name == "index_put" and operation.concrete[3] == "True"
    return [*found, replace(named("index", name, traffic(bytes_of(others) + put, put, dtype)), known=not sorts)]


def _elements_put(name: str, operation: Operation) -> int:
    """The elements that are written: the values, or, where one value is repeated, all that the indices name."""
    shape, *others = operation.dims
    if name == "embedding_renorm":
        return int(prod(others[0]) * shape[-1])
    if name == "index_fill":
        return int(prod(others[1]) * prod(shape) // shape[int(operation.concrete[1])])
    if name == "index_put":
        # The list does not tell which dimensions are indexed (`x[:, i]`): those that fit the values, else the first
        # ones. A mask may name all.
        indices, values = others[0], prod(others[1])
        indexed = len(indices[0]) if operation.types[1].endswith(":bool") else len(indices)
        of_each = prod(np.broadcast_shapes(*indices))
        able = [of_each * prod(shape[:at] + shape[at + indexed :]) for at in range(len(shape) - indexed + 1)]
        return int(values if values in able else able[0])
    return max(prod(other) for other, _ in tensors_of(operation)[1:])


def _filled(name: str, operation: Operation) -> list[Kernel]:
    """Fill the output, then copy the input into a part of it; padding by negative sizes copies a part of the input."""
    taken, out, dtype = bytes_of(tensors_of(operation)[:1]), bytes_of(operation.outputs), format_of(operation)
    if out < taken:
        return [named("elementwise", name, traffic(out, out, dtype))]
    return [
        named("elementwise_fill", name, traffic(0, out, dtype)),
        named("elementwise_copy", name, traffic(taken, taken, dtype)),
    ]


def _rows_bytes(operation: Operation) -> int:
    """The bytes of one row of the first operand for each index of the second."""
    return int(prod(operation.dims[1]) * operation.dims[0][-1] * ELEMENT_BYTES[operation.types[0]])


def _bags(name: str, operation: Operation) -> list[Kernel]:
    """Sum rows of the table."""
    return [
        named("embedding", name, traffic(_rows_bytes(operation), bytes_of(operation.outputs[:1]), format_of(operation)))
    ]


def _bags_backward(name: str, operation: Operation) -> list[Kernel]:
    """Set the gradient of the whole table to zero, then accumulate rows."""
    rows = _rows_bytes(operation)
    table, dtype = bytes_of(operation.outputs), format_of(operation)
    return [
        named("elementwise_fill", name, traffic(0, table, dtype)),
        named("embedding", name, traffic(rows, rows, dtype)),
    ]


# The backward pass of FlashAttention recomputes the scores, then runs two products for each of the forward ones
# (Dao et al., "FlashAttention", NeurIPS 2022, algorithm 4): five products instead of two.
ATTENTION_BACKWARD = 2.5


def _attention(name: str, operation: Operation) -> list[Kernel]:
    backward = "backward" in name
    operator = attention_of(operation.name, operation.dims, format_of(operation), operation.concrete)
    if operator is None:
        return _unknown(name, operation)
    return [named(f"flash_{'bwd' if backward else 'fwd'}", name, operator, ATTENTION_BACKWARD if backward else 1.0)]


def _loss_backward(name: str, operation: Operation) -> list[Kernel]:
    """Set the gradient of all scores to zero, then write one element of each row."""
    scores, dtype = bytes_of(operation.outputs), format_of(operation)
    return [
        named("elementwise_fill", name, traffic(0, scores, dtype)),
        named("reduce", name, traffic(1, bytes_of(operation.outputs[:1]) / max(operation.outputs[0][0][-1], 1), dtype)),
    ]


def _loss(name: str, operation: Operation) -> list[Kernel]:
    """Read one score of each row."""
    scores, dtype = operation.dims[0], format_of(operation)
    rows = prod(scores[:-1]) * 4
    return [named("reduce", name, traffic(rows, 0, dtype))]


def _lists(name: str, operation: Operation) -> list[Kernel]:
    """A multi-tensor operator: launches with as many tensors and chunks as fit (``multi_tensor``)."""
    lists = [(d, t) for d, t in zip(operation.dims, operation.types, strict=True) if t.startswith("TensorList") and d]
    if not lists:
        return []
    shapes = lists[0][0]
    kinds = [t.partition(":")[2] for d, t in lists if len(d) == len(shapes) and any(d)]
    # Norms return one number for each tensor.
    fresh = bool(operation.outputs) and not operation.name.endswith("_") and "norm" not in name
    size, *other_sizes = [ELEMENT_BYTES.get(kind, 4) for kind in kinds] or [4]
    # Fused updates write parameters and both moments; others write their first list, or a new one.
    written = 0 if "norm" in name else 3 * size if name.startswith("_fused") else size
    read = sum(other_sizes) + (0 if name == "_foreach_copy" else size)
    elements = [prod(shape) for shape in shapes]
    dtype = FORMATS.get(kinds[0] if kinds else "", "fp32")
    return [
        named("multi_tensor_apply", name, traffic(read * count, written * count, dtype))
        for count in launches_of(elements, len(kinds) + fresh)
    ]


_Rule = Callable[[str, Operation], list[Kernel]]
_ATTENTIONS = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_flash_attention_forward", "_efficient_attention_forward",
)  # fmt: skip
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "linear", "_grouped_mm"), _product),
    **dict.fromkeys(("convolution", "_convolution", "conv2d", "cudnn_convolution"), _convolution),
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
         "native_batch_norm_backward", "cudnn_batch_norm_backward"),
        _batch_norm,
    ),
    **dict.fromkeys(
        ("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
         "_fused_rms_norm", "_fused_rms_norm_backward"),
        _layer_norm,
    ),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    "_softmax_backward_data": _softmax_backward,
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool2d_with_indices_backward"), _max_pool),
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("embedding", "index", "index_select", "gather"), _rows_taken),
    **dict.fromkeys(
        ("index_put", "index_add", "index_copy", "index_fill", "scatter", "scatter_add", "scatter_reduce",
         "embedding_renorm"),
        _rows_put,
    ),
    **dict.fromkeys(("slice_backward", "select_backward", "constant_pad_nd"), _filled),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _bags),
    **dict.fromkeys(("_embedding_bag_backward", "_embedding_bag_dense_backward"), _bags_backward),
    **dict.fromkeys(_ATTENTIONS, _attention),
    **dict.fromkeys((f"{name.removesuffix('_forward')}_backward" for name in _ATTENTIONS), _attention),
    **dict.fromkeys(("_cudnn_rnn", "_cudnn_rnn_backward"), cudnn_kernels),
    "nll_loss_forward": _loss,
    "nll_loss_backward": _loss_backward,
}  # fmt: skip


def has_rule(name: str) -> bool:
    """Whether the operator ("aten::conv2d") has a kernel rule besides that of moved bytes."""
    short = name.removeprefix("aten::").rstrip("_")
    return short in _RULES or short.startswith(("_foreach", "_fused"))
