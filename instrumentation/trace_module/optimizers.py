"""Optimizers of torch.optim on meta tensors, in the implementation that a device would use."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from whatif.runtime.errors import WhatifError

_CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}
IMPLEMENTATIONS = ("foreach", "fused", "for-loop", "master")
_FUSED = ("adam", "adamw")
_HALF = (torch.float16, torch.bfloat16)
# torch loops over its parameters unless foreach is requested, as it is used when memory is short.
_LOOPS = ("adafactor",)
# Any value that an update of meta tensors reads back (Adafactor: norms): no branch of torch.optim depends on it.
READ_IN_UPDATE = 1.0
_ELEMENTWISE_LISTS = frozenset(
    f"aten::_foreach_{name}"
    for name in ("add", "sub", "mul", "div", "sqrt", "neg", "lerp", "addcmul", "addcdiv", "maximum", "pow", "copy")
)


def make_optimizer(option: str, model: nn.Module, *, on_cpu: bool) -> torch.optim.Optimizer:
    """Return the optimizer "adam", "adamw:fused", "sgd:for-loop" ... of the model's parameters; "none" updates nothing.

    Without an implementation it is torch's default: lists of tensors (foreach) on a GPU, a loop on a CPU.
    "adamw:master" is the fused one on fp32 copies of parameters in half precision.
    """
    name, _, implementation = option.partition(":")
    if name == "none":
        return _Nothing(model)
    if name not in _CLASSES or implementation not in ("", *IMPLEMENTATIONS):
        raise WhatifError(
            f"predict: expected --optimizer NAME[:HOW] with one of {', '.join([*_CLASSES, 'none'])} and one of "
            f"{', '.join(IMPLEMENTATIONS)}, got {option!r}."
        )
    if implementation in ("fused", "master") and name not in _FUSED:
        raise WhatifError(f"predict: expected {implementation} with one of {', '.join(_FUSED)}, got {option!r}.")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise WhatifError("predict: expected a model with parameters to train, got none; use --inference.")
    if implementation == "master":
        if not any(p.dtype in _HALF for p in parameters):
            raise WhatifError(f"predict: expected --dtype fp16 or bf16 with --optimizer {option}, got neither.")
        return MasterWeights(parameters, _CLASSES[name][0])
    implementation = implementation or ("for-loop" if on_cpu or name in _LOOPS else "foreach")
    optimizer_class, options = _CLASSES[name]
    flags: dict[str, Any] = {"fused": True} if implementation == "fused" else {"foreach": implementation == "foreach"}
    with fused_on_meta():
        optimizer: torch.optim.Optimizer = optimizer_class(parameters, **options, **flags)
    return optimizer


def prepare_state(optimizer: torch.optim.Optimizer) -> None:
    """Run the optimizer's first step, which creates its state, on temporary gradients."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    mode: Any = _ListsOnMeta  # untyped
    with mode():
        optimizer.step()
    optimizer.zero_grad()


class _ListsOnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func._schema.name)
        if name == "aten::_local_scalar_dense" and args[0].is_meta:
            return READ_IN_UPDATE
        return lists_on_meta(func, name, args, kwargs) if "_foreach_" in name else func(*args, **(kwargs or {}))


def lists_on_meta(func: Any, name: str, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
    """Run an operator on lists of meta tensors; an elementwise one only allocates its results.

    torch would visit every tensor several times in Python, which took half of the time of a whole step.
    """
    tensors = args[0]
    if not all(t.is_meta for t in tensors) or name.rstrip("_") not in _ELEMENTWISE_LISTS:
        return func(*args, **(kwargs or {}))
    return None if name.endswith("_") else [torch.empty_like(t) for t in tensors]


@contextmanager
def fused_on_meta() -> Iterator[None]:
    """Let torch's fused optimizers accept meta tensors: their operators support them, only a check does not."""
    # The name torch.optim.optimizer is not reachable as an attribute.
    module = importlib.import_module("torch.optim.optimizer")
    devices = module._get_fused_kernels_supported_devices
    with patch.object(module, "_get_fused_kernels_supported_devices", lambda: [*devices(), "meta"]):
        yield


class MasterWeights(torch.optim.Optimizer):
    """fp32 copies of parameters in half precision, updated and copied back.

    As in a step of Megatron-LM's Float16OptimizerWithFloat16Params: gradients are copied to fp32, unscaled (fp16),
    clipped by the norm of all, and the copies are updated by a fused optimizer.
    """

    def __init__(self, parameters: list[nn.Parameter], optimizer_class: type[torch.optim.Optimizer]) -> None:
        super().__init__(parameters, {"fused": True})
        self._parameters = parameters
        self._copies = [p.detach().float() if p.dtype in _HALF else p for p in parameters]
        self._scaled = any(p.dtype == torch.float16 for p in parameters)
        with fused_on_meta():
            flags: dict[str, Any] = {"fused": True}
            self._inner = optimizer_class(self._copies, **flags)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter once."""
        used = [(p, copy) for p, copy in zip(self._parameters, self._copies, strict=True) if p.grad is not None]
        halves = [(p, copy) for p, copy in used if p is not copy]
        halved = [p.grad for p, _ in halves if p.grad is not None]
        wide = [torch.empty_like(copy) for _, copy in halves]
        torch._foreach_copy_(wide, halved)
        for (_, copy), gradient in zip(halves, wide, strict=True):
            copy.grad = gradient
        gradients = [copy.grad for _, copy in used if copy.grad is not None]
        if self._scaled:
            torch._foreach_mul_(gradients, 1.0)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (1.0 / norm).clamp(max=1.0))
        self._inner.step()
        torch._foreach_copy_([p for p, _ in halves], [copy for _, copy in halves])
        for p, copy in used:
            self.state[p] = {**self._inner.state[copy], **({} if p is copy else {"master": copy})}
        for _, copy in halves:
            copy.grad = None


class _Nothing(torch.optim.Optimizer):
    """No update: gradients are computed and dropped."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""
