"""Finds the overload of a recorded call by its schema, which also names the inputs."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .calls import Argument, Call, NotReplayable, RecordedCall, read_inputs

# These may return their input or copy it: the recorded strides decide, as they did in the run.
_MAY_COPY = frozenset({"reshape", "flatten", "contiguous", "to", "_reshape_alias", "reshape_as"})
# They change a tensor's metadata only, return a number to Python, or need a special kind of memory.
_NO_COMPUTATION = frozenset(
    {"set_", "resize_", "resize_as_", "detach_", "requires_grad_", "t_", "transpose_", "squeeze_", "unsqueeze_"}
    | {"as_strided_", "swapaxes_", "swapdims_", "lift_fresh", "item", "_local_scalar_dense", "is_nonzero"}
    | {"record_stream", "pin_memory", "_pin_memory", "lift", "result_type", "_has_compatible_shallow_copy_type"}
)
_INTEGERS = frozenset({"IntType", "SymIntType", "ScalarTypeType", "LayoutType", "MemoryFormatType"})
_NUMBERS = _INTEGERS | {"FloatType", "NumberType", "BoolType"}


def resolve(call: RecordedCall) -> Call:
    """Return a recorded call with its inputs named; `overload_of` returns its overload.

    Raises NotReplayable, with the reason, for a call that computes nothing, has no tensor, or fits no schema.
    """
    op = call.name.removeprefix("aten::")
    if op in _NO_COMPUTATION:
        raise NotReplayable("computes nothing")
    inputs = read_inputs(call)
    if not any(given is not None and given.tensors for given in inputs):
        raise NotReplayable("has no tensor inputs")
    for overload in _overloads(op):
        arguments = _match(overload._schema, inputs)
        if arguments is None:
            continue
        if _is_view(overload._schema) and op not in _MAY_COPY:
            raise NotReplayable("computes nothing")
        return Call(op, tuple(arguments), call.backward)
    raise NotReplayable("no schema fits the inputs")


def overload_of(call: Call) -> Any:
    """Return the `torch.ops.aten` overload whose arguments have the call's names.

    Raises NotReplayable if this torch has none.
    """
    names = [argument.name for argument in call.arguments]
    for overload in _overloads(call.op):
        schema = overload._schema.arguments
        if [argument.name for argument in schema] == names and all(map(_accepts, schema, call.arguments)):
            return overload
    raise NotReplayable("no schema fits the inputs")


# c10/core/ScalarType.h: the number of a dtype in operators' arguments, by the profiler's name of it.
_SCALAR_TYPES = {"c10::Half": 5, "float": 6, "double": 7, "c10::BFloat16": 15}


@functools.cache
def _overloads(op: str) -> Sequence[Any]:
    if not op.isidentifier() or op.startswith("__"):
        raise NotReplayable("operator unknown to this version of torch")
    packet = getattr(torch.ops.aten, op, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise NotReplayable("operator unknown to this version of torch")
    untyped: Any = packet
    return tuple(getattr(untyped, name) for name in untyped.overloads())


def _match(schema: Any, inputs: Sequence[Argument | None]) -> list[Argument] | None:
    """Return the inputs with the schema's names, or None if they do not fit it."""
    if len(schema.arguments) != len(inputs):
        return None
    arguments = []
    tensors = [tensor for given in inputs if given is not None for tensor in given.tensors]
    for expected, given in zip(schema.arguments, inputs, strict=True):
        if given is None:
            # The profiler does not record strings, devices or None: the default is the best guess.
            if may_be_absent(expected):
                given = Argument("", value=expected.default_value)
            elif str(expected.real_type) == "ScalarType" and tensors and tensors[0].dtype in _SCALAR_TYPES:
                given = Argument("", value=_SCALAR_TYPES[tensors[0].dtype])  # as input_dtype of a softmax's backward
            else:
                return None
        argument = replace(given, name=expected.name)
        if not _accepts(expected, argument):
            return None
        arguments.append(argument)
    return arguments


def may_be_absent(expected: Any) -> bool:
    """Whether an argument of a schema has a default, which is None for one that is optional."""
    return bool(expected.has_default_value() or expected.type.kind() == "OptionalType")


def _accepts(expected: Any, given: Argument) -> bool:
    kind = expected.type
    if kind.kind() == "OptionalType":
        if not given.tensors and given.value is None:
            return True
        kind = kind.getElementType()
    if given.tensors:
        return _accepts_tensors(kind, given)
    if isinstance(given.value, list):
        return kind.kind() == "ListType" and all(_accepts_value(kind.getElementType(), item) for item in given.value)
    if expected.has_default_value() and given.value == expected.default_value:
        return True
    return _accepts_value(kind, given.value)


def _accepts_tensors(kind: Any, given: Argument) -> bool:
    if not given.is_list:
        return bool(kind.kind() == "TensorType")
    return bool(kind.kind() == "ListType" and kind.getElementType().kind() == "TensorType")


def _accepts_value(kind: Any, value: Any) -> bool:
    if isinstance(value, bool):
        return kind.kind() in ("BoolType", "NumberType")
    if isinstance(value, int):
        return kind.kind() in _NUMBERS - {"BoolType"}
    if isinstance(value, float):
        return kind.kind() in ("FloatType", "NumberType")
    return False


def _is_view(schema: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
