"""The parts of a step on a CPU, corrected separately: forward, backward, update, loading, and the rest.

The profiler's cost differs between them: next to large products an event costs several times as much as in a loop of
small operators, and colder caches slow the products. So each part is matched to its share of the step's time without
the profiler.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Float64, Int64, Phase
from whatif.prediction.untraced import Untraced

# The recorder's names; its `outside` still includes `loading`.
OUTSIDE, FORWARD, BACKWARD, UPDATE, LOADING = PARTS = ("outside", "forward", "backward", "update", "loading")
_FORWARD, _UPDATE = 0, 1
# The part of tasks between two of these, by the one before (row) and the one after (column).
_BETWEEN = np.array([[PARTS.index(FORWARD), PARTS.index(BACKWARD)], [PARTS.index(OUTSIDE), PARTS.index(UPDATE)]])
# Our choice: the parts of short steps are those of the warm-up, and if these differ more from the untraced steps, their
# parts do not give the shares.
AGREES = 0.5
# Our choice: a task that takes this many times its whole part in the median step is a pause, as for garbage. It is not
# among the part's usual work, and has the mean pace.
PAUSE = 2.0


class PartTimes(NamedTuple):
    """The corrections that match each part of the step to its time without the profiler, shape (n_tasks,) each."""

    event_cost_ns: Float64
    pace: Float64
    mean_event_cost_ns: float
    mean_pace: float


def part_times(
    graph: TaskGraph, untraced: Untraced, event_cost_ns: float, least: float, most: float
) -> PartTimes | None:
    """Return the cost of the profiler's events in each part, at most ``event_cost_ns``, and the pace of the rest.

    Paces lie from ``least`` to ``most``. None if the recording lacks the parts, or they are not those of a step on one
    CPU thread.
    """
    parts_ms = graph.info.recorded.parts_ms
    if untraced.clock != "cpu" or set(parts_ms) | {LOADING} != set(PARTS) or not graph.info.n_steps:
        return None
    part = _parts(graph)
    if part is None:
        return None
    first, last = graph.info.steady
    counted = (graph.step >= first) & (graph.step < last)
    loading = (part == PARTS.index(OUTSIDE)) & (graph.phase == Phase.DATA)
    loading_ms = parts_ms.get(LOADING, 0.0)
    if not loading_ms < parts_ms[OUTSIDE] or not (loading & counted).any():
        loading_ms = 0.0
    if loading_ms:
        part[loading] = PARTS.index(LOADING)
    target_ns = 1e6 * np.array(
        [parts_ms[OUTSIDE] - loading_ms, parts_ms[FORWARD], parts_ms[BACKWARD], parts_ms[UPDATE], loading_ms]
    )
    if not abs(target_ns.sum() / untraced.median_ns - 1) <= AGREES:
        return None
    target_ns *= untraced.median_ns / target_ns.sum()
    place = (graph.step[counted].astype(np.int64) - first) * len(PARTS) + part[counted]

    def per_step(amount: Float64) -> Float64:
        sums = np.bincount(place, weights=amount[counted], minlength=(last - first) * len(PARTS))
        return np.asarray(np.median(sums.reshape(-1, len(PARTS)), axis=0), dtype=np.float64)

    time_ns, events = graph.duration_ns.astype(np.float64), graph.profiler_events.astype(np.float64)
    n_events = per_step(events)
    usual_ns = per_step(time_ns)
    cost_ns = np.clip((usual_ns - target_ns) / np.maximum(n_events, 1), 0, event_cost_ns)
    left_ns = per_step(np.maximum(time_ns - cost_ns[part] * events, 0))
    pace = np.clip(target_ns / np.maximum(left_ns, 1), least, most)
    mean_pace = float(pace @ left_ns / left_ns.sum())
    return PartTimes(
        cost_ns[part],
        np.where(time_ns > PAUSE * usual_ns[part], mean_pace, pace[part]),
        float(cost_ns @ n_events / max(n_events.sum(), 1)),
        mean_pace,
    )


def _parts(graph: TaskGraph) -> Int64 | None:
    """The part of each task, a place in ``PARTS``, shape (n_tasks,); None without layers or marks of the optimizer."""
    order = graph.by_thread
    known = np.full(len(graph), -1)
    in_layer = np.array([bool(name) for name in graph.layers]).take(graph.layer)
    known[in_layer & (graph.phase == Phase.FORWARD)] = _FORWARD
    known[graph.in_optimizer] = _UPDATE
    known = known[order]
    if not all((known == each).any() for each in (_FORWARD, _UPDATE)):
        return None
    at = np.arange(len(order))
    before = np.maximum.accumulate(np.where(known >= 0, at, -1))
    after = np.minimum.accumulate(np.where(known >= 0, at, len(order))[::-1])[::-1]
    # The recording may begin and end inside a step; the two alternate.
    first, last = known[after[0]], known[before[-1]]
    ended = np.where(before >= 0, known[before], 1 - first)
    begins = np.where(after < len(order), known[np.minimum(after, len(order) - 1)], 1 - last)
    part = np.empty(len(graph), dtype=np.int64)
    part[order] = _BETWEEN[ended, begins]
    return part
