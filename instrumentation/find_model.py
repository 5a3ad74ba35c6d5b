"""Finds the model of a script: the modules with the optimized parameters, or the modules that it calls.

A script with an optimizer gets no hooks for this: their removal would make torch.compile recompile the model.
"""

import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .layers import Hooks


class OutermostModules(Hooks):
    """Collects the modules that the script itself calls, not another module, until `remove`."""

    def __init__(self, after: Callable[[nn.Module], None] | None = None) -> None:
        """Register the hooks; `after` is called at the end of each such call."""
        self.found: list[nn.Module] = []
        self._after = after
        self._local = threading.local()
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        depth = getattr(self._local, "depth", 0)
        self._local.depth = depth + 1
        if depth == 0 and not any(module is other for other in self.found):
            self.found.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._local.depth = max(0, getattr(self._local, "depth", 0) - 1)
        if self._local.depth == 0 and self._after is not None:
            self._after(module)


class SeveralModels(nn.Module):
    """A parent for models that have none in common."""


def choose_model(optimizers: list[torch.optim.Optimizer], called: list[nn.Module]) -> nn.Module:
    """Return the module that holds the optimized parameters, or a new parent if there are several.

    The script need not call it: a trainer calls `module.training_step`, which calls parts of the module. Without
    optimizers it is the `called` module with parameters.
    """
    if not optimizers:
        models = _outermost([module for module in called if any(True for _ in module.parameters())])
    else:
        models = _models_of(optimizers)
    if len(models) == 1:
        return models[0]
    parent = SeveralModels()
    for module in models:
        name = type(module).__name__
        n_same = sum(child.startswith(name) for child, _ in parent.named_children())
        parent.add_module(f"{name}_{n_same}" if n_same else name, module)
    return parent


def _models_of(optimizers: list[torch.optim.Optimizer]) -> list[nn.Module]:
    """Return the outermost modules that hold optimized parameters, in the order of those parameters."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rank: dict[int, int] = {}
    for tensor in (tensor for group in groups for tensor in group["params"]):
        rank.setdefault(id(tensor), len(rank))

    def first(module: nn.Module) -> int:
        return min((rank[id(tensor)] for tensor in module.parameters() if id(tensor) in rank), default=len(rank))

    return sorted(_outermost([module for module in _live_modules() if first(module) < len(rank)]), key=first)


def _live_modules() -> list[nn.Module]:
    # By type: isinstance reads the object's __class__, which objects of other libraries may override.
    kinds = ((obj, type(obj)) for obj in gc.get_objects())
    return [obj for obj, kind in kinds if issubclass(kind, nn.Module) and not issubclass(kind, SeveralModels)]


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Drop duplicates and the modules that are inside others."""
    distinct = {id(module): module for module in modules}
    inside = {id(child) for module in distinct.values() for child in module.modules() if child is not module}
    return [module for key, module in distinct.items() if key not in inside]
