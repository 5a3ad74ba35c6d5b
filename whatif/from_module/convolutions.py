"""Convolutions of one or three axes, and transposed ones, as the convolutions of images that do the same products."""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from whatif.from_module.operations import Operation

_FORWARD, _BACKWARD = "aten::convolution", "aten::convolution_backward"


def over_images(operation: Operation) -> Operation:
    """Return the convolution of images, not transposed, that stands for one convolution or one of its gradients.

    PyTorch runs one axis as images of one row. Of three axes, the first becomes images of the batch, and its part of
    the kernel channels: as many products, but more bytes. Raises ValueError or IndexError on impossible inputs.
    """
    place = {_FORWARD: 6, "aten::_convolution": 6, _BACKWARD: 7}.get(operation.name)
    if place is None:  # of a library, which knows images alone
        return operation
    if operation.concrete[place] == "True":
        operation = _not_transposed(operation)
    axes = len(operation.dims[0]) - 2
    return _of_rows(operation) if axes == 1 else _of_slices(operation) if axes == 3 else operation


def _not_transposed(operation: Operation) -> Operation:
    """A transposed convolution is the gradient of one that has its output as input, and its gradient is that one."""
    dims, types, concrete = operation.dims, operation.types, operation.concrete
    if operation.name != _BACKWARD:
        x, weight, out = dims[0], dims[1], list(operation.outputs[0][0])
        given = (x, types[0], concrete[0]), (out, types[0], concrete[0]), (weight, types[1], concrete[1])
        options, mask = concrete[3:9], "[True, False, False]"
    else:
        grad, x, weight = zip(dims[:3], types[:3], concrete[:3], strict=True)
        options, mask = concrete[4:10], concrete[10]
        if "True" in mask.split(",")[0]:
            return _made(operation, _FORWARD, (grad, weight), options, [])
        given = x, grad, weight
    return _made(operation, _BACKWARD, given, options, [mask])


def _made(operation: Operation, name: str, given: Any, options: list[str], mask: list[str]) -> Operation:
    """A convolution of tensors (shape, type, layout), whose bias is left out."""
    shapes, types, layouts = (list(column) for column in zip(*given, strict=True))
    others = ["", *options[:3], "False", *options[4:], *mask]
    blank: list[Any] = [[] for _ in others]
    return replace(
        operation, name=name, dims=shapes + blank, types=types + [""] * len(others), concrete=layouts + others
    )


def _tensors(operation: Operation) -> int:
    return 3 if operation.name == _BACKWARD else 2


def _lists(operation: Operation, changed: Any) -> list[str]:
    """The concrete inputs with other strides, paddings and dilations."""
    first, concrete = _tensors(operation) + 1, list(operation.concrete)
    for place, usual in ((first, 1), (first + 1, 0), (first + 2, 1)):
        concrete[place] = str(changed(list(map(int, re.findall(r"\d+", concrete[place]))), usual))
    return concrete


def _of_rows(operation: Operation) -> Operation:
    count = _tensors(operation)
    dims = [[*shape[:2], 1, shape[2]] for shape in operation.dims[:count]] + operation.dims[count:]
    return replace(operation, dims=dims, concrete=_lists(operation, lambda values, usual: [usual, values[-1]]))


def _of_slices(operation: Operation) -> Operation:
    count = _tensors(operation)
    *images, weight = operation.dims[:count]
    stride, padding, dilation = (int(re.findall(r"\d+", text)[0]) for text in operation.concrete[count + 1 : count + 4])
    kernel, x = weight[2], images[-1]
    slices = (x[2] + 2 * padding - dilation * (kernel - 1) - 1) // max(stride, 1) + 1
    made = [[x[0] * slices, x[1] * kernel, *x[3:]], [weight[0], weight[1] * kernel, *weight[3:]]]
    if count == 3:
        made = [[x[0] * slices, weight[0], *images[0][3:]], *made]
    dims = made + operation.dims[count:]
    return replace(operation, dims=dims, concrete=_lists(operation, lambda values, usual: values[-2:]))
