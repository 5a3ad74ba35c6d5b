"""Arguments of operators in the format of PyTorch's profiler: "Input Dims", "Input type", "Concrete Inputs"."""

from typing import Any

import torch

from whatif.ingest.operator_calls import CHANNELS_LAST

from .layouts import is_channels_last

TYPE_NAMES = {
    torch.float64: "double", torch.float32: "float", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16",
    torch.float8_e4m3fn: "c10::Float8_e4m3fn", torch.float8_e5m2: "c10::Float8_e5m2", torch.int64: "long int",
    torch.int32: "int", torch.int16: "short int", torch.int8: "signed char", torch.uint8: "unsigned char",
    torch.bool: "bool", torch.complex64: "c10::complex<float>",
}  # fmt: skip
DTYPES_BY_NAME = {name: dtype for dtype, name in TYPE_NAMES.items()}


def spelled(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], list[str], list[str]]:
    """Return dims, types and concrete values of a call, one entry for each argument of the operator's schema.

    The concrete value of a channels-last tensor is its layout, where the profiler leaves an empty string. A list of
    tensors is "TensorList:float": the profiler's format omits the dtype of its members.
    """
    dims: list[Any] = []
    types: list[str] = []
    concrete: list[str] = []
    for position, argument in enumerate(func._schema.arguments):
        named = kwargs.get(argument.name, argument.default_value)
        input_dims, input_type, value = _input(args[position] if position < len(args) else named)
        dims.append(input_dims)
        types.append(input_type)
        concrete.append(value)
    return dims, types, concrete


def _input(value: Any) -> tuple[list[Any], str, str]:
    if isinstance(value, torch.Tensor):
        layout = CHANNELS_LAST if is_channels_last(value) else ""
        return list(value.shape), TYPE_NAMES.get(value.dtype, "unknown"), layout
    if isinstance(value, list | tuple):
        tensors = [item for item in value if isinstance(item, torch.Tensor)]
        if tensors:  # indices may contain None as well
            return [list(t.shape) for t in tensors], f"TensorList:{TYPE_NAMES.get(tensors[-1].dtype, 'unknown')}", ""
        return [], "ScalarList", f"[{', '.join(map(str, value))}]"
    if value is None:
        return [], "", ""
    if isinstance(value, bool | int | float):
        return [], "Scalar", str(value)
    return [], "", ""
