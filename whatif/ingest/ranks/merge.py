"""Several ranks as one graph: their threads side by side, and each collective a meeting of all its ranks.

A collective of n ranks has a hub, a task without length on a channel. Before its transfer each rank has an arrival,
without length too, which waits for all that the transfer waits for on that rank. The hub waits for the arrivals, the
transfers for the hub: n edges in and n out.

Transforms are written for one rank. So a graph of several can be taken apart again: each rank's part, without
arrivals and hubs, is a graph like that of one recording, with a column (``COLLECTIVE``) that says which task is whose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np

from whatif.graph.columns import COLUMNS, filled, one_table
from whatif.graph.edit import columns_of, renumbered, reorder, woven_in
from whatif.graph.kernels import collective_of
from whatif.graph.task_graph import GraphInfo, TaskGraph
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
from whatif.simulation.sharing import USES
from whatif.simulation.transfers import workers_of

# Attached: 1 + the collective that a task is one rank's part of, 0 for all others; negative for a rank that has left
# before the others come, whom they wait for and who waits for nobody.
COLLECTIVE = "collective"
# Threads that belong to no rank.
NOBODY = -1
# How often the times by which tasks are put in order are pushed behind hubs before a general sort takes over.
_ROUNDS = 50


def merge(parts: Sequence[TaskGraph], info: GraphInfo, numbers: Sequence[int], begins_ns: Sequence[int]) -> TaskGraph:
    """Return one graph of the ranks ``numbers`` (ascending); part i begins at ``begins_ns[i]`` (0 or more).

    ``info`` is what is known of all; its ``ranks`` are the parts' own. Tasks with the same ``COLLECTIVE`` meet.
    """
    blocks = [_with_arrivals(part, begin_ns) for part, begin_ns in zip(parts, begins_ns, strict=True)]
    names, name_codes = one_table(block.names for block in blocks)
    layers, layer_codes = one_table(block.layers for block in blocks)
    operators, operator_codes = one_table(block.info.operators for block in blocks)
    sizes = np.cumsum([0, *(len(block) for block in blocks)])
    first_thread = np.cumsum([0, *(len(block.threads) for block in blocks)])
    first_number = {
        each.name: np.cumsum([0, *(int(getattr(block, each.name).max(initial=-1)) + 1 for block in blocks)])
        for each in COLUMNS
        if each.across_ranks == "number"
    }
    columns: dict[str, list[Array]] = {each.name: [] for each in COLUMNS}
    dtypes = {name: column.dtype for block in blocks for name, column in block.attached.items()}
    attached: dict[str, list[Array]] = {name: [] for name in dtypes}
    dependencies, waits = [], []
    for i, block in enumerate(blocks):
        new_thread = np.arange(len(block.threads), dtype=np.int32) + np.int32(first_thread[i])
        new_codes = {"names": name_codes, "layers": layer_codes, "operators": operator_codes}
        for each in COLUMNS:
            own = getattr(block, each.name)
            if each.across_ranks == "table":
                codes = new_thread if each.codes == "threads" else new_codes[str(each.codes)][i]
                if not np.array_equal(codes, np.arange(len(codes))):
                    own = np.append(codes, np.int32(-1))[own]  # -1 is the last entry
            elif each.across_ranks == "number" and first_number[each.name][i]:
                own = np.where(own >= 0, own + first_number[each.name][i], -1)
            elif each.across_ranks == "time" and begins_ns[i]:
                own = np.where(own >= 0, own + begins_ns[i], -1)
            columns[each.name].append(own.astype(each.dtype, copy=False))
        for name, dtype in dtypes.items():
            column = block.attached.get(name, np.zeros(len(block), dtype=dtype))
            attached[name].append(_uses(column, new_thread) if name == USES else column)
        new_id = np.arange(sizes[i], sizes[i + 1], dtype=np.int32)
        dependencies.append(renumbered(block.dependencies, new_id))
        scope = np.where(block.waits.scope >= 0, block.waits.scope + first_thread[i], block.waits.scope)
        waits.append(Waits(new_id[block.waits.task], scope.astype(np.int32), block.waits.lag_ns))
    graph = TaskGraph(
        **{name: _joined(column) for name, column in columns.items()},
        dependencies=Dependencies.concatenate(dependencies),
        waits=Waits(*(np.concatenate([getattr(w, c) for w in waits]) for c in Waits.__slots__)),
        names=names,
        threads=tuple(
            replace(thread, rank=number, name=f"{_prefix(number)}{thread.name}")
            for number, block in zip(numbers, blocks, strict=True)
            for thread in block.threads
        ),
        layers=layers,
        info=replace(info, operators=operators),
        attached={name: np.concatenate(column) for name, column in attached.items()},
        notes=_notes(blocks),
        declined=(),
    )
    return _met(graph, sizes.tolist())


def _joined(columns: list[Array]) -> Array:
    """The columns one after the other; one value for all tasks stays one."""
    if all(column.strides == (0,) and column[0] == columns[0][0] for column in columns):
        return np.broadcast_to(columns[0][:1], sum(map(len, columns)))
    return np.concatenate(columns)


def _uses(column: Array, new_thread: Array) -> Array:
    """What tasks use of devices and links, which are named by 1 + the thread that stands for them, renumbered."""
    column = column.copy()
    for thing in ("device", "link"):
        used = column[thing] > 0
        column[thing][used] = new_thread[column[thing][used] - 1] + 1
    return column


def _prefix(number: int) -> str:
    return f"rank {number}: "


def _with_arrivals(part: TaskGraph, begin_ns: int) -> TaskGraph:
    """The graph of one rank with an arrival ahead of each of its collectives, which waits for the same tasks.

    And with a task that holds everything back until the rank's recording begins.
    """
    n = len(part)
    transfer = np.flatnonzero(part.attached.get(COLLECTIVE, np.zeros(n, dtype=np.int64)))
    threads, begin = part.threads, np.empty(0, dtype=np.int64)
    first_of_thread = np.unique(part.thread, return_index=True)[1] if begin_ns else begin
    # Where a new row stands: ahead of the task with that id.
    ahead = np.concatenate([np.zeros(int(begin_ns > 0), dtype=np.int64), transfer])
    count = len(ahead)
    if not count:
        return part
    names = tuple(dict.fromkeys((*part.names, ARRIVAL_NAME, BEGIN_NAME)))
    taken_over = {each.name: getattr(part, each.name)[ahead] for each in COLUMNS if each.inherits}
    rows = filled(count, {
        **taken_over, "start_ns": part.start_ns[ahead], "name": names.index(ARRIVAL_NAME), "kind": TaskKind.WAIT,
    })  # fmt: skip
    if begin_ns:
        threads = (*threads, Thread(BEGIN_NAME, ThreadKind.CHANNEL))
        for key in ("duration_ns", "low_ns", "high_ns"):
            rows[key][0] = begin_ns
        rows["name"][0], rows["thread"][0], rows["step"][0] = names.index(BEGIN_NAME), len(threads) - 1, -1
        rows["layer"][0], rows["phase"][0], rows["start_ns"][0] = 0, 0, 0
    place = ahead + np.arange(count)
    woven, moved = woven_in(part, rows, place)
    arrival = place[bool(begin_ns) :]
    if len(arrival):
        collective = woven.attached[COLLECTIVE].copy()
        collective[arrival] = part.attached[COLLECTIVE][transfer]
        woven = woven.attach(**{COLLECTIVE: collective})
    dependencies = [woven.dependencies]
    into = part.dependencies.take(np.isin(part.dependencies.target, transfer))
    where = np.searchsorted(transfer, into.target)
    kind = np.where(into.kind == DependencyKind.LAUNCH, DependencyKind.EVENT, into.kind).astype(np.int8)
    dependencies.append(
        Dependencies(moved[into.source], arrival[where].astype(np.int32), kind, into.lag_ns, into.anchor)
    )
    if begin_ns:
        firsts = moved[first_of_thread]
        firsts = np.concatenate([firsts, arrival[np.isin(transfer, first_of_thread)]])
        dependencies.append(Dependencies.of(np.full(len(firsts), place[0]), firsts, DependencyKind.EVENT))
    return woven.replace(threads=threads, names=names, dependencies=Dependencies.concatenate(dependencies))


def _met(graph: TaskGraph, bounds: Sequence[int]) -> TaskGraph:
    """The graph with a hub for every collective, in the order of recorded time, every dependency forward.

    Part i has the tasks from ``bounds[i]`` on, arrivals included, and keeps their order.
    """
    n = len(graph)
    collective = np.abs(graph.attached.get(COLLECTIVE, np.zeros(n, dtype=np.int64)))
    taking_part = np.flatnonzero(collective)
    arrives = graph.kind[taking_part] == TaskKind.WAIT
    arrival, transfer = taking_part[arrives], taking_part[~arrives]
    present, first, which = np.unique(collective[arrival], return_index=True, return_inverse=True)
    # Collectives that share a thread on their first rank run one after the other there: so may their hubs.
    lanes, lane = np.unique(graph.thread[arrival[first]], return_inverse=True)
    threads = (Thread(f"{HUB_NAME} {i + 1}", ThreadKind.CHANNEL, rank=NOBODY) for i in range(len(lanes)))
    names = tuple(dict.fromkeys((*graph.names, HUB_NAME))) if len(present) else graph.names
    rows = {name: column[arrival[first]] for name, column in columns_of(graph).items()}
    rows["name"] = np.full(len(present), names.index(HUB_NAME) if len(present) else 0)
    rows["thread"] = (len(graph.threads) + lane).astype(np.int32)
    rows["start_ns"] = np.full(len(present), -1, dtype=np.int64)
    np.maximum.at(rows["start_ns"], which, graph.start_ns[arrival])
    waiting = transfer[graph.attached[COLLECTIVE][transfer] > 0] if len(transfer) else transfer
    of_waiting = np.searchsorted(present, collective[waiting])
    key, hub_key = _times(graph.start_ns, rows["start_ns"], bounds, (arrival, which), (waiting, of_waiting))
    # In the order of time; of those at one time the hubs come last.
    order = np.argsort(key, kind="stable")
    hub_order = np.argsort(hub_key, kind="stable")
    hub = np.empty(len(present), dtype=np.int64)
    hub[hub_order] = np.searchsorted(key[order], hub_key[hub_order], side="right") + np.arange(len(present))
    edited, moved = woven_in(graph, rows, hub, order)
    lag_ns = np.array([thread.lag_ns for thread in graph.threads], dtype=np.int64)[graph.thread[waiting]]
    dependencies = [
        edited.dependencies,
        Dependencies.of(moved[arrival], hub[which], DependencyKind.COMMUNICATION),
        Dependencies.of(hub[of_waiting], moved[waiting], DependencyKind.COMMUNICATION, lag_ns),
    ]
    return reorder(
        edited.replace(
            names=names, threads=(*graph.threads, *threads), dependencies=Dependencies.concatenate(dependencies)
        )
    )[0]


def _times(
    start_ns: Int64, hub_ns: Int64, bounds: Sequence[int], into: tuple[Int64, Int64], out: tuple[Int64, Int64]
) -> tuple[Int64, Int64]:
    """Times by which tasks and hubs can be sorted: hubs behind their arrivals, transfers behind their hubs.

    ``into`` pairs arrivals with hubs, ``out`` transfers. Within a part no task stands before one ahead of it.
    """
    key, hub_key = start_ns.copy(), hub_ns.copy()
    _never_back(key, bounds)
    for _ in range(_ROUNDS):
        before = key.copy()
        np.maximum.at(hub_key, into[1], key[into[0]] + 1)
        np.maximum.at(key, out[0], hub_key[out[1]] + 1)
        _never_back(key, bounds)
        if np.array_equal(key, before):
            break
    return key, hub_key


def _never_back(key: Int64, bounds: Sequence[int]) -> None:
    """Let no task stand before one ahead of it in its part, in place; one without a time stands with that."""
    for begin, end in pairwise(bounds):
        np.maximum.accumulate(key[begin:end], out=key[begin:end])


def ranks_of(graph: TaskGraph) -> Int32:
    """Return the rank of each task, shape (n_tasks,); ``NOBODY`` for the hubs."""
    return np.array([thread.rank for thread in graph.threads], dtype=np.int32)[graph.thread]


def begins_of(graph: TaskGraph) -> list[int]:
    """Return when each rank's recording begins, ns, in the order of ``graph.info.ranks``."""
    begin = np.array([name == BEGIN_NAME for name in graph.names], dtype=np.bool_)[graph.name]
    held = dict(zip(ranks_of(graph)[begin].tolist(), graph.duration_ns[begin].tolist(), strict=True))
    return [held.get(rank, 0) for rank in rank_numbers(graph)]


def rank_numbers(graph: TaskGraph) -> list[int]:
    """Return the ranks of a graph, ascending: one for each of ``graph.info.ranks``."""
    return sorted({thread.rank for thread in graph.threads} - {NOBODY})


def take_apart(graph: TaskGraph) -> list[TaskGraph]:
    """Return the graph of each rank of a merged one, without arrivals and hubs, in the order of ``info.ranks``."""
    helps = np.array([name in (ARRIVAL_NAME, HUB_NAME, BEGIN_NAME) for name in graph.names], dtype=np.bool_)
    kept = ~helps[graph.name]
    rank = np.where(kept, ranks_of(graph), NOBODY)
    ends = graph.dependencies
    inside = np.where(kept[ends.source] & kept[ends.target], rank[ends.target], NOBODY)
    new_id = np.full(len(graph), -1, dtype=np.int32)
    parts = []
    numbers = rank_numbers(graph)
    lots = zip(_by(rank, numbers), _by(inside, numbers), _by(rank[graph.waits.task], numbers), strict=True)
    for number, begin_ns, info, (tasks, edges, waits) in zip(
        numbers, begins_of(graph), graph.info.ranks, lots, strict=True
    ):
        new_id[tasks] = np.arange(len(tasks), dtype=np.int32)
        new_thread = np.full(len(graph.threads), -1, dtype=np.int32)
        own = [code for code, t in enumerate(graph.threads) if t.rank == number and not t.name.endswith(BEGIN_NAME)]
        new_thread[own] = np.arange(len(own), dtype=np.int32)
        columns = {name: column[tasks] for name, column in columns_of(graph).items()}
        columns["thread"] = new_thread[columns["thread"]]
        columns["start_ns"] = np.where(columns["start_ns"] >= 0, columns["start_ns"] - begin_ns, -1)
        scope = graph.waits.scope[waits]
        threads = (graph.threads[code] for code in own)
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
    """The places at which each number stands, in their order."""
    order = np.argsort(rank, kind="stable")
    first = np.searchsorted(rank[order], numbers)
    last = np.searchsorted(rank[order], numbers, side="right")
    return [order[begin:end] for begin, end in zip(first.tolist(), last.tolist(), strict=True)]


def _notes(parts: Sequence[TaskGraph]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for part in parts for note in part.notes))


def _only_spoke(new: TaskGraph, old: TaskGraph) -> bool:
    """Whether a transform left notes and nothing else."""
    columns = {field.name for field in fields(TaskGraph)} - {"notes", "declined"}
    return all(getattr(new, column) is getattr(old, column) for column in columns)


def rank_by_rank(graph: TaskGraph, transform: Callable[[TaskGraph], Any]) -> TaskGraph:
    """Return a merged graph in which each rank's part is what ``transform`` makes of it."""
    before = take_apart(graph)
    after = []
    for part in before:
        changed = transform(part)
        if not isinstance(changed, TaskGraph):
            return cast(TaskGraph, changed)  # the caller says what is wrong with it
        after.append(changed)
    if all(new is old for new, old in zip(after, before, strict=True)):
        return graph
    if all(_only_spoke(new, old) for new, old in zip(after, before, strict=True)):
        declined = min((part.declined for part in after), key=len)  # nothing changes where every rank says so
        return graph.replace(notes=_notes(after), declined=(*graph.declined, *declined))
    first = after[0].info
    info = replace(
        graph.info,
        ranks=tuple(part.info for part in after),
        batch_size=first.batch_size,
        passes=first.passes,
        workers=graph.info.workers if first.workers == before[0].info.workers else first.workers,
        gpu=first.gpu,
        gpu_memory_bytes=first.gpu_memory_bytes,
        memory=first.memory,
        queue_depth=first.queue_depth,
        execution=first.execution,
    )
    return merge(_meeting_anew(after), info, rank_numbers(graph), begins_of(graph))


def _meeting_anew(parts: Sequence[TaskGraph]) -> list[TaskGraph]:
    """The parts in which what a transform put in meets as well: the k-th all-reduce of a name is that of every rank.

    What the ranks do not have alike meets nobody, and neither does what one rank sends another.
    """
    columns = [part.attached.get(COLLECTIVE, np.zeros(len(part), dtype=np.int64)).copy() for part in parts]
    new: list[dict[str, Array]] = []
    for part, column in zip(parts, columns, strict=True):
        put_in = (part.kind == TaskKind.COMMUNICATION) & (column == 0) & (part.start_ns < 0) & (workers_of(part) > 0)
        codes = np.unique(part.name[put_in]).tolist()
        meets = [code for code in codes if collective_of(part.names[code], "") in MEETING]
        new.append({part.names[code]: np.flatnonzero(put_in & (part.name == code)) for code in meets})
    number = max((int(np.abs(column).max(initial=0)) for column in columns), default=0)
    for name in sorted(set().union(*new)):
        counts = {len(tasks.get(name, ())) for tasks in new}
        if len(counts) != 1:
            continue
        for column, tasks in zip(columns, new, strict=True):
            column[tasks[name]] = number + 1 + np.arange(len(tasks[name]))
        number += counts.pop()
    return [part.attach(**{COLLECTIVE: column}) for part, column in zip(parts, columns, strict=True)]
