"""Tensors for a replayed call: recorded shapes and strides, and values that the operator accepts."""

import math

import torch

from ..trace_module.spelling import DTYPES_BY_NAME
from .calls import Argument, Call, TensorSpec

# Recordings on a CPU contain "long" and "short" as well.
_DTYPES = DTYPES_BY_NAME | {"long": torch.int64, "short": torch.int16}
# Arguments that are variances or their inverses, and operators whose input must not be negative.
_POSITIVE_ARGUMENTS = frozenset({"running_var", "save_invstd", "save_var", "rstd"})
_POSITIVE_OPERATORS = frozenset({"sqrt", "sqrt_", "rsqrt", "rsqrt_", "log", "log_", "log2", "log10", "pow"})


def make_tensor(spec: TensorSpec, argument: Argument, call: Call, device: torch.device) -> torch.Tensor:
    """Return a tensor of the spec's shape, strides and type on the device, for this argument of the call.

    Floating-point values are normally distributed, and positive if they have to be; integers are valid indices into
    the tensor that the argument indexes, else 0; bools are true with probability 1/2.
    """
    elements = spec.storage_elements
    dtype = _DTYPES[spec.dtype]
    if spec.is_floating:
        values = _floats(elements, argument, call, device).to(dtype)
    elif spec.dtype == "bool":
        values = torch.rand(elements, device=device) < 0.5
    else:
        values = torch.randint(0, max(1, _index_bound(argument, call)), (elements,), dtype=dtype, device=device)
    if spec.strides is None or elements == 0:
        return values.view(spec.shape)
    return values.as_strided(spec.shape, spec.strides)


def _floats(elements: int, argument: Argument, call: Call, device: torch.device) -> torch.Tensor:
    # With other values a repeated in-place operator would diverge to infinity or to denormals, which are slow.
    if call.op.endswith("_") and argument is not call.arguments[0]:
        return torch.ones(elements, device=device)
    values = torch.randn(elements, device=device)
    if argument.name in _POSITIVE_ARGUMENTS or call.op in _POSITIVE_OPERATORS:
        return values.abs_().add_(0.5)
    return values


def _index_bound(argument: Argument, call: Call) -> int:
    """Return the exclusive upper bound of the argument's indices; 1 if unknown."""
    if argument.name == "target":
        scores = _shape(call, "self", "input")
        return scores[1] if len(scores) > 1 else math.prod(scores)
    if argument.name == "indices" and call.op.startswith("embedding"):
        return next(iter(_shape(call, "weight")), _value(call, "num_weights"))
    if argument.name == "indices" and "max_pool" in call.op:
        return math.prod(_shape(call, "self")[2:])
    if argument.name == "index":
        indexed, dim = _shape(call, "self"), _value(call, "dim")
        return indexed[dim] if -len(indexed) <= dim < len(indexed) else 1
    return 1


def _shape(call: Call, *names: str) -> tuple[int, ...]:
    argument = call.argument(*names)
    return argument.tensor.shape if argument is not None and argument.tensor is not None else ()


def _value(call: Call, name: str) -> int:
    argument = call.argument(name)
    return argument.value if argument is not None and type(argument.value) is int else 0
