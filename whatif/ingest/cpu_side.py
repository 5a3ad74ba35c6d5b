"""The CPU's half of a recording: every thread cut into tasks that follow one another without holes.

A piece between two calls is a task of its own (a gap, or an operator's own time where no GPU is involved), never a
property of the call: added to a child on another thread it would count twice (docs/design.md).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from msgspec import Struct

from whatif.graph.order import places
from whatif.graph.types import Bool, Int64, among
from whatif.ingest.calls import CallKind
from whatif.ingest.events import EventCategory, Events
from whatif.ingest.gpu_side import Calls
from whatif.ingest.grouped import Grouped, by_track, named, rows_marked, rows_named
from whatif.ingest.handoff import Handoffs, activity, find_handoffs
from whatif.ingest.marks import NameMarks
from whatif.ingest.nest import loops
from whatif.simulation.intervals import interval_of

CPU_CATEGORIES = (EventCategory.CPU_OP, EventCategory.ANNOTATION, EventCategory.RUNTIME, EventCategory.MODULE)


class CpuTasks(Struct, frozen=True):
    """Pieces of one CPU thread in order, shape (n_pieces,); ``call`` is -1 for a piece between calls."""

    start_ns: Int64
    end_ns: Int64
    call: Int64

    def edges_among(self, at_ns: Int64, side: Literal["left", "right"] = "left") -> tuple[Int64, Int64]:
        """Return the places of the start and the end of each piece among sorted times, as ``places`` does."""
        last = places(at_ns, self.end_ns, side=side)
        first = np.append(places(at_ns, self.start_ns[:1], side=side), last[:-1])
        apart = np.flatnonzero(self.start_ns[1:] != self.end_ns[:-1]) + 1
        first[apart] = places(at_ns, self.start_ns[apart], side=side)
        return first, last


def find_cpu_tracks(events: Events, operators: Grouped, calls: Calls, marks: NameMarks, *, has_gpu: bool) -> list[int]:
    """Return the tracks that are execution threads, the main thread first."""
    works = np.zeros(len(events.tracks), dtype=np.bool_)
    works[[track for track, _ in operators.items()]] = True
    works[calls.track] = True
    tracks = [int(t) for t in np.flatnonzero(works)]
    if not tracks:
        return []
    for mark in (marks.step, marks.optimizer, marks.loading):
        rows = rows_marked(events, mark)
        rows = rows[among(events.category[rows], CPU_CATEGORIES)]
        marked = np.bincount(events.track[rows], minlength=len(events.tracks)) * works
        if marked.any():
            main = int(marked.argmax())
            break
    else:
        forward = named(events, operators.rows, ~marks.autograd)
        weight = np.bincount(events.track[forward], minlength=len(events.tracks)) * works
        # Without operators: the thread that calls first is the one that starts the others.
        by_calls = has_gpu and not weight.any()
        main = int(calls.track[calls.start_ns.argmin()] if by_calls else weight.argmax())
    return [main, *(t for t in tracks if t != main)]


def find_all_handoffs(
    events: Events, operators: Grouped, autograd: Int64, calls: Calls, tracks: list[int], marks: NameMarks
) -> list[Handoffs]:
    """Return the hand-offs from the main thread to each thread that runs autograd, by its operators ``autograd``.

    In a trace without operators any thread that launches counts as one. Operators of autograd on the main thread are
    ignored: parameters on the CPU are accumulated by the caller while it waits.
    """
    runs_it = np.zeros(len(events.tracks), dtype=np.bool_)
    runs_it[events.track[autograd]] = True
    if not len(operators.rows):
        runs_it[calls.track[among(calls.kind, [CallKind.LAUNCH, CallKind.GRAPH_LAUNCH])]] = True
    if not tracks:
        return []
    main_operators = operators[tracks[0]]
    if runs_it[tracks[0]]:
        main_operators = named(events, main_operators, ~marks.autograd)
    main = activity(events, calls, main_operators, tracks[0])
    return [
        find_handoffs(track, main, activity(events, calls, operators[track], track))
        for track in tracks[1:]
        if runs_it[track]
    ]


class Cutter:
    """Cuts threads at their calls, marks and layers (and at their operators if ``by_operator``)."""

    def __init__(
        self, events: Events, operators: Grouped, autograd: Int64, calls: Calls, marks: NameMarks, *, by_operator: bool
    ) -> None:
        self._events, self._operators, self._calls = events, operators, calls
        cutting = [
            rows_named(events, EventCategory.ANNOTATION, _cuts(marks)),
            events.of_category[EventCategory.MODULE],
            operators.rows if by_operator else autograd,
        ]
        self._cutting = by_track(events, np.sort(np.concatenate(cutting), kind="stable"))
        self._recorded = by_track(events, events.on_host)

    def cut(
        self, track: int, *, edges_ns: Int64, extent_ns: tuple[int, int] | None, left_out: tuple[Int64, Int64]
    ) -> CpuTasks:
        """Cut a thread into pieces.

        ``edges_ns`` are further cuts; ``left_out`` are starts and ends of disjoint intervals, sorted, in which the
        thread only waits: pieces between calls that lie in them are dropped. ``extent_ns`` widens the thread's time.
        """
        events, calls = self._events, self._calls
        span = calls.of_track.span(track)
        call_start_ns, call_end_ns = calls.start_ns[span], calls.end_ns[span]
        cutting, operators = self._cutting[track], self._operators[track]
        starts, ends = events.start_ns[cutting], events.end_ns[cutting]
        bounds = [*(extent_ns or ())]
        if len(operators):
            bounds += [int(events.start_ns[operators[0]]), int(events.end_ns[operators].max())]
        if len(call_start_ns):
            bounds += [int(call_start_ns[0]), int(call_end_ns[-1])]
        low, high = min(bounds), max(bounds)
        cuts = np.concatenate([starts, ends, edges_ns, *left_out])
        cuts = _outside_calls(cuts, call_start_ns, call_end_ns).clip(low, high)
        # All parts are sorted, so a merging sort is quicker than np.unique, which hashes.
        points = np.concatenate([cuts, call_start_ns, call_end_ns, [low, high]]).astype(np.int64, copy=False)
        points.sort(kind="stable")
        start_ns, end_ns, call = np.empty((3, len(points) + len(call_start_ns)), dtype=np.int64)
        n = loops.cut(points, call_start_ns, call_end_ns, *left_out, span.start, start_ns, end_ns, call)
        return CpuTasks(start_ns[:n], end_ns[:n], call[:n])

    def profiler_events(self, track: int, pieces: CpuTasks) -> Int64:
        """Return the number of events that the profiler recorded in each piece of a thread, shape (n_pieces,).

        torch takes an event's start time after its own work on the event, and the end time before the rest of it. The
        cost of an event therefore lies outside it: nine tenths before the start (measured on empty nested events, torch
        2.13), so the piece that ends at the start counts the event. A CUDA call is assumed to cost CUPTI as much,
        inside the call: our estimate.
        """
        begins_ns = self._events.start_ns[self._recorded[track]]  # sorted, as all events are
        first, last = pieces.edges_among(begins_ns, side="right")
        return last - first + (pieces.call >= 0)


def _cuts(marks: NameMarks) -> Bool:
    """Mask of the names of annotations at which tasks are cut: marks and layers; others are only labels."""
    return marks.step | marks.update | marks.loading | marks.is_layer | marks.pause


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
