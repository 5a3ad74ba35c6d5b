"""The graph's hot loops, compiled with numba. Import only where the work pays for the compiler's start-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

from whatif.graph.types import Int8, Int32, Int64

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function) -> Function:
    """Compile on first use; keep the result on disk where a cache can be written."""
    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # numba found no folder that it may write to
        return cast(Function, numba.njit(nogil=True)(function))


@jit
def group_by_target(
    n_tasks: int,
    source: Int32,
    target: Int32,
    lags_ns: Int64,
    anchors: Int8,
    offsets: Int64,
    points: Int32,
    lags: Int64,
) -> None:
    """Fill ``offsets``, shape (n_tasks + 1,), and by target the indices into (starts, ends) and the lags: counted."""
    for row in range(len(target)):
        offsets[target[row] + 1] += 1
    for task in range(n_tasks):
        offsets[task + 1] += offsets[task]
    # offsets[task] runs to the end of the task's rows, which is where the next one's begin: shifted back below.
    for row in range(len(target)):
        at = offsets[target[row]]
        offsets[target[row]] = at + 1
        points[at] = source[row] + (n_tasks if anchors[row] == 0 else 0)
        lags[at] = lags_ns[row]
    for task in range(n_tasks, 0, -1):
        offsets[task] = offsets[task - 1]
    offsets[0] = 0
