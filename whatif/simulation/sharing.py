"""The tasks' use of shared resources: a GPU, a CPU core, a link. One attached column that transforms write.

A row gives a task's device, its share of that, and its link. ``whatif.simulation.rate_sharing`` computes the rates of
concurrent users of a resource; a graph without the column is simulated without sharing.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from whatif.graph.structure_cache import newest
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Int32, ThreadKind
from whatif.runtime.errors import WhatifError

# The attached column; rows of zeros, as for inserted tasks, use nothing.
USES = "uses"


class Role(IntEnum):
    """The role of a task among the others on its device."""

    NONE = 0
    HOLDS = 1  # has an exclusive share while it runs: a collective on its multiprocessors
    YIELDS = 2  # gets what the holders leave, independent of others of its role: a kernel beside a collective
    SHARES = 3  # shares what the holders leave fairly with others of this role: kernels of several streams


# A resource is represented by an execution thread: 1 + its code; 0 is none.
COLUMN = np.dtype(
    [
        ("device", np.int32),
        ("role", np.int8),
        ("compute", np.float64),  # share of the device's multiprocessors, or of a core, that the task uses alone
        ("memory", np.float64),  # share of the device's memory bandwidth that it uses alone
        ("slowed", np.float64),  # slowdown of a holder beside work that holds nothing; 0 for none
        ("link", np.int32),
        ("link_share", np.float64),  # share of the link that it uses alone
        ("lead_ns", np.int64),  # time before it uses anything: the latency of a transfer
    ]
)
Uses = npt.NDArray[Any]


def in_fixed_order(graph: TaskGraph) -> bool:
    """Return whether one sweep in id order simulates the graph: no thread chooses, and no task slows another."""
    return USES not in graph.attached and all(thread.ordered for thread in graph.threads)


def uses_of(graph: TaskGraph) -> Uses:
    """Return a copy of the column, shape (n_tasks,), zeros if no what-if has set a value."""
    found = graph.attached.get(USES)
    return np.zeros(len(graph), dtype=COLUMN) if found is None else found.copy()


# Compute kernels beside collectives took 18.9 % longer on average and 40 % at most on A100, H100, MI210 and MI250
# (arXiv 2507.03114): the upper end is 1.5 times the held share. At the lower end a new collective is not slowed.
HELD_AT_MOST, MOST_HELD = 1.5, 0.9


def at_bounds(graph: TaskGraph) -> tuple[TaskGraph, TaskGraph]:
    """Return the graph twice: with the least and the most that collectives and kernels may slow each other on a GPU.

    This applies to inserted collectives; for recorded ones the recording gives the slowdown.
    """
    streams = np.array([False] + [thread.kind == ThreadKind.STREAM for thread in graph.threads])
    uses, new = graph.attached[USES], np.flatnonzero(graph.start_ns < 0)
    new = new[uses["role"][new] == Role.HOLDS]
    new = new[streams[uses["device"][new]]]
    if not len(new):
        return graph, graph
    low, high = uses.copy(), uses.copy()
    low["slowed"][new] = 0.0
    for name in ("compute", "memory"):
        share = high[name][new]
        high[name][new] = np.maximum(share, np.minimum(share * HELD_AT_MOST, MOST_HELD))
    return graph.attach(**{USES: low}), graph.attach(**{USES: high})


def checked(graph: TaskGraph) -> tuple[Int32, dict[str, Array]]:
    """Return each task's row, shape (n_tasks,), and the rows' fields by name: the first row, of zeros, uses nothing.

    For a graph with the column. Raises WhatifError on an invalid row. Without a role a task uses no device. The result
    for the last column is cached: a prediction simulates three graphs that differ only in durations.
    """
    uses = graph.attached[USES]
    return newest(graph, "fields of uses", (uses, graph.threads), lambda: _fields(graph, uses))


def _fields(graph: TaskGraph, uses: Uses) -> tuple[Int32, dict[str, Array]]:
    if uses.dtype != COLUMN:
        raise WhatifError(
            f"simulate: the attached column {USES!r} is not one of whatif.simulation.sharing; give it another name."
        )
    used = np.flatnonzero((uses["device"] != 0) | (uses["link"] != 0))
    row = np.zeros(len(uses), dtype=np.int32)
    row[used] = np.arange(1, len(used) + 1)
    rows = np.zeros(len(used) + 1, dtype=COLUMN)
    # Numpy takes whole rows eight times faster than it indexes them, and five times faster than it assigns them.
    uses.take(used, out=rows[1:], mode="clip")
    fields = {name: rows[name].copy() for name in COLUMN.names or ()}
    for name in ("device", "link"):
        codes = fields[name]
        if not (int(codes.min()) >= 0 and int(codes.max()) <= len(graph.threads)):
            raise WhatifError(f"simulate: a task uses the {name} of a thread outside 0..{len(graph.threads) - 1}.")
    for name in ("compute", "memory", "slowed", "link_share", "lead_ns"):
        values = fields[name]
        if not (float(values.min()) >= 0 and float(values.max()) < 2**50):
            raise WhatifError(f"simulate: expected {name} of 0 or more for what a task uses, got another value.")
    fields["device"] = fields["device"] * (fields["role"] > 0)
    row[used[(fields["device"][1:] == 0) & (fields["link"][1:] == 0)]] = 0
    return row, fields
