"""The time of a training step by three clocks.

``gpu``: the ends of the last GPU task launched in consecutive steps. If the CPU runs ahead, its marks shrink and
stretch, while this stays the time in which the machine finishes a step. ``mark``: from the start of a step's first task
on the main thread to the start of the next one's. Under a what-if the CPU gets no further ahead of the GPU than in the
recording: in a longer run the GPU would hold it up. ``span``: from the start of the first GPU task to the end of the
last one (CPU tasks without a GPU). In a graph of several ranks the steps are those of the first one: training
together, all take the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from whatif.graph.structure_cache import found
from whatif.graph.types import Array, Bool, Int64

if TYPE_CHECKING:
    from whatif.graph.task_graph import TaskGraph

# Fewer steps leave too few between the first, which CPU run-ahead shrinks, and the last, which the profiler flushes.
MIN_STEPS = 4
# On a CPU nothing runs ahead and nothing is flushed: two marks give a step.
MIN_MARKED = 2
# Our choice: if steps differ by more than this share, the other clock is compared as well.
UNEVEN = 0.25
# Attached by a what-if that inserts a step before the recorded one: the tasks that define the span.
COUNTED = "counted by the span"
# The noun for each clock's times; the span is that of steps that were not distinguished.
CLOCK_NOUNS = {"gpu": "step", "mark": "step", "span": "span"}
RECORDED = {"gpu": "a recorded step", "mark": "a recorded step", "span": "the recorded span"}


def step_times_ns(graph: TaskGraph, start_ns: Int64, end_ns: Int64, clock: str) -> tuple[int, ...]:
    """Return the time of each step in ns; the ``gpu`` clock has one entry less than steps, the span one in all."""
    if not len(graph):
        return ()
    return tuple(np.diff(_edges(graph, start_ns, end_ns, clock)).tolist())


def _edges(graph: TaskGraph, start_ns: Int64, end_ns: Int64, clock: str) -> Int64:
    """The times between which a clock's steps lie, ns, ascending."""
    if clock != "span":
        tasks = edge_tasks(graph, clock)[0]
        return edge_times_ns(graph, start_ns[tasks], end_ns[tasks], clock)
    counted = np.flatnonzero(span_tasks(graph))
    return np.array([start_ns[counted].min(), end_ns[counted].max()])


def edge_tasks(graph: TaskGraph, clock: str) -> tuple[Int64, Bool]:
    """Return the tasks (ids) at the edges of a clock's steps (not the span's), and a mask of those whose start counts.

    After the marks come the GPU tasks at the edges of the GPU's clock.
    """
    return found(graph, f"edges {clock}", _last_gpu_tasks if clock == "gpu" else _marks_and_last_gpu_tasks)


def edge_times_ns(graph: TaskGraph, start_ns: Array, end_ns: Array, clock: str) -> Array:
    """Return the edges from the starts and ends of the edge tasks, whose axis comes first; others are scenarios."""
    by_start = edge_tasks(graph, clock)[1]
    edges = np.where(by_start.reshape(-1, *[1] * (start_ns.ndim - 1)), start_ns, end_ns)
    if clock == "gpu":
        return np.maximum.accumulate(edges)
    n_marks = int(by_start.sum()) + by_start.any()
    return _delayed_by_gpu(graph, edges[:n_marks], np.maximum.accumulate(edges[n_marks:]))


def _delayed_by_gpu(graph: TaskGraph, marks_ns: Array, ends_ns: Array) -> Array:
    """The marks, delayed so that no step takes a smaller share of its recorded time than the GPU's step before it.

    Counted from the second mark, and only if both clocks give as many steps as were recorded.
    """
    recorded_ns = graph.info.measured_step_ns
    by_mark, by_gpu = (np.array(recorded_ns.get(clock, ()), dtype=np.int64) for clock in ("mark", "gpu"))
    if len(by_gpu) < 1 or not len(by_mark) == len(marks_ns) - 1 == len(ends_ns) == len(by_gpu) + 1:
        return marks_ns
    shape = (-1, *[1] * (marks_ns.ndim - 1))
    share = np.diff(ends_ns, axis=0) / np.maximum(by_gpu, 1).reshape(shape)
    delayed_ns = marks_ns[1] + np.rint(np.cumsum(by_mark[1:].reshape(shape) * share, axis=0)).astype(marks_ns.dtype)
    return np.concatenate([marks_ns[:2], np.maximum(marks_ns[2:], delayed_ns)])


def span_tasks(graph: TaskGraph) -> Bool:
    """Return a mask of the tasks whose first start and last end define the span."""
    counted = graph.attached.get(COUNTED)
    if counted is not None:
        return np.asarray(counted, dtype=np.bool_)
    return (graph.on_gpu & graph.of_clock if graph.has_gpu else graph.of_clock).mask


def _last_gpu_tasks(graph: TaskGraph) -> tuple[Int64, Bool]:
    """The GPU task that was launched last in each step, by its end."""
    gpu = graph.on_gpu.ids
    gpu = gpu[graph.of_clock.mask[gpu] & (graph.step[gpu] >= 0)]
    if not len(gpu):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
    launch = graph.launch_of[gpu]
    gpu = gpu[np.argsort(np.where(launch >= 0, launch, gpu), kind="stable")]
    step = graph.step[gpu]
    last = np.full(int(step.max()) + 1, -1, dtype=np.int64)
    last[step] = gpu  # the last write wins if a step has several tasks
    last = last[last >= 0]
    return last, np.zeros(len(last), dtype=np.bool_)


def _marks_and_last_gpu_tasks(graph: TaskGraph) -> tuple[Int64, Bool]:
    marks, ends = _marks(graph), edge_tasks(graph, "gpu")
    return np.concatenate([marks[0], ends[0]]), np.concatenate([marks[1], ends[1]])


def _marks(graph: TaskGraph) -> tuple[Int64, Bool]:
    """Each step's first task on the main thread, by its start, and the last step's last one, by its end."""
    main = np.flatnonzero((graph.thread == 0) & (graph.step >= 0))
    if not len(main):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
    steps = graph.step[main]
    first = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
    return np.append(main[first], main[-1]), np.append(np.ones(len(first), dtype=np.bool_), False)


def steady(times_ns: tuple[int, ...], graph: TaskGraph, clock: str) -> tuple[int, ...]:
    """Return the times of the steady steps: without the first and the last if there are enough."""
    if clock == "span" or len(times_ns) < MIN_STEPS - 1:
        return times_ns
    begin = _first_steady(times_ns, graph, clock)
    first, last = graph.info.steady
    return times_ns[begin : begin + last - first] or times_ns


def _first_steady(times_ns: tuple[int, ...], graph: TaskGraph, clock: str) -> int:
    """The position of the first steady step among the times of a clock."""
    if len(times_ns) < MIN_STEPS - 1:
        return 0
    # Entry i of the gpu clock is the time between the ends of steps i and i + 1: the time of step i + 1.
    first = max(graph.info.steady[0] - (1 if clock == "gpu" else 0), 0)
    return first if first < len(times_ns) else 0


def step_ns(times_ns: tuple[int, ...], graph: TaskGraph, clock: str) -> float:
    """Return the step time in ns, the median of the steady steps; 0 if there is none.

    ``times_ns`` is ``whatif.simulate(graph).step_times_ns(clock)``, and ``clock`` is ``gpu``, ``mark`` or ``span``.
    """
    chosen = steady(times_ns, graph, clock)
    return float(np.median(chosen)) if chosen else 0.0


def least_steps(graph: TaskGraph) -> int:
    """Return the number of steps below which reports time the whole span."""
    return MIN_STEPS if graph.has_gpu else MIN_MARKED


def default_clock(graph: TaskGraph) -> str:
    """Return the default clock of reports, among those that the recording has.

    The GPU's, or on a CPU the marks', if enough steps are known; the marks' if the steps differ by the GPU's clock and
    much less by the marks' (a GPU that waits for others ends its steps when they allow).
    """
    times_ns = graph.info.measured_step_ns
    if graph.info.n_steps < least_steps(graph) or not {"gpu", "mark"} & times_ns.keys():
        return "span"
    if not graph.has_gpu or "gpu" not in times_ns:
        return "mark" if "mark" in times_ns else "span"
    if "mark" not in times_ns:
        return "gpu"
    by_gpu, by_mark = (_spread(steady(times_ns[clock], graph, clock)) for clock in ("gpu", "mark"))
    return "mark" if by_gpu > UNEVEN and by_mark < by_gpu / 2 else "gpu"


def _spread(times_ns: tuple[int, ...]) -> float:
    """The longest step over the shortest one, less one; infinite if a step takes no time."""
    return max(times_ns) / min(times_ns) - 1 if times_ns and min(times_ns) > 0 else float("inf")


def window_ns(graph: TaskGraph, start_ns: Int64, end_ns: Int64, clock: str) -> tuple[int, int]:
    """Return the begin and end, ns, of the steady step whose time by a clock is closest to the median of them all.

    The middle one of several: before and after it, the host of a predicted step runs ahead or is done.
    """
    if not len(graph):
        return 0, 0
    edges = _edges(graph, start_ns, end_ns, clock)
    times_ns = tuple(np.diff(edges).tolist())
    chosen = np.array(steady(times_ns, graph, clock))
    if not len(chosen):
        edges, at = _edges(graph, start_ns, end_ns, "span"), 0
    else:
        distance = np.abs(chosen - np.median(chosen))
        closest = np.flatnonzero(distance == distance.min())
        at = int(closest[(len(closest) - 1) // 2])
        at += 0 if clock == "span" else _first_steady(times_ns, graph, clock)
    return int(edges[at]), int(edges[at + 1])
