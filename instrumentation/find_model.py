"""Finds the model of a script: the modules that hold what it optimizes, or that it calls.

A script with an optimizer is not hooked for this: torch.compile would compile its model anew without the hooks.
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
    """Watches which modules the script calls that no other module calls, until `remove`."""

    def __init__(self, after: Callable[[nn.Module], None] | None = None) -> None:
        """Watch from now on; `after` is called at the end of each such call."""
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
        if depth == 0 and not any(module is known for known in self.found):
            self.found.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._local.depth = max(0, getattr(self._local, "depth", 0) - 1)
        if self._local.depth == 0 and self._after is not None:
            self._after(module)


class SeveralModels(nn.Module):
    """A parent of our own over models that have none."""


def choose_model(optimizers: list[torch.optim.Optimizer], called: list[nn.Module]) -> nn.Module:
    """Return the module that holds the optimized parameters, or a new parent of them where there are several.

    It need not be one that is called: a trainer calls `module.training_step`, which calls parts of the module. Without
    optimizers it is the `called` module that has parameters.
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
        taken = sum(child.startswith(name) for child, _ in parent.named_children())
        parent.add_module(f"{name}_{taken}" if taken else name, module)
    return parent


def _models_of(optimizers: list[torch.optim.Optimizer]) -> list[nn.Module]:
    """Return the outermost modules that hold optimized parameters, in the order of these."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    place: dict[int, int] = {}
    for tensor in (tensor for group in groups for tensor in group["params"]):
        place.setdefault(id(tensor), len(place))

    def first(module: nn.Module) -> int:
        return min((place[id(tensor)] for tensor in module.parameters() if id(tensor) in place), default=len(place))

    return sorted(_outermost([module for module in _live_modules() if first(module) < len(place)]), key=first)


def _live_modules() -> list[nn.Module]:
    # By their type: isinstance asks the object, and objects of other libraries answer with anything at all.
    kinds = ((thing, type(thing)) for thing in gc.get_objects())
    return [thing for thing, kind in kinds if issubclass(kind, nn.Module) and not issubclass(kind, SeveralModels)]


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Drop duplicates and the modules that are inside others."""
    distinct = {id(module): module for module in modules}
    inside = {id(child) for module in distinct.values() for child in module.modules() if child is not module}
    return [module for key, module in distinct.items() if key not in inside]
