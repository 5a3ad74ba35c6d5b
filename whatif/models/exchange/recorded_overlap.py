"""The durations of recorded work without the slowdown of its recorded overlap.

A kernel that ran beside a collective is slow in the recording. If a what-if makes such tasks slow each other in the
simulation, the recorded duration would count the overlap twice. So each task that overlapped others is set to its work,
by the rates of ``whatif.simulation.rate_sharing`` over its recorded time. An unchanged schedule then reproduces the
recorded durations.
"""

from __future__ import annotations

import numpy as np

from whatif.graph.order import each_once, grouped
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Int64, among
from whatif.simulation.rate_sharing import User, rates
from whatif.simulation.sharing import USES, Role, Uses


def set_to_alone(graph: TaskGraph, uses: Uses) -> TaskGraph:
    """Return the graph with the column ``uses``, and recorded tasks at their durations alone (see above).

    If the graph already had the column, only the change of rates is taken out. A duration that another what-if changed
    keeps its factor: its recorded end is then derived from the new length.
    """
    before = graph.attached.get(USES)
    changed = graph.attach(**{USES: uses})
    factor = _share_of_time(graph, uses)
    if before is not None:
        factor /= _share_of_time(graph, before)
    moved = np.flatnonzero(factor != 1.0)
    return changed.scale(moved, factor[moved]) if len(moved) else changed


def _share_of_time(graph: TaskGraph, uses: Uses) -> Array:
    """The mean rate of each recorded task over its recorded time, shape (n_tasks,); 1 if it was alone."""
    share, recorded = np.ones(len(graph)), np.flatnonzero(uses["role"] > 0)
    recorded = recorded[(graph.start_ns[recorded] >= 0) & (graph.duration_ns[recorded] > 0)]
    device = uses["device"][recorded]
    can_slow = among(uses["role"][recorded], (Role.HOLDS, Role.SHARES))
    for gpu in each_once(device[can_slow]).tolist():
        _of_device(graph, uses, recorded[device == gpu], share)
    return share


def _of_device(graph: TaskGraph, uses: Uses, tasks: Int64, share: Array) -> None:
    start, end = _one_at_a_time(graph, tasks)
    order = np.argsort(start, kind="stable")
    tasks, start, end = tasks[order], start[order], end[order]
    alone = _untouched(start, end)
    tasks, start, end = tasks[~alone], start[~alone], end[~alone]
    columns = (uses["compute"][tasks], tasks, *(uses[name][tasks] for name in ("memory", "role", "slowed")))
    users = [User(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    done = [0.0] * len(tasks)
    place = {task: i for i, task in enumerate(tasks.tolist())}
    # Ends come before starts at equal times: back-to-back tasks do not overlap.
    times = np.concatenate([start, end])
    kinds = np.repeat([1, 0], len(tasks))
    rows = np.tile(np.arange(len(tasks)), 2)
    events = np.lexsort((rows, kinds, times))
    running: list[User] = []
    last_ns = 0
    for time_ns, starts, row in zip(times[events].tolist(), kinds[events].tolist(), rows[events].tolist(), strict=True):
        if time_ns > last_ns and running:
            for user, rate in zip(running, rates(running), strict=True):
                done[place[user.task]] += rate * (time_ns - last_ns)
        last_ns = time_ns
        running = sorted([*running, users[row]]) if starts else [user for user in running if user != users[row]]
    lasted = end - start
    share[tasks] = np.where(lasted > 0, np.array(done) / np.maximum(lasted, 1), 1.0)


def _one_at_a_time(graph: TaskGraph, tasks: Int64) -> tuple[Int64, Int64]:
    """Recorded start and end of tasks (ascending ids); on one stream a task ends where the next one starts.

    Launches that depend on one another (programmatic ones) overlap by microseconds, without sharing anything.
    """
    start = graph.start_ns[tasks]
    end = start + graph.duration_ns[tasks]
    _, order = grouped(len(graph.threads), graph.thread[tasks])
    same = np.diff(graph.thread[tasks][order]) == 0
    following = np.where(same, start[order][1:], np.iinfo(np.int64).max)
    end[order[:-1]] = np.maximum(np.minimum(end[order[:-1]], following), start[order[:-1]])
    return start, end


def _untouched(start: Int64, end: Int64) -> Array:
    """Mask of the intervals (sorted by start) that overlap no other."""
    if not len(start):
        return np.zeros(0, dtype=np.bool_)
    reach = np.maximum.accumulate(end)
    after = np.append(True, start[1:] >= reach[:-1])
    before = np.append(end[:-1] <= start[1:], True)
    return np.asarray(after & before)
