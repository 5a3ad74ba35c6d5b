"""Several passes per step: forward and backward work is repeated before the recorded pass, which is the last."""

from __future__ import annotations

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Float64, Phase, TaskKind
from whatif.models.durations.work_done import with_work
from whatif.models.exchange.collective_tasks import all_reduces
from whatif.models.layers.added_gradients import add_in_passes, additions
from whatif.models.layers.calls import launches_of
from whatif.models.layers.gradients import backward_ends, step_of
from whatif.models.layers.repeat import repeat
from whatif.simulation.transfers import LATENCY, ON_CPU, of_activations

# Attached: the number of passes that a task of an added pass represents; 0 for all other tasks.
STANDS_FOR = "stands for passes"
# The phases of a pass.
PASSING = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD)
# Added passes are run one by one up to this many tasks; beyond that each represents several.
MOST_TASKS = 200_000


def with_passes(graph: TaskGraph, passes: int) -> TaskGraph:
    """Return the graph whose steps with a backward pass run forward and backward work ``passes`` times.

    Every pass but the first adds its gradients to the existing ones. Gradient exchange and update happen once, in the
    last pass or after it. A pass begins on the CPU when the previous backward pass has ended there; a GPU may still be
    running.
    """
    recorded, step = graph, step_of(graph)
    of_pass = _of_pass(graph)
    graph = _waiting_as_often(graph, passes)
    ends = backward_ends(graph)
    forward = np.flatnonzero(of_pass & graph.on_cpu & (graph.phase == Phase.FORWARD))
    steps, at = np.unique(step[forward], return_index=True)
    both = np.intersect1d(step[ends], steps, return_indices=True)
    copies = min(passes - 1, max(MOST_TASKS // max(int(of_pass.sum()), 1), 1))
    graph, run = repeat(graph, of_pass, copies + 1, step, ends=ends[both[1]], begins=forward[at][both[2]])
    graph = _scaled_to(graph, (run >= 0) & (run < copies), (passes - 1) / copies)
    times = np.append(np.full(copies, (passes - 2) / copies), 1.0)
    if copies == passes - 1:
        times = np.append(0.0, np.ones(copies))
    graph = add_in_passes(graph, run, times, recorded)
    # An addition represents as many passes as the work that it follows.
    added, represented = np.flatnonzero(additions(graph)), passes_represented(graph).copy()
    represented[added] = represented[graph.neighbours[0][added]]
    return graph.attach(**{STANDS_FOR: represented})


def passes_represented(graph: TaskGraph) -> Float64:
    """Return the number of passes that each task of an added pass represents, shape (n_tasks,); else 0."""
    return np.asarray(graph.attached.get(STANDS_FOR, np.zeros(len(graph))), dtype=np.float64)


def _of_pass(graph: TaskGraph) -> Bool:
    """The work of the passes of steps with a backward pass, without all-reduces of gradients."""
    passing = np.isin(graph.phase, PASSING)
    summed = all_reduces(graph) & (graph.phase == Phase.BACKWARD) & ~of_activations(graph)
    once = summed | launches_of(graph, summed)
    in_step = _with_backward(graph)
    launched = graph.launch_of >= 0
    if launched.any():  # tasks launched before the recording began are a cut-off pass without calls
        once = once | (graph.gpu_work & ~launched)
    return np.asarray(passing & in_step & ~once & (graph.on_gpu | graph.on_cpu | of_activations(graph)), np.bool_)


def _with_backward(graph: TaskGraph) -> Bool:
    """The tasks of the steps that have a backward pass."""
    step = step_of(graph)
    return np.isin(step, step[backward_ends(graph)])


def _waiting_as_often(graph: TaskGraph, passes: int) -> TaskGraph:
    """Put the unexplained waits of all passes into the last pass."""
    waits = (graph.kind == TaskKind.WAIT) & np.isin(graph.phase, PASSING) & _with_backward(graph)
    if not waits.any():
        return graph
    centre, low, high = (column[waits] * passes for column in (graph.duration_ns, graph.low_ns, graph.high_ns))
    return graph.with_duration(waits, centre, low_ns=low, high_ns=high)


def _scaled_to(graph: TaskGraph, tasks: Bool, times: float) -> TaskGraph:
    """Scale the time, work and bytes of ``tasks`` to ``times`` passes."""
    if times != 1:
        # Each repetition also follows its predecessor on the stream.
        lag_ns = graph.thread_lag_ns[graph.thread[tasks]] * (times - 1)
        centre, low, high = (
            column[tasks] * times + lag_ns for column in (graph.duration_ns, graph.low_ns, graph.high_ns)
        )
        graph = graph.with_duration(tasks, centre, low_ns=low, high_ns=high)
        graph = with_work(graph, tasks, times)
        if of_activations(graph).any():
            columns = {name: graph.attached[name] for name in (LATENCY, *ON_CPU) if name in graph.attached}
            graph = graph.attach(**{name: np.where(tasks, times, 1) * column for name, column in columns.items()})
    return graph.attach(**{STANDS_FOR: np.where(tasks, times, 0.0)})
