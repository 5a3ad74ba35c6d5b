"""Ranges of durations that were estimated: a recording of a predicted step carries them beside its events."""

from __future__ import annotations

from typing import Any

import numpy as np

from whatif.errors import WhatifError
from whatif.graph import TaskGraph
from whatif.types import Int64, TaskKind

# In the recorder's part of a recording: {"low_ns": [...], "high_ns": [...], ...} of one step's kernels in their order.
PREDICTED = "predicted"


def with_ranges(graph: TaskGraph) -> TaskGraph:
    """Give the graph with the ranges that its recording tells of its kernels and of the host; else as it is.

    Raises WhatifError where they do not fit the recording's kernels.
    """
    told = graph.info.metadata.get(PREDICTED)
    if not isinstance(told, dict):
        return graph
    factor = told.get("cpu_range_factor")
    if isinstance(factor, int | float) and not isinstance(factor, bool) and 1 <= factor <= 100:
        cpu = graph.on_cpu
        graph = graph.scale(cpu, 1.0, low=1 / factor, high=float(factor))
    kernels = np.flatnonzero(graph.kind == TaskKind.KERNEL)
    low, high = (_column(told.get(key), graph.info.path) for key in ("low_ns", "high_ns"))
    if not len(low) and not len(kernels):
        return graph
    if len(low) != len(high) or not len(low) or len(kernels) % len(low):
        raise WhatifError(
            f"{graph.info.path}: expected the ranges of all {len(kernels)} kernels of a predicted step, got "
            f"{len(low)} and {len(high)}; predict it again."
        )
    steps = len(kernels) // len(low)
    duration_ns = graph.duration_ns[kernels]
    return graph.with_duration(
        kernels, duration_ns,
        low_ns=np.minimum(np.tile(low, steps), duration_ns), high_ns=np.maximum(np.tile(high, steps), duration_ns),
    )  # fmt: skip


def _column(told: Any, path: str) -> Int64:
    if not isinstance(told, list) or not all(type(value) is int and 0 <= value < 2**60 for value in told):
        raise WhatifError(f"{path}: expected ranges of a predicted step in whole nanoseconds; predict it again.")
    return np.array(told, dtype=np.int64)
