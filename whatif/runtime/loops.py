"""Loads a file of hot loops in one of two forms: compiled ahead of time, or the same file as plain Python.

Files of loops are named ``_*.py``; setup.py compiles each of them to a module with the suffix ``_aot``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PLAIN = os.environ.get("WHATIF_PLAIN") == "1"


def all_plain() -> bool:
    """Whether the loops of this installation run as plain Python; imports nothing heavy."""
    return PLAIN or find_spec("whatif.graph._loops_aot") is None


class Loops:
    """The loops of one file, as functions of numpy arrays; ``compiled`` is whether they are compiled."""

    def __init__(self, module: str, plain: bool = PLAIN) -> None:
        """Import the compiled form of ``module``, or the file itself if that was not built or if ``plain``."""
        self.module = module
        loaded = _imported(module, plain)
        self.compiled: bool = loaded.COMPILED
        for name, loop in vars(loaded).items():
            if callable(loop) and not name.startswith("_"):
                setattr(self, name, loop if self.compiled else _on_lists(loop))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"{self.module} has no loop {name!r}")


def _imported(module: str, plain: bool) -> ModuleType:
    if not plain:
        try:
            return import_module(f"{module}_aot")
        except ModuleNotFoundError:
            pass
    return import_module(module)


def _on_lists(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a plain Python loop to run on lists, which is faster, and copy its results back.

    Two-dimensional arrays are passed unchanged: plain loops work on their rows.
    """

    @wraps(loop)
    def called(*args: Any) -> Any:
        columns = [getattr(a, "ndim", 0) == 1 for a in args]
        lists = [a.tolist() if column else a for a, column in zip(args, columns, strict=True)]
        result = loop(*lists)
        for array, column, values in zip(args, columns, lists, strict=True):
            if column and array.flags.writeable:
                array[...] = values
        return result

    return called
