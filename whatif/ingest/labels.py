"""Layer and phase of every CPU task, without synchronisation (Daydream §4.3); GPU tasks take those of their launch.

A forward task belongs to the innermost layer whose mark encloses it. A backward operator carries the autograd sequence
number of the forward operator that created it, and so belongs to that one's layer.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from msgspec import Struct

from whatif.graph.order import each_once, places
from whatif.graph.types import (
    Array,
    Bool,
    Int8,
    Int32,
    Int64,
    Phase,
    among,
)
from whatif.ingest.events import EventCategory, Events
from whatif.ingest.grouped import Grouped, by_track, rows_marked, rows_named
from whatif.ingest.marks import NameMarks
from whatif.ingest.nest import Nest, loops, outermost
from whatif.simulation.intervals import lies_inside, union

# Recomputation repeats at most one forward pass; gradients of gradients build a graph of two. Midway between both.
MOST_RECOMPUTED = 1.5


class Labels(Struct, frozen=True):
    """Labels of pieces of one thread, shape (n_pieces,): layer code (0: none), phase, innermost operator's row."""

    layer: Int32
    phase: Int8
    operator: Int64
    loading: Bool
    landmark: Bool  # determines the phase of tasks around it
    in_optimizer: Bool  # inside an optimizer's own mark, but not an operator of a closure's passes
    recomputed: Bool  # inside an operator of the forward pass that the backward pass runs again
    pause: Int64  # row of the program's pause around it (garbage collection); -1 if there is none


class Labeller:
    """Labels tasks with the layers of a trace (``layers[0]`` is ""): backward ones by their sequence numbers.

    The masks ``is_backward``, ``is_building`` and ``is_building_again`` select the operators of the backward pass,
    those that create its nodes, and those of them that do so while it runs, shape (n_events,): activation
    checkpointing, unless ``differentiates_gradients``; with ``recomputes_unbuilt`` (use_reentrant=True) the forward
    pass builds no graph of what it recomputes. ``workers`` are the tracks that work for the main thread (autograd): all
    of their work is backward.
    """

    def __init__(self, events: Events, operators: Grouped, marks: NameMarks, workers: Collection[int] = ()) -> None:
        self._events, self._marks, self._workers = events, marks, frozenset(workers)
        self.layers = [""]
        self._layer_of_name, _ = _add_layers(self.layers, events, marks.layer)
        self._region_of_name, regions = _add_layers(self.layers, events, marks.region)
        modules, annotations = (
            rows_named(events, category, marks.is_layer)
            for category in (EventCategory.MODULE, EventCategory.ANNOTATION)
        )
        self._layer_rows = by_track(events, np.sort(np.concatenate([modules, annotations])))
        self._region_rows = by_track(events, regions)
        rows = events.of_category[EventCategory.CPU_OP]
        numbered = events.sequence[rows] >= 0
        is_backward = marks.autograd.take(events.name[rows]) | ((events.forward_thread[rows] >= 0) & numbered)
        backward, forward = rows[np.flatnonzero(is_backward)], rows[np.flatnonzero(numbered & ~is_backward)]
        building = self._operators_that_build(forward)
        self.is_backward, self.is_building = self._mask(backward), self._mask(building)
        self.has_backward = bool(len(backward))
        self._backward, self._building = by_track(events, backward), by_track(events, building)
        self._layer_of_sequence = self._sequence_layers(forward)
        self._numbered = bool(len(self._layer_of_sequence[0]))
        self._accumulates = np.array(["AccumulateGrad" in name for name in events.names], dtype=np.bool_)
        self._backward_layer = self._backward_layers(backward)
        self._operators = operators
        self.is_building_again = self._builders_in_backward()
        unbuilt = self._in_reentrant_checkpoints()
        self.differentiates_gradients = self._builds_other_work_again(building, unbuilt)
        self.recomputes_unbuilt = bool(unbuilt.any())
        self._updating, self._loading, self._stepping, self._pausing = (
            by_track(events, rows_named(events, EventCategory.ANNOTATION, named))
            for named in (marks.update, marks.loading, marks.optimizer, marks.pause)
        )

    def _mask(self, rows: Int64) -> Bool:
        mask = np.zeros(len(self._events), dtype=np.bool_)
        mask[rows] = True
        return mask

    def _operators_that_build(self, rows: Int64) -> Int64:
        """Return those of the forward operators with a sequence number that build the autograd graph.

        An operator that saves nothing carries the number of the next one that does. If the optimizer's step lies
        between them (unscaling, clipping), it builds nothing.
        """
        events = self._events
        step_ns = events.start_ns[rows_named(events, EventCategory.ANNOTATION, self._marks.optimizer)]
        if not len(step_ns) or not len(rows):
            return rows
        steps_before = places(step_ns, events.start_ns[rows])
        sequence = each_once(events.sequence[rows])
        which = places(sequence, events.sequence[rows])
        latest = np.zeros(len(sequence), dtype=np.int64)
        np.maximum.at(latest, which, steps_before)
        return rows[np.flatnonzero(steps_before == latest[which])]

    def _builders_in_backward(self) -> Bool:
        events, found = self._events, np.zeros(len(self._events), dtype=np.bool_)
        for track, rows in self._building.items() if self.has_backward else ():
            backward = self._backward[track]
            if track in self._workers:
                found[rows] = True
            elif len(backward):
                found[rows] = self._nest(backward).innermost(events.start_ns[rows]) >= 0
        return found

    def _builds_other_work_again(self, building: Int64, unbuilt: Bool) -> bool:
        """Whether backward passes build a graph of their gradients (create_graph=True, as for a gradient penalty).

        What activation checkpointing recomputes are the operators that the forward pass calls, once; the formulas of
        gradients call others, or more. Operators inside others are left out: both call products, and so are those of
        which the forward pass builds no graph (``unbuilt``).
        """
        events, is_again = self._events, self.is_building_again[building]
        again = building[np.flatnonzero(is_again & ~unbuilt[building])]
        if is_again.all() or not len(again):
            return False
        once, again = self._outermost(building[~is_again]), self._outermost(again)
        repeats = np.isin(events.name[again], events.name[once])
        duration_ns = events.duration_ns[again]
        return bool(2 * duration_ns[repeats].sum() < duration_ns.sum()) or len(again) > MOST_RECOMPUTED * len(once)

    def _in_reentrant_checkpoints(self) -> Bool:
        """Mask of what nodes of checkpoints with use_reentrant=True build again, shape (n_events,)."""
        events, found = self._events, np.zeros(len(self._events), dtype=np.bool_)
        checkpoints = np.array(["Checkpoint" in name for name in events.names], dtype=np.bool_)
        for track, rows in self._building.items() if checkpoints.any() else ():
            nodes, again = self._backward[track], rows[self.is_building_again[rows]]
            found[again] = _inside(events, nodes[checkpoints[events.name[nodes]]], events.start_ns[again])
        return found

    def _outermost(self, rows: Int64) -> Int64:
        """Return those of the events, on any threads, that lie in no other of them."""
        threads = by_track(self._events, rows).values()
        return np.concatenate([rows[:0], *(each[outermost(self._events.end_ns[each])] for each in threads)])

    def _nest(self, rows: Array) -> Nest:
        return Nest(self._events.start_ns[rows], self._events.end_ns[rows])

    def enclosing_layers(self, track: int, time_ns: Int64) -> Int32:
        """Return the innermost module at each time, else the innermost compiled region."""
        layer = self._innermost(self._layer_rows[track], self._layer_of_name, time_ns)
        regions = self._region_rows[track]
        if not len(regions):
            return layer
        return np.where(layer > 0, layer, self._innermost(regions, self._region_of_name, time_ns)).astype(np.int32)

    def _innermost(self, rows: Array, code_of_name: Int32, time_ns: Int64) -> Int32:
        if not len(rows):
            return np.zeros(len(time_ns), dtype=np.int32)
        found = self._nest(rows).innermost(time_ns)
        return np.append(code_of_name.take(self._events.name[rows]), np.int32(0))[found]

    def _sequence_layers(self, rows: Int64) -> tuple[Int64, Int32]:
        """Sequence numbers of forward operators (``rows``), sorted, and the layer of the last that carries each."""
        events = self._events
        layer = np.zeros(len(rows), dtype=np.int32)
        for track, on_track in Grouped(np.arange(len(rows)), events.track[rows]).items():
            layer[on_track] = self.enclosing_layers(track, events.start_ns[rows[on_track]])
        # Several operators share a number: the last in time created the backward node.
        order = np.lexsort((events.start_ns[rows], events.sequence[rows]))
        sequence = events.sequence[rows][order]
        last = np.append(sequence[1:] != sequence[:-1], True) if len(sequence) else np.empty(0, dtype=np.bool_)
        return sequence[last], layer[order][last]

    def _backward_layers(self, rows: Int64) -> Int32:
        """The layer of each backward operator (``rows``), shape (n_events,); 0 elsewhere and where unknown."""
        events = self._events
        layers = np.zeros(len(events), dtype=np.int32)
        sequence, layer = self._layer_of_sequence
        rows = rows[np.flatnonzero(events.sequence[rows] >= 0)]
        if len(sequence):
            at = np.minimum(places(sequence, events.sequence[rows]), len(sequence) - 1)
            layers[rows] = np.where(sequence[at] == events.sequence[rows], layer[at], 0)
        self._through_flows(layers)
        return layers

    def _through_flows(self, layers: Int32) -> None:
        """Fill in backward operators that carry no number but are reached by a forward-to-backward arrow."""
        flows = self._events.flows
        for track in each_once(flows.target_track).tolist():
            rows = self._backward[track]
            arrows = np.flatnonzero(flows.target_track == track)
            if not len(rows):
                continue
            reached = self._nest(rows).innermost(flows.target_ns[arrows])
            for source_track in each_once(flows.source_track[arrows]):
                chosen = (flows.source_track[arrows] == source_track) & (reached >= 0)
                layer = self.enclosing_layers(int(source_track), flows.source_ns[arrows[chosen]])
                target = rows[reached[chosen]]
                layers[target] = np.where(layers[target] == 0, layer, layers[target])

    def label(self, track: int, time_ns: Int64) -> Labels:
        """Return the labels of the pieces of ``track`` that start at ``time_ns``."""
        events, worker = self._events, track in self._workers
        operators = self._operators[track]
        found = self._nest(operators).innermost(time_ns)
        # Index -1 gives the appended value; an irregular mask would take several times as long.
        operator = np.append(operators, -1)[found]
        layer = enclosing = self.enclosing_layers(track, time_ns)
        in_layer = layer > 0
        backward_rows = self._backward[track]
        backward = np.zeros(len(time_ns), dtype=np.bool_)
        if len(backward_rows):
            inner = self._nest(backward_rows).innermost(time_ns)
            backward = inner >= 0
            backward_layer = np.append(self._backward_layer[backward_rows], np.int32(0))[inner]
            # A gradient is accumulated right after the operator that made it; Python between two operators belongs to
            # the one before.
            passing = backward | worker
            # A node of no layer (the loss) has none, and takes none from the step before.
            unlabelled = (
                events.sequence[backward_rows] >= 0
                if self._numbered
                else ~self._accumulates[events.name[backward_rows]]
            )
            ends = np.append(unlabelled, False)[inner]
            bits = (mask.view(np.uint8) for mask in (passing, operator < 0, ends))
            loops.carry_layers(backward_layer, *bits, self._numbered and not worker)
            layer = np.where(passing, backward_layer, layer)
        update, loading, stepping = (
            _inside(events, rows[track], time_ns) for rows in (self._updating, self._loading, self._stepping)
        )
        # What builds the autograd graph is forward, wherever it runs: between two backward passes of one step, or in
        # the closure of an optimizer, where all of a layer's forward call is.
        building = self._building[track]
        # In a recording without operators only the layers' forward calls show it.
        forward, recomputed = in_layer, np.zeros(len(time_ns), dtype=np.bool_)
        if len(building):
            inner = self._nest(building).innermost(time_ns)
            forward = inner >= 0
            if not self.differentiates_gradients:
                recomputed = np.append(self.is_building_again[building], False)[inner]
                # The layer that runs again, not that of the node which asks for its activations.
                layer = np.where(recomputed & in_layer, enclosing, layer)
        phase = np.full(len(time_ns), Phase.UNKNOWN, dtype=np.int8)
        if len(building) and (stepping & forward).any():
            forward |= in_layer & update
            update &= ~self._in_closure(track, time_ns, forward, backward)
        phase[np.flatnonzero(update)] = Phase.UPDATE
        phase[np.flatnonzero(loading)] = Phase.DATA
        phase[np.flatnonzero(forward & ~loading)] = Phase.FORWARD
        phase[np.flatnonzero(backward | worker)] = Phase.BACKWARD
        # Gradients are zeroed anywhere between an update and the next backward pass: no landmark.
        landmark = (stepping & (phase == Phase.UPDATE)) | among(phase, [Phase.FORWARD, Phase.BACKWARD, Phase.DATA])
        stepping &= among(phase, [Phase.UPDATE, Phase.UNKNOWN])
        pauses = self._pausing[track]
        pause = self._nest(pauses).innermost(time_ns)
        pause = np.append(pauses, -1)[pause] if len(pauses) else pause
        return Labels(layer, phase, operator, loading, landmark, stepping, recomputed, pause)

    def _in_closure(self, track: int, time_ns: Int64, forward: Bool, backward: Bool) -> Bool:
        """Select what lies in a pass that an optimizer's closure runs, up to its last backward operator."""
        marks, at = self._stepping[track], np.arange(len(time_ns))
        passes = forward | backward
        before = np.maximum.accumulate(np.where(passes, at, 0))
        after = np.minimum.accumulate(np.where(passes, at, len(at) - 1)[::-1])[::-1]
        mark = self._nest(marks).innermost(time_ns) if len(marks) else np.full(len(at), -1)
        together = (mark >= 0) & (mark[before] == mark) & (mark[after] == mark) & passes[before] & passes[after]
        return np.asarray(together & ~(backward[before] & ~backward[after]), dtype=np.bool_)


def _add_layers(layers: list[str], events: Events, named: list[str]) -> tuple[Int32, Int64]:
    """Add the layers that events name; return the layer of each name, shape (n_names,), 0 for none, and their rows."""
    rows = rows_marked(events, np.array([bool(layer) for layer in named], dtype=np.bool_))
    codes = np.zeros(len(events.names), dtype=np.int32)
    known = {layer: code for code, layer in enumerate(layers)}
    for code in each_once(events.name[rows]).tolist():
        layer = named[code]
        codes[code] = known.setdefault(layer, len(layers))
        if codes[code] == len(layers):
            layers.append(layer)
    return codes, rows


def _inside(events: Events, rows: Int64, time_ns: Int64) -> Bool:
    return lies_inside(time_ns, *union(events.start_ns[rows], events.end_ns[rows]))


def complete_phases(phase: Int8, landmark: Bool, time_ns: Int64, *, trains: bool) -> Int8:
    """Give every CPU task a phase, from the ``landmark`` tasks before and after it in time.

    Before a backward pass: forward. Between a backward pass and the update: update (gradient clipping, unscaling).
    After the update: update as well (logging). Gradients that are zeroed without an update were used before: to move
    the weights for the next pass (SAM), which is an update. Without any backward pass or update it is inference:
    forward.
    """
    if not trains:
        return np.where(phase == Phase.UNKNOWN, Phase.FORWARD, phase).astype(np.int8)
    known = np.flatnonzero(landmark)
    unknown = np.flatnonzero(phase == Phase.UNKNOWN)
    if not len(known):
        return np.where(phase == Phase.UNKNOWN, Phase.FORWARD, phase).astype(np.int8)
    order = known[np.argsort(time_ns[known], kind="stable")]
    known_ns = np.append(time_ns[order], np.iinfo(np.int64).max)
    at = places(known_ns[:-1], time_ns[unknown], side="right")
    before = np.where(at > 0, phase[order[np.maximum(at - 1, 0)]], Phase.UNKNOWN)
    after = np.where(at < len(order), phase[order[np.minimum(at, len(order) - 1)]], Phase.UNKNOWN)
    result = np.full(len(unknown), Phase.FORWARD, dtype=np.int8)
    zeroed_ns = np.append(np.sort(time_ns[np.flatnonzero((phase == Phase.UPDATE) & ~landmark)]), np.iinfo(np.int64).max)
    uses_gradients = (after == Phase.UPDATE) | (zeroed_ns[places(zeroed_ns, time_ns[unknown])] < known_ns[at])
    result[(before == Phase.BACKWARD) & uses_gradients] = Phase.UPDATE
    result[(before == Phase.BACKWARD) & (after == Phase.BACKWARD)] = Phase.BACKWARD
    result[(before == Phase.UPDATE) & among(after, [Phase.UPDATE, Phase.DATA, Phase.UNKNOWN])] = Phase.UPDATE
    filled = phase.copy()
    filled[unknown] = result
    return filled
