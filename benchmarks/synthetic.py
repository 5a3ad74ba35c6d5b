"""Task graphs of any size, with the density of real ones."""

from __future__ import annotations

import numpy as np

from whatif.graph.columns import filled
from whatif.graph.info import GraphInfo
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Dependencies,
    DependencyKind,
    Thread,
    ThreadKind,
    Waits,
)

THREADS = 16
# Explicit dependencies per task, besides the order of its thread; real traces have fewer (0.4 in the V100 one).
DEPENDENCIES_PER_TASK = 1.68
WINDOW = 2_000


def in_order(n_tasks: int, *, small: bool = False) -> TaskGraph:
    """Return a graph whose threads run in the order of their ids, without choices.

    ``small``: columns that a simulation does not read are broadcast from one value and take no memory.
    """
    random = np.random.default_rng(0)
    parts = []
    # One table per kind of dependency, each in the order of time, as in a real graph.
    for share in (1.0, DEPENDENCIES_PER_TASK - 1):
        target = np.arange(1, n_tasks, dtype=np.int32)
        target = target[random.random(len(target)) < share]
        source = np.maximum(target - random.integers(1, WINDOW, len(target), dtype=np.int32), 0)
        parts.append(Dependencies.of(source, target, DependencyKind.USER))
    return _graph(random, Dependencies.concatenate(parts), n_tasks, ordered=True, small=small)


def with_choices(n_tasks: int, width: int) -> TaskGraph:
    """Return ``width`` chains of tasks over threads in free order: about as many tasks are ready at any time."""
    target = np.arange(width, n_tasks)
    chains = Dependencies.of(target - width, target, DependencyKind.USER)
    return _graph(np.random.default_rng(0), chains, n_tasks, ordered=False)


def _graph(
    random: np.random.Generator, dependencies: Dependencies, n_tasks: int, *, ordered: bool, small: bool = False
) -> TaskGraph:
    duration_ns = random.integers(1_000, 50_000, n_tasks)
    # Graphs read from files share the upper bound with the duration.
    low_ns = duration_ns if small else duration_ns.copy()
    given = {"duration_ns": duration_ns, "low_ns": low_ns, "high_ns": duration_ns, "step": 0, "start_ns": 0}
    given["thread"] = random.integers(0, THREADS, n_tasks, dtype=np.int32)
    if small:
        one = {name: np.broadcast_to(column, n_tasks) for name, column in filled(1, {}).items()}
        columns = one | given | {name: np.broadcast_to(one[name][:1], n_tasks) for name in ("step", "start_ns")}
    else:
        columns = filled(n_tasks, given)
    none = np.empty(0, np.int32)
    return TaskGraph(
        **columns, dependencies=dependencies, waits=Waits(none, none, np.empty(0, np.int64)), names=("",), layers=("",),
        threads=tuple(Thread(f"thread {i}", ThreadKind.CPU, ordered=ordered) for i in range(THREADS)), info=GraphInfo(),
    )  # fmt: skip
