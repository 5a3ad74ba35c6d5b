"""The sizes of a step's gradients, from autograd's operators in a recording with shapes."""

from __future__ import annotations

import numpy as np

from whatif.graph.types import Int64
from whatif.ingest.events import Events
from whatif.ingest.marks import ACCUMULATE
from whatif.ingest.op_cost import input_tensors
from whatif.ingest.step_rows import StepRows


def gradient_sizes(events: Events, rows: StepRows | None, edges_ns: Int64) -> tuple[int, ...]:
    """Return the bytes of each gradient of a steady step, in the order in which its last backward pass finishes them.

    ``rows`` are of that step; without them the middle step between ``edges_ns`` is taken, or the whole recording if it
    has no steps. Empty if the shape of one of its gradients was not recorded.
    """
    middle = max((len(edges_ns) - 1) // 2, 0)
    window_ns = edges_ns[middle : middle + 2] if rows is None else np.array([rows.backward_ns, rows.end_ns])
    return tuple(_accumulated(events, window_ns)[1].tolist())


def gradients_of_rows(events: Events, rows: StepRows) -> Int64 | None:
    """Return the bytes of the gradients of each row of a step, (n_rows,), which add up to ``gradient_sizes``.

    None if that is empty.
    """
    accumulates, size = _accumulated(events, np.array([rows.backward_ns, rows.end_ns]))
    if not len(size):
        return None
    found = np.zeros(len(rows.names), dtype=np.int64)
    np.add.at(found, rows.row_at(events.start_ns[accumulates], events.start_ns), size)
    return found


def _accumulated(events: Events, window_ns: Int64) -> tuple[Int64, Int64]:
    """The operators that complete a gradient in a window, and its bytes each; none if the shape of one is missing."""
    none = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    if ACCUMULATE not in events.names:
        return none
    first, last = np.searchsorted(events.start_ns, window_ns).tolist() if len(window_ns) == 2 else (0, len(events))
    accumulates = first + np.flatnonzero(events.name[first:last] == events.names.index(ACCUMULATE))
    sizes: dict[int, int] = {-1: 0}
    found = []
    for shape in events.shape[accumulates].tolist():
        if shape not in sizes:
            dims, types, _ = events.shapes[shape]
            tensors = input_tensors(dims, types) or [None]
            sizes[shape] = tensors[0].size_bytes if tensors and tensors[0] is not None else 0
        found.append(sizes[shape])
    return (accumulates, np.array(found, dtype=np.int64)) if all(found) else none
