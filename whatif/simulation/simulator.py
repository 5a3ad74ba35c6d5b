"""The simulator: Daydream's Algorithm 1, with an override-able schedule and a fast path where no choice is left.

Daydream §4.1, Algorithm 1, with gaps as tasks of their own (its literal form adds a task's gap to every child, also on
other threads) and with dependencies that carry a lag and count from the start or the end of their source.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from whatif.errors import WhatifError
from whatif.graph.order import outgoing
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Dependencies,
    Int32,
    Int64,
)
from whatif.simulation.sharing import USES, at_bounds
from whatif.simulation.timeline import Timeline

# Tasks simulated in plain Python before the compiled loops take over: they need 0.6 s to load, plain Python 0.3 to
# 0.7 us a task (docs/performance.md).
PLAIN_TASKS = 600_000
_plain_tasks_done = 0


@dataclass(slots=True)
class Frontier:
    """The state that a schedule function sees: the tasks that are ready to run, and when each thread is free.

    ``ready_ns`` maps the id of each ready task to the time from which it can run; ``free_ns`` lists when each thread
    becomes free; ``graph`` has all columns, and ``thread`` is its thread column as a list, which is faster to read
    one by one. A schedule keeps its own state between picks in ``memory``.
    To delay a ready task, a schedule raises the task's entry in ``ready_ns``.
    """

    graph: TaskGraph
    ready_ns: dict[int, int]
    free_ns: list[int]
    thread: list[int]
    memory: dict[str, Any] = field(default_factory=dict)

    def start_ns(self, task: int) -> int:
        """Return the earliest start of a ready task: it is ready and its thread is free, ns."""
        return max(self.ready_ns[task], self.free_ns[self.thread[task]])

    def earliest(self) -> int:
        """Return the ready task that starts first, ties by (start, ready time, task id): the default schedule."""
        free_ns, thread = self.free_ns, self.thread
        best, best_key = -1, (0, 0, 0)
        for task, ready_ns in self.ready_ns.items():
            free = free_ns[thread[task]]
            key = (ready_ns if ready_ns > free else free, ready_ns, task)
            if best < 0 or key < best_key:
                best, best_key = task, key
        return best


Schedule = Callable[[Frontier], int]


def simulate(graph: TaskGraph, schedule: Schedule | None = None) -> Timeline:
    """Simulate the graph and return its timeline.

    Without ``schedule`` every task starts as early as it can, ties by (start, ready time, task id). Raises WhatifError
    on a cycle, or if ``schedule`` picks a task that is not ready. Tasks that share a resource, as declared by a
    transform (``whatif.simulation.sharing``), slow each other down.
    """
    if schedule is not None:
        times = _with_schedule(graph, schedule)
    elif USES in graph.attached:
        times = rate_sharing().simulate_shared(graph)
    elif all(thread.ordered for thread in graph.threads):
        times = _swept(graph, graph.duration_ns)
    else:
        times = _with_free_threads(graph)
    return Timeline(graph, times[: len(graph)], times[len(graph) :])


def simulate_bounds(graph: TaskGraph, schedule: Schedule | None = None) -> tuple[Timeline, Timeline]:
    """Return the timelines with all durations, and what tasks slow one another by, at their low and high bounds."""
    low, high = at_bounds(graph) if USES in graph.attached else (graph, graph)
    return (
        simulate(low.replace(duration_ns=graph.low_ns), schedule),
        simulate(high.replace(duration_ns=graph.high_ns), schedule),
    )


def simulate_scenarios(
    graph: TaskGraph, slope_ns: npt.ArrayLike, x: npt.ArrayLike, observed: npt.ArrayLike = ()
) -> tuple[Array, Array]:
    """Simulate every scenario x[s], in which task i lasts ``duration_ns[i] + slope_ns[i] * x[s]``, in one sweep.

    Returns the ends in ns of the tasks ``observed``, shape (n_observed, n_scenarios), and the makespans in ns, shape
    (n_scenarios,). Raises WhatifError if a thread's order is free, because a schedule has to choose in each scenario.
    """
    from whatif.simulation import compiled

    if USES in graph.attached:
        raise WhatifError(
            "simulate_scenarios: expected tasks that share nothing, got ones that slow one another; "
            "simulate scenarios one by one."
        )
    if not all(thread.ordered for thread in graph.threads):
        raise WhatifError("simulate_scenarios: expected every thread in fixed order; simulate scenarios one by one.")
    offsets, points, lags_ns, thread_lag_ns = _prepared(graph)
    values, slopes = np.asarray(x, dtype=np.float64), np.asarray(slope_ns, dtype=np.float64)
    rows, n_rows = compiled.live_rows(offsets, points)
    wanted = np.asarray(observed, dtype=np.int64)
    watched = np.full(len(graph), -1, dtype=np.int64)
    distinct, place = np.unique(wanted, return_inverse=True)
    watched[distinct] = np.arange(len(distinct))
    # Blocks of 128 scenarios keep the rows that are still waited for in the second-level cache.
    blocks = [
        compiled.sweep_scenarios(
            graph.thread, graph.duration_ns, slopes, values[first : first + 128], offsets, points, lags_ns,
            thread_lag_ns, rows, n_rows, watched, len(distinct),
        )
        for first in range(0, max(len(values), 1), 128)
    ]  # fmt: skip
    return np.concatenate([b[0] for b in blocks], axis=1)[place], np.concatenate([b[1] for b in blocks])


def _prepared(graph: TaskGraph) -> tuple[Int64, Int32, Int64, Int64]:
    """Dependencies grouped by target, as indices into (starts, ends), and the lag of each thread."""
    thread_lag_ns = np.array([thread.lag_ns for thread in graph.threads], dtype=np.int64)
    return *graph.incoming, thread_lag_ns


def use_compiled(n_tasks: int) -> bool:
    """Say whether the compiled loops should run a simulation of ``n_tasks``, counting what plain Python has done."""
    global _plain_tasks_done
    if "whatif.simulation.compiled" in sys.modules or _plain_tasks_done + n_tasks > PLAIN_TASKS:
        return True
    _plain_tasks_done += n_tasks
    return False


def rate_sharing() -> ModuleType:
    """Return the module that simulates tasks which share what they run on; most graphs do not need it."""
    from whatif.simulation import rate_sharing

    return rate_sharing


def _swept(graph: TaskGraph, duration_ns: Int64) -> Int64:
    offsets, points, lags_ns, thread_lag_ns = _prepared(graph)
    if use_compiled(len(graph)):
        from whatif.simulation import compiled

        times = np.zeros(2 * len(graph), dtype=np.int64)
        compiled.sweep(graph.thread, duration_ns, offsets, points, lags_ns, thread_lag_ns, times)
        return times
    return np.array(
        plain_sweep(
            graph.thread.tolist(), duration_ns.tolist(), offsets.tolist(), points.tolist(), lags_ns.tolist(),
            thread_lag_ns.tolist(),
        ),
        dtype=np.int64,
    )  # fmt: skip


def plain_sweep(
    thread: Sequence[int],
    duration_ns: Sequence[int],
    offsets: Sequence[int],
    points: Sequence[int],
    lags_ns: Sequence[int],
    thread_lag_ns: Sequence[int],
) -> list[int]:
    """Return start and end times, one list behind the other: ``compiled.sweep`` in plain Python."""
    n = len(thread)
    times = [0] * (2 * n)
    free_ns = [0] * len(thread_lag_ns)
    first = 0
    for task in range(n):
        t = thread[task]
        start_ns = free_ns[t]
        last = offsets[task + 1]
        while first < last:
            reached_ns = times[points[first]] + lags_ns[first]
            if reached_ns > start_ns:
                start_ns = reached_ns
            first += 1
        end_ns = start_ns + duration_ns[task]
        times[task] = start_ns
        times[n + task] = end_ns
        free = end_ns + thread_lag_ns[t]
        free_ns[t] = free if free > 0 else 0
    return times


def outgoing_dependencies(graph: TaskGraph) -> tuple[Int64, Dependencies]:
    """Return all dependencies by source, and where each task's begin among them, shape (n_tasks + 1,)."""
    dependencies = Dependencies.concatenate([graph.dependencies, graph.derived])
    offsets, rows = outgoing(len(graph), dependencies)
    return offsets, dependencies.take(rows)


def _with_free_threads(graph: TaskGraph) -> Int64:
    if not use_compiled(8 * len(graph)):  # plain Python takes about eight times as long as for a sweep
        return _by_schedule(graph, Frontier.earliest)
    from whatif.simulation import compiled

    n = len(graph)
    offsets, dependencies = outgoing_dependencies(graph)
    times = np.zeros(2 * n, dtype=np.int64)
    previous, following = graph.neighbours
    done = compiled.frontier_simulation(
        graph.thread, graph.duration_ns, previous, following,
        np.array([thread.ordered for thread in graph.threads], dtype=np.bool_),
        offsets, dependencies.target, dependencies.lag_ns, dependencies.anchor,
        np.array([thread.lag_ns for thread in graph.threads], dtype=np.int64), times,
    )  # fmt: skip
    if done < n:
        raise cycle(n - done)
    return times


def _with_schedule(graph: TaskGraph, schedule: Schedule) -> Int64:
    """Simulate with a schedule that somebody else wrote. Raises WhatifError, naming it, where it fails."""
    run = rate_sharing().by_schedule if USES in graph.attached else _by_schedule
    try:
        return run(graph, schedule)
    except (WhatifError, MemoryError):
        raise
    # Around the whole loop, because a handler for each pick would slow it down. What is not an int fails in the loop.
    except (Exception, SystemExit) as error:
        code = getattr(schedule, "__code__", None)
        where = f" of {code.co_filename}" if code is not None else ""
        raise WhatifError(
            f"{getattr(schedule, '__name__', 'schedule')}(){where} failed: {type(error).__name__}: {error}; "
            "it has to return one of the keys of frontier.ready_ns, and --debug shows where."
        ) from error


def _by_schedule(graph: TaskGraph, schedule: Schedule) -> Int64:
    """Algorithm 1 as the paper writes it: pick from the frontier, run, release the children."""
    n = len(graph)
    offsets_array, dependencies = outgoing_dependencies(graph)
    offsets: list[int] = offsets_array.tolist()
    # One tuple a dependency is quicker to walk than three columns.
    edges: list[tuple[int, int, int]] = list(
        zip(dependencies.target.tolist(), dependencies.lag_ns.tolist(), dependencies.anchor.tolist(), strict=True)
    )
    ordered = np.array([thread.ordered for thread in graph.threads], dtype=np.bool_)
    previous, following_array = graph.neighbours
    missing_array = np.bincount(dependencies.target, minlength=n) + (ordered[graph.thread] & (previous >= 0))
    following: list[int] = np.where(ordered[graph.thread], following_array, -1).tolist()
    missing: list[int] = missing_array.tolist()
    duration_ns: list[int] = graph.duration_ns.tolist()
    lag_ns = [thread.lag_ns for thread in graph.threads]
    reached_ns = [0] * n
    starts, ends = [0] * n, [0] * n

    thread: list[int] = graph.thread.tolist()
    free_ns = [0] * len(graph.threads)
    ready_ns = {int(task): 0 for task in np.flatnonzero(missing_array == 0)}
    frontier = Frontier(graph, ready_ns, free_ns, thread)
    done = 0
    while ready_ns:
        task = schedule(frontier)
        ready = ready_ns.pop(task, None)
        if ready is None:
            raise not_ready(task, len(ready_ns))
        t = thread[task]
        start = free_ns[t]
        if ready > start:
            start = ready
        end = start + duration_ns[task]
        starts[task], ends[task] = start, end
        free = end + lag_ns[t]
        free_ns[t] = free if free > 0 else 0
        done += 1
        after = following[task]
        if after >= 0:
            missing[after] -= 1
            if not missing[after]:
                ready_ns[after] = reached_ns[after]
        for target, lag, anchor in edges[offsets[task] : offsets[task + 1]]:
            time = (start if anchor else end) + lag
            if time > reached_ns[target]:
                reached_ns[target] = time
            missing[target] -= 1
            if not missing[target]:
                ready_ns[target] = reached_ns[target]
    if done < n:
        raise cycle(n - done)
    return np.array(starts + ends, dtype=np.int64)


def cycle(n_waiting: int) -> WhatifError:
    """Return what is wrong where so many tasks could not run."""
    return WhatifError(f"simulate: {n_waiting} tasks wait for one another in a cycle; graph.check() names one of them.")


def not_ready(task: object, n_ready: int) -> WhatifError:
    """Return what is wrong where a schedule chose something else than one of ``n_ready`` tasks of the frontier."""
    return WhatifError(
        f"schedule: expected a task of the frontier ({n_ready} are ready), got {task!r}; "
        "return one of the keys of frontier.ready_ns."
    )
