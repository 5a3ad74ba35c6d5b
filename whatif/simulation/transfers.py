"""What is known of a transfer that a what-if made: its latency and its number of workers, as attached columns."""

from __future__ import annotations

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Int64

# The part of a duration that no bandwidth shortens, and how many workers exchange.
LATENCY, WORKERS = "latency ns", "workers"


def latency_of(graph: TaskGraph) -> Int64:
    """Return the part of each task's duration that is latency, ns, shape (n_tasks,); 0 where no what-if told it."""
    return np.asarray(graph.attached.get(LATENCY, np.zeros(len(graph), dtype=np.int64)), dtype=np.int64)


def workers_of(graph: TaskGraph) -> Int64:
    """Return how many workers each transfer of a what-if is between, shape (n_tasks,); 0 for all other tasks."""
    return np.asarray(graph.attached.get(WORKERS, np.zeros(len(graph), dtype=np.int64)), dtype=np.int64)
