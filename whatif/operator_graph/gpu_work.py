"""Which kernels a GPU runs for an operation, and as which operator of the database each of them is asked for.

What moves memory and computes little is asked for as an elementwise operator that moves as many bytes (the rule of
NeuSight, section 4, for operators without a predictor). Operators that no rule knows are too, and say so: ``known``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from whatif.opdb.importers.torch_operators import Described, describe
from whatif.operator_graph.multi_tensor import launches_of
from whatif.operator_graph.operations import ELEMENT_BYTES, FORMATS, Operation, tensors_of


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: its name, and the operator of the database whose time, ``share`` times, is its own."""

    name: str
    what: Described
    share: float = 1.0
    known: bool = True


def kernels_of(operation: Operation) -> list[Kernel]:
    """Give the kernels that an operation runs on a GPU, in order; none for views and for what the host computes."""
    name = operation.name.removeprefix("aten::").rstrip("_")
    if not operation.on_device or name in _NO_WORK or (operation.name.endswith("_") and name in _VIEWS):
        return []
    if name.startswith(("_foreach", "_fused")):
        return _lists(name, operation)
    if not operation.outputs or not any(prod(shape) for shape, _ in operation.outputs):
        return []
    rule = _RULES.get(name)
    if rule is not None:
        return rule(name, operation)
    known = _MOVES_ONCE.fullmatch(name) is not None
    return [replace(kernel, known=known) for kernel in _elementwise(name, operation)]


def on_tensor_cores(kernels: Sequence[Kernel], tf32_families: Sequence[str]) -> list[Kernel]:
    """Give an operation's kernels as a GPU with tensor cores runs them.

    Products of fp32 numbers of the families named may be computed in TF32. Tensor cores convolve in the layout NHWC,
    and PyTorch's own is NCHW: cuDNN transposes what is read and what is written (seen in recordings of an H100).
    """
    found = []
    for kernel in kernels:
        if kernel.what.dtype == "fp32" and kernel.what.family in tf32_families:
            kernel = replace(
                kernel, name=kernel.name.replace("_fp32", "_tf32"), what=replace(kernel.what, dtype="tf32")
            )
        found.append(kernel)
        if kernel.what.family == "conv" and kernel.what.dtype in _TENSOR_CORES:
            # Named by what they do, and of the format that lies in memory.
            element = replace(kernel.what, dtype="fp32") if kernel.what.dtype == "tf32" else kernel.what
            found += [
                _kernel(f"{way}_{kernel.what.phase}", "transpose", traffic(size, size, element.dtype))
                for way, size in _transposed_bytes(kernel.what)
            ]
    return found


_TENSOR_CORES = ("tf32", "fp16", "bf16")


def _transposed_bytes(what: Described) -> list[tuple[str, float]]:
    """What is transposed around a convolution, bytes each: its larger tensors; weights are small beside them."""
    c = dict(what.integers)
    out = [
        (c[f"in_{axis}"] + 2 * c[f"padding_{axis}"] - c[f"dilation_{axis}"] * (c[f"kernel_{axis}"] - 1) - 1)
        // c[f"stride_{axis}"] + 1
        for axis in "hw"
    ]  # fmt: skip
    size = 2 if what.dtype in ("fp16", "bf16") else 4
    x = float(c["batch"] * c["in_channels"] * c["in_h"] * c["in_w"] * size)
    y = float(c["batch"] * c["out_channels"] * out[0] * out[1] * size)
    read, written = {"fwd": ([x], [y]), "dgrad": ([y], [x]), "wgrad": ([x, y], [])}[what.phase]
    return [("nchwToNhwc", size) for size in read] + [("nhwcToNchw", size) for size in written]


# Views, shapes and allocations: no kernel.
_NO_WORK = frozenset(
    ("view", "_unsafe_view", "_reshape_alias", "alias", "expand", "as_strided", "detach", "lift_fresh", "empty",
     "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set", "resize", "permute", "select", "slice",
     "split", "split_with_sizes", "chunk", "unbind", "narrow", "diagonal", "real", "view_as_real", "view_as_complex",
     "reshape", "flatten", "contiguous", "_local_scalar_dense", "item", "is_nonzero", "unsafe_split",
     "unsafe_split_with_sizes", "unsafe_chunk", "record_stream", "_nested_view")
)  # fmt: skip
_VIEWS = frozenset(("t", "transpose", "squeeze", "unsqueeze", "swapaxes", "swapdims"))
# Their first input is written and not read.
_OVERWRITES = frozenset(
    ("copy", "fill", "zero", "uniform", "normal", "bernoulli", "random", "exponential", "arange", "zeros_like",
     "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full")
)  # fmt: skip
# Every input once, every output once: what elementwise operators, reductions, copies and look-ups cost.
_MOVES_ONCE = re.compile(
    r"add|sub|rsub|mul|div|pow|sqrt|rsqrt|reciprocal|exp|expm1|log|log1p|log2|neg|abs|sign|sin|cos|erf|floor|ceil|round|"
    r"maximum|minimum|eq|ne|lt|gt|le|ge|logical_\w+|bitwise_\w+|where|masked_fill|clamp\w*|relu6?|gelu\w*|silu\w*|elu\w*|"
    r"leaky_relu\w*|mish\w*|softplus\w*|hardtanh\w*|hardswish\w*|hardsigmoid\w*|sigmoid\w*|tanh\w*|threshold\w*|lerp|"
    r"addcmul|addcdiv|native_dropout\w*|bernoulli|uniform|normal|random|exponential|fill|zero|zeros?\w*|ones?\w*|full\w*|"
    r"new_(zeros|ones|full)|arange|scalar_tensor|copy|_to_copy|clone|cat|stack|constant_pad_nd|repeat|roll|flip|tri[lu]|"
    r"sum|mean|amax|amin|max|min|prod|norm|linalg_vector_norm|var\w*|std\w*|any|all|argmax|argmin|cumsum|nll_loss\w*|"
    r"mse_loss\w*|smooth_l1_loss\w*|binary_cross_entropy\w*|\w*softmax\w*|\w*pool\w*|upsample\w*|glu\w*|prelu\w*|"
    r"_weight_norm\w*|rand\w*|isnan|isinf|isfinite|nan_to_num|polar|complex|index_select|gather|slice_backward|"
    r"select_backward|unfold_backward|squeeze|_cast\w*"
)


def _bytes(tensors: Sequence[tuple[tuple[int, ...], str]]) -> int:
    return sum(prod(shape) * ELEMENT_BYTES.get(kind, 4) for shape, kind in tensors)


def _format(operation: Operation) -> str:
    """The number format of the work: that of the first floating-point tensor that is written, else read."""
    for _, kind in (*operation.outputs, *tensors_of(operation)):
        if kind in FORMATS:
            return FORMATS[kind]
    return "fp32"


def traffic(read_bytes: float, written_bytes: float, dtype: str) -> Described:
    """Give the elementwise operator that moves so many bytes: of one input where about as much is read as written."""
    size = {"fp64": 8, "fp16": 2, "bf16": 2, "fp8": 1}.get(dtype, 4)
    two = read_bytes > 1.5 * written_bytes
    name, tensors = ("add", 2) if two else ("relu", 1)
    elements = max(1, round((read_bytes + written_bytes) / size / (tensors + 1)))
    return Described("elementwise", name, dtype, (("elements", elements), ("tensors", tensors)))


def _kernel(kind: str, name: str, what: Described, share: float = 1.0) -> Kernel:
    return Kernel(f"predicted_{kind}_{name.strip('_')}_{what.dtype}", what, share)


def _moved(operation: Operation, name: str) -> tuple[int, int]:
    inputs = tensors_of(operation)
    return _bytes(inputs[1:] if name in _OVERWRITES else inputs), _bytes(operation.outputs)


def _own(operation: Operation) -> Described | None:
    return describe(operation.name, operation.dims, operation.types, operation.concrete)


def _elementwise(name: str, operation: Operation) -> list[Kernel]:
    what = _own(operation)
    if what is None or what.family != "elementwise":
        what = traffic(*_moved(operation, name), _format(operation))
    return [_kernel(_kind(name), name, what)]


def _kind(name: str) -> str:
    if re.match(
        r"(sum|mean|amax|amin|max|min|prod|norm|linalg|var|std|any|all|argm|nll_loss|cumsum)(_|$|x$|in$)", name
    ):
        return "reduce"
    if "pool" in name:
        return "pool"
    if "softmax" in name:
        return "softmax"
    return "index" if re.search(r"index|gather|scatter|embedding|sort|topk|unique", name) else "elementwise"


def _product(name: str, operation: Operation) -> list[Kernel]:
    what = _own(operation)
    return [_kernel("gemm", name, what)] if what is not None else _unknown(name, operation)


def _unknown(name: str, operation: Operation) -> list[Kernel]:
    return [replace(kernel, known=False) for kernel in _elementwise(name, operation)]


def _convolution(name: str, operation: Operation) -> list[Kernel]:
    what = _own(operation)
    if what is None:
        return _unknown(name, operation)
    found = [_kernel("conv_fprop", name, what)]
    if len(operation.types) > 2 and operation.types[2] in ELEMENT_BYTES:  # the bias is added by a kernel of its own
        out = _bytes(operation.outputs)
        found.append(_kernel("elementwise_bias", name, traffic(out, out, what.dtype)))
    return found


def _convolution_backward(name: str, operation: Operation) -> list[Kernel]:
    mask = re.findall("True|False", operation.concrete[10])
    found = []
    for kind, place, asked in (("dgrad", 0, "[True, False, False]"), ("wgrad", 1, "[False, True, False]")):
        if mask[place] == "True":
            half = replace(operation, concrete=[*operation.concrete[:10], asked])
            what = _own(half)
            found += [_kernel(f"conv_{kind}", name, what)] if what is not None else _unknown(name, operation)[:1]
    if mask[2:3] == ["True"]:
        gradient = _bytes(tensors_of(operation)[:1])
        found.append(_kernel("reduce", "bias_gradient", traffic(gradient, 0, _format(operation))))
    return found


def _batch_norm(name: str, operation: Operation) -> list[Kernel]:
    """One kernel: statistics read all, normalizing reads it again; backward reads input and gradient twice each."""
    x = _bytes(tensors_of(operation)[:1])
    trains = "True" in operation.concrete
    backward = name.endswith("backward")
    reads = (2 if trains else 1) * (2 if backward else 1)
    what = traffic(2 * x, x, _format(operation))
    return [_kernel("batch_norm_bw" if backward else "batch_norm_fw", name, what, (reads + 1) / 3)]


def _layer_norm(name: str, operation: Operation) -> list[Kernel]:
    x = _bytes(tensors_of(operation)[:1])
    if not name.endswith("backward"):
        what = _own(operation)
        return [_kernel("layer_norm", name, what or traffic(x, x, _format(operation)))]
    dtype = _format(operation)
    return [
        _kernel("layer_norm", name, traffic(2 * x, x, dtype)),
        _kernel("layer_norm_gammabeta", name, traffic(2 * x, 0, dtype)),
    ]


def _softmax(name: str, operation: Operation) -> list[Kernel]:
    what = _own(operation)
    return [_kernel("softmax", name, what)] if what is not None else _elementwise(name, operation)


def _embedding(name: str, operation: Operation) -> list[Kernel]:
    out = _bytes(operation.outputs)
    return [_kernel("embedding", name, traffic(out, out, _format(operation)))]


def _embedding_backward(name: str, operation: Operation) -> list[Kernel]:
    """The whole table's gradient is set to zero, then rows are added up."""
    gradient, table, dtype = _bytes(tensors_of(operation)[:1]), _bytes(operation.outputs), _format(operation)
    return [
        _kernel("elementwise_fill", name, traffic(0, table, dtype)),
        _kernel("embedding", name, traffic(gradient, gradient, dtype)),
    ]


def _rows_taken(name: str, operation: Operation) -> list[Kernel]:
    out = _bytes(operation.outputs)
    return [_kernel("index", name, traffic(out, out, _format(operation)))]


# A backward pass of FlashAttention computes the scores again and then two products for each of the forward ones
# (Dao et al., "FlashAttention", NeurIPS 2022, algorithm 4): five products instead of two.
ATTENTION_BACKWARD = 2.5


def _attention(name: str, operation: Operation) -> list[Kernel]:
    backward = "backward" in name
    q, k, v = (list(t) for t in operation.dims[1:4]) if backward else (list(t) for t in operation.dims[:3])
    del v
    if len(q) != 4 or len(k) != 4:
        return _unknown(name, operation)
    heads, rows = (1, 2) if "scaled_dot_product" in name else (2, 1)
    sizes = (
        ("batch", q[0]), ("query_length", q[rows]), ("key_length", k[rows]), ("heads", q[heads]),
        ("kv_heads", k[heads]), ("head_size", q[3]), ("causal", int(_is_causal(operation))),
    )  # fmt: skip
    what = Described("attention", "attention", _format(operation), sizes)
    return [_kernel(f"flash_{'bwd' if backward else 'fwd'}", name, what, ATTENTION_BACKWARD if backward else 1.0)]


def _is_causal(operation: Operation) -> bool:
    """Whether a mask of positions is set: the first truth among the arguments of every attention operator but one."""
    truths = [text for text in operation.concrete if text in ("True", "False")]
    # The efficient kernel's first truth says whether it keeps what its backward pass needs.
    place = 1 if operation.name == "aten::_scaled_dot_product_efficient_attention" else 0
    return truths[place : place + 1] == ["True"]


def _loss_backward(name: str, operation: Operation) -> list[Kernel]:
    """The gradient of all scores is set to zero, then one of each row is written."""
    scores, dtype = _bytes(operation.outputs), _format(operation)
    return [
        _kernel("elementwise_fill", name, traffic(0, scores, dtype)),
        _kernel("reduce", name, traffic(1, _bytes(operation.outputs[:1]) / max(operation.outputs[0][0][-1], 1), dtype)),
    ]


def _loss(name: str, operation: Operation) -> list[Kernel]:
    """One score of each row is read."""
    scores, dtype = operation.dims[0], _format(operation)
    rows = prod(scores[:-1]) * 4
    return [_kernel("reduce", name, traffic(rows, 0, dtype))]


def _lists(name: str, operation: Operation) -> list[Kernel]:
    """A multi-tensor operator: launches of as many tensors and chunks as one takes (``multi_tensor``)."""
    lists = [(d, t) for d, t in zip(operation.dims, operation.types, strict=True) if t.startswith("TensorList") and d]
    if not lists:
        return []
    shapes, spelled = lists[0]
    kind = spelled.partition(":")[2]
    fresh = bool(operation.outputs) and not operation.name.endswith("_")
    depth = len([1 for d, _ in lists if len(d) == len(shapes) and any(d)]) + fresh
    fused = name.startswith("_fused")
    # Fused updates write parameters and both moments; the others their first list or a new one.
    written = 3 if fused else 1
    reads = depth - fresh
    size = ELEMENT_BYTES.get(kind, 4)
    elements = [prod(shape) for shape in shapes]
    dtype = FORMATS.get(kind, "fp32")
    return [
        _kernel("multi_tensor_apply", name, traffic(reads * count * size, written * count * size, dtype))
        for count in launches_of(elements, depth)
    ]


_Rule = Callable[[str, Operation], list[Kernel]]
_ATTENTIONS = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_flash_attention_forward", "_efficient_attention_forward",
)  # fmt: skip
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "linear"), _product),
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
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("index", "index_select", "gather"), _rows_taken),
    **dict.fromkeys(_ATTENTIONS, _attention),
    **dict.fromkeys((f"{name.removesuffix('_forward')}_backward" for name in _ATTENTIONS), _attention),
    "nll_loss_forward": _loss,
    "nll_loss_backward": _loss_backward,
}  # fmt: skip


def has_rule(name: str) -> bool:
    """Whether a kernel rule of its own knows the operator ("aten::conv2d"), beside that of moved bytes."""
    short = name.removeprefix("aten::").rstrip("_")
    return short in _RULES or short.startswith(("_foreach", "_fused"))


def moves_once(name: str) -> bool:
    """Whether the operator ("aten::sum") is known to cost what moving its inputs and outputs once does."""
    return _MOVES_ONCE.fullmatch(name.removeprefix("aten::").rstrip("_")) is not None
