"""Run part of each step several times: copies of its tasks and of the dependencies among them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from whatif.graph.columns import COLUMNS
from whatif.graph.edit import renumbered, reorder, with_rows
from whatif.graph.order import topological_order
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Dependencies, DependencyKind, Int32, Int64, Waits
from whatif.runtime.errors import WhatifError


class Repeated(NamedTuple):
    """The graph, and each task's run, shape (n_tasks,): 0 for the first run, -1 for tasks that run once."""

    graph: TaskGraph
    run: Int64


def repeat(graph: TaskGraph, tasks: Bool, times: int, part: Int64, *, ends: Int64, begins: Int64) -> Repeated:
    """Return the graph in which the ``tasks`` of each part run ``times`` times, one run after the other.

    ``tasks`` (n_tasks,) is a mask and ``part`` (n_tasks,) the number of each task's part. The first run has the
    recorded predecessors, the last run the recorded successors, and each thread runs one run after the other. In
    addition ``begins`` of a run wait for ``ends`` of the previous run: ids of tasks, shape (n,), of CPU threads that
    continue when another is done. Raises WhatifError if no order can run them.
    """
    chosen = np.flatnonzero(tasks)
    n, count, runs = len(graph), len(chosen), times - 1
    place = np.full(n, -1, dtype=np.int64)
    place[chosen] = np.arange(count)
    # The recorded tasks keep their numbers and are the last run; the tasks of the other runs follow.
    source_row = np.concatenate([np.arange(n), np.tile(chosen, runs)])
    run = np.concatenate([np.where(tasks, runs, -1), np.repeat(np.arange(runs), count)])

    ahead = _ahead(graph, tasks, part)

    def again(dependencies: Dependencies) -> Dependencies:
        """Dependencies within a part recur in each run; dependencies from outside hold for the first run."""
        old, new = dependencies.source, dependencies.target
        # A task that runs once in the middle of a part is in the last run; in the others its predecessors replace it.
        source = ahead[old]
        inside = tasks[new] & (source >= 0) & (part[source] == part[new])
        first = np.where(tasks[new] & ~inside, n + place[new], new).astype(np.int32)
        among = replace(dependencies, source=source.astype(np.int32)).take(inside)
        copies = [
            replace(
                among, source=_at(n + count * k, place, among.source), target=_at(n + count * k, place, among.target)
            )
            for k in range(runs)
        ]
        return Dependencies.concatenate([replace(dependencies, target=first), *copies])

    def next_run(ends: Int64, begins: Int64) -> tuple[Int64, Int64]:
        """The ends of every run but the last, and the begins of the run after each."""
        of = np.arange(runs)[:, np.newaxis] * count + n
        following = np.where(np.arange(runs)[:, np.newaxis] < runs - 1, of + count + place[begins], begins)
        return (of + place[ends]).ravel(), following.ravel()

    stored = Dependencies.concatenate(
        [again(graph.dependencies), Dependencies.of(*next_run(ends, begins), DependencyKind.HANDOFF)]
    )
    on_threads = Dependencies.of(*next_run(*_thread_ends(graph, tasks, part)), DependencyKind.THREAD)
    every = Dependencies.concatenate([again(graph.all_dependencies()), stored, on_threads])
    order = _order(source_row, run, part, tasks, every)
    new_id = np.empty(len(order), dtype=np.int32)
    new_id[order] = np.arange(len(order), dtype=np.int32)
    changed = with_rows(graph, source_row[order].astype(np.intp), renumbered(stored, new_id), new_id[:n])
    changed = _with_waits(changed, graph, chosen, new_id[n:], runs)
    # The tasks that a wait waits for follow from the order, which may have to change.
    changed, moved = reorder(_numbered(changed, run[order], runs))
    number = np.empty(len(order), dtype=np.int64)
    number[moved] = run[order]
    return Repeated(changed, number)


def _at(first: int, place: Int64, ids: Int32) -> Int32:
    return (first + place[ids]).astype(np.int32)


def _ahead(graph: TaskGraph, tasks: Bool, part: Int64) -> Int64:
    """The last of ``tasks``, by part, that each other task waits for, by its thread or through others; else -1.

    Shape (n_tasks,); for ``tasks`` themselves, each task itself.
    """
    order, count = graph.by_thread, int(tasks.sum())
    chosen = np.flatnonzero(tasks)
    ranked = chosen[np.lexsort((chosen, part[chosen]))]
    rank = np.full(len(graph), -1, dtype=np.int64)
    rank[ranked] = np.arange(count)
    every = graph.all_dependencies()
    every = every.take(~tasks[every.target])
    thread = graph.thread[order].astype(np.int64) * (count + 1)
    ahead, before = rank, np.full(len(graph), -2)
    while not np.array_equal(ahead, before):
        before, ahead = ahead, ahead.copy()
        np.maximum.at(ahead, every.target, ahead[every.source])
        along = np.maximum.accumulate(thread + ahead[order] + 1) - thread - 1
        ahead[order] = np.where(tasks[order], rank[order], along)
    return np.append(ranked, -1)[ahead]


def _thread_ends(graph: TaskGraph, tasks: Bool, part: Int64) -> tuple[Int64, Int64]:
    """The last and the first task of each part on each thread."""
    chosen = np.flatnonzero(tasks)
    key = part[chosen] * len(graph.threads) + graph.thread[chosen]
    first = np.unique(key, return_index=True)[1]
    last = len(key) - 1 - np.unique(key[::-1], return_index=True)[1]
    return chosen[last], chosen[first]


def _order(source_row: Int64, run: Int64, part: Int64, tasks: Bool, every: Dependencies) -> Int32:
    """An order that satisfies all dependencies, with the runs of a part one after the other at its begin."""
    chosen = np.flatnonzero(tasks)
    parts, first = np.unique(part[chosen], return_index=True)
    begin = np.concatenate([np.arange(len(tasks)), np.zeros(len(run) - len(tasks), dtype=np.int64)])
    put_in = np.arange(len(run)) >= len(tasks)
    begin[put_in] = chosen[first][np.searchsorted(parts, part[source_row[put_in]])]
    wanted = np.lexsort((source_row, np.where(put_in, run, run.max(initial=0) + 1), begin))
    at = np.empty(len(wanted), dtype=np.int32)
    at[wanted] = np.arange(len(wanted), dtype=np.int32)
    found = topological_order(len(wanted), renumbered(every, at))
    if len(found) < len(wanted):
        raise WhatifError("repeat: expected a part of the step that can run again, got one that waits for itself.")
    return wanted[found].astype(np.int32)


def _with_waits(changed: TaskGraph, graph: TaskGraph, chosen: Int64, new_id: Int32, runs: int) -> TaskGraph:
    """Give new tasks the waits for streams of the tasks that they repeat; ``new_id`` run by run."""
    waits = graph.waits
    of_chosen = np.isin(waits.task, chosen)
    at = np.searchsorted(chosen, waits.task[of_chosen])
    parts = [changed.waits]
    parts += [Waits(new_id[k * len(chosen) + at], waits.scope[of_chosen], waits.lag_ns[of_chosen]) for k in range(runs)]
    return changed.replace(waits=Waits(*(np.concatenate([getattr(w, c) for w in parts]) for c in Waits.__slots__)))


def _numbered(graph: TaskGraph, run: Int64, last: int) -> TaskGraph:
    """Give each run separate values in columns of numbers, such as calls."""
    more = np.where((run >= 0) & (run < last), run + 1, 0)
    columns = {}
    for name in (column.name for column in COLUMNS if column.across_ranks == "number"):
        number = getattr(graph, name)
        columns[name] = np.where(number >= 0, number + more * (int(number.max(initial=-1)) + 1), -1).astype(
            number.dtype
        )
    return graph.replace(**columns)
