"""The same call under a what-if: another precision, memory format, batch size, or normalization in eval mode."""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from .calls import BF16, FP32, Argument, Call, TensorSpec

RECORDED = "recorded"

# Normalizations accept a bf16 input with fp32 weights and statistics, which autocast does not convert.
_NORMALIZATIONS = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")
_ACTIVATIONS = frozenset({"input", "self", "grad_out", "grad_output", "grad"})
# Attention keeps its sums in fp32 for any input type.
_ALWAYS_FP32 = frozenset({"logsumexp"})
# Arguments that belong to a layer and not to a sample, whatever their shape.
_PARAMETERS = frozenset(
    {"weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var", "params"}
    | {f"weight{number}" for number in range(5)}
)
# Arguments that repeat the shape of a tensor.
_SIZES = frozenset({"size", "shape", "sizes", "input_sizes", "self_sizes", "N"})
_RECURRENT = ("lstm", "gru", "rnn")
# Larger batch sizes in a recording are ignored.
LARGEST_BATCH = 1 << 31
# c10's numbers of the two types.
_FP32_NUMBER, _BF16_NUMBER = 6, 15


@dataclass(frozen=True)
class Run:
    """Facts of the whole recording about its calls.

    `batch_lengths` are the batch size and its products with the axes behind it, as in a [batch x tokens, width]
    product; `parameter_shapes` is empty if they are not recorded.
    """

    batch_size: int | None
    batch_lengths: frozenset[int]
    parameter_shapes: frozenset[tuple[int, ...]]
    has_convolutions: bool


def describe_run(calls: Iterable[Call], metadata: dict[str, Any]) -> Run:
    """Return the facts about the batch from the calls and the recording's metadata ("batch_size", "layers")."""
    calls = list(calls)
    batch_size = metadata.get("batch_size")
    if type(batch_size) is not int or not 0 < batch_size <= LARGEST_BATCH:
        batch_size = None
    parameter_shapes = frozenset(parameter_shape for _, parameter_shape in named_parameter_shapes(metadata))
    lengths = set() if batch_size is None else {batch_size}
    for tensor in (tensor for call in calls for tensor in call.tensors()):
        if len(tensor.shape) > 1 and tensor.shape[0] == batch_size and tensor.shape not in parameter_shapes:
            lengths.update(math.prod(tensor.shape[:axes]) for axes in range(2, len(tensor.shape)))
    has_convolutions = any("conv" in call.op for call in calls)
    return Run(batch_size, frozenset(lengths), parameter_shapes, has_convolutions)


def named_parameter_shapes(metadata: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape of every parameter from the metadata key "layers"; invalid shapes are left out."""
    layers = metadata.get("layers")
    found = []
    for layer in layers if isinstance(layers, list) else []:
        shapes = layer.get("shapes") if isinstance(layer, dict) else None
        for name, shape in shapes.items() if isinstance(shapes, dict) else ():
            if isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape):
                found.append((f"{layer.get('name')}.{name}", tuple(shape)))
    return found


def variants(call: Call, run: Run, requested: Iterable[str]) -> dict[str, Call]:
    """Return the requested variants that apply to the call, by name, in the order of `VARIANTS`."""
    chosen = set(requested) | {RECORDED}
    changed = {name: change(call, run) for name, change in _CHANGES.items() if name in chosen}
    return {name: variant for name, variant in changed.items() if variant is not None}


def stays_fp32(argument: Argument, call: Call) -> bool:
    """Return whether autocast leaves an argument in fp32 when it converts the call's tensors."""
    normalization = any(name in call.op for name in _NORMALIZATIONS)
    return argument.name in _ALWAYS_FP32 or (normalization and argument.name not in _ACTIVATIONS)


def _in_bf16(call: Call, run: Run) -> Call | None:
    def changed(argument: Argument) -> Argument:
        if stays_fp32(argument, call):
            return argument
        if argument.name == "input_dtype" and argument.value == _FP32_NUMBER:
            return replace(argument, value=_BF16_NUMBER)
        specs = (replace(spec, dtype=BF16) if spec.dtype == FP32 else spec for spec in argument.tensors)
        return replace(argument, tensors=tuple(specs))

    return _if_changed(call, replace(call, arguments=tuple(map(changed, call.arguments))))


def _in_channels_last(call: Call, run: Run) -> Call | None:
    # Tensors with four axes that are not images (attention heads) have no channels.
    if not run.has_convolutions or "attention" in call.op:
        return None

    def changed(spec: TensorSpec) -> TensorSpec:
        if len(spec.shape) != 4 or not spec.is_floating:
            return spec
        _, channels, height, width = (max(1, size) for size in spec.shape)
        return replace(spec, strides=(height * width * channels, 1, width * channels, channels))

    arguments = (replace(argument, tensors=tuple(map(changed, argument.tensors))) for argument in call.arguments)
    return _if_changed(call, replace(call, arguments=tuple(arguments)))


def _in_eval_mode(call: Call, run: Run) -> Call | None:
    """Batch normalization with its running statistics; its backward call is torch's native one, also under cuDNN."""
    if call.op == "cudnn_batch_norm_backward":
        cudnn_names = {"grad_out": "grad_output", "save_invstd": "save_var", "eps": "epsilon"}
        names = ("grad_out", "input", "weight", "running_mean", "running_var", "save_mean", "save_invstd")
        renamed = [(name, call.argument(cudnn_names.get(name, name))) for name in (*names, "eps")]
        if any(argument is None for _, argument in renamed):
            return None
        *tensors, eps = (replace(argument, name=name) for name, argument in renamed if argument is not None)
        flags = Argument("train", value=False), eps, Argument("output_mask", value=[True, True, True])
        return replace(call, op="native_batch_norm_backward", arguments=(*tensors, *flags))
    if "batch_norm" not in call.op:
        return None
    arguments = (
        replace(argument, value=False)
        if argument.name in ("training", "train") and argument.value is True
        else argument
        for argument in call.arguments
    )
    return _if_changed(call, replace(call, arguments=tuple(arguments)))


def _if_changed(call: Call, changed: Call) -> Call | None:
    return None if changed == call else changed


class _AmbiguousError(Exception):
    """A length is that of the batch and of a parameter, or cannot be scaled to an integer."""


def _with_batch(call: Call, run: Run, factor: float) -> Call | None:
    """Return the call on a batch `factor` times as large; None if it has no batch or the batch axis is ambiguous."""
    if run.batch_size is None or run.batch_size * factor != int(run.batch_size * factor):
        return None
    try:
        if call.op in ("mm", "addmm"):
            return _product_with_batch(call, run, factor)
        recurrent = any(name in call.op for name in _RECURRENT)
        arguments = tuple(
            _recurrent_argument(call, argument, run, factor) if recurrent else _argument(argument, run, factor)
            for argument in call.arguments
        )
    except _AmbiguousError:
        return None
    if all(new.tensors == old.tensors for new, old in zip(arguments, call.arguments, strict=True)):
        return None
    return replace(call, arguments=arguments)


def _argument(argument: Argument, run: Run, factor: float) -> Argument:
    if argument.name in _PARAMETERS:
        return argument
    if argument.name in _SIZES:
        return replace(argument, value=_scaled_sizes(argument.value, run, factor))
    return replace(argument, tensors=tuple(_scaled(spec, _batch_axis(spec, run), factor) for spec in argument.tensors))


def _batch_axis(spec: TensorSpec, run: Run) -> int | None:
    if not spec.shape:
        return None
    is_parameter = spec.is_floating and bool({spec.shape, spec.shape[::-1]} & run.parameter_shapes)
    if spec.shape[0] in run.batch_lengths:
        if is_parameter:
            raise _AmbiguousError
        return 0
    # A stacked or sequence-first tensor: one axis that can only be the batch.
    found = [axis for axis, size in enumerate(spec.shape) if size == run.batch_size]
    return found[0] if len(found) == 1 and len(spec.shape) > 2 and not is_parameter else None


def _scaled(spec: TensorSpec, axis: int | None, factor: float) -> TensorSpec:
    if axis is None:
        return spec
    scaled = spec.scaled(axis, factor)
    if scaled is None:
        raise _AmbiguousError
    return scaled


def _scaled_sizes(value: Any, run: Run, factor: float) -> Any:
    """Scale the first size that is the batch's, in a list or a single number."""
    sizes = list(value) if isinstance(value, list) else [value]
    for position, size in enumerate(sizes):
        if type(size) is int and size in run.batch_lengths:
            sizes[position] = int(size * factor)
            break
    return sizes if isinstance(value, list) else sizes[0]


def _recurrent_argument(call: Call, argument: Argument, run: Run, factor: float) -> Argument:
    """Sequences are [time, batch, width] unless the layer is batch-first; states are [layers, batch, width]."""
    if argument.name in _PARAMETERS:
        return argument
    flag = call.argument("batch_first")
    # oneDNN's layer gets transposed sequences, whatever its flag.
    batch_first = flag is not None and flag.value is True and not call.op.startswith("mkldnn")
    sequence = argument.name in ("input", "output", "grad_output")

    def changed(spec: TensorSpec) -> TensorSpec:
        if len(spec.shape) not in (2, 3):
            return spec
        axis = 1 if len(spec.shape) == 3 and not (sequence and batch_first) else 0
        if spec.shape[axis] != run.batch_size:
            raise _AmbiguousError
        return _scaled(spec, axis, factor)

    return replace(argument, tensors=tuple(map(changed, argument.tensors)))


def _product_with_batch(call: Call, run: Run, factor: float) -> Call | None:
    """Scale a matrix product: the rows of activations times weight, the summed axis of a weight's gradient."""
    left, right = call.argument("mat1" if call.op == "addmm" else "self"), call.argument("mat2")
    if left is None or right is None or left.tensor is None or right.tensor is None:
        return None
    a, b = left.tensor, right.tensor
    if len(a.shape) != 2 or len(b.shape) != 2:
        return None
    rows, summed, columns = *a.shape, b.shape[1]
    by_rows = rows in run.batch_lengths
    by_sum = summed in run.batch_lengths
    if run.parameter_shapes:
        by_rows &= bool({(summed, columns), (columns, summed)} & run.parameter_shapes)
        by_sum &= bool({(rows, columns), (columns, rows)} & run.parameter_shapes)
    if by_rows == by_sum:
        return None
    changed = {left.name: replace(left, tensors=(_scaled(a, 0 if by_rows else 1, factor),))}
    if by_sum:
        changed[right.name] = replace(right, tensors=(_scaled(b, 0, factor),))
    return replace(call, arguments=tuple(changed.get(argument.name, argument) for argument in call.arguments))


def _in_bf16_channels_last(call: Call, run: Run) -> Call | None:
    bf16 = _in_bf16(call, run)
    return None if bf16 is None else _in_channels_last(bf16, run)


# None: the call has no such variant.
_CHANGES: dict[str, Callable[[Call, Run], Call | None]] = {
    RECORDED: lambda call, run: call,
    "bf16": _in_bf16,
    "channels_last": _in_channels_last,
    "bf16_channels_last": _in_bf16_channels_last,
    "batch_x0.5": functools.partial(_with_batch, factor=0.5),
    "batch_x2": functools.partial(_with_batch, factor=2),
    "eval": _in_eval_mode,
}
VARIANTS = tuple(_CHANGES)
