"""Run part of each step several times: its tasks, with what they wait for among them, are put in again."""

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
    """The graph, and of each task the number of its run, shape (n_tasks,): 0 for the first, -1 for what runs once."""

    graph: TaskGraph
    run: Int64


def repeat(graph: TaskGraph, tasks: Bool, times: int, part: Int64, *, ends: Int64, begins: Int64) -> Repeated:
    """Return the graph in which the ``tasks`` of each part run ``times`` times, one run after another.

    ``tasks`` (n_tasks,) is a mask and ``part`` (n_tasks,) the number of the part that each is in. The first run waits
    for what the recorded one waits for, what waits for the recorded one waits for the last, and each thread does a run
    behind the one before. Beside that ``begins`` of a run wait for ``ends`` of the one before: ids of tasks, shape
    (n,), CPU threads that go on when another is done. Raises WhatifError where no order can run them.
    """
    chosen = np.flatnonzero(tasks)
    n, count, runs = len(graph), len(chosen), times - 1
    place = np.full(n, -1, dtype=np.int64)
    place[chosen] = np.arange(count)
    # The recorded tasks keep their numbers, and are the last run; then come those of the others.
    source_row = np.concatenate([np.arange(n), np.tile(chosen, runs)])
    run = np.concatenate([np.where(tasks, runs, -1), np.repeat(np.arange(runs), count)])

    ahead = _ahead(graph, tasks, part)

    def again(dependencies: Dependencies) -> Dependencies:
        """What is among tasks of one part is so in each of its runs; what comes from elsewhere, the first waits for."""
        old, new = dependencies.source, dependencies.target
        # What runs once in the midst of a part does so in its last run: in the others, what is ahead of it counts.
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
        """What ends and begins, of every run but the last and of the one after it."""
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
    # Which tasks a wait waits for follows from the order, which may have to change for it.
    changed, moved = reorder(_numbered(changed, run[order], runs))
    number = np.empty(len(order), dtype=np.int64)
    number[moved] = run[order]
    return Repeated(changed, number)


def _at(first: int, place: Int64, ids: Int32) -> Int32:
    return (first + place[ids]).astype(np.int32)


def _ahead(graph: TaskGraph, tasks: Bool, part: Int64) -> Int64:
    """The last of ``tasks`` in the last part that each other task waits for, by its thread or through others; else -1.

    Shape (n_tasks,); of ``tasks`` themselves it is each one itself.
    """
    order, count = graph.by_thread, int(tasks.sum())
    chosen = np.flatnonzero(tasks)
    ranked = chosen[np.lexsort((chosen, part[chosen]))]
    own = np.full(len(graph), -1, dtype=np.int64)
    own[ranked] = np.arange(count)
    every = graph.all_dependencies()
    every = every.take(~tasks[every.target])
    thread = graph.thread[order].astype(np.int64) * (count + 1)
    ahead, before = own, np.full(len(graph), -2)
    while not np.array_equal(ahead, before):
        before, ahead = ahead, ahead.copy()
        np.maximum.at(ahead, every.target, ahead[every.source])
        along = np.maximum.accumulate(thread + ahead[order] + 1) - thread - 1
        ahead[order] = np.where(tasks[order], own[order], along)
    return np.append(ranked, -1)[ahead]


def _thread_ends(graph: TaskGraph, tasks: Bool, part: Int64) -> tuple[Int64, Int64]:
    """The last and the first of the tasks of each part on each thread."""
    chosen = np.flatnonzero(tasks)
    key = part[chosen] * len(graph.threads) + graph.thread[chosen]
    first = np.unique(key, return_index=True)[1]
    last = len(key) - 1 - np.unique(key[::-1], return_index=True)[1]
    return chosen[last], chosen[first]


def _order(source_row: Int64, run: Int64, part: Int64, tasks: Bool, every: Dependencies) -> Int32:
    """The tasks in an order that all dependencies allow: the runs of a part one by one where it begins."""
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
    """The graph whose new tasks wait for streams as those do that they repeat; ``new_id`` run by run."""
    waits = graph.waits
    mine = np.isin(waits.task, chosen)
    at = np.searchsorted(chosen, waits.task[mine])
    parts = [changed.waits]
    parts += [Waits(new_id[k * len(chosen) + at], waits.scope[mine], waits.lag_ns[mine]) for k in range(runs)]
    return changed.replace(waits=Waits(*(np.concatenate([getattr(w, c) for w in parts]) for c in Waits.__slots__)))


def _numbered(graph: TaskGraph, run: Int64, last: int) -> TaskGraph:
    """The graph in which what has a number of its own, as a call has, has another one in each run."""
    more = np.where((run >= 0) & (run < last), run + 1, 0)
    columns = {}
    for name in (column.name for column in COLUMNS if column.across_ranks == "number"):
        number = getattr(graph, name)
        columns[name] = np.where(number >= 0, number + more * (int(number.max(initial=-1)) + 1), -1).astype(
            number.dtype
        )
    return graph.replace(**columns)
