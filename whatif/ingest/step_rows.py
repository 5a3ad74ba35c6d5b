"""One step of a recording as rows: visits of layers in the order of the forward pass, and their times.

A row is what one layer runs without another layer in between; without layer names, each operator is a row.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from whatif.graph.order import each_once
from whatif.graph.types import Array, Bool, Int64
from whatif.ingest.build import Parts
from whatif.ingest.events import EventCategory, Events
from whatif.ingest.marks import ACCUMULATE
from whatif.ingest.nest import outermost


class StepRows(Struct, frozen=True):
    """Rows of one step, and its operators; times in ns.

    ``forward`` and ``backward`` are rows of events in the order of their starts, ``forward_row`` and ``backward_row``
    say which row each belongs to. A step of several passes is identified by its last one, and ``passes`` are those that
    add to gradients.
    """

    names: tuple[str, ...]  # of the layer of each row
    forward: Int64
    forward_row: Int64
    backward: Int64
    backward_row: Int64
    begin_ns: int
    forward_ns: int  # when the pass begins
    builds_ns: int  # its first operator that builds the autograd graph
    others_ns: int  # from here to ``backward_ns`` there may be passes through other parts
    backward_ns: int
    update_ns: int
    end_ns: int
    passes: int
    # Rows [first, last] of each run of forward work that was repeated in the backward pass.
    recomputed_runs: tuple[tuple[int, int], ...] = ()

    def row_at(self, time_ns: Int64, starts_ns: Int64) -> Int64:
        """Return the row at work at each time; ``starts_ns`` are the starts of all events of the recording."""
        found = np.zeros(len(time_ns), dtype=np.int64)
        for operators, row, part in (
            (self.forward, self.forward_row, time_ns < self.backward_ns),
            (self.backward, self.backward_row, time_ns >= self.backward_ns),
        ):
            if len(operators):
                at = np.searchsorted(starts_ns[operators], time_ns[part], side="right") - 1
                found[part] = row[np.maximum(at, 0)]
        return found


class _Passes(Struct, frozen=True):
    """The passes of a step: a pass begins at the first operator that builds the graph after a backward one."""

    begins_ns: Int64
    backward: list[Int64]  # of each pass
    numbers: Int64  # of the nodes of the backward pass that the step creates, ascending
    creators: Int64  # the operator that creates each

    @staticmethod
    def of(events: Events, builds: Int64, backward: Int64) -> _Passes:
        starts_ns, builds_ns = events.start_ns[backward], events.start_ns[builds]
        begins_ns = builds_ns[np.flatnonzero(np.diff(np.searchsorted(starts_ns, builds_ns), prepend=-1))]
        edges = np.searchsorted(starts_ns, begins_ns)
        # The last operator in time that carries a number created the node.
        numbers, place = np.unique(events.sequence[builds][::-1], return_index=True)
        return _Passes(begins_ns, np.split(backward, edges)[1:], numbers, builds[::-1][place])

    def that_accumulate(self, events: Events) -> int:
        """How many passes add to gradients, as torch.autograd.grad does not; all of them if no operator shows it."""
        if ACCUMULATE not in events.names:
            return len(self.begins_ns)
        code = events.names.index(ACCUMULATE)
        return sum(bool((events.name[each] == code).any()) for each in self.backward) or len(self.begins_ns)

    def first_of_last(self, events: Events) -> int:
        """The pass in which the forward work of the last backward pass begins.

        It is an earlier one if that work is ahead of a backward pass through another part: of torch.autograd.grad, or
        of a discriminator whose generator ran before.
        """
        created = self.creators[np.isin(self.numbers, events.sequence[self.backward[-1]])]
        earliest_ns = events.start_ns[created].min(initial=self.begins_ns[-1])
        return int(np.searchsorted(self.begins_ns, earliest_ns, side="right")) - 1

    def forward_of_last(self, events: Events, forward: Int64, first: int) -> Int64:
        """The operators ahead of the last backward pass, from the ``first`` pass with its work, without other passes'.

        Operators before the first one that builds belong to a step's first pass: they cast the batch.
        """
        starts_ns = events.start_ns[forward]
        begins_ns = self.begins_ns[first:].copy()
        begins_ns[0] = begins_ns[0] if first else 0
        ends_ns = np.array([events.start_ns[each[0]] for each in self.backward[first:]])
        which = np.searchsorted(begins_ns, starts_ns, side="right") - 1
        inside = (which >= 0) & (starts_ns < ends_ns[np.maximum(which, 0)])
        if len(begins_ns) > 1:
            earlier = np.concatenate(self.backward[first:-1])
            done = np.setdiff1d(events.sequence[earlier], events.sequence[self.backward[-1]])
            inside &= (events.sequence[forward] < 0) | ~np.isin(events.sequence[forward], done)
        return forward[inside]


def find_step_rows(parts: Parts) -> StepRows | None:
    """Return the rows of the middle step; None if it lacks operators of a forward or a backward pass."""
    events, labeller = parts.events, parts.labeller
    edges_ns = parts.steps.edges_ns
    if not len(events) or not parts.tracks:
        return None
    if len(edges_ns) > 1:
        middle = (len(edges_ns) - 1) // 2
        begin_ns, end_ns = int(edges_ns[middle]), int(edges_ns[middle + 1])
    else:
        begin_ns, end_ns = int(events.start_ns[0]), int(events.end_ns.max()) + 1
    window = slice(*np.searchsorted(events.start_ns, [begin_ns, end_ns]).tolist())
    inside = np.arange(window.start, window.stop)
    inside = inside[events.category[inside] == EventCategory.CPU_OP]
    backward = inside[labeller.is_backward[inside]]
    forward = inside[~labeller.is_backward[inside] & (events.track[inside] == parts.tracks[0])]
    if not len(backward):
        return None
    builds = inside[labeller.is_building[inside]]
    recomputing = labeller.is_building_again[builds]
    recomputed, builds = builds[recomputing], builds[~recomputing]
    if not len(builds):
        return None
    passes = _Passes.of(events, builds, backward)
    if passes.begins_ns[-1] > events.start_ns[backward[-1]]:  # the next step's forward pass
        return None
    count = passes.that_accumulate(events)
    number = passes.first_of_last(events)
    first, others_ns = int(passes.begins_ns[number]), int(events.start_ns[passes.backward[number][0]])
    forward, backward = passes.forward_of_last(events, forward, number), passes.backward[-1]
    backward_ns = int(events.start_ns[backward[0]])
    update_ns = int((events.end_ns[backward]).max())
    if not len(forward):  # another thread than the main one runs it
        return None
    names, row = _rows(parts, forward)
    backward, backward_row = _backward_rows(parts, names, forward, row, backward, recomputed)
    return StepRows(
        names, forward, row, backward, backward_row,
        begin_ns, first if len(passes.begins_ns) > 1 else begin_ns, first,
        others_ns, backward_ns, update_ns, end_ns, count,
        () if labeller.differentiates_gradients else _runs(parts, names, backward, backward_row, recomputed),
    )  # fmt: skip


def _rows(parts: Parts, forward: Int64) -> tuple[tuple[str, ...], Int64]:
    events, layers = parts.events, parts.labeller.layers
    layer = parts.labeller.enclosing_layers(parts.tracks[0], events.start_ns[forward])
    if layer.any():
        begins = np.append(True, layer[1:] != layer[:-1]) if len(layer) else np.empty(0, dtype=np.bool_)
        return tuple(layers[code] for code in layer[begins].tolist()), np.cumsum(begins).astype(np.int64) - 1
    begins = outermost(events.end_ns[forward])
    names = tuple(events.names[code].removeprefix("aten::") for code in events.name[forward[begins]].tolist())
    return names, np.cumsum(begins).astype(np.int64) - 1


def _runs(
    parts: Parts, names: tuple[str, ...], backward: Int64, backward_row: Int64, recomputed: Int64
) -> tuple[tuple[int, int], ...]:
    """The rows of each recomputation, which one operator of the backward pass requests: its row is the last one."""
    starts_ns = parts.events.start_ns
    requested_by = np.searchsorted(starts_ns[backward], starts_ns[recomputed], side="right") - 1
    row = _rows_by_name(parts, names, recomputed)
    found = {}
    for number in each_once(requested_by).tolist():
        rows = np.append(row[(requested_by == number) & (row >= 0)], backward_row[number])
        found[number] = int(rows.min()), int(rows.max())
    return tuple(sorted(found.values()))


def _backward_rows(
    parts: Parts, names: tuple[str, ...], forward: Int64, row: Int64, backward: Int64, recomputed: Int64
) -> tuple[Int64, Int64]:
    """The backward operators, and the row of the forward operator that created each; else that of the one before."""
    events = parts.events
    numbered = events.sequence[forward] >= 0
    sequence = np.append(events.sequence[forward][numbered], events.sequence[recomputed])
    created_row = np.append(row[numbered], _rows_by_name(parts, names, recomputed))
    # The last operator in time that carries a number created the node.
    order = np.argsort(sequence, kind="stable")
    sequence, created_row = sequence[order], created_row[order]
    at = np.searchsorted(sequence, events.sequence[backward], side="right") - 1
    known: Bool = (at >= 0) & (events.sequence[backward] >= 0)
    known[known] &= sequence[at[known]] == events.sequence[backward][known]
    known[known] &= created_row[at[known]] >= 0
    last = np.maximum.accumulate(np.where(known, np.arange(len(backward)), -1))
    found: Array = np.where(last >= 0, created_row[at[np.maximum(last, 0)]], int(row.max(initial=0)))
    return backward, found.astype(np.int64)


def _rows_by_name(parts: Parts, names: tuple[str, ...], rows: Int64) -> Int64:
    """The last row of each event's layer; -1 if there is none."""
    last = {name: number for number, name in enumerate(names) if name}
    found = np.full(len(rows), -1, dtype=np.int64)
    for track in each_once(parts.events.track[rows]).tolist():
        on_track = np.flatnonzero(parts.events.track[rows] == track)
        layer = parts.labeller.enclosing_layers(track, parts.events.start_ns[rows[on_track]])
        found[on_track] = [last.get(parts.labeller.layers[code], -1) for code in layer.tolist()]
    return found
