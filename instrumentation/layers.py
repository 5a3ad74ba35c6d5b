"""The recording's data on layers: a span around the forward call of every module, sizes, gradient order.

Backward spans are not marked: every backward operator carries the autograd sequence number of its forward operator,
which lies inside a mark. Full backward hooks would wrap the module's tensors and break in-place layers.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from .tensors import dtype_name

LAYER_PREFIX = "whatif::layer::"

# The outermost module has the empty qualified name, which no reader could select.
ROOT_LAYER = "(root)"

# Wrapper modules that torch inserts, by the attribute that holds the wrapped one.
_WRAPPER_ATTRIBUTES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# The private class is cheaper while the profiler runs, and torch's compiler uses it; the public one is the fallback.
_Mark: Any = getattr(torch._C._profiler, "_RecordFunctionFast", record_function)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module, without the wrappers of data parallelism, sharding and `torch.compile`."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
            continue
        inner = [child for name, child in model.named_children() if name in _WRAPPER_ATTRIBUTES]
        if not inner:
            return model
        model = inner[0]


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of the model, outermost first, with its qualified name in the user's code."""
    for qualified_name, module in unwrap(model).named_modules():
        parts = qualified_name.split(".")
        if parts[-1] in _WRAPPER_ATTRIBUTES:
            continue
        yield ".".join(part for part in parts if part not in _WRAPPER_ATTRIBUTES) or ROOT_LAYER, module


def named_parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield full name, layer and parameter of every parameter once, in the order of the layers."""
    seen: set[int] = set()
    for layer, module in named_layers(model):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield (name if layer == ROOT_LAYER else f"{layer}.{name}"), layer, parameter


def describe_layers(model: nn.Module, gradients: Iterable[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return name, type, number and shapes of its direct parameters and gradient bytes of every layer, outermost first.

    A parameter that two layers share is counted in the first. ``gradients`` are the rows of `GradientOrder`.
    """
    sizes = {row["name"]: row["bytes"] for row in gradients}
    rows: dict[str, dict[str, Any]] = {
        name: {"name": name, "type": type(module).__name__, "parameters": 0, "gradient_bytes": 0, "shapes": {}}
        for name, module in named_layers(model)
    }
    for full_name, layer, parameter in named_parameters(model):
        row = rows[layer]
        row["parameters"] += parameter.numel()
        row["gradient_bytes"] += sizes.get(full_name, parameter.nbytes) if parameter.requires_grad else 0
        row["shapes"][full_name.rpartition(".")[2]] = list(parameter.shape)
    return list(rows.values())


class HookHere(functools.partial[Any]):
    """A hook of one module: in copies of the module, also pickled ones, it does nothing and needs no `whatif`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # accepts any arguments, returns None


class Hooks:
    """Hooks on a model, its layers or its parameters that are removed together."""

    _handles: list[RemovableHandle]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def hook_layers(model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> list[RemovableHandle]:
    """Hook every layer: `enter(name, module, args)` before its forward call, `leave(name, module, args, output)` after.

    `leave` is called even if the layer raises an error that the user's code catches.
    """
    handles = []
    for name, module in named_layers(model):
        if isinstance(module, torch.jit.ScriptModule):  # Runs outside Python and does not call hooks.
            continue
        handles.append(module.register_forward_pre_hook(HookHere(enter, name), prepend=True))
        handles.append(module.register_forward_hook(HookHere(leave, name), always_call=True))
    return handles


class LayerMarks(Hooks):
    """Marks the forward call of every layer in the trace until `remove`."""

    def __init__(self, model: nn.Module) -> None:
        self._open = threading.local()
        self._handles = hook_layers(model, self._enter, self._leave)

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # Compiled regions must not change.
            return
        mark = _Mark(LAYER_PREFIX + name)
        if not hasattr(self._open, "marks"):
            self._open.marks = []
        self._open.marks.append(mark)
        mark.__enter__()

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        marks = getattr(self._open, "marks", None)
        if marks:
            marks.pop().__exit__(None, None, None)


class GradientOrder(Hooks):
    """Records the order in which a backward pass finishes the gradients, until `remove`.

    Data parallelism fills its buckets in this order.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows: dict[int, dict[str, Any]] = {}
        self._handles = []
        for full_name, layer, parameter in named_parameters(model):
            if not parameter.requires_grad or not parameter.is_leaf:
                continue
            row = {
                "name": full_name,
                "layer": layer,
                "bytes": parameter.nbytes,  # A dense gradient has the same shape and type.
                "dtype": dtype_name(parameter.dtype),
            }
            untyped: Any = parameter
            self._handles.append(untyped.register_post_accumulate_grad_hook(functools.partial(self._ready, row)))

    def _ready(self, row: dict[str, Any], parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if id(parameter) not in self._rows and gradient is not None and gradient.is_sparse:
            row |= {"bytes": gradient._indices().nbytes + gradient._values().nbytes, "sparse": True}
        self._rows.setdefault(id(parameter), row)

    def rows(self) -> list[dict[str, Any]]:
        """Return name, layer, bytes and dtype of each parameter's gradient, in the order of the first pass.

        A sparse gradient (nn.EmbeddingBag(sparse=True)) is marked, and its bytes are those of indices and values.
        """
        return list(self._rows.values())
