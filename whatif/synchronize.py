"""Insert a synchronisation: a CPU call that returns when the GPU has done all that was launched before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from whatif.insert import NewTasks, insert
from whatif.types import TaskKind

if TYPE_CHECKING:
    from whatif.graph import TaskGraph

# How long after the GPU is done a waiting call returns, where a trace shows none: 5 to 15 us in the recordings of
# docs/accuracy.md.
RETURN_NS = 8_000


def synchronize(graph: TaskGraph, after: npt.ArrayLike, *, call_ns: int, name: str, stream: int) -> TaskGraph:
    """See ``TaskGraph.synchronize``.

    ``stream`` is a thread's code, or ``ALL_STREAMS``; ``call_ns`` is the call's own work. Ids of tasks behind the first
    insertion change.
    """
    return insert(graph, synchronizing(after, call_ns=call_ns, name=name, stream=stream)).graph


def synchronizing(after: npt.ArrayLike, *, call_ns: int, name: str, stream: int) -> NewTasks:
    """Give the tasks of such calls, each behind one of the tasks ``after``: the call, and its wait."""
    places = np.atleast_1d(np.asarray(after))
    kinds = np.tile([TaskKind.RUNTIME, TaskKind.WAIT], len(places))
    return NewTasks(
        np.repeat(places, 2), name, kinds, np.where(kinds == TaskKind.WAIT, 0, call_ns), waits_for=stream,
        return_ns=RETURN_NS,
    )  # fmt: skip
