# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# mypy: disable-error-code="valid-type, no-any-return, untyped-decorator"
"""The hot loops of the task graph: one source, compiled ahead of time where a compiler is at hand (whatif.loops)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import cython  # what the compiler reads; nothing imports Cython at run time
else:
    from whatif import uncompiled as cython

COMPILED = cython.compiled


def group_by_target(
    n_tasks: cython.Py_ssize_t,
    source: cython.const[cython.int][::1],
    target: cython.const[cython.int][::1],
    lags_ns: cython.const[cython.longlong][::1],
    anchors: cython.const[cython.schar][::1],
    offsets: cython.longlong[::1],
    points: cython.int[::1],
    lags: cython.longlong[::1],
) -> None:
    """Fill ``offsets``, shape (n_tasks + 1,), and by target the indices into (starts, ends) and the lags: counted."""
    row: cython.Py_ssize_t
    task: cython.Py_ssize_t
    at: cython.longlong
    n_rows: cython.Py_ssize_t = len(target)
    with cython.nogil:
        for row in range(n_rows):
            offsets[target[row] + 1] += 1
        for task in range(n_tasks):
            offsets[task + 1] += offsets[task]
        # offsets[task] runs to the end of the task's rows, which is where the next one's begin: shifted back below.
        for row in range(n_rows):
            at = offsets[target[row]]
            offsets[target[row]] = at + 1
            points[at] = source[row] + (n_tasks if anchors[row] == 0 else 0)
            lags[at] = lags_ns[row]
        for task in range(n_tasks, 0, -1):
            offsets[task] = offsets[task - 1]
        offsets[0] = 0
