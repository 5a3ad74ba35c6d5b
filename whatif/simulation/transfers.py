"""What is known of a transfer that a what-if made: its latency and its number of workers, as attached columns."""

from __future__ import annotations

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Int64

# The part of a duration that no bandwidth shortens, and how many workers exchange.
LATENCY, WORKERS = "latency ns", "workers"
# Of transfers between the parts of one model: they are no exchange of gradients, which may still be put in.
ACTIVATIONS = "exchanges activations"


def latency_of(graph: TaskGraph) -> Int64:
    """Return the part of each task's duration that is latency, ns, shape (n_tasks,); 0 where no what-if told it."""
    return np.asarray(graph.attached.get(LATENCY, np.zeros(len(graph), dtype=np.int64)), dtype=np.int64)


def of_activations(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the transfers between the parts of one model that a what-if put in."""
    return np.asarray(graph.attached.get(ACTIVATIONS, np.zeros(len(graph), dtype=np.bool_)), dtype=np.bool_)


def workers_of(graph: TaskGraph) -> Int64:
    """Return how many workers each transfer of a what-if is between, shape (n_tasks,); 0 for all other tasks."""
    return np.asarray(graph.attached.get(WORKERS, np.zeros(len(graph), dtype=np.int64)), dtype=np.int64)
