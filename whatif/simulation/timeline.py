"""A timeline: start and end of each task of a graph, step times, busy times, the critical path."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from whatif.graph.order import loops
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Dependencies, DependencyKind, Int64, TaskKind
from whatif.runtime.notebook_view import notebook_view, plot
from whatif.simulation.steps import default_clock, step_ns, step_times_ns, window_ns


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation; ``start_ns`` and ``end_ns`` have shape (n_tasks,) and begin at 0."""

    graph: TaskGraph
    start_ns: Int64
    end_ns: Int64

    @cached_property
    def makespan_ns(self) -> int:
        """The time from 0 to the end of the last task, ns."""
        return int(self.end_ns.max()) if len(self.end_ns) else 0

    def step_times_ns(self, clock: str) -> tuple[int, ...]:
        """Return the time of every step by a clock: ``gpu``, ``mark`` or ``span`` (see ``whatif.simulation.steps``)."""
        known = self._step_times_ns
        if clock not in known:
            known[clock] = step_times_ns(self.graph, self.start_ns, self.end_ns, clock)
        return known[clock]

    @property
    def step_ns(self) -> float:
        """The step time by the clock that a report uses, ns."""
        return self.step_ns_by(default_clock(self.graph))

    def step_ns_by(self, clock: str) -> float:
        """Return the step time by ``clock``, ns: the median of the steady steps; 0 if there is none."""
        return step_ns(self.step_times_ns(clock), self.graph, clock)

    def window_ns(self, clock: str) -> tuple[int, int]:
        """Return the begin and end, ns, of the steady step whose time by ``clock`` is closest to the median."""
        return window_ns(self.graph, self.start_ns, self.end_ns, clock)

    def within_ns(self, low_ns: int, high_ns: int) -> Int64:
        """Return the time of each task between two times, ns, shape (n_tasks,)."""
        return np.clip(self.end_ns, low_ns, high_ns) - np.clip(self.start_ns, low_ns, high_ns)

    @cached_property
    def _step_times_ns(self) -> dict[str, tuple[int, ...]]:
        """The step times by each requested clock, cached: a report reads them many times."""
        return {}

    @cached_property
    def busy_ns(self) -> Int64:
        """The work and transfers of each thread, ns, shape (n_threads,); waits are not work."""
        working = self.graph.kind != TaskKind.WAIT
        busy = np.bincount(
            self.graph.thread[working],
            weights=(self.end_ns - self.start_ns)[working],
            minlength=len(self.graph.threads),
        )
        return busy.astype(np.int64)

    @cached_property
    def order_of_free_threads(self) -> Dependencies:
        """The order in which threads without a fixed order ran their tasks."""
        graph = self.graph
        free = np.array([not thread.ordered for thread in graph.threads], dtype=np.bool_)
        tasks = np.flatnonzero(free.take(graph.thread))
        tasks = tasks[np.lexsort((tasks, self.end_ns[tasks], self.start_ns[tasks], graph.thread[tasks]))]
        same = graph.thread[tasks][1:] == graph.thread[tasks][:-1]
        source, target = tasks[:-1][same], tasks[1:][same]
        return Dependencies.of(source, target, DependencyKind.THREAD, graph.thread_lag_ns[graph.thread[source]])

    @cached_property
    def critical_path(self) -> Int64:
        """The ids of the tasks on the critical path, first to last: each starts when the one before it allows.

        If several predecessors bind, it takes the one on the same thread, then the one with the smallest id.
        """
        graph = self.graph
        n = len(graph)
        if not n:
            return np.empty(0, dtype=np.int64)
        ordered = np.array([thread.ordered for thread in graph.threads], dtype=np.uint8)
        before = np.full(n, -1, dtype=np.int32)
        if not ordered.all():
            free = self.order_of_free_threads
            before[free.target] = free.source
        path, seen = np.empty(n, dtype=np.int64), np.zeros(n, dtype=np.uint8)
        count = loops.walk_back(
            self.start_ns, self.end_ns, graph.thread, ordered, graph.thread_lag_ns, *graph.by_target[:3], before,
            int(self.end_ns.argmax()), seen, path,
        )  # fmt: skip
        return path[:count][::-1].copy()

    def __repr__(self) -> str:
        return f"Timeline({self.makespan_ns:,} ns of {self.graph!r})"

    _repr_html_ = notebook_view
    plot = plot
