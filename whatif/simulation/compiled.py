"""The hot loops, compiled with numba. Import this module only where the work pays for the compiler's start-up."""

from __future__ import annotations

import numpy as np

from whatif.graph.types import (
    Array,
    Bool,
    Int8,
    Int32,
    Int64,
)
from whatif.simulation.jit import jit


@jit
def sweep(
    thread: Int32, duration_ns: Int64, offsets: Int64, points: Int32, lags_ns: Int64, thread_lag_ns: Int64, times: Int64
) -> None:
    """Fill ``times`` with start (first half) and end (second half) of every task: the longest path in id order.

    ``points`` index ``times``: a dependency counts from the start or from the end of its source.
    """
    n = len(thread)
    free_ns = np.zeros(len(thread_lag_ns), dtype=np.int64)
    for task in range(n):
        t = thread[task]
        start_ns = free_ns[t]
        for row in range(offsets[task], offsets[task + 1]):
            reached_ns = times[points[row]] + lags_ns[row]
            if reached_ns > start_ns:
                start_ns = reached_ns
        end_ns = start_ns + duration_ns[task]
        times[task] = start_ns
        times[n + task] = end_ns
        free_ns[t] = max(end_ns + thread_lag_ns[t], 0)


@jit
def live_rows(offsets: Int64, points: Int32) -> tuple[Int32, int]:
    """Return each task a row for its ends, free again behind the last task that waits for it; and the rows in all.

    Row 0 takes the ends that nobody waits for.
    """
    n = len(offsets) - 1
    last = np.full(n, -1, dtype=np.int32)
    for task in range(n):
        for row in range(offsets[task], offsets[task + 1]):
            last[points[row] % n] = task
    rows = np.zeros(n, dtype=np.int32)
    spare = np.zeros(n, dtype=np.int32)
    n_spare, n_rows = 0, 1
    for task in range(n):
        if last[task] >= 0:
            if n_spare:
                n_spare -= 1
                rows[task] = spare[n_spare]
            else:
                rows[task] = n_rows
                n_rows += 1
        for row in range(offsets[task], offsets[task + 1]):
            source = points[row] % n
            if last[source] == task:
                last[source] = -1  # given back once, though a task may wait twice for another
                spare[n_spare] = rows[source]
                n_spare += 1
    return rows, n_rows


@jit
def sweep_scenarios(
    thread: Int32,
    duration_ns: Int64,
    slope_ns: Array,
    x: Array,
    offsets: Int64,
    points: Int32,
    lags_ns: Int64,
    thread_lag_ns: Int64,
    rows: Int32,
    n_rows: int,
    watched: Int64,
    n_watched: int,
) -> tuple[Array, Array]:
    """Sweep all scenarios at once; durations are ``duration_ns + slope_ns * x[s]``.

    ``rows`` come from ``live_rows``; ``watched`` is each task's row in the first result, -1 for none. Returns the ends
    of the watched tasks, shape (n_watched, n_scenarios), and the makespans (n_scenarios,).
    """
    n, scenarios = len(thread), len(x)
    ends = np.zeros((n_rows, scenarios))
    free = np.zeros((len(thread_lag_ns), scenarios))
    start = np.zeros(scenarios)
    makespan = np.zeros(scenarios)
    seen = np.zeros((n_watched, scenarios))
    for task in range(n):
        t, own = thread[task], rows[task]
        base, slope, lag_t = float(duration_ns[task]), slope_ns[task], float(thread_lag_ns[t])
        for s in range(scenarios):
            start[s] = free[t, s]
        for row in range(offsets[task], offsets[task + 1]):
            point, lag = points[row], float(lags_ns[row])
            if point >= n:
                source = rows[point - n]
                for s in range(scenarios):
                    reached = ends[source, s] + lag
                    start[s] = reached if reached > start[s] else start[s]
            else:
                # Only ends are kept: a start is the end less the duration.
                source, lag, slower = rows[point], lag - float(duration_ns[point]), slope_ns[point]
                for s in range(scenarios):
                    reached = ends[source, s] - slower * x[s] + lag
                    start[s] = reached if reached > start[s] else start[s]
        for s in range(scenarios):
            done = start[s] + base + slope * x[s]
            ends[own, s] = done
            after = done + lag_t
            free[t, s] = after if after > 0.0 else 0.0
            makespan[s] = done if done > makespan[s] else makespan[s]
        if watched[task] >= 0:
            for s in range(scenarios):
                seen[watched[task], s] = ends[own, s]
    return seen, makespan


@jit
def _before(a: int, b: int, ready_ns: Int64) -> bool:
    return bool(ready_ns[a] < ready_ns[b] or (ready_ns[a] == ready_ns[b] and a < b))


@jit
def meld(a: int, b: int, ready_ns: Int64, child: Int32, sibling: Int32) -> int:
    """Join two pairing heaps ordered by (ready time, id); -1 is the empty heap."""
    if a < 0:
        return b
    if b < 0:
        return a
    if not _before(a, b, ready_ns):
        a, b = b, a
    sibling[b] = child[a]
    child[a] = b
    return a


@jit
def without_root(root: int, ready_ns: Int64, child: Int32, sibling: Int32) -> int:
    """The heap without its root: children are paired left to right, then melded right to left."""
    paired = -1
    node = child[root]
    while node >= 0:
        first = node
        second = sibling[first]
        sibling[first] = -1
        if second < 0:
            node = -1
        else:
            node = sibling[second]
            sibling[second] = -1
        both = meld(first, second, ready_ns, child, sibling)
        sibling[both] = paired
        paired = both
    heap = -1
    while paired >= 0:
        following = sibling[paired]
        sibling[paired] = -1
        heap = meld(heap, paired, ready_ns, child, sibling)
        paired = following
    return heap


@jit
def _sooner(a: int, b: int, roots: Int32, free_ns: Int64, ready_ns: Int64) -> int:
    """Of two threads the one whose next task comes first by (start, ready time, id)."""
    if a < 0 or roots[a] < 0:
        return b
    if b < 0 or roots[b] < 0:
        return a
    task_a, task_b = roots[a], roots[b]
    start_a, start_b = max(ready_ns[task_a], free_ns[a]), max(ready_ns[task_b], free_ns[b])
    if start_a != start_b:
        return a if start_a < start_b else b
    return a if _before(task_a, task_b, ready_ns) else b


@jit
def frontier_simulation(
    thread: Int32,
    duration_ns: Int64,
    previous: Int32,
    following: Int32,
    ordered: Bool,
    offsets: Int64,
    targets: Int32,
    lags_ns: Int64,
    anchors: Int8,
    thread_lag_ns: Int64,
    times: Int64,
) -> int:
    """Algorithm 1 with the default schedule, for graphs in which a thread may choose; returns the tasks that ran.

    Each thread keeps its ready tasks in a pairing heap, and a tournament tree over the threads names the one that is
    next, so a frontier of any width costs a logarithm. ``previous`` and ``following`` are neighbours on a thread.
    """
    n, n_threads = len(thread), len(thread_lag_ns)
    ready_ns = np.zeros(n, dtype=np.int64)
    missing = np.zeros(n, dtype=np.int32)
    child = np.full(n, -1, dtype=np.int32)
    sibling = np.full(n, -1, dtype=np.int32)
    roots = np.full(n_threads, -1, dtype=np.int32)
    free_ns = np.zeros(n_threads, dtype=np.int64)
    for row in range(len(targets)):
        missing[targets[row]] += 1
    for task in range(n):
        if ordered[thread[task]] and previous[task] >= 0:
            missing[task] += 1
    for task in range(n):
        if missing[task] == 0:
            roots[thread[task]] = meld(roots[thread[task]], task, ready_ns, child, sibling)
    leaves = 1
    while leaves < n_threads:
        leaves *= 2
    winner = np.full(2 * leaves, -1, dtype=np.int32)
    for t in range(n_threads):
        winner[leaves + t] = t
    for node in range(leaves - 1, 0, -1):
        winner[node] = _sooner(winner[2 * node], winner[2 * node + 1], roots, free_ns, ready_ns)
    done = 0
    while True:
        t = winner[1]
        if t < 0 or roots[t] < 0:
            return done
        task = roots[t]
        roots[t] = without_root(task, ready_ns, child, sibling)
        child[task] = -1
        start_ns = max(ready_ns[task], free_ns[t])
        end_ns = start_ns + duration_ns[task]
        times[task] = start_ns
        times[n + task] = end_ns
        free_ns[t] = max(end_ns + thread_lag_ns[t], 0)
        done += 1
        if ordered[t] and following[task] >= 0:
            after = following[task]
            missing[after] -= 1
            if missing[after] == 0:
                roots[t] = meld(roots[t], after, ready_ns, child, sibling)
        node = (leaves + t) // 2
        while node >= 1:
            winner[node] = _sooner(winner[2 * node], winner[2 * node + 1], roots, free_ns, ready_ns)
            node //= 2
        for row in range(offsets[task], offsets[task + 1]):
            target = targets[row]
            reached_ns = (start_ns if anchors[row] == 1 else end_ns) + lags_ns[row]
            ready_ns[target] = max(ready_ns[target], reached_ns)
            missing[target] -= 1
            if missing[target] == 0:
                other = thread[target]
                roots[other] = meld(roots[other], target, ready_ns, child, sibling)
                node = (leaves + other) // 2
                while node >= 1:
                    winner[node] = _sooner(winner[2 * node], winner[2 * node + 1], roots, free_ns, ready_ns)
                    node //= 2
