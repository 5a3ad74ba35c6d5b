"""Insert a synchronisation: a CPU call that returns when the GPU has done all that was launched before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from whatif.edit import reorder
from whatif.insert import NewTasks, insert
from whatif.types import TaskKind, Waits

if TYPE_CHECKING:
    from whatif.graph import TaskGraph

# Median return of a synchronisation after the GPU is done, over the traces of docs/design.md (5 to 15 us).
RETURN_NS = 8_000


def synchronize(graph: TaskGraph, after: npt.ArrayLike, *, call_ns: int, name: str, stream: int) -> TaskGraph:
    """See ``TaskGraph.synchronize``.

    ``stream`` is a thread's code, or ``ALL_STREAMS``; ``call_ns`` is the call's own work. Ids of tasks behind the first
    insertion change.
    """
    calls = insert(graph, NewTasks(after, name, TaskKind.RUNTIME, call_ns))
    waits = insert(calls.graph, NewTasks(calls.ids, name, TaskKind.WAIT, 0))
    old = waits.graph.waits
    table = Waits(
        np.concatenate([old.task, waits.ids]).astype(np.int32),
        np.concatenate([old.scope, np.full(len(waits.ids), stream)]).astype(np.int32),
        np.concatenate([old.lag_ns, np.full(len(waits.ids), RETURN_NS)]),
    )
    return reorder(waits.graph.replace(waits=table))[0]
