"""The profiler's cost to the host and its place in the trace, from the trace alone.

Operators that only call another one ("aten::t" calls "aten::transpose") last as long as the profiler takes to record an
event. Their mean exclusive time A, thread by thread, times kappa is the cost of an operator. Unlike a constant it
adapts to the host, the version of torch and the options of the profiler. Constants and ranges were fitted on recordings
with and without the profiler (benchmarks/profiler_cost.py; docs/limits.md has the errors).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from msgspec import Struct

from whatif.graph.order import each_once
from whatif.graph.recorded import ProfilerEstimate
from whatif.graph.types import Float64, Int64
from whatif.ingest.cpu_side import CpuTasks
from whatif.ingest.events import EventCategory, Events
from whatif.ingest.grouped import Grouped
from whatif.ingest.nest import loops


class Rate(Struct, frozen=True):
    """A cost with its range."""

    low: float
    mid: float
    high: float


# Cost of an operator over A. On a CPU fitted on seven models in two sizes with sixteen sets of options, whose own
# values lie between 0.65 and 1.4 (traces/profiler_cost_cpu). Beside a GPU, where Kineto also ties operators to calls,
# chosen so that recordings of one program with different costs come to the same host time (V100 ResNet-50 of 2020-12
# and of 2021-06).
KAPPA_CPU, KAPPA_GPU = Rate(0.75, 1.1, 1.55), Rate(1.0, 1.35, 1.65)
# us per event: a Python function, an allocation, a call of CUDA (no clean figure is published for the last).
PYTHON_US, MEMORY_US, CALL_US = Rate(0.3, 0.5, 0.8), Rate(0.1, 0.25, 0.4), Rate(0.2, 0.6, 1.5)
# us per call stack and per frame of it, if torch (1.8 to 1.11) walked it at the start of an operator: the difference
# between equal operators with and without one in the V100 recording of 2021-06.
STACK_US, FRAME_US, STACK_RANGE = 1.0, 1.09, Rate(0.85, 1.0, 1.15)
# us per operator and per recorded input of it, if A cannot be measured (torch 1.12 to 2.13, CPU): only if the header
# shows that such a version wrote the trace.
KNOWN_VERSIONS = ("record_shapes", "with_stack", "trace_id", "baseTimeNanoseconds")
OPERATOR_US, INPUT_US, CONSTANT_RANGE = 0.60, 0.128, Rate(0.6, 1.3, 2.2)

# The largest quarter of the wrappers' times is left out (they do some work of their own), and the first tenth of each
# thread's time, which is cold.
KEPT_SHARE, COLD_SHARE = 0.75, 0.1
# Fewer wrappers give no mean.
LEAST_WRAPPERS = 20
# Where times are whole microseconds, a mean below this is biased low.
LEAST_OF_WHOLE_US = 1.5


class ProfilerCost(Struct, frozen=True):
    """The profiler's cost by event; ``operator_ns`` has the shape of ``operators`` (rows of events, by track)."""

    estimate: ProfilerEstimate
    _events: Events
    _operators: Grouped
    _before_ns: Float64  # shape (n_events,): lies before the event's start
    _inside_ns: Float64  # the same: lies inside, right after the start; () if nothing does
    _python: Grouped
    _python_ns: float
    _call_ns: float

    def of_pieces(self, track: int, pieces: CpuTasks) -> Float64:
        """Return the profiler's cost in each piece of a thread, ns, shape (n_pieces,)."""
        rows = self._operators[track]
        at_ns = self._events.start_ns[rows]
        # An event's start is the end of the piece before it.
        cost_ns = _between(at_ns, self._before_ns[rows], pieces, side="right")
        if len(self._inside_ns):
            cost_ns += _between(at_ns, self._inside_ns[rows], pieces, side="left")
        python = self._python[track]
        if len(python):
            first, last = pieces.edges_among(self._events.python.time_ns[python])
            cost_ns += self._python_ns * (last - first)
        cost_ns += self._call_ns * (pieces.call >= 0)
        return cost_ns


def _between(at_ns: Int64, cost_ns: Float64, pieces: CpuTasks, *, side: Literal["left", "right"]) -> Float64:
    """Return the sum of the costs that lie in each piece: (start, end] with ``side`` right, [start, end) left."""
    if not cost_ns.any():
        return np.zeros(len(pieces.start_ns))
    total = np.append(0.0, np.cumsum(cost_ns))
    first, last = pieces.edges_among(at_ns, side=side)
    return np.asarray(total[last] - total[first])


def find_profiler_cost(events: Events, operators: Grouped, tracks: list[int], n_calls: int) -> ProfilerCost | None:
    """Return the profiler's cost of a trace that torch wrote; None if the trace does not show it.

    ``operators`` are the rows of all operators by track.
    """
    is_operator = events.category == EventCategory.CPU_OP
    n_operators = sum(len(operators[track]) for track in tracks)
    if not n_operators:
        return None
    walked = np.flatnonzero((events.frames > 0) & is_operator) if not len(events.python) else np.empty(0, np.int64)
    rows_of = Grouped(np.arange(len(events)), events.track)
    # One operator alone wraps none.
    wrapped_ns = {
        track: wrapper_ns(events, rows_of[track]) if len(operators[track]) > 1 else np.empty(0)
        for track in tracks
        if len(operators[track])
    }
    by_wrappers = _by_thread(wrapped_ns, events, walked)
    if not by_wrappers and not any(key in events.header for key in KNOWN_VERSIONS):
        return None
    before_ns = np.zeros(len(events))
    kappa = (KAPPA_GPU if n_calls else KAPPA_CPU) if by_wrappers else CONSTANT_RANGE
    if by_wrappers:
        for track, each_ns in by_wrappers.items():
            before_ns[operators[track]] = kappa.mid * each_ns
    else:
        rows = np.concatenate([operators[track] for track in wrapped_ns])
        before_ns[rows] = kappa.mid * _constant_ns(events, rows)
    own_ns = float(before_ns.sum())
    n_memory = len(events.allocations) if events.allocations is not None else 0
    memory_ns = MEMORY_US.mid * 1e3 * n_memory
    if n_memory:
        before_ns[operators.rows] += memory_ns / len(operators.rows)
    inside_ns = np.zeros(len(events) if len(walked) else 0)
    inside_ns[walked] = 1e3 * (STACK_US + FRAME_US * events.frames[walked])
    parts = [
        (own_ns, kappa),
        (memory_ns, MEMORY_US),
        (float(inside_ns.sum()), STACK_RANGE),
        (1e3 * PYTHON_US.mid * len(events.python), PYTHON_US),
        (1e3 * CALL_US.mid * n_calls, CALL_US),
    ]
    total_ns = sum(time_ns for time_ns, _ in parts)
    low, high = (
        sum(time_ns * getattr(rate, end) / rate.mid for time_ns, rate in parts) / total_ns for end in ("low", "high")
    )
    estimate = ProfilerEstimate(low, high, own_ns / n_operators / 1e3, read_from_trace=bool(by_wrappers))
    python = Grouped(np.arange(len(events.python)), events.python.track)
    return ProfilerCost(
        estimate, events, operators, before_ns, inside_ns, python, 1e3 * PYTHON_US.mid, 1e3 * CALL_US.mid
    )


def _constant_ns(events: Events, rows: Int64) -> Float64:
    """The cost of operators from constants, ns, before the range's factors."""
    inputs = np.array([len(dims) if isinstance(dims, list) else 0 for dims, _, _ in events.shapes] + [0])
    return 1e3 * (OPERATOR_US + INPUT_US * inputs[events.shape[rows]])


def _by_thread(wrapped_ns: dict[int, Float64], events: Events, walked: Int64) -> dict[int, float]:
    """Return A of each thread, ns; that of all threads for one with too few wrappers; empty if it is unknown."""
    # Wrappers include the walks of call stacks inside them: threads without any are preferred.
    walking = set(each_once(events.track[walked]).tolist())
    without = {track: times for track, times in wrapped_ns.items() if track not in walking}
    used = without or wrapped_ns
    pooled = np.concatenate(list(used.values()))
    if len(pooled) < LEAST_WRAPPERS:
        return {}
    every_ns = _mean_ns(pooled)
    parts = (events.start_ns[at : at + 4096] for at in range(0, len(events), 4096))  # stops at decimals in us
    if every_ns < 1e3 * LEAST_OF_WHOLE_US and not any((part_ns % 1000).any() for part_ns in parts):
        return {}
    return {
        track: _mean_ns(times) if track in used and len(times) >= LEAST_WRAPPERS else every_ns
        for track, times in wrapped_ns.items()
    }


def _mean_ns(times_ns: Float64) -> float:
    # Whole ns: their sum is exact in any order.
    n_kept = max(int(KEPT_SHARE * len(times_ns)), 1)
    return float(np.partition(times_ns, n_kept - 1)[:n_kept].mean())


def wrapper_ns(events: Events, rows: Int64) -> Float64:
    """Return the exclusive times of the operators among a thread's events whose only child is an operator, ns."""
    start_ns, duration_ns = events.start_ns[rows], events.duration_ns[rows]
    is_operator = events.category[rows] == EventCategory.CPU_OP
    # An event without a duration still lies inside its parent, and may have children.
    ends_ns = np.sort(start_ns + np.maximum(duration_ns, 1), kind="stable")
    warm_ns = start_ns[0] + COLD_SHARE * (ends_ns[-1] - start_ns[0])
    own_ns = np.empty(len(rows), dtype=np.int64)
    n = loops.wrappers(start_ns, duration_ns, ends_ns, is_operator.view(np.uint8), warm_ns, own_ns)
    return own_ns[:n].astype(np.float64)
