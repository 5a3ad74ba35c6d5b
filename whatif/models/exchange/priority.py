"""Scheduling by priority: the waiting transfer that a channel takes next (Daydream, Algorithm 7, Schedule)."""

from __future__ import annotations

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array

# The attached column of priorities: the largest goes first.
PRIORITY = "priority"


def attached_priority(graph: TaskGraph) -> Array:
    """Return the attached priorities, shape (n_tasks,); zeros if the graph has none."""
    return graph.attached.get(PRIORITY, np.zeros(len(graph), dtype=np.int64))
