"""The simulator: Daydream's Algorithm 1, with an overridable schedule and a fast path without choices.

Daydream §4.1, Algorithm 1, with gaps as separate tasks (its literal form adds a task's gap to every child, also on
other threads) and with dependencies that carry a lag and count from the start or the end of their source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from whatif.graph.edit import as_ids, as_numbers
from whatif.graph.structure_cache import found, newest
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Int32,
    Int64,
)
from whatif.runtime.errors import WhatifError
from whatif.runtime.loops import Loops
from whatif.simulation.sharing import COLUMN, USES, at_bounds, checked, in_fixed_order
from whatif.simulation.timeline import Timeline

sweeps = Loops("whatif.simulation._sweeps")
_frontier = Loops("whatif.simulation._frontier")
# The least rate of a task beside holders that demand everything: no task stalls for ever.
LEAST = 0.01
# Scenarios swept at once: with fewer, the cost per task dominates; with more, rows leave the cache.
BLOCK = 256


@dataclass(slots=True)
class Frontier:
    """The state that a schedule function sees: the tasks that are ready to run, and when each thread is free.

    ``ready_ns`` maps the id of each ready task to the time from which it can run; ``free_ns`` lists when each thread
    becomes free; ``graph`` has all columns, and ``thread`` is its thread column as a list, which is faster to read
    one by one. A schedule keeps its state between picks in ``memory``. To delay a ready task, it raises the
    task's entry in ``ready_ns``.
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


@dataclass(frozen=True, slots=True)
class ByPriority:
    """A schedule without a pick in Python: the task that starts first; among the tasks that could start at that time on
    a thread with a free order, the one with the largest priority.

    ``priority`` returns a number for each task of the simulated graph, shape (n_tasks,). Ties: tasks of ordered
    threads come first; on a thread ready time and id decide.
    """

    priority: Callable[[TaskGraph], npt.ArrayLike]

    def behind(self, graph: TaskGraph) -> Int64:
        """Return each task's rank below the most urgent ones, shape (n_tasks,). Raises WhatifError."""
        column = np.asarray(self.priority(graph))
        has_nan = column.dtype.kind == "f" and np.isnan(column).any()
        if column.shape != (len(graph),) or column.dtype.kind not in "biuf" or has_nan:
            raise WhatifError(
                f"priority: expected a number for each of the {len(graph)} tasks, got {column.dtype} of shape "
                f"{column.shape}{', some of them NaN' if has_nan else ''}."
            )
        if column.flags.writeable:
            return _below_most_urgent(column)
        # An attached column is the same in all three simulations of a prediction.
        return newest(graph, "urgencies", (column,), lambda: _below_most_urgent(column))


def _below_most_urgent(column: Array) -> Int64:
    order = np.argsort(column, kind="stable")
    ordered, behind = column[order], np.zeros(len(column), dtype=np.int64)
    behind[order[1:]] = -np.cumsum(ordered[1:] != ordered[:-1], dtype=np.int32)
    return behind


Schedule = Callable[[Frontier], int] | ByPriority
_NO_USES = {name: np.zeros(0, COLUMN[name]) for name in COLUMN.names or ()}


def simulate(graph: TaskGraph, schedule: Schedule | None = None) -> Timeline:
    """Simulate the graph and return its timeline.

    Without ``schedule`` every task starts as early as it can, ties by (start, ready time, task id). Raises WhatifError
    on a cycle, or if ``schedule`` picks a task that is not ready. Tasks that share a resource, as declared by a
    transform (``whatif.simulation.sharing``), slow each other down.
    """
    _expect_graph("simulate", graph)
    if isinstance(schedule, ByPriority):
        times = _by_events(graph, _run_user_function(schedule.priority, schedule.behind, graph))
    elif schedule is not None:
        times = _with_schedule(graph, schedule)
    elif in_fixed_order(graph):
        times = swept(graph.thread, graph.duration_ns, *_prepared(graph))
    else:
        times = _by_events(graph)
    return Timeline(graph, times[: len(graph)], times[len(graph) :])


def simulate_bounds(graph: TaskGraph, schedule: Schedule | None = None) -> tuple[Timeline, Timeline]:
    """Return the timelines with all durations and mutual slowdowns at their low and high bounds."""
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
    _expect_graph("simulate_scenarios", graph)
    if USES in graph.attached:
        raise WhatifError(
            "simulate_scenarios: expected tasks that share nothing, got ones that slow one another; "
            "simulate scenarios one by one."
        )
    if not all(thread.ordered for thread in graph.threads):
        raise WhatifError("simulate_scenarios: expected every thread in fixed order; simulate scenarios one by one.")
    offsets, points, lags_ns, thread_lag_ns = _prepared(graph)
    values, slopes = (as_numbers("simulate_scenarios", given).astype(np.float64, copy=False) for given in (x, slope_ns))
    if values.ndim != 1 or slopes.shape != (len(graph),):
        raise WhatifError(
            f"simulate_scenarios: expected a list of x and a slope for each of the {len(graph)} tasks, got shapes "
            f"{values.shape} and {slopes.shape}."
        )
    rows, n_rows = live_rows(graph)
    watched, place = np.unique(as_ids(graph, np.asarray(observed)), return_inverse=True)
    observed_ns, makespan = np.zeros((len(watched), len(values))), np.zeros(len(values))
    # Blocks of scenarios keep the rows that are still waited for in the cache.
    for first in range(0, len(values), BLOCK):
        block = np.ascontiguousarray(values[np.newaxis, first : first + BLOCK])
        ends, free, last, watched_ends = (
            np.zeros((height, block.shape[1])) for height in (n_rows, len(graph.threads), 1, len(watched))
        )
        sweeps.sweep_scenarios(
            graph.thread, graph.duration_ns, slopes, block, offsets, points, lags_ns, thread_lag_ns, rows, watched,
            ends, free, last, watched_ends,
        )  # fmt: skip
        observed_ns[:, first : first + BLOCK], makespan[first : first + BLOCK] = watched_ends, last[0]
    return observed_ns[place], makespan


def _expect_graph(function: str, given: Any) -> None:
    if not isinstance(given, TaskGraph):
        hint = "take its .graph" if hasattr(given, "graph") else "whatif.read(path) gives one"
        raise WhatifError(f"{function}: expected a TaskGraph, got {type(given).__name__}; {hint}.")


def live_rows(graph: TaskGraph) -> tuple[Int32, int]:
    """Return a row for the ends of each task, reused after the last task that waits for it, and the number of rows."""
    return found(graph, "live rows", _live_rows)


def _live_rows(graph: TaskGraph) -> tuple[Int32, int]:
    offsets, points, _ = graph.incoming
    last, spare, rows = (np.empty(len(graph), dtype=np.int32) for _ in range(3))
    return rows, sweeps.live_rows(offsets, points, last, spare, rows)


def _prepared(graph: TaskGraph) -> tuple[Int32, Int32, Int64, Int64]:
    """Dependencies grouped by target, as indices into (starts, ends), and the lag of each thread."""
    return *graph.incoming, graph.thread_lag_ns


def swept(
    thread: Int32, duration_ns: Int64, offsets: Int32, points: Int32, lags_ns: Int64, thread_lag_ns: Int64 | None = None
) -> Int64:
    """Return starts, then ends, ns, shape (2 n_tasks,): the longest path in id order, each thread in that order too.

    Dependencies are grouped by target as in ``TaskGraph.incoming``; by default threads have no lag.
    """
    times = np.empty(2 * len(thread), dtype=np.int64)
    if thread_lag_ns is None:
        thread_lag_ns = np.zeros(int(thread.max(initial=-1)) + 1, dtype=np.int64)
    sweeps.sweep(thread, duration_ns, offsets, points, lags_ns, thread_lag_ns, times)
    return times


def _by_events(graph: TaskGraph, behind: Int64 | None = None) -> Int64:
    """Algorithm 1 with the default schedule or by urgency, for free thread orders or shared resources."""
    n = len(graph)
    offsets, dependencies = graph.outgoing
    following, missing = graph.waits_for
    shares = USES in graph.attached
    row, uses = checked(graph) if shares else (np.zeros(0, dtype=np.int32), _NO_USES)
    fields = ("device", "role", "compute", "memory", "slowed", "link", "link_share", "lead_ns")
    times = np.zeros(2 * n, dtype=np.int64)
    done = _frontier.simulate(
        graph.thread, graph.grouped_by_thread[0], graph.duration_ns, following, missing.copy(), offsets,
        dependencies.target, dependencies.lag_ns, dependencies.anchor, graph.thread_lag_ns,
        np.array([not thread.ordered for thread in graph.threads], dtype=np.uint8), behind is not None,
        np.zeros(0, np.int64) if behind is None else behind,
        shares, row, *(uses[name] for name in fields), LEAST, times,
    )  # fmt: skip
    if done < n:
        raise cycle(n - done)
    return times


def _with_schedule(graph: TaskGraph, schedule: Callable[[Frontier], int]) -> Int64:
    if USES in graph.attached:
        from whatif.simulation.rate_sharing import by_schedule  # most graphs do not need it

        return _run_user_function(schedule, lambda graph: by_schedule(graph, schedule), graph)
    return _run_user_function(schedule, lambda graph: _by_schedule(graph, schedule), graph)


def _run_user_function(function: Callable[..., Any], run: Callable[[TaskGraph], Int64], graph: TaskGraph) -> Int64:
    """Run a user's function. Raises WhatifError, naming it, if it fails."""
    name = getattr(function, "__name__", "schedule")
    expected = "a number for each task" if name == "priority" else "one of the keys of frontier.ready_ns"
    try:
        return run(graph)
    except (WhatifError, MemoryError):
        raise
    # Around the whole loop, because a handler for each pick would slow it down. Values other than int fail in the loop.
    except (Exception, SystemExit) as error:
        code = getattr(function, "__code__", None)
        where = f" of {code.co_filename}" if code is not None else ""
        raise WhatifError(
            f"{name}(){where} failed: {type(error).__name__}: {error}; "
            f"it has to return {expected}, and --debug shows where."
        ) from error


def _by_schedule(graph: TaskGraph, schedule: Callable[[Frontier], int]) -> Int64:
    """Algorithm 1 as the paper writes it: pick from the frontier, run, release the children."""
    n = len(graph)
    offsets_array, dependencies = graph.outgoing
    offsets: list[int] = offsets_array.tolist()
    # One tuple per dependency is faster to iterate than three columns.
    edges: list[tuple[int, int, int]] = list(
        zip(dependencies.target.tolist(), dependencies.lag_ns.tolist(), dependencies.anchor.tolist(), strict=True)
    )
    following_array, missing_array = graph.waits_for
    following: list[int] = following_array.tolist()
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
    """Return the error for the number of tasks that could not run."""
    return WhatifError(f"simulate: {n_waiting} tasks wait for one another in a cycle; graph.check() names one of them.")


def not_ready(task: object, n_ready: int) -> WhatifError:
    """Return the error for a schedule that chose none of the ``n_ready`` tasks of the frontier."""
    return WhatifError(
        f"schedule: expected a task of the frontier ({n_ready} are ready), got {task!r}; "
        "return one of the keys of frontier.ready_ns."
    )
