"""Added work that no task waits for and that still runs when its step ends: the step's time excludes it."""

from __future__ import annotations

import numpy as np

from whatif.graph.types import Array, Bool, Int64
from whatif.simulation.steps import CLOCK_NOUNS, edge_tasks, edge_times_ns, span_tasks
from whatif.simulation.timeline import Timeline

# Less than this share of a step gets no warning.
LEAST_SHARE = 0.01


def unfinished_work(timeline: Timeline, clock: str) -> str:
    """Return a sentence on added tasks that still run when their step ends and that nothing waits for; "" without any.

    The last of several steps is excluded: the successors of its tasks were not recorded.
    """
    graph = timeline.graph
    added = np.flatnonzero(graph.start_ns < 0)
    if not len(added):
        return ""
    steps, ends_ns = _ends(timeline, clock)
    added = added[~_is_waited_for(timeline, clock)[added] & ((clock == "span") | np.isin(graph.step[added], steps))]
    place = np.searchsorted(steps, graph.step[added]) if clock != "span" else np.zeros(len(added), dtype=np.int64)
    late_ns = timeline.end_ns[added] - ends_ns[place]
    if not len(late_ns):
        return ""
    by_step = np.zeros(len(ends_ns), dtype=np.int64)
    np.maximum.at(by_step, place, late_ns)
    median_ns = float(np.median(by_step))
    if median_ns <= LEAST_SHARE * timeline.step_ns_by(clock):
        return ""
    name, noun = graph.names[graph.name[added[late_ns.argmax()]]], CLOCK_NOUNS[clock]
    return (
        f"added work ({name[:60]!r}) still runs for {median_ns / 1e6:.2f} ms when a {noun} ends, and no task waits for "
        f"it: the predicted {noun} leaves it out"
    )


def _ends(timeline: Timeline, clock: str) -> tuple[Array, Int64]:
    """The steps except the last, ascending, and the end of each, ns; for the span its end."""
    graph = timeline.graph
    if clock == "span":
        return np.zeros(1, dtype=np.int64), np.array([timeline.end_ns[span_tasks(graph)].max()])
    edges = edge_tasks(graph, clock)[0]
    times_ns = edge_times_ns(graph, timeline.start_ns[edges], timeline.end_ns[edges], clock)
    # By the GPU's clock a step ends with its own edge; by the marks' with the next edge, and the last edge ends a step.
    ends_ns = times_ns[:-1] if clock == "gpu" else times_ns[1:-1]
    return graph.step[edges][: len(ends_ns)], ends_ns


def _is_waited_for(timeline: Timeline, clock: str) -> Bool:
    """Mask of the tasks that were recorded, end a step, or are direct or indirect predecessors of these."""
    graph = timeline.graph
    waited: Bool = graph.start_ns >= 0
    if clock != "span":
        waited[edge_tasks(graph, clock)[0]] = True  # a what-if may replace all recorded tasks
    # A task waits for the one that ran before it on its thread, even if a schedule chose the order.
    order, derived = np.lexsort((np.arange(len(graph)), timeline.start_ns, graph.thread)), graph.derived
    same_thread = graph.thread[order[1:]] == graph.thread[order[:-1]]
    source = np.concatenate([graph.dependencies.source, derived.source, order[:-1][same_thread]])
    target = np.concatenate([graph.dependencies.target, derived.target, order[1:][same_thread]])
    of_added = ~waited[source]
    source, target = source[of_added], target[of_added]
    while len(reached := source[waited[target] & ~waited[source]]):
        waited[reached] = True
    return waited
