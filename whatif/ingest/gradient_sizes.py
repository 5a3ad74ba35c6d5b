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
    if ACCUMULATE not in events.names:
        return ()
    accumulates = events.name == events.names.index(ACCUMULATE)
    middle = max((len(edges_ns) - 1) // 2, 0)
    window = edges_ns[middle : middle + 2] if rows is None else np.array([rows.backward_ns, rows.end_ns])
    first, last = np.searchsorted(events.start_ns, window).tolist() if len(window) == 2 else (0, len(events))
    sizes: dict[int, int] = {-1: 0}
    found = []
    for shape in events.shape[first:last][accumulates[first:last]].tolist():
        if shape not in sizes:
            dims, types, _ = events.shapes[shape]
            tensors = input_tensors(dims, types) or [None]
            sizes[shape] = tensors[0].size_bytes if tensors and tensors[0] is not None else 0
        found.append(sizes[shape])
    return tuple(found) if all(found) else ()
