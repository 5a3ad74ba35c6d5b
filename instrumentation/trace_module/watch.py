"""Traces a step on meta tensors: operators with their layers and autograd nodes, and lifetimes of memory."""

import weakref
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from whatif.from_module.operations import Allocation, LayerCall, Operation
from whatif.from_module.recurrent import CUDNN_OPERATORS
from whatif.graph.types import Phase
from whatif.runtime.errors import WhatifError

from ..layers import Hooks, hook_layers
from ..tensors import dtype_name, tensors_in
from .formats import FormatFlow
from .known_values import KnownValues
from .layouts import as_on_device
from .optimizers import READ_IN_UPDATE, lists_on_meta
from .recurrent import cudnn_on_meta
from .spelling import TYPE_NAMES, spelled

# Operators that read a value back: a program that does so may branch on data, which a step on meta does not have.
_READ_BACK = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "unique")
# A GPU's caching allocator rounds every tensor up to this (CUDACachingAllocator.cpp: kMinBlockSize).
_BLOCK_BYTES = 512
# Devices refuse these on operands of several types; some of their shape functions do not.
_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")
# Operators without cost on CPU and GPU: the profiler's marks, and copies of Python numbers.
_WITHOUT_COST = ("profiler::", "aten::lift_fresh", "aten::detach", "prim::")


class Watch(Hooks, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Traces every operator called while it is active; ``phase`` is set by the caller that runs the step."""

    def __init__(self, model: nn.Module, *, rounded: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.layer_calls: list[LayerCall] = []
        self.allocations: list[Allocation] = []
        self.phase = Phase.FORWARD
        self.mixed = ""  # the first product of two types
        self._rounded = rounded
        self._values = KnownValues()
        self._formats = FormatFlow({p.untyped_storage()._cdata for p in model.parameters()})
        self._open: list[tuple[str, int, nn.Module]] = []
        self._last_sequence = _next_sequence() - 1
        self._known: dict[int, None] = {}
        self._handles = hook_layers(model, self._enter, self._leave)

    @property
    def layer(self) -> str:
        """The innermost running layer."""
        return self._open[-1][0] if self._open else ""

    def ignore(self, tensors: Any) -> None:
        """Ignore the memory of ``tensors``, which exists before the step."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()._cdata] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func._schema.name)
        device_tensors = [t for t in tensors_in([*args, *kwargs.values()]) if t.is_meta]
        if device_tensors and name.removeprefix("aten::").rstrip("_") in _READ_BACK:
            values = [self._values.twin(t) for t in device_tensors]
            if self.phase == Phase.UPDATE and name == "aten::_local_scalar_dense" and values[0] is None:
                self._record(func, name, args, kwargs, device_tensors, None)
                return READ_IN_UPDATE
            if name != "aten::_local_scalar_dense" or values[0] is None:
                self._raise_data_dependent(name)
            self._record(func, name, args, kwargs, device_tensors, None)
            return func(*values)
        try:
            if name.startswith("aten::_foreach_"):
                result = lists_on_meta(func, name, args, kwargs)
            elif name in CUDNN_OPERATORS and device_tensors:
                result = cudnn_on_meta(func, name, args)
            else:
                result = func(*args, **kwargs)
        except NotImplementedError as error:
            if torch.Tag.dynamic_output_shape in func.tags:
                self._raise_data_dependent(name, "returns as many elements as its data say")
            raise WhatifError(
                f"predict: expected operators that run on shapes alone, got {name}{self._where()}, which cannot: "
                "remove it from the model, or record a run with `whatif collect`."
            ) from error
        if any(tensor.layout != torch.strided for tensor in tensors_in([result])):
            raise WhatifError(
                f"predict: expected dense tensors, got a sparse one from {name}{self._where()}, whose size depends on "
                "data: build the model without it (an embedding with sparse=False), or record a run with "
                "`whatif collect`."
            )
        result = as_on_device(name, args, result)
        self._values.follow(func, args, kwargs, result)
        if not name.startswith(_WITHOUT_COST):
            self._record(func, name, args, kwargs, device_tensors, result)
        if not self.mixed and name in _PRODUCTS and len({t.dtype for t in device_tensors}) > 1:
            types = " and ".join(dtype_name(t.dtype) for t in device_tensors[-2:])
            self.mixed = f"{name}{self._where()} multiplies {types}"
        return result

    def _raise_data_dependent(self, name: str, why: str = "reads a value of a tensor back") -> NoReturn:
        masked = self._open and isinstance(self._open[-1][2], nn.TransformerEncoder | nn.TransformerDecoder)
        hint = "tell it whether its mask is causal (is_causal, tgt_is_causal), or " if masked else ""
        raise WhatifError(
            f"predict: expected a step that does not depend on its data, got {name}{self._where()}, which "
            f"{why}: without data it is unknown; {hint}record a run with `whatif collect`."
        )

    def _where(self) -> str:
        return f" in layer {self.layer!r}" if self.layer else ""

    def _record(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], inputs: list[torch.Tensor], result: Any
    ) -> None:
        node: Any = torch._C._current_autograd_node()
        newest = _next_sequence() - 1
        sequence = built = newest if newest > self._last_sequence else -1
        if node is not None:
            sequence = int(node._sequence_nr())
            sequence = sequence if sequence < 2**62 else -1  # of a node without an operator
        self._last_sequence = newest
        results = tensors_in([result])
        meta = [t for t in results if t.is_meta]
        fresh = [] if func.is_view else meta
        # The results are written, new or in place, unless the operator is a view.
        outputs = tuple((tuple(t.shape), TYPE_NAMES.get(t.dtype, "unknown")) for t in fresh)
        on_device = bool(inputs or meta)
        share, casts = (1.0, 0)
        if not func.is_view and self.phase != Phase.UPDATE:
            share, casts = self._formats.follow(name, args, kwargs, result, self.phase)
        self.operations.append(
            Operation(
                name, *spelled(func, args, kwargs), self.phase, outputs, sequence,
                str(node.name()).rpartition("::")[2] if node is not None else "", on_device, share, casts,
                built if node is not None else -1,
            )
        )  # fmt: skip
        for tensor in meta:
            self._track_memory(tensor)

    def _track_memory(self, tensor: torch.Tensor) -> None:
        """Record when the memory of a tensor is allocated and freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key in self._known or not size:
            return
        self._known[key] = None
        birth = len(self.operations) - 1
        if self._rounded:
            size = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        weakref.finalize(storage, self._on_freed, key, birth, size).atexit = False

    def _on_freed(self, key: int, birth: int, size_bytes: int) -> None:
        self._known.pop(key, None)
        self.allocations.append(Allocation(birth, len(self.operations), size_bytes))

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._open.append((name, len(self.operations), module))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        _, first, _ = self._open.pop()
        if len(self.operations) > first:
            self.layer_calls.append(LayerCall(name, first, len(self.operations)))


def _next_sequence() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
