"""Compiles loops with numba. Import only where the work pays for the compiler's start-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function) -> Function:
    """Compile on first use; keep the result on disk where a cache can be written."""
    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # numba found no folder that it may write to
        return cast(Function, numba.njit(nogil=True)(function))
