"""Several ranks as one graph: their threads side by side, and each collective a meeting of all its ranks.

A collective of n ranks has a hub, a task of zero duration on a channel. Before its transfer each rank has an arrival,
of zero duration too, with all dependencies that the transfer has on that rank. The hub waits for the arrivals, the
transfers for the hub: n edges in and n out.

Transforms are written for one rank, so a graph of several can be taken apart again. Each rank's part, without
arrivals and hubs, is like the graph of one recording, with a column (``COLLECTIVE``) of the tasks' collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from whatif.graph.columns import COLUMNS, TASK_COLUMNS, Column, filled, one_table
from whatif.graph.edit import columns_of, renumbered, reorder, woven_in
from whatif.graph.info import GraphInfo
from whatif.graph.kernels import collective_of
from whatif.graph.memory import fullest
from whatif.graph.order import each_once
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    ARRIVAL_NAME,
    BEGIN_NAME,
    HUB_NAME,
    Array,
    Dependencies,
    DependencyKind,
    Int32,
    Int64,
    TaskKind,
    Thread,
    ThreadKind,
    Waits,
)
from whatif.ingest.ranks.clocks import MEETING
from whatif.runtime.threads import map_large
from whatif.simulation.sharing import USES
from whatif.simulation.transfers import workers_of

# Attached: 1 + the collective of which a task is one rank's part, 0 for all others; negative for a rank that leaves
# before the others arrive: they wait for it, and it waits for no other.
COLLECTIVE = "collective"
# The rank of threads that belong to none.
NOBODY = -1
# How often the times by which tasks are ordered are moved after hubs before a general sort takes over.
_ROUNDS = 50


def merge(parts: Sequence[TaskGraph], info: GraphInfo, numbers: Sequence[int], begins_ns: Sequence[int]) -> TaskGraph:
    """Return one graph of the ranks ``numbers`` (ascending); part i begins at ``begins_ns[i]`` (0 or more).

    ``info`` describes all of them; its ``ranks`` are the parts' own. Tasks with the same ``COLLECTIVE`` meet.
    """
    blocks = [_with_names(part, begin_ns) for part, begin_ns in zip(parts, begins_ns, strict=True)]
    names, name_codes = one_table(block.names for block in blocks)
    layers, layer_codes = one_table(block.layers for block in blocks)
    operators, operator_codes = one_table(block.info.operators for block in blocks)
    groups, group_codes = one_table(block.info.groups for block in blocks)
    sizes = np.cumsum([0, *(len(block) for block in blocks)])
    first_thread = np.cumsum([0, *(len(block.threads) for block in blocks)])
    first_number = {
        each.name: np.cumsum([0, *(int(getattr(block, each.name).max(initial=-1)) + 1 for block in blocks)])
        for each in COLUMNS
        if each.across_ranks == "number"
    }
    new_thread = [np.arange(begin, end, dtype=np.int32) for begin, end in pairwise(first_thread.tolist())]
    new_codes = {"names": name_codes, "layers": layer_codes, "operators": operator_codes, "groups": group_codes,
                 "threads": new_thread}  # fmt: skip

    def placed(each: Column, i: int) -> Array:
        """A column of part i with the codes, numbers and times of the merged graph."""
        values: Array = getattr(blocks[i], each.name)
        if each.across_ranks == "table":
            codes = new_codes[str(each.codes)][i]
            if not np.array_equal(codes, np.arange(len(codes))):
                values = np.append(codes, np.int32(-1))[values]  # -1 is the last entry
        elif each.across_ranks == "number" and first_number[each.name][i]:
            values = np.where(values >= 0, values + first_number[each.name][i], -1)
        elif each.across_ranks == "time" and begins_ns[i]:
            values = np.where(values >= 0, values + begins_ns[i], -1)
        return values.astype(each.dtype, copy=False)

    def joined(each: Column) -> Array:
        return _joined([placed(each, i) for i in range(len(blocks))])

    dtypes = {name: column.dtype for block in blocks for name, column in block.attached.items()}
    attached: dict[str, list[Array]] = {name: [] for name in dtypes}
    dependencies, waits = [], []
    for i, block in enumerate(blocks):
        for name, dtype in dtypes.items():
            column = block.attached.get(name, np.zeros(len(block), dtype=dtype))
            attached[name].append(_uses(column, new_thread[i]) if name == USES else column)
        new_id = np.arange(sizes[i], sizes[i + 1], dtype=np.int32)
        dependencies.append(renumbered(block.dependencies, new_id))
        scope = np.where(block.waits.scope >= 0, block.waits.scope + first_thread[i], block.waits.scope)
        waits.append(Waits(new_id[block.waits.task], scope.astype(np.int32), block.waits.lag_ns))
    graph = TaskGraph(
        **dict(zip(TASK_COLUMNS, map_large(joined, COLUMNS, int(sizes[-1])), strict=True)),
        dependencies=Dependencies.concatenate(dependencies),
        waits=Waits(*(np.concatenate([getattr(w, c) for w in waits]) for c in Waits.__slots__)),
        names=names,
        threads=tuple(
            replace(thread, rank=number, name=f"{_prefix(number)}{thread.name}")
            for number, block in zip(numbers, blocks, strict=True)
            for thread in block.threads
        ),
        layers=layers,
        info=replace(info, operators=operators, groups=groups),
        attached={name: np.concatenate(column) for name, column in attached.items()},
        notes=tuple(dict.fromkeys(note for block in blocks for note in block.notes)),
        declined=(),
    )
    begins = [_Begin(i, begin_ns, int(first_thread[i + 1]) - 1) for i, begin_ns in enumerate(begins_ns) if begin_ns]
    # Many ranks fill the memory: what the joined graph was made of is not held any longer.
    for part in (blocks, attached, dependencies, waits):
        part.clear()
    return _with_hubs(graph, sizes.tolist(), begins)


def _joined(columns: list[Array]) -> Array:
    """The columns one after the other; one value for all tasks stays one."""
    if all(column.strides == (0,) and column[0] == columns[0][0] for column in columns):
        return np.broadcast_to(columns[0][:1], sum(map(len, columns)))
    return np.concatenate(columns)


def _uses(column: Array, new_thread: Array) -> Array:
    """Renumber the devices and links that tasks use: each is 1 + the thread that represents it."""
    column = column.copy()
    for resource in ("device", "link"):
        used = column[resource] > 0
        column[resource][used] = new_thread[column[resource][used] - 1] + 1
    return column


def _prefix(number: int) -> str:
    return f"rank {number}: "


class _Begin(NamedTuple):
    """The delay of a part until its recording begins: the part, the time, and the thread of the wait."""

    part: int
    begin_ns: int
    thread: int


def _with_names(part: TaskGraph, begin_ns: int) -> TaskGraph:
    """The graph of one rank with the names, and the thread, of the tasks that will be added."""
    if not begin_ns and not part.attached.get(COLLECTIVE, np.zeros(1)).any():
        return part
    names = tuple(dict.fromkeys((*part.names, ARRIVAL_NAME, BEGIN_NAME)))
    threads = (*part.threads, Thread(BEGIN_NAME, ThreadKind.CHANNEL)) if begin_ns else part.threads
    return part.replace(names=names, threads=threads)


class _Meetings(NamedTuple):
    """The collectives of a graph, and the transfers of which they consist: one for each rank that takes part."""

    first: Int64  # the first transfer of each collective, a place in ``transfer``
    start_ns: Int64  # the latest start of each collective's transfers
    transfer: Int64  # ids of all transfers
    of_transfer: Int64  # the collective of each
    waiting: Int64  # ids of the transfers that wait for the others
    of_waiting: Int64


class _Places(NamedTuple):
    """The ids of the added tasks, and the order of the old ones."""

    old: Int64
    begin: Int64
    arrival: Int64
    hub: Int64


def _with_hubs(graph: TaskGraph, bounds: Sequence[int], begins: Sequence[_Begin]) -> TaskGraph:
    """The graph with an arrival before each transfer and a hub for every collective, in the order of recorded time.

    Part i has the tasks from ``bounds[i]`` on, and keeps their order. An arrival has all dependencies of its transfer.
    Every dependency points forward.
    """
    meetings = _meetings(graph)
    places = _places(graph, bounds, begins, meetings)
    names, threads, rows = _added(graph, begins, meetings)
    edited, moved = woven_in(graph, rows, np.concatenate([places.arrival, places.hub, places.begin]), places.old)
    if len(meetings.transfer):
        collective = edited.attached[COLLECTIVE].copy()
        collective[places.arrival] = graph.attached[COLLECTIVE][meetings.transfer]
        edited = edited.attach(**{COLLECTIVE: collective})
    dependencies = [edited.dependencies, *_dependencies(graph, bounds, begins, meetings, places, moved)]
    return reorder(edited.replace(names=names, threads=threads, dependencies=Dependencies.concatenate(dependencies)))[0]


def _meetings(graph: TaskGraph) -> _Meetings:
    none = np.zeros(len(graph), dtype=np.int64)
    collective = graph.attached.get(COLLECTIVE, none)
    transfer = np.flatnonzero(collective)
    present, first, which = np.unique(np.abs(collective[transfer]), return_index=True, return_inverse=True)
    start_ns = np.full(len(present), -1, dtype=np.int64)
    np.maximum.at(start_ns, which, graph.start_ns[transfer])
    waits = collective[transfer] > 0
    return _Meetings(first, start_ns, transfer, which, transfer[waits], which[waits])


def _places(graph: TaskGraph, bounds: Sequence[int], begins: Sequence[_Begin], meetings: _Meetings) -> _Places:
    # The task before which each begin and each arrival is inserted; of both before one task, the begin comes first.
    first_of_part = np.array([bounds[begin.part] for begin in begins], dtype=np.int64)
    ahead = np.concatenate([first_of_part, meetings.transfer])
    by_place = np.argsort(ahead, kind="stable")
    place = np.empty(len(ahead), dtype=np.int64)
    place[by_place] = ahead[by_place] + np.arange(len(ahead))
    begin, arrival = place[: len(begins)], place[len(begins) :]
    # Rows in the order of their parts, begins and arrivals with them: the task that each is, or that it precedes.
    is_new = np.zeros(len(graph) + len(place), dtype=np.bool_)
    is_new[place] = True
    within = np.arange(len(is_new)) - np.cumsum(is_new) + is_new
    start_ns = graph.start_ns.take(within, mode="clip")
    start_ns[begin] = [each.begin_ns for each in begins]
    row_bounds = [bound + int(np.count_nonzero(ahead < bound)) for bound in bounds]
    into = arrival, meetings.of_transfer
    out = np.flatnonzero(~is_new)[meetings.waiting], meetings.of_waiting
    key, hub_key = _sort_keys(start_ns, meetings.start_ns, row_bounds, into, out)
    # In order of time; at one time the hubs come last.
    order, hub_order = np.argsort(key, kind="stable"), np.argsort(hub_key, kind="stable")
    hub = np.empty(len(hub_key), dtype=np.int64)
    ahead_of_hub = np.searchsorted(key, hub_key[hub_order], side="right", sorter=order)
    hub[hub_order] = ahead_of_hub + np.arange(len(hub))
    new_at = np.flatnonzero(is_new.take(order))
    id_of = np.empty(len(order), dtype=np.int64)  # of the new rows alone: their places, and the hubs before them
    id_of[order[new_at]] = new_at + np.searchsorted(ahead_of_hub, new_at, side="right")
    return _Places(within.take(np.delete(order, new_at)), id_of[begin], id_of[arrival], hub)


def _added(
    graph: TaskGraph, begins: Sequence[_Begin], meetings: _Meetings
) -> tuple[tuple[str, ...], tuple[Thread, ...], dict[str, Array]]:
    """The names and threads of the graph with arrivals, hubs and begins, and the columns of these tasks in that order.

    Collectives that share a thread on their first rank run one after the other there: so may their hubs.
    """
    transfer, first = meetings.transfer, meetings.transfer[meetings.first]
    names = tuple(dict.fromkeys((*graph.names, HUB_NAME))) if len(first) else graph.names
    lanes, lane = np.unique(graph.thread[first], return_inverse=True)
    threads = [Thread(f"{HUB_NAME} {i + 1}", ThreadKind.CHANNEL, rank=NOBODY) for i in range(len(lanes))]
    like = np.concatenate([transfer, first])
    inherited = {each.name: getattr(graph, each.name)[like] for each in COLUMNS if each.inherits}
    start_ns = np.concatenate([graph.start_ns[transfer], meetings.start_ns])
    waits = filled(len(like), {**inherited, "start_ns": start_ns, "kind": TaskKind.WAIT})
    if len(like):
        waits["name"][: len(transfer)], waits["name"][len(transfer) :] = map(names.index, (ARRIVAL_NAME, HUB_NAME))
        waits["thread"][len(transfer) :] = len(graph.threads) + lane
    until_ns = np.array([each.begin_ns for each in begins], dtype=np.int64)
    delays = filled(len(begins), {
        "thread": np.array([each.thread for each in begins], dtype=np.int32), "kind": TaskKind.WAIT,
        "name": names.index(BEGIN_NAME) if begins else 0,
        **dict.fromkeys(("duration_ns", "low_ns", "high_ns", "start_ns"), until_ns),
    })  # fmt: skip
    return names, (*graph.threads, *threads), {name: np.concatenate([waits[name], delays[name]]) for name in waits}


def _dependencies(
    graph: TaskGraph, bounds: Sequence[int], begins: Sequence[_Begin], meetings: _Meetings, places: _Places,
    moved: Int32,
) -> Iterator[Dependencies]:  # fmt: skip
    """Yield those of the added tasks; ``graph`` is without them, and ``moved`` has the new id of each of its tasks."""
    arrival_of = np.full(len(graph), -1, dtype=np.int32)
    arrival_of[meetings.transfer] = places.arrival
    into = graph.dependencies.take(arrival_of[graph.dependencies.target] >= 0)
    kind = np.where(into.kind == DependencyKind.LAUNCH, DependencyKind.EVENT, into.kind).astype(np.int8)
    yield Dependencies(moved[into.source], arrival_of[into.target], kind, into.lag_ns, into.anchor)
    yield Dependencies.of(places.arrival, places.hub[meetings.of_transfer], DependencyKind.COMMUNICATION)
    lag_ns = graph.thread_lag_ns[graph.thread[meetings.waiting]]
    hubs, waiting = places.hub[meetings.of_waiting], moved[meetings.waiting]
    yield Dependencies.of(hubs, waiting, DependencyKind.COMMUNICATION, lag_ns)
    for each, begin in zip(begins, places.begin.tolist(), strict=True):
        from_task, to_task = bounds[each.part : each.part + 2]
        firsts = from_task + np.unique(graph.thread[from_task:to_task], return_index=True)[1]
        held = np.concatenate([moved[firsts], arrival_of[firsts][arrival_of[firsts] >= 0]])
        yield Dependencies.of(np.full(len(held), begin), held, DependencyKind.EVENT)


def _sort_keys(
    start_ns: Int64, hub_ns: Int64, bounds: Sequence[int], into: tuple[Int64, Int64], out: tuple[Int64, Int64]
) -> tuple[Int64, Int64]:
    """Times by which tasks and hubs can be sorted: hubs after their arrivals, transfers after their hubs.

    ``into`` pairs arrivals with hubs, ``out`` transfers with hubs. Within a part the times never decrease.
    """
    key, hub_key = start_ns.copy(), hub_ns.copy()
    _non_decreasing(key, bounds)
    # Only these rows are moved; the rows after them follow at the end.
    rows = np.sort(np.concatenate([into[0], out[0]]))
    arrival, transfer = np.searchsorted(rows, into[0]), np.searchsorted(rows, out[0])
    of_rows, row_bounds = key[rows], np.searchsorted(rows, bounds).tolist()
    for _ in range(_ROUNDS):
        before = of_rows.copy()
        np.maximum.at(hub_key, into[1], of_rows[arrival] + 1)
        np.maximum.at(of_rows, transfer, hub_key[out[1]] + 1)
        _non_decreasing(of_rows, row_bounds)
        if np.array_equal(of_rows, before):
            break
    key[rows] = of_rows
    _non_decreasing(key, bounds)
    return key, hub_key


def _non_decreasing(key: Int64, bounds: Sequence[int]) -> None:
    """Make the times of each part non-decreasing, in place; a task without a time gets that of the one before."""
    for begin, end in pairwise(bounds):
        np.maximum.accumulate(key[begin:end], out=key[begin:end])


def ranks_of(graph: TaskGraph) -> Int32:
    """Return the rank of each task, shape (n_tasks,); ``NOBODY`` for the hubs."""
    return np.array([thread.rank for thread in graph.threads], dtype=np.int32).take(graph.thread)


def place_of_threads(graph: TaskGraph) -> Int64:
    """Return the place of each thread's rank in ``rank_numbers``, shape (n_threads,); those of hubs come after all."""
    numbers = np.array(rank_numbers(graph), dtype=np.int64)
    rank = np.array([thread.rank for thread in graph.threads], dtype=np.int64)
    return np.where(rank == NOBODY, len(numbers), np.searchsorted(numbers, rank))


def begins_of(graph: TaskGraph) -> list[int]:
    """Return when each rank's recording begins, ns, in the order of ``graph.info.ranks``."""
    begin = np.array([name == BEGIN_NAME for name in graph.names], dtype=np.bool_).take(graph.name)
    held = dict(zip(ranks_of(graph)[begin].tolist(), graph.duration_ns[begin].tolist(), strict=True))
    return [held.get(rank, 0) for rank in rank_numbers(graph)]


def rank_numbers(graph: TaskGraph) -> list[int]:
    """Return the ranks of a graph, ascending: one for each of ``graph.info.ranks``."""
    return sorted({thread.rank for thread in graph.threads} - {NOBODY})


def take_apart(graph: TaskGraph) -> list[TaskGraph]:
    """Return the graph of each rank of a merged one, without arrivals and hubs, in the order of ``info.ranks``."""
    is_added = np.array([name in (ARRIVAL_NAME, HUB_NAME, BEGIN_NAME) for name in graph.names], dtype=np.bool_)
    kept = ~is_added.take(graph.name)
    rank = np.where(kept, ranks_of(graph), NOBODY)
    ends = graph.dependencies
    inside = np.where(kept[ends.source] & kept[ends.target], rank[ends.target], NOBODY)
    new_id = np.full(len(graph), -1, dtype=np.int32)
    parts = []
    numbers = rank_numbers(graph)
    shares = zip(_by(rank, numbers), _by(inside, numbers), _by(rank[graph.waits.task], numbers), strict=True)
    for number, begin_ns, info, (tasks, edges, waits) in zip(
        numbers, begins_of(graph), graph.info.ranks, shares, strict=True
    ):
        new_id[tasks] = np.arange(len(tasks), dtype=np.int32)
        new_thread = np.full(len(graph.threads), -1, dtype=np.int32)
        codes = [code for code, t in enumerate(graph.threads) if t.rank == number and not t.name.endswith(BEGIN_NAME)]
        new_thread[codes] = np.arange(len(codes), dtype=np.int32)
        columns = {name: column[tasks] for name, column in columns_of(graph).items()}
        columns["thread"] = new_thread[columns["thread"]]
        columns["start_ns"] = np.where(columns["start_ns"] >= 0, columns["start_ns"] - begin_ns, -1)
        scope = graph.waits.scope[waits]
        threads = (graph.threads[code] for code in codes)
        parts.append(
            graph.replace(
                **columns,
                threads=tuple(replace(t, rank=0, name=t.name.removeprefix(_prefix(number))) for t in threads),
                dependencies=renumbered(ends.take(edges), new_id),
                waits=Waits(
                    new_id[graph.waits.task[waits]],
                    np.where(scope >= 0, new_thread[scope], scope).astype(np.int32),
                    graph.waits.lag_ns[waits],
                ),
                attached={
                    name: _uses(column[tasks], new_thread) if name == USES else column[tasks]
                    for name, column in graph.attached.items()
                },
                info=replace(info, operators=graph.info.operators),
            )
        )
    return parts


def _by(rank: Array, numbers: Sequence[int]) -> list[Array]:
    """The places of each number in ``rank``, ascending."""
    order = np.argsort(rank, kind="stable")
    first = np.searchsorted(rank[order], numbers)
    last = np.searchsorted(rank[order], numbers, side="right")
    return [order[begin:end] for begin, end in zip(first.tolist(), last.tolist(), strict=True)]


def sentences_by_rank(sentences: Sequence[Sequence[str]], numbers: Sequence[int]) -> list[str]:
    """The sentences on the ranks ``numbers``: those common to all once, the others with their ranks."""
    ranks_with: dict[str, list[int]] = {}
    for number, own_sentences in zip(numbers, sentences, strict=True):
        for sentence in own_sentences:
            ranks_with.setdefault(sentence, []).append(number)
    found = []
    for sentence, ranks in ranks_with.items():
        some = ", ".join(map(str, ranks[:5])) + (", …" if len(ranks) > 5 else "")
        named = f"rank {some}: " if len(ranks) == 1 else f"ranks {some}: "
        found.append(sentence if len(ranks) == len(numbers) else named + sentence)
    return found


def _only_notes(new: TaskGraph, old: TaskGraph) -> bool:
    """Whether a transform left notes and nothing else."""
    columns = {field.name for field in fields(TaskGraph)} - {"notes", "declined"}
    return all(getattr(new, column) is getattr(old, column) for column in columns)


def rank_by_rank(graph: TaskGraph, transform: Callable[[TaskGraph], Any]) -> TaskGraph:
    """Apply ``transform`` to each rank's part of a merged graph; return the merged result."""
    before = take_apart(graph)
    after = []
    for part in before:
        changed = transform(part)
        if not isinstance(changed, TaskGraph):
            return cast(TaskGraph, changed)  # the caller reports the error
        after.append(changed)
    if all(new is old for new, old in zip(after, before, strict=True)):
        return graph
    notes = tuple(sentences_by_rank([part.notes for part in after], rank_numbers(graph)))
    if all(_only_notes(new, old) for new, old in zip(after, before, strict=True)):
        declined = min((part.declined for part in after), key=len)  # nothing changes if every rank declines
        return graph.replace(notes=notes, declined=(*graph.declined, *declined))
    first = after[0].info
    workers = graph.info.workers if first.workers == before[0].info.workers else first.workers
    info = replace(
        graph.info,
        ranks=tuple(part.info for part in after),
        batch_size=first.batch_size,
        batch_factor=first.batch_factor,
        passes=first.passes,
        workers=workers,
        gpu=first.gpu,
        gpu_memory_bytes=first.gpu_memory_bytes,
        # One worker's step and samples are the first rank's.
        memory=first.memory if workers == 1 else fullest([part.info.memory for part in after])[1],
        queue_depth=first.queue_depth,
        execution=first.execution,
        changes=first.changes,
    )
    return merge(_match_added(after), info, rank_numbers(graph), begins_of(graph)).replace(notes=notes)


def _number_each_run(column: Array, number: int) -> int:
    """Give each run but the first of the collectives 1 to ``number`` a new number; return the largest count of runs."""
    tasks = np.flatnonzero(column)
    tasks = tasks[np.argsort(np.abs(column[tasks]), kind="stable")]
    number_of = np.abs(column[tasks])
    run = np.arange(len(tasks)) - np.searchsorted(number_of, number_of)
    column[tasks] += np.sign(column[tasks]) * run * number
    return int(run.max(initial=0)) + 1


def _match_added(parts: Sequence[TaskGraph]) -> list[TaskGraph]:
    """Match the collectives that a transform added: the k-th all-reduce of a name is that of every rank.

    If a transform runs a collective several times, the k-th runs of all ranks are one. Collectives that the ranks do
    not have alike stay unmatched, and so do sends from one rank to another.
    """
    columns = [part.attached.get(COLLECTIVE, np.zeros(len(part), dtype=np.int64)).copy() for part in parts]
    new: list[dict[str, Array]] = []
    for part, column in zip(parts, columns, strict=True):
        added = (part.kind == TaskKind.COMMUNICATION) & (column == 0) & (part.start_ns < 0) & (workers_of(part) > 0)
        codes = each_once(part.name[added]).tolist()
        meets = [code for code in codes if collective_of(part.names[code], "") in MEETING]
        new.append({part.names[code]: np.flatnonzero(added & (part.name == code)) for code in meets})
    number = max((int(np.abs(column).max(initial=0)) for column in columns), default=0)
    number *= max(_number_each_run(column, number) for column in columns)
    for name in sorted(set().union(*new)):
        counts = {len(tasks.get(name, ())) for tasks in new}
        if len(counts) != 1:
            continue
        for column, tasks in zip(columns, new, strict=True):
            column[tasks[name]] = number + 1 + np.arange(len(tasks[name]))
        number += counts.pop()
    return [part.attach(**{COLLECTIVE: column}) for part, column in zip(parts, columns, strict=True)]
