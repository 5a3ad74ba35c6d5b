"""The weight update in pieces: each parameter as soon as its gradient is ready, instead of all at the end.

Source: PyTorch, "How to save memory by fusing an optimizer step into the backward pass" (tutorial, 2023) and
torch.Tensor.register_post_accumulate_grad_hook: a separate optimizer for every parameter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whatif.graph.insert import NewTasks
from whatif.graph.kernels import KernelFamily
from whatif.graph.order import each_once
from whatif.graph.remove import GOES, STAYS, contract
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    Change,
    Int64,
    Phase,
    TaskKind,
)
from whatif.models.durations.estimator import Estimates, Source, mark, shortest_kernel_ns
from whatif.models.kernels.launches import stays_outside
from whatif.models.layers.calls import operator_cost_ns
from whatif.models.layers.gradients import ReadyGradients, ready_gradients
from whatif.models.layers.update_tasks import implementation, step_kernels, update_in_marks
from whatif.runtime.errors import WhatifError

PIECE_NAME = "update (as soon as the gradient is there)"
# The extra time of step() and zero_grad() with one optimizer per parameter: 81 us for for-loop and 93 for fused Adam,
# and 28 to 32 to clear, measured inside the backward pass of a BERT of 55 parameters on one CPU thread (torch 2.13).
# Called in a row, with warm caches, step() takes 29 us (SGD) to 59 (AdamW) more.
STEP_CALL_NS = (110_000, 50_000, 200_000)
# Uncertainty up and down: a new gradient may still be in a cache, and small kernels fill a GPU less. Our estimate.
SPREAD = 0.2
# Kernels and operators that read all gradients before the first update: clipping by a norm, a GradScaler.
_OF_ALL_GRADIENTS = r"(?i)non_?finite|unscale|lpnorm|vector_norm|_foreach_norm|clip_grad"


class Piece(NamedTuple):
    """The updates that one task makes possible, shape (n,) each: number of parameters, and share of all bytes."""

    task: Int64
    step: Int64
    parameters: Int64
    share: npt.NDArray[np.float64]


def pieces(ready: ReadyGradients, steps: Array) -> Piece:
    """Return the pieces of the update of ``steps``, in the order of the tasks that complete their gradients."""
    chosen = np.isin(ready.step, steps)
    task, step, size = ready.task[chosen], ready.step[chosen], ready.size_bytes[chosen].astype(np.float64)
    of_step = np.bincount(step, weights=size)
    tasks, first, inverse = np.unique(task, return_index=True, return_inverse=True)
    count = np.bincount(inverse)
    size_bytes = np.bincount(inverse, weights=size)
    return Piece(tasks, step[first], count, size_bytes / np.maximum(of_step[step[first]], 1.0))


def needs_all_gradients(graph: TaskGraph) -> bool:
    """Return whether the recorded update first reads every gradient: clipping by a global norm, or a GradScaler."""
    if (graph.select(name=_OF_ALL_GRADIENTS) & graph.select(phase=Phase.UPDATE)).any():
        return True
    # Reductions between the backward pass and the optimizer's mark: kernels of a norm do not have its name.
    reduces = graph.select(phase=Phase.UPDATE) & (graph.family == KernelFamily.REDUCTION) & ~graph.in_optimizer
    return bool(graph.in_optimizer.any() and reduces.any())


def update_in_pieces(graph: TaskGraph) -> tuple[TaskGraph, int]:
    """Return the graph whose update runs piece by piece as gradients become ready, and the number of pieces per step.

    The update's kernels (on a CPU: operators) and all CPU work in the optimizer's marks are removed. Each piece takes
    its share of their time by the bytes of its gradients, plus the CPU time of an optimizer call for each parameter;
    the thread that launched the gradient's kernel launches it. The same graph if no step has both gradients and an
    update. Raises WhatifError if a backward pass follows an update of its step.
    """
    on_gpu = graph.has_gpu
    kernels = step_kernels(graph)
    if _updates_between_passes(graph, kernels):
        raise WhatifError(
            "optimizer_in_backward: expected one update, after all backward passes of a step, got "
            f"{graph.info.path or 'a recording'} with a backward pass after an update (two optimizers, as in a GAN, or "
            "SAM): it adds gradients that no update may use."
        )
    ready = ready_gradients(graph)
    steps = np.intersect1d(each_once(ready.step), each_once(graph.step[kernels]))
    if not len(steps):
        return graph, 0
    kernels = kernels & np.isin(graph.step, steps)
    host = _host_work(graph, kernels, steps, on_gpu=on_gpu)
    piece = pieces(ready, steps)
    per_step = np.bincount(ready.step[np.isin(ready.step, steps)])
    device, call = _times(graph, kernels, host, piece, per_step, on_gpu=on_gpu)
    launch = np.maximum.accumulate(np.where(graph.on_gpu, graph.launch_of, -1))[piece.task] if on_gpu else piece.task
    known = launch >= 0
    behind, launch = piece.task[known], launch[known]
    work_ns, call_ns = _rows(device)[known], _rows(call)[known]
    piece_ns = work_ns if on_gpu else work_ns + call_ns
    tasks = NewTasks(
        behind, PIECE_NAME, graph.kernel_kind, piece_ns[:, 0], low_ns=piece_ns[:, 1],
        high_ns=piece_ns[:, 2], phase=Phase.UPDATE, family=int(KernelFamily.OPTIMIZER), launch_name=PIECE_NAME,
        launched_after=launch if on_gpu else None, launch_ns=call_ns[:, 0] if on_gpu else 0,
    )  # fmt: skip
    inserted = graph.insert(tasks)
    changed = mark(inserted.graph, inserted.ids, Source.ASSUMED)
    if on_gpu:
        changed = mark(changed, inserted.launches, Source.ASSUMED).with_duration(
            inserted.launches, call_ns[:, 0], low_ns=call_ns[:, 1], high_ns=call_ns[:, 2]
        )
    fate = np.full(len(changed), STAYS, dtype=np.int64)
    fate[inserted.moved[kernels | host]] = GOES
    changed = contract(changed, fate).with_change(Change.UPDATES_IN_BACKWARD)
    return changed, round(len(behind) / len(steps))


def _updates_between_passes(graph: TaskGraph, kernels: Bool) -> bool:
    """Return whether a step computes gradients after the first of its updates, whose tasks are ``kernels``."""
    worker = graph.kind == graph.kernel_kind
    backward = np.flatnonzero(worker & (graph.phase == Phase.BACKWARD) & (graph.step >= 0))
    update = np.flatnonzero(kernels & (graph.step >= 0))
    first_update = np.full(int(graph.step.max(initial=0)) + 1, len(graph), dtype=np.int64)
    np.minimum.at(first_update, graph.step[update], update)
    return bool((backward > first_update[graph.step[backward]]).any())


def _host_work(graph: TaskGraph, kernels: Bool, steps: Array, *, on_gpu: bool) -> Bool:
    """The CPU's work for the update: all in the optimizer's marks, else the calls of its kernels and their gaps."""
    if graph.in_optimizer.any():
        return (update_in_marks(graph) & np.isin(graph.step, steps) & ~stays_outside(graph)).mask
    host = np.zeros(len(graph), dtype=np.bool_)
    if on_gpu:
        calls = graph.launch_of[kernels]
        calls = calls[calls >= 0]
        behind = graph.neighbours[1][calls]
        behind = behind[behind >= 0]
        host[calls] = True
        host[behind[graph.kind[behind] == TaskKind.GAP]] = True
    return host


def _times(
    graph: TaskGraph, kernels: Bool, host: Bool, piece: Piece, per_step: Int64, *, on_gpu: bool
) -> tuple[Estimates, Estimates]:
    """The time of each piece's arithmetic, and of its calls to the optimizer."""
    floor_ns = shortest_kernel_ns(graph)
    n_steps = int(graph.step.max()) + 1

    def by_step(tasks: Bool, time_ns: Int64 | None = None) -> npt.NDArray[np.float64]:
        weights = None if time_ns is None else time_ns[tasks]
        return np.bincount(graph.step[tasks], weights=weights, minlength=n_steps).astype(np.float64)

    work_ns = by_step(kernels, np.maximum(graph.duration_ns - floor_ns, 0))
    if implementation(graph) == "for_loop":
        per_parameter = by_step(kernels)[piece.step] / per_step[piece.step]
        host_ns = by_step(host & ~kernels, graph.duration_ns)[piece.step] / per_step[piece.step]
    else:
        # Operations on lists of tensors run once for each parameter, each with a launch.
        distinct = len(each_once(graph.name[kernels]))
        per_parameter = np.full(len(piece.task), float(distinct))
        host_ns = per_parameter * (operator_cost_ns(graph) if on_gpu else 0.0)
    starting_ns = per_parameter * floor_ns * piece.parameters
    centre = work_ns[piece.step] * piece.share + starting_ns
    device = Estimates.of(centre, Source.ASSUMED, centre * (1 - SPREAD), centre * (1 + SPREAD))
    call, low, high = (piece.parameters * (host_ns + step_ns) for step_ns in STEP_CALL_NS)
    return device, Estimates.of(call, Source.ASSUMED, low, high)


def _rows(estimates: Estimates) -> npt.NDArray[np.float64]:
    """Duration and both ends of its range, shape (n, 3)."""
    return np.stack([estimates.duration_ns, estimates.low_ns, estimates.high_ns], axis=1)
