"""A schedule by priority: which of the waiting transfers a channel takes next (Daydream, Algorithm 7, Schedule)."""

from __future__ import annotations

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array

# The attached column that shows how urgent a task is: the largest goes first.
PRIORITY = "priority"


def attached_priority(graph: TaskGraph) -> Array:
    """Return the column of that name, shape (n_tasks,); zeros where a graph has none."""
    return graph.attached.get(PRIORITY, np.zeros(len(graph), dtype=np.int64))
