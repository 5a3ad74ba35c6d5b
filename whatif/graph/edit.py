"""Edits of a task graph that keep its tasks: scale, set, split, add dependencies, renumber. All return new graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from whatif.graph.columns import COLUMNS, TASK_COLUMNS, taken
from whatif.graph.order import spread, topological_order
from whatif.graph.selection import Selection, Tasks, mask_of
from whatif.graph.structure_cache import Later, keep, unread
from whatif.graph.types import (
    Anchor,
    Array,
    Bool,
    Dependencies,
    DependencyKind,
    Int32,
    Int64,
    TaskKind,
    Thread,
    Waits,
)
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from whatif.graph.task_graph import TaskGraph

# Thirteen days: sums over 8,000 such tasks still fit in an int64.
MAX_DURATION_NS = 2**50

# Random graphs converge after two orders, if at all.
MAX_ORDERS = 4

Columns = dict[str, Array]

# What a graph caches that other dependencies do not change.
_OF_THREADS_AND_LAUNCHES = (
    "on_gpu", "has_gpu", "on_cpu", "of_clock", "grouped_by_thread", "neighbours", "launch_of", "derived",
)  # fmt: skip


def scale(
    graph: TaskGraph, tasks: Tasks, factor: npt.ArrayLike, *, low: npt.ArrayLike | None, high: npt.ArrayLike | None
) -> TaskGraph:
    """See ``TaskGraph.scale``. Raises WhatifError on a factor that is negative or not finite."""
    ids = as_ids(graph, tasks)  # numpy gathers five times faster by number than by mask
    factors = [as_numbers("scale", factor if given is None else given) for given in (factor, low, high)]
    for each in factors:
        if not np.all(np.isfinite(each) & (each >= 0)):
            raise WhatifError(f"scale: expected a factor of 0 or more, got {each}.")
        if each.size != 1 and each.shape != ids.shape:
            raise WhatifError(f"scale: expected one factor, or one for each of the {len(ids)} tasks, got {each.size}.")
    if low is not None and high is not None and np.any(factors[1] > factors[2]):
        raise WhatifError("scale: expected low to be at most high, got more.")
    columns = (graph.duration_ns, graph.low_ns, graph.high_ns)
    centre, least, most = (column[ids] * each for column, each in zip(columns, factors, strict=True))
    return with_duration(graph, ids, centre, low_ns=least, high_ns=most)


def with_duration(
    graph: TaskGraph,
    tasks: Tasks,
    duration_ns: npt.ArrayLike,
    *,
    low_ns: npt.ArrayLike | None,
    high_ns: npt.ArrayLike | None,
) -> TaskGraph:
    """See ``TaskGraph.with_duration``. Raises WhatifError on a negative duration, or on too many or too few."""
    ids = as_ids(graph, tasks)

    def put(column: Int64, values: npt.ArrayLike) -> Int64:
        new = column.copy()
        times_ns = as_ns(values)
        try:
            new[ids] = times_ns
        except ValueError:
            raise WhatifError(
                f"with_duration: expected one time, or one for each of the {len(ids)} tasks, got {times_ns.size}."
            ) from None
        return new

    if not len(ids):
        return graph
    duration = put(graph.duration_ns, duration_ns)
    if len(duration) and int(duration.min()) < 0:
        raise WhatifError("with_duration: expected durations of 0 ns or more, got a negative one.")
    low = put(graph.low_ns, duration_ns if low_ns is None else low_ns)
    high = put(graph.high_ns, duration_ns if high_ns is None else high_ns)
    np.minimum(low, duration, out=low)
    np.maximum(high, duration, out=high)
    return graph.replace(duration_ns=duration, low_ns=low, high_ns=high)


def split(graph: TaskGraph, tasks: Tasks, parts: int) -> TaskGraph:
    """See ``TaskGraph.split``: successors of a task wait for its last part. Raises WhatifError if parts < 1."""
    if not isinstance(parts, int | np.integer) or parts < 1:
        raise WhatifError(f"split: expected 1 part or more, got {parts!r}.")
    mask = as_mask(graph, tasks)
    if parts == 1 or not mask.any():
        return graph
    repeats = np.where(mask, parts, 1)
    index = np.repeat(np.arange(len(graph)), repeats)
    first = (np.cumsum(repeats) - repeats).astype(np.int32)
    last = (first + repeats - 1).astype(np.int32)
    part = np.arange(len(index)) - first[index]
    old = graph.dependencies
    source = np.where(old.anchor == Anchor.START, first[old.source], last[old.source])
    cut = with_rows(graph, index, replace(old, source=source, target=first[old.target]), first)
    n = repeats[index]
    divided = {}
    for name in (column.name for column in COLUMNS if column.divides):
        total = getattr(cut, name)
        divided[name] = np.where(total < 0, total, total // n + (part < total % n)).astype(total.dtype, copy=False)
    return cut.replace(**divided)


def add_dependencies(graph: TaskGraph, new: Dependencies) -> TaskGraph:
    """See ``TaskGraph.add_dependencies``; ids change only if a new dependency points backward."""
    n = len(graph)
    ids = np.concatenate([new.source, new.target])
    if len(ids) and (ids.min() < 0 or ids.max() >= n):
        raise WhatifError(f"add_dependencies: expected ids in 0..{n - 1}, got one outside.")
    edited = graph.replace(dependencies=Dependencies.concatenate([graph.dependencies, new]))
    if not (new.kind == DependencyKind.LAUNCH).any():
        keep(graph, edited, _OF_THREADS_AND_LAUNCHES)
    return reorder(edited)[0]


def without_waits(graph: TaskGraph, tasks: Tasks) -> TaskGraph:
    """See ``TaskGraph.without_waits``."""
    mask = as_mask(graph, tasks)
    waits, dependencies = graph.waits, graph.dependencies
    left = ~mask[waits.task]
    waiting = mask[dependencies.target] & (dependencies.kind == DependencyKind.SYNC)
    changed = graph.replace(
        waits=Waits(waits.task[left], waits.scope[left], waits.lag_ns[left]),
        dependencies=dependencies.take(~waiting),
    )
    return changed.with_duration(mask & (graph.kind == TaskKind.WAIT), 0)


def add_thread(graph: TaskGraph, thread: Thread) -> tuple[TaskGraph, int]:
    """Return the graph with one more execution thread, and its code."""
    return graph.replace(threads=(*graph.threads, thread)), len(graph.threads)


def reorder(graph: TaskGraph) -> tuple[TaskGraph, Int32]:
    """Renumber the tasks so that every dependency points forward; return the graph and each task's new id.

    The order of each ordered thread stays. Raises WhatifError on a cycle.
    """
    place = np.arange(len(graph), dtype=np.int32)
    # The tasks that a wait waits for depend on the order: check the new order again.
    for _ in range(MAX_ORDERS):
        tables = graph.dependencies, graph.derived
        if all(bool(np.all(d.source < d.target)) for d in tables):
            return graph, place
        ordered = np.array([thread.ordered for thread in graph.threads], dtype=np.bool_)
        thread = graph.thread if ordered.all() else np.where(ordered.take(graph.thread), graph.thread, np.int32(-1))
        order = topological_order(len(graph), Dependencies.concatenate([*tables]), thread)
        if len(order) < len(graph):
            break
        graph, moved = permuted(graph, order)
        place = moved[place]
    raise WhatifError("graph: the dependencies form a cycle, so no order can run these tasks; see what was added last.")


def permuted(graph: TaskGraph, order: Array) -> tuple[TaskGraph, Int32]:
    """Return the graph with its tasks in ``order``, their old ids, and each task's new id."""
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    index = order.astype(np.intp)  # numpy gathers two to three times faster with its own index type
    return with_rows(graph, index, renumbered(graph.dependencies, place), place), place


def with_rows(graph: TaskGraph, rows: Array, dependencies: Dependencies, new_id: Int32) -> TaskGraph:
    """Return the graph of the tasks at ``rows`` (ids), with ``dependencies`` between them.

    ``new_id`` (n_tasks,) is each old task's new id, -1 if it is removed; waits of removed tasks are removed.
    """
    before = _unread_columns_of(graph)
    distinct = {id(column): column for column in before.values()}
    gathered = {key: _later(column, lambda column: taken(column, rows)) for key, column in distinct.items()}
    columns = {name: gathered[id(column)] for name, column in before.items()}
    attached = {name: column.take(rows) for name, column in graph.attached.items()}
    task = new_id[graph.waits.task]
    waits = Waits(task[task >= 0], graph.waits.scope[task >= 0], graph.waits.lag_ns[task >= 0])
    return graph.replace(**columns, dependencies=dependencies, waits=waits, attached=attached)


def _unread_columns_of(graph: TaskGraph) -> dict[str, Array | Later]:
    return {name: unread(graph).get(name) or getattr(graph, name) for name in TASK_COLUMNS}


def _later(column: Array | Later, edited: Callable[[Array], Array]) -> Later:
    return Later(lambda: edited(column.read() if isinstance(column, Later) else column))


def woven_in(
    graph: TaskGraph, rows: Mapping[str, npt.ArrayLike], place: Array, order: Array | None = None
) -> tuple[TaskGraph, Int32]:
    """Return the graph with new tasks, whose ids will be ``place``, and each old task's new id.

    ``rows`` has a value for each new task in every column; attached columns are 0 there. ``order``, shape (n_tasks,),
    is the new order of the old tasks; by default unchanged.
    """
    is_old = np.ones(len(graph) + len(place), dtype=np.bool_)
    is_old[place] = False
    old_places = np.flatnonzero(is_old)
    moved = old_places.astype(np.int32)
    if order is not None:
        moved[order] = old_places
    skipped = np.sort(np.asarray(place, dtype=np.int64))
    row = None
    if order is not None and len(order):
        row = np.zeros(len(is_old), dtype=np.int64)  # the old task at each place; any at new ones
        row[old_places] = order

    def woven(column: Array, inserted: npt.ArrayLike) -> Array:
        if column.strides == (0,) and bool(np.all(inserted == column[0])):
            return np.broadcast_to(column[:1], is_old.shape)
        result = spread(column, skipped, len(is_old)) if row is None else column.take(row)
        result[place] = inserted
        return result

    def woven_attached(column: Array) -> Array:
        if column.dtype.kind not in "biu" or column.ndim > 1:
            return woven(column, 0)
        result, marked = np.zeros(len(is_old), dtype=column.dtype), np.flatnonzero(column)  # few tasks have a value
        result[moved[marked]] = column[marked]
        return result

    columns = {
        name: _later(column, partial(woven, inserted=rows[name])) for name, column in _unread_columns_of(graph).items()
    }
    attached = {name: woven_attached(column) for name, column in graph.attached.items()}
    waits = Waits(moved[graph.waits.task], graph.waits.scope, graph.waits.lag_ns)
    dependencies = renumbered(graph.dependencies, moved)
    return graph.replace(**columns, dependencies=dependencies, waits=waits, attached=attached), moved


def as_ns(values: npt.ArrayLike, label: str = "durations") -> Int64:
    """Return whole nanoseconds. Raises WhatifError if a value is not finite or longer than a task can last."""
    numbers = as_numbers(label, values)
    if not np.all(np.abs(numbers) <= MAX_DURATION_NS):
        raise WhatifError(
            f"{label}: expected 0 ns or more and below {MAX_DURATION_NS / 3.6e12:.0f} hours, got another one."
        )
    return np.rint(numbers).astype(np.int64)


def as_numbers(label: str, values: npt.ArrayLike) -> Array:
    """Return an array of numbers. Raises WhatifError, which begins with ``label``, if they are not numbers."""
    try:
        numbers = np.asarray(values)
    except ValueError:  # lists of several lengths
        numbers = np.empty(0, dtype=object)
    if numbers.dtype.kind not in "biuf":
        raise WhatifError(f"{label}: expected numbers, got {str(values)[:60]!r}.")
    return numbers


def as_index(graph: TaskGraph, tasks: Tasks) -> Array:
    """Return an index into the columns: the mask of a selection or a mask, or ids in their order.

    Raises WhatifError on a selection made before an edit changed ids, on a mask of another length, and on ids out of
    range: numpy would count a negative one from the end.
    """
    if isinstance(tasks, Selection):
        return mask_of(tasks, graph.order)
    tasks, n = as_numbers("ids of tasks", tasks), len(graph)
    if tasks.dtype == np.bool_:
        if tasks.shape != (n,):
            raise WhatifError(f"expected a mask of {n} tasks, got one of {tasks.size}.")
        return tasks
    if tasks.size and not 0 <= (least := tasks.min()) <= (most := tasks.max()) < n:
        raise WhatifError(
            f"expected ids of tasks in 0..{n - 1}, got {least if least < 0 else most}"
            + ("; -1 stands for an unknown task, as in launch_of: leave it out." if least == -1 else ".")
        )
    if tasks.dtype.kind == "f":
        fractional = tasks[tasks != np.rint(tasks)]
        if len(fractional):
            raise WhatifError(f"expected whole ids of tasks, got {fractional[0]}.")
        return tasks.astype(np.int64)
    return tasks


def as_mask(graph: TaskGraph, tasks: Tasks) -> Bool:
    """Return a mask, shape (n_tasks,), for any argument of ``as_index``, with the same errors."""
    index = as_index(graph, tasks)
    if index.dtype == np.bool_:
        return index
    mask = np.zeros(len(graph), dtype=np.bool_)
    mask[index.astype(np.int64)] = True
    return mask


def as_ids(graph: TaskGraph, tasks: npt.ArrayLike | Selection) -> Int64:
    """Return ids, in order, for any argument of ``as_index`` or one id, with the same errors."""
    index = np.atleast_1d(as_index(graph, tasks if isinstance(tasks, Selection) else np.asarray(tasks)))
    return np.flatnonzero(index) if index.dtype == np.bool_ else index.astype(np.int64, copy=False)


def renumbered(dependencies: Dependencies, new_id: Int32) -> Dependencies:
    # Numpy gathers by codes of 32 bits three times faster with ``take`` than with brackets.
    return replace(dependencies, source=new_id.take(dependencies.source), target=new_id.take(dependencies.target))


def columns_of(graph: TaskGraph) -> Columns:
    return {name: getattr(graph, name) for name in TASK_COLUMNS}
