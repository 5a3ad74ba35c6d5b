"""The weight update of a step: its tasks, and its time when the kernels are fused."""

from __future__ import annotations

import numpy as np

from whatif.graph.order import each_once
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Int64
from whatif.models.durations.estimator import Estimates, Source, put, scaled, shortest_kernel_ns
from whatif.models.durations.measured import LARGEST_RATIO, SMALLEST_RATIO
from whatif.models.layers.columns import named
from whatif.models.layers.memory_effects import change_memory, updated_as
from whatif.models.layers.update_tasks import FUSED_NAMES, implementation, step_kernels, update_in_marks
from whatif.runtime.errors import WhatifError

# In a step the gradients have left the cache: our estimate of the effect.
MEASURED_SPREAD = 0.15
FUSED_NAME, FOREACH_NAME = "fused_adam (all parameters)", "multi_tensor_apply (one operation, all parameters)"


def measured_update_ratio(graph: TaskGraph, to: str) -> float | None:
    """Return the time of the update alone as ``to`` over that as recorded; None if not measured.

    On a CPU only: on a GPU the time of an update alone is that of its launches or its kernels, whichever is longer.
    """
    times = graph.info.recorded.update_times_ns
    if graph.has_gpu or not times:
        return None
    before, after = times.get(implementation(graph)), times.get(to)
    if before is None or after is None:
        return None
    ratio = after / before
    return ratio if SMALLEST_RATIO <= ratio <= LARGEST_RATIO else None


def scale_update(graph: TaskGraph, ratio: float, to: str) -> TaskGraph:
    """Return the graph in which all CPU work inside the optimizer's marks takes ``ratio`` of its time.

    In a recording without marks, the operators of the update.
    """
    update = _update_work(graph)
    graph = _renamed(graph, step_kernels(graph), FUSED_NAME if to == "fused" else FOREACH_NAME)
    low, high = ratio * (1 - MEASURED_SPREAD), ratio * (1 + MEASURED_SPREAD)
    return put(graph, update, scaled(graph, update, ratio, Source.MEASURED, low=low, high=high))


def _update_work(graph: TaskGraph) -> Array:
    """All CPU work inside the optimizer's marks, without a closure's passes; without marks, the update's operators."""
    if not graph.in_optimizer.any():
        return step_kernels(graph)
    return update_in_marks(graph).mask


def n_operations(graph: TaskGraph) -> int:
    """Return the number of distinct kernels (or operators) of the update: with one there is nothing to fuse."""
    return len(each_once(graph.name[step_kernels(graph)]))


def fuse_update(
    graph: TaskGraph, ratio: float, *, low: float, high: float, source: Source = Source.ROOFLINE
) -> TaskGraph:
    """Return the graph in which each step's update kernels are one kernel that takes ``ratio`` of their time.

    Time below the floor of each kernel does not count; ``low`` and ``high`` bound the ratio, and ``source`` is its
    source, by default the kernels' own rate and the bytes left. Raises WhatifError if the graph has no update; a fused
    update stays, with a note.
    """
    update = step_kernels(graph)
    if not update.any():
        raise WhatifError(
            f"fused_adam: {graph.info.path or 'this recording'} has no kernels in an optimizer's step to fuse; "
            "is it inference, or was it recorded without optimizer marks?"
        )
    if (update & graph.select(name=FUSED_NAMES)).any():
        return graph.unchanged("fused_adam: the optimizer is fused already; nothing changes")
    if not graph.has_gpu:
        work = _update_work(graph)
        estimates = scaled(graph, work, ratio, source, low=low, high=max(high, ratio))
        return _renamed(put(graph, work, estimates), update).note(
            f"fused_adam: {int(update.sum())} update operators of the recording move {1 / ratio:.1f} times less data"
        )
    launched = np.flatnonzero(update & (graph.launch_of >= 0))
    if not len(launched):
        raise WhatifError("fused_adam: the recording does not show which calls launched the kernels of the update.")
    launched = launched[np.argsort(graph.step[launched], kind="stable")]
    groups = np.split(launched, np.flatnonzero(np.diff(graph.step[launched])) + 1)
    if max(len(tasks) for tasks in groups) == 1:
        return graph.unchanged("fused_adam: one kernel does the whole update already; nothing changes")
    return _with_one_kernel_each(graph, groups, (ratio, low, high), source).note(
        f"fused_adam: {len(groups[0])} kernels of an update become one"
    )


def batch_update(graph: TaskGraph) -> TaskGraph:
    """Return the graph in which each operation of a GPU's update is one kernel for all parameters (foreach=True).

    They move the same bytes. Raises WhatifError if there is no update; a foreach or fused one stays.
    """
    update = step_kernels(graph)
    if implementation(graph) != "for_loop":
        return graph.unchanged("fused_adam: the optimizer works on lists of tensors already; nothing changes")
    launched = np.flatnonzero(update & (graph.launch_of >= 0))
    if not len(launched):
        raise WhatifError("fused_adam: expected update kernels and the calls that launched them, got none.")
    order = np.lexsort((launched, graph.name[launched], graph.step[launched]))
    launched = launched[order]
    same = (np.diff(graph.step[launched]) == 0) & (np.diff(graph.name[launched]) == 0)
    groups = np.split(launched, np.flatnonzero(~same) + 1)
    return _with_one_kernel_each(graph, groups, (1.0, 1.0, 1.0), Source.ROOFLINE, FOREACH_NAME).note(
        f"fused_adam: {len(launched) // max(graph.info.n_steps, 1)} kernels of an update become "
        f"{len(groups) // max(graph.info.n_steps, 1)}"
    )


def _with_one_kernel_each(
    graph: TaskGraph,
    groups: list[Int64],
    ratios: tuple[float, float, float],
    source: Source,
    new_name: str = FUSED_NAME,
) -> TaskGraph:
    """Keep the first kernel of each group, with its launch and the fused kernel's time; remove the others."""
    first = np.array([tasks[0] for tasks in groups])
    starts = np.cumsum([0, *map(len, groups[:-1])])
    each_ns = graph.duration_ns[np.concatenate(groups)]
    floor_ns = shortest_kernel_ns(graph)
    above_floor_ns, unfused_ns = (
        np.add.reduceat(time_ns, starts) for time_ns in (np.maximum(each_ns - floor_ns, 0), each_ns)
    )
    centre_ns, low_ns, high_ns = (np.minimum(np.rint(floor_ns + above_floor_ns * by), unfused_ns) for by in ratios)
    graph = put(graph, first, Estimates.of(centre_ns, source, low_ns, high_ns))
    graph = _renamed(graph, first, new_name)
    return graph.remove(np.concatenate([tasks[1:] for tasks in groups]))


def _renamed(graph: TaskGraph, tasks: Array, new_name: str = FUSED_NAME) -> TaskGraph:
    """Rename the fused tasks, so that they are not taken for the kernels they replace."""
    form, optimizer = "fused" if new_name == FUSED_NAME else "foreach", graph.info.optimizer
    return change_memory(named(graph, {new_name: tasks}), lambda memory: updated_as(memory, optimizer, form))
