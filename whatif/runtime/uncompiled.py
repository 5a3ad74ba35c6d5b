"""Replaces the module ``cython`` if a loop runs as plain Python: Cython is needed to build, never to run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
compiled = False


class _NoGil(nullcontext[None]):
    def __call__(self, function: Function) -> Function:
        return function


nogil = _NoGil()


def cfunc(function: Function) -> Function:
    return function


cclass = final = inline = cfunc
longlong = int


def cast(kind: type, value: Any) -> Any:
    return kind(value)


def exceptval(*_: Any, **__: Any) -> Callable[[Function], Function]:
    return cfunc
