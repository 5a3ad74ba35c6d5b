"""Several passes a step: forward and backward work is run again ahead of the recorded pass, which is the last."""

from __future__ import annotations

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Float64, Phase, TaskKind
from whatif.models.durations.work_done import with_work
from whatif.models.exchange.collective_tasks import all_reduces
from whatif.models.layers.calls import launches_of
from whatif.models.layers.gradients import backward_ends
from whatif.models.layers.repeat import repeat
from whatif.simulation.transfers import LATENCY, ON_CPU, of_activations

# Attached: how many passes a task of a pass ahead of the last one stands for; 0 for all other tasks.
STANDS_FOR = "stands for passes"
# The phases of a pass.
PASSING = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD)
# Passes ahead of the last are run one by one while they have fewer tasks than that; else each stands for several.
MOST_TASKS = 200_000


def with_passes(graph: TaskGraph, passes: int) -> TaskGraph:
    """Return the graph whose steps with a backward pass run forward and backward work ``passes`` times.

    What exchanges gradients and what updates happens once, in the last pass or after it. A pass begins on the CPU when
    the backward pass ahead of it has ended there; a GPU may still be at work.
    """
    mine = _of_pass(graph)
    graph = _waiting_as_often(graph, passes)
    ends = backward_ends(graph)
    forward = np.flatnonzero(mine & graph.on_cpu & (graph.phase == Phase.FORWARD))
    steps, at = np.unique(graph.step[forward], return_index=True)
    both = np.intersect1d(graph.step[ends], steps, return_indices=True)
    copies = min(passes - 1, max(MOST_TASKS // max(int(mine.sum()), 1), 1))
    graph, run = repeat(
        graph, mine, copies + 1, graph.step.astype(np.int64), ends=ends[both[1]], begins=forward[at][both[2]]
    )
    return _standing_for(graph, (run >= 0) & (run < copies), (passes - 1) / copies)


def stands_for(graph: TaskGraph) -> Float64:
    """Return how many passes each task of a pass ahead of a step's last one stands for, shape (n_tasks,); else 0."""
    return np.asarray(graph.attached.get(STANDS_FOR, np.zeros(len(graph))), dtype=np.float64)


def _of_pass(graph: TaskGraph) -> Bool:
    """The work of the passes of steps with a backward pass, without the sums of gradients among workers."""
    passing = np.isin(graph.phase, PASSING)
    summed = all_reduces(graph) & (graph.phase == Phase.BACKWARD) & ~of_activations(graph)
    once = summed | launches_of(graph, summed)
    in_step = np.isin(graph.step, graph.step[backward_ends(graph)])
    launched = graph.launch_of >= 0
    if launched.any():  # what was launched before the recording began is the rest of a pass, which nothing launches
        once = once | (graph.on_gpu & (graph.kind != TaskKind.COMMUNICATION) & ~launched)
    return np.asarray(passing & in_step & ~once & (graph.on_gpu | graph.on_cpu | of_activations(graph)), np.bool_)


def _waiting_as_often(graph: TaskGraph, passes: int) -> TaskGraph:
    """The graph in which what a pass waits for without a reason in the recording is waited for in each: in the last."""
    waits = (graph.kind == TaskKind.WAIT) & np.isin(graph.phase, PASSING)
    waits &= np.isin(graph.step, graph.step[backward_ends(graph)])
    if not waits.any():
        return graph
    centre, low, high = (column[waits] * passes for column in (graph.duration_ns, graph.low_ns, graph.high_ns))
    return graph.with_duration(waits, centre, low_ns=low, high_ns=high)


def _standing_for(graph: TaskGraph, tasks: Bool, times: float) -> TaskGraph:
    """Let each of ``tasks`` take as long, do and send as much as in so many passes."""
    if times != 1:
        # Each time it also follows the one before it on its stream.
        lag_ns = graph.thread_lag_ns[graph.thread[tasks]] * (times - 1)
        centre, low, high = (
            column[tasks] * times + lag_ns for column in (graph.duration_ns, graph.low_ns, graph.high_ns)
        )
        graph = graph.with_duration(tasks, centre, low_ns=low, high_ns=high)
        graph = with_work(graph, tasks, times)
        if of_activations(graph).any():
            told = {name: graph.attached[name] for name in (LATENCY, *ON_CPU) if name in graph.attached}
            graph = graph.attach(**{name: np.where(tasks, times, 1) * column for name, column in told.items()})
    return graph.attach(**{STANDS_FOR: np.where(tasks, times, 0.0)})
