"""The sweep over many groups of tasks at once, compiled. Import it only where the work pays for the compiler."""

from __future__ import annotations

import numpy as np

from whatif.graph.types import (
    Array,
    Bool,
    Int32,
    Int64,
)
from whatif.simulation.jit import jit


@jit
def sweep_groups(
    thread: Int32,
    duration_ns: Int64,
    groups: Int32,
    first: int,
    n_groups: int,
    factors: Array,
    offsets: Int64,
    points: Int32,
    lags_ns: Int64,
    thread_lag_ns: Int64,
    rows: Int32,
    n_rows: int,
    watched: Int64,
    n_watched: int,
    counted: Bool,
) -> tuple[Array, Array, Array, Array]:
    """Sweep the scenarios (group, factor) of ``n_groups`` groups from ``first`` on: times in that one are scaled.

    ``groups`` has shape (n_columns, n_tasks): a task is in one group of each column, -1 for none. Factors are at most
    1. ``rows`` come from ``live_rows``; ``watched`` is each task's row in the first two results, -1 for none. Returns
    the starts and the ends of the watched tasks, shape (n_watched, n_scenarios), the first start and the last end of
    the counted tasks (n_scenarios,). Whole numbers below 2^53 ns are exact.
    """
    n, n_factors = len(thread), len(factors)
    scenarios = n_groups * n_factors
    ends = np.zeros((n_rows, scenarios))
    free = np.zeros((len(thread_lag_ns), scenarios))
    start = np.zeros(scenarios)
    begin = np.full(scenarios, np.inf)
    until = np.zeros(scenarios)
    seen_start = np.zeros((n_watched, scenarios))
    seen_end = np.zeros((n_watched, scenarios))
    for task in range(n):
        t, own = thread[task], rows[task]
        base, lag_t = float(duration_ns[task]), float(thread_lag_ns[t])
        for s in range(scenarios):
            start[s] = free[t, s]
        for row in range(offsets[task], offsets[task + 1]):
            point, lag = points[row], float(lags_ns[row])
            if point >= n:
                source = rows[point - n]
                for s in range(scenarios):
                    reached = ends[source, s] + lag
                    start[s] = reached if reached > start[s] else start[s]
                continue
            # Only ends are kept: a start is the end less the duration.
            source, lasted = rows[point], float(duration_ns[point])
            for s in range(scenarios):
                reached = ends[source, s] - lasted + lag
                start[s] = reached if reached > start[s] else start[s]
            # Where the source is scaled it started later than that, for no factor is above 1.
            for column in range(len(groups)):
                group = groups[column, point] - first
                if 0 <= group < n_groups:
                    for f in range(n_factors):
                        s = group * n_factors + f
                        reached = ends[source, s] - np.rint(lasted * factors[f]) + lag
                        start[s] = reached if reached > start[s] else start[s]
        for s in range(scenarios):
            ends[own, s] = start[s] + base
        for column in range(len(groups)):
            group = groups[column, task] - first
            if 0 <= group < n_groups:
                for f in range(n_factors):
                    s = group * n_factors + f
                    ends[own, s] = start[s] + np.rint(base * factors[f])
        for s in range(scenarios):
            after = ends[own, s] + lag_t
            free[t, s] = after if after > 0.0 else 0.0
        if counted[task]:
            for s in range(scenarios):
                begin[s] = start[s] if start[s] < begin[s] else begin[s]
                until[s] = ends[own, s] if ends[own, s] > until[s] else until[s]
        if watched[task] >= 0:
            for s in range(scenarios):
                seen_start[watched[task], s] = start[s]
                seen_end[watched[task], s] = ends[own, s]
    return seen_start, seen_end, begin, until
