"""Many scenarios in one sweep: in each, the tasks of one group are scaled, and all others keep their time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    Int32,
    Int64,
)
from whatif.runtime.errors import WhatifError
from whatif.simulation.sharing import in_fixed_order
from whatif.simulation.simulator import BLOCK, live_rows, simulate, sweeps


class GroupTimes(Struct, frozen=True):
    """The observed times of each scenario, ns: ``[..., group, factor]``."""

    start_ns: Array  # of the observed tasks, shape (n_observed, n_groups, n_factors)
    end_ns: Array
    begin_ns: Array  # the first start of the counted tasks, shape (n_groups, n_factors)
    until_ns: Array  # their last end


def simulate_groups(
    graph: TaskGraph, groups: Int32, n_groups: int, factors: npt.ArrayLike, *, observed: Int64, counted: Bool
) -> GroupTimes:
    """Simulate every scenario (g, f), in which the tasks of group g last ``factors[f]`` times as long, in one sweep.

    ``groups`` has shape (n_columns, n_tasks): the group of each task in each column, -1 for none; a group belongs to
    one column. Factors lie between 0 and 1. Each result is that of ``simulate`` on the scaled graph, to the
    nanosecond. If a thread's order is free, the scenarios are simulated one by one. Raises WhatifError on a factor
    out of range.
    """
    scales = np.asarray(factors, dtype=np.float64)
    if not np.all((scales >= 0) & (scales <= 1)):
        raise WhatifError(f"simulate_groups: expected factors from 0 to 1, got {scales.tolist()}.")
    if not in_fixed_order(graph):
        return _one_by_one(graph, groups, n_groups, scales, observed, counted)
    (offsets, points, lags_ns), thread_lag_ns = graph.incoming, graph.thread_lag_ns
    rows, n_rows = live_rows(graph)
    watched, place = np.unique(observed, return_inverse=True)
    result = _empty_times(observed, n_groups, len(scales))
    block_size = max(BLOCK // max(len(scales), 1), 1)
    for first in range(0, n_groups, block_size):
        n_block = min(block_size, n_groups - first)
        ends, free, begin, until, seen_start, seen_end = (
            np.zeros((height, n_block * len(scales)))
            for height in (n_rows, len(graph.threads), 1, 1, len(watched), len(watched))
        )
        begin[:] = np.inf
        sweeps.sweep_groups(
            graph.thread, graph.duration_ns, np.ascontiguousarray(groups, dtype=np.int32), first, n_block, scales,
            offsets, points, lags_ns, thread_lag_ns, rows, watched, counted.view(np.uint8), ends, free, begin, until,
            seen_start, seen_end,
        )  # fmt: skip
        block, shape = slice(first, first + n_block), (n_block, len(scales))
        result.start_ns[:, block] = seen_start.reshape(-1, *shape)[place]
        result.end_ns[:, block] = seen_end.reshape(-1, *shape)[place]
        result.begin_ns[block], result.until_ns[block] = begin.reshape(shape), until.reshape(shape)
    return result


def _one_by_one(
    graph: TaskGraph, groups: Int32, n_groups: int, factors: Array, observed: Int64, counted: Bool
) -> GroupTimes:
    result = _empty_times(observed, n_groups, len(factors))
    for group in range(n_groups):
        scaled = (groups == group).any(axis=0)
        for place, factor in enumerate(factors.tolist()):
            duration_ns = np.where(scaled, np.rint(graph.duration_ns * factor), graph.duration_ns).astype(np.int64)
            timeline = simulate(graph.replace(duration_ns=duration_ns))
            start_ns, end_ns = timeline.start_ns, timeline.end_ns
            result.start_ns[:, group, place], result.end_ns[:, group, place] = start_ns[observed], end_ns[observed]
            result.begin_ns[group, place] = start_ns[counted].astype(np.float64).min(initial=np.inf)
            result.until_ns[group, place] = end_ns[counted].max(initial=0)
    return result


def _empty_times(observed: Int64, n_groups: int, n_factors: int) -> GroupTimes:
    start_ns, end_ns = (np.zeros((len(observed), n_groups, n_factors)) for _ in range(2))
    begin_ns, until_ns = (np.zeros((n_groups, n_factors)) for _ in range(2))
    return GroupTimes(start_ns, end_ns, begin_ns, until_ns)
