"""A recording of one step as two, for what-ifs in which a step affects the next one: the second is timed."""

from __future__ import annotations

import numpy as np

from whatif.graph.insert import NewTasks
from whatif.graph.order import each_once
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import BEFORE_NAME, Int64, Phase, TaskKind
from whatif.models.layers.gradients import step_of
from whatif.models.layers.repeat import repeat
from whatif.simulation.steps import COUNTED

MARK = "(end of the step before)"


def with_next_step(graph: TaskGraph) -> TaskGraph:
    """Return a recording with one backward pass as two such steps; the time between their ends is its step time.

    Others are returned unchanged. A step ends with its work, without transfers that still run.
    """
    steps = step_of(graph)
    if len(each_once(steps[(graph.phase == Phase.BACKWARD) & (steps >= 0)])) != 1:
        return graph
    nothing: Int64 = np.empty(0, dtype=np.int64)
    everything = np.ones(len(graph), dtype=np.bool_)
    twice, run = repeat(graph, everything, 2, np.zeros(len(graph), dtype=np.int64), ends=nothing, begins=nothing)
    twice = twice.replace(step=np.where(step_of(twice) >= 0, run, -1).astype(np.int32))
    # Threads wait for their first task once.
    lead_in = twice.select(name=f"^{BEFORE_NAME.replace('(', '[(]').replace(')', '[)]')}$").mask
    twice = twice.with_duration(lead_in & (run == 1), 0)
    work = twice.gpu_work if twice.has_gpu else twice.on_cpu.mask
    work = np.asarray(work & twice.of_clock, dtype=np.bool_)
    last = np.flatnonzero(work & (run == 0))[-1:]
    marked = twice.insert(NewTasks(last, MARK, TaskKind(int(twice.kind[last[0]])), 0))
    counted = np.zeros(len(marked.graph), dtype=np.bool_)
    counted[marked.moved[np.flatnonzero(work & (run == 1))]] = True
    counted[marked.ids] = True
    return marked.graph.attach(**{COUNTED: counted})
