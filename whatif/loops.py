"""Chooses between the two forms of a file of hot loops: compiled ahead of time, or the same file as plain Python.

Files of loops are named ``_*.py``; setup.py compiles each of them to a module with ``_aot`` behind its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

PLAIN = os.environ.get("WHATIF_PLAIN") == "1"


class Loops:
    """The loops of one file, as functions of numpy arrays. ``compiled`` says which form they have."""

    def __init__(self, module: str, plain: bool = PLAIN) -> None:
        """Import the compiled form of ``module`` or, where it was not built or is not wanted, the file itself."""
        self._module = _imported(module, plain)
        self.compiled: bool = self._module.COMPILED

    def __getattr__(self, name: str) -> Callable[..., Any]:
        loop = getattr(self._module, name)
        found: Callable[..., Any] = loop if self.compiled else _on_lists(loop)
        setattr(self, name, found)
        return found


def _imported(module: str, plain: bool) -> ModuleType:
    if not plain:
        try:
            return import_module(f"{module}_aot")
        except ModuleNotFoundError:
            pass
    return import_module(module)


def _on_lists(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loop that plain Python runs on lists, which is quicker; what it wrote is copied back."""

    @wraps(loop)
    def called(*args: Any) -> Any:
        given = [a.tolist() if isinstance(a, np.ndarray) else a for a in args]
        result = loop(*given)
        for array, values in zip(args, given, strict=True):
            if isinstance(array, np.ndarray) and array.flags.writeable:
                array[...] = values
        return result

    return called
