"""The CPU's half of a recording: every thread cut into tasks that follow one another without holes.

A piece between two calls is a task of its own (a gap, or an operator's own time where no GPU is involved), never a
property of the call: added to a child on another thread it would count twice (docs/design.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whatif.graph.order import places
from whatif.graph.types import Bool, Int64, among
from whatif.ingest.calls import CallKind
from whatif.ingest.events import MISSING, EventCategory, Events
from whatif.ingest.gpu_side import Calls
from whatif.ingest.grouped import Grouped, by_track
from whatif.ingest.handoff import Handoffs, activity, find_handoffs
from whatif.ingest.marks import NameMarks
from whatif.simulation.intervals import interval_of

CPU_CATEGORIES = (EventCategory.CPU_OP, EventCategory.ANNOTATION, EventCategory.RUNTIME, EventCategory.MODULE)


@dataclass(frozen=True, slots=True)
class CpuTasks:
    """Pieces of one CPU thread in order, shape (n_pieces,); ``call`` is -1 for a piece between calls."""

    start_ns: Int64
    end_ns: Int64
    call: Int64


def find_cpu_tracks(events: Events, calls: Calls, marks: NameMarks, *, has_gpu: bool) -> list[int]:
    """Return the tracks that are execution threads, the main thread first."""
    works = np.zeros(len(events.tracks), dtype=np.bool_)
    works[events.track[events.category == EventCategory.CPU_OP]] = True
    works[calls.track] = True
    tracks = [int(t) for t in np.flatnonzero(works)]
    if not tracks:
        return []
    on_cpu = among(events.category, CPU_CATEGORIES)
    for mark in (marks.step, marks.optimizer, marks.loading):
        marked = np.bincount(events.track[on_cpu & mark[events.name]], minlength=len(events.tracks)) * works
        if marked.any():
            main = int(marked.argmax())
            break
    else:
        forward = (events.category == EventCategory.CPU_OP) & ~marks.autograd[events.name]
        weight = np.bincount(events.track[forward], minlength=len(events.tracks)) * works
        # Without operators: the thread that calls first is the one that starts the others.
        by_calls = has_gpu and not weight.any()
        main = int(calls.track[calls.start_ns.argmin()] if by_calls else weight.argmax())
    return [main, *(t for t in tracks if t != main)]


def find_all_handoffs(events: Events, calls: Calls, tracks: list[int], marks: NameMarks) -> list[Handoffs]:
    """Return the hand-offs from the main thread to each thread that runs autograd, by its operators.

    In a trace without operators any thread that launches is taken for one. Operators of autograd that run on the main
    thread are ignored: parameters on the CPU are accumulated by the caller while it waits.
    """
    operators = events.category == EventCategory.CPU_OP
    autograd = np.zeros(len(events.tracks), dtype=np.bool_)
    autograd[events.track[operators & marks.autograd[events.name]]] = True
    if not operators.any():
        autograd[calls.track[among(calls.kind, [CallKind.LAUNCH, CallKind.GRAPH_LAUNCH])]] = True
    if not tracks:
        return []
    calls_of = Grouped(np.arange(len(calls.track)), calls.track)
    main = activity(
        events, calls, by_track(events, operators & ~marks.autograd[events.name])[tracks[0]], calls_of[tracks[0]]
    )
    operators_of = by_track(events, operators)
    return [
        find_handoffs(track, main, activity(events, calls, operators_of[track], calls_of[track]))
        for track in tracks[1:]
        if autograd[track]
    ]


class Cutter:
    """Cuts threads at their calls, marks and layers (and at their operators where ``by_operator``)."""

    def __init__(self, events: Events, calls: Calls, marks: NameMarks, *, by_operator: bool) -> None:
        self._events, self._calls = events, calls
        cutting = (
            ((events.category == EventCategory.ANNOTATION) & _cuts(events, marks))
            | (events.category == EventCategory.MODULE)
            | ((events.category == EventCategory.CPU_OP) & (by_operator | marks.autograd[events.name]))
        )
        self._cutting = by_track(events, cutting)
        self._working = by_track(events, among(events.category, [EventCategory.CPU_OP, EventCategory.RUNTIME]))
        self._recorded = by_track(events, among(events.category, [EventCategory.CPU_OP, EventCategory.ANNOTATION]))
        self._calls_of = Grouped(np.arange(len(calls.track)), calls.track)

    def cut(
        self, track: int, *, edges_ns: Int64, extent_ns: tuple[int, int] | None, left_out: tuple[Int64, Int64]
    ) -> CpuTasks:
        """Cut a thread into pieces.

        ``edges_ns`` are further cuts; ``left_out`` are starts and ends of disjoint intervals, sorted, in which the
        thread only waits: pieces between calls that lie in them are dropped. ``extent_ns`` widens the thread's time.
        """
        events, calls = self._events, self._calls
        mine = self._calls_of[track]
        call_start_ns, call_end_ns = calls.start_ns[mine], calls.end_ns[mine]
        cutting, working = self._cutting[track], self._working[track]
        starts, ends = events.start_ns[cutting], events.start_ns[cutting] + events.duration_ns[cutting]
        bounds = [*(extent_ns or ())]
        if len(working):
            whole_ns = events.start_ns[working]
            bounds += [int(whole_ns.min()), int((whole_ns + events.duration_ns[working]).max())]
        low, high = min(bounds), max(bounds)
        cuts = np.concatenate([starts, ends, edges_ns, *left_out])
        cuts = _outside_calls(cuts, call_start_ns, call_end_ns).clip(low, high)
        # All parts are sorted, so a merging sort is quicker than np.unique, which hashes.
        points = np.concatenate([cuts, call_start_ns, call_end_ns, [low, high]]).astype(np.int64, copy=False)
        points.sort(kind="stable")
        points = points[np.append(True, points[1:] != points[:-1])]
        start_ns, end_ns = points[:-1], points[1:]
        if not len(mine) and not len(left_out[0]):
            return CpuTasks(start_ns, end_ns, np.full(len(start_ns), MISSING))
        between = interval_of(start_ns, call_start_ns, call_end_ns) < 0
        between &= interval_of(start_ns, *left_out) < 0
        start_ns = np.concatenate([call_start_ns, start_ns[between]])
        end_ns = np.concatenate([call_end_ns, end_ns[between]])
        call = np.concatenate([mine, np.full(len(start_ns) - len(mine), MISSING)])
        # An empty call comes before the piece that starts with it.
        order = np.lexsort((end_ns, start_ns))
        return CpuTasks(start_ns[order], end_ns[order], call[order])

    def profiler_events(self, track: int, pieces: CpuTasks) -> Int64:
        """Return how many events the profiler took down inside each piece of a thread, shape (n_pieces,).

        torch stamps an event's start behind its own work on it and the end ahead of the rest, so that what an event
        costs lies outside it: nine tenths before the start (measured on empty nested events, torch 2.13), wherefore
        the piece that ends with the start counts it. A CUDA call is taken to cost CUPTI as much, inside the call: our
        estimate.
        """
        begins_ns = self._events.start_ns[self._recorded[track]]  # sorted, as all events are
        before_end = places(begins_ns, pieces.end_ns, side="right")
        return before_end - places(begins_ns, pieces.start_ns, side="right") + (pieces.call >= 0)


def _cuts(events: Events, marks: NameMarks) -> Bool:
    """Annotations at whose edges tasks are cut: marks and layers; others are only labels."""
    cutting = marks.step | marks.update | marks.loading | marks.is_layer | marks.pause
    return cutting[events.name]


def _outside_calls(cuts: Int64, start_ns: Int64, end_ns: Int64) -> Int64:
    """Move cuts that fall inside a call to its end: a call is never cut."""
    if not len(start_ns):
        return cuts
    at = interval_of(cuts, start_ns + 1, end_ns)
    return np.where(at >= 0, end_ns[at], cuts)


def idle_between(handoffs: Handoffs) -> tuple[Int64, Int64]:
    """Return the intervals in which a thread waits for its next burst: before the first and between any two.

    Only pauses in which the thread is not busy count; the thread may also work for itself.
    """
    if not len(handoffs.start_ns):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    starts, ends = handoffs.busy_start_ns, handoffs.busy_end_ns
    at = np.searchsorted(starts, handoffs.start_ns + 1, side="right") - 1
    idle_start_ns = np.where(at > 0, np.append(0, ends)[np.maximum(at, 0)], handoffs.start_ns)
    return np.minimum(idle_start_ns, handoffs.start_ns).astype(np.int64), handoffs.start_ns
