"""When each step's gradients are ready, and the buckets in which data parallel training sends them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from whatif.graph.structure_cache import of_graph
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    Int64,
    Phase,
)
from whatif.models.exchange.more_passes import passes_represented
from whatif.models.layers.found_gradients import FoundGradients, finished, found_gradients
from whatif.models.layers.gradients import ready_gradients, step_of, superseded
from whatif.models.layers.layer_facts import gradient_bytes, layer_codes
from whatif.runtime.errors import WhatifError
from whatif.units import counted

# Limits of DistributedDataParallel(bucket_cap_mb=None): its documentation, and dist._DEFAULT_FIRST_BUCKET_BYTES.
CAP_BYTES, FIRST_BYTES = 25 << 20, 1 << 20
MEBIBYTE = 1 << 20
# If only the sum of the gradients is known, they are assumed to be tensors of this size: our estimate.
PIECE_BYTES, MOST_PIECES = 1 << 20, 10_000


class StepGradients(NamedTuple):
    """One row per step and gradient, shape (n,) each, by step and then in the order of completion."""

    step: Int64
    row: Int64  # the gradient's number, equal in every step, counted from the output of the model
    task: Int64  # the task that completes it
    size_bytes: Int64
    layer: Int64  # its layer; -1 if unknown
    low_bytes: Int64  # the range of its size
    high_bytes: Int64


def checked_bytes(gradient_mb: float, name: str) -> float:
    """Return the bytes of ``gradient_mb``. Raises WhatifError, for the what-if ``name``, unless it is above 0."""
    if not 0 < gradient_mb <= 1e7:
        raise WhatifError(f"{name}: expected gradient_mb above 0 and up to 10,000,000, got {gradient_mb}.")
    return gradient_mb * 1e6


def step_gradients(graph: TaskGraph, gradient_mb: float | None, name: str) -> StepGradients:
    """Return the gradients of every step: ``gradient_mb`` of them, else from the first source that has any.

    Sources are the recorder's list, layers with their parameters, and gradients found in the trace
    (``whatif.models.layers.found_gradients``). ``gradient_mb``, in million bytes, is spread evenly over the time of the
    backward pass. ``name`` is the what-if's. Raises WhatifError if there is no backward pass, or if no gradient is
    known.
    """
    work = _backward_work(graph)
    if not work.any():
        raise WhatifError(f"{name}: expected a recording whose steps have a backward pass, got none.")
    if gradient_mb is not None:
        return _spread(graph, _of_last_passes(graph, work), checked_bytes(gradient_mb, name))
    known = _known_gradients(graph)
    if known is None:
        raise WhatifError(
            f"{name}: {graph.info.path or 'this recording'} lacks the gradients of its model (`whatif collect` "
            f"records them); say how many megabytes they are, as in {name}:gradient_mb=102 for ResNet-50."
        )
    return known


@of_graph
def _known_gradients(graph: TaskGraph) -> StepGradients | None:
    work, found = _backward_work(graph), ready_gradients(graph)
    if len(found.step) and int(found.size_bytes.sum()) > 0:
        code = layer_codes(graph)
        owners = (gradient.layer for gradient in graph.info.recorded.gradients)
        layer = np.array([code.get(owner, -1) if owner else -1 for owner in owners], dtype=np.int64)
        return _certain(found.step, found.row, found.task, found.size_bytes, layer[found.row])
    if bool((work & (gradient_bytes(graph) > 0).take(graph.layer)).any()):
        return _by_layer(graph, work)
    traced = found_gradients(graph)
    return None if traced is None else _by_trace(graph, _of_last_passes(graph, work), traced)


def sparse_gradients(graph: TaskGraph, gradient_mb: float | None) -> str:
    """Return the end of a note that names sparse gradients; "" without any."""
    count = 0 if gradient_mb else sum(bool(row.other.get("sparse")) for row in graph.info.recorded.gradients)
    return f"; {counted(count, 'sparse gradient')}, which DDP gathers: that takes longer" if count else ""


def gradients_source(graph: TaskGraph, gradient_mb: float | None) -> str:
    """Return the source of gradients that are not listed, and its possible error; else ""."""
    if gradient_mb is not None or graph.info.recorded.gradients or bool((gradient_bytes(graph) > 0).any()):
        return ""
    traced = found_gradients(graph)
    if traced is None:
        return ""
    certain = traced.low == traced.high == 1.0
    spread = "" if certain else f" ({100 * (traced.low - 1):+z.1f} to {100 * (traced.high - 1):+z.1f} %)"
    return traced.source + spread


def _certain(step: Int64, row: Int64, task: Int64, size_bytes: Int64, layer: Int64) -> StepGradients:
    return StepGradients(step, row, task, size_bytes, layer, size_bytes, size_bytes)


def _by_trace(graph: TaskGraph, work: Bool, traced: FoundGradients) -> StepGradients:
    """Gradients complete with autograd's operators; in a recording without these, evenly over the backward pass."""
    count = len(traced.size_bytes)
    ready = finished(graph, step_of(graph), work, count)
    if ready is None or count == 1:
        even = _spread(graph, work, float(traced.size_bytes.sum()))
        return _within(even, traced)
    step, task = np.repeat(list(ready), count).astype(np.int64), np.concatenate(list(ready.values()))
    layer = np.where(graph.layer[task] > 0, graph.layer[task], -1).astype(np.int64)
    rows, sizes = np.tile(np.arange(count), len(ready)), np.tile(traced.size_bytes, len(ready))
    return _within(_certain(step, rows, task, sizes, layer), traced)


def _within(gradients: StepGradients, traced: FoundGradients) -> StepGradients:
    low, high = (np.rint(gradients.size_bytes * by).astype(np.int64) for by in (traced.low, traced.high))
    return gradients._replace(low_bytes=low, high_bytes=high)


def _of_last_passes(graph: TaskGraph, work: Bool) -> Bool:
    return np.asarray(work & ~superseded(graph), dtype=np.bool_)


@of_graph
def _backward_work(graph: TaskGraph) -> Bool:
    """The backward work of each step, without that of added passes."""
    worker = graph.on_device
    last = (step_of(graph) >= 0) & (passes_represented(graph) == 0)
    return np.asarray(worker & (graph.phase == Phase.BACKWARD) & last, dtype=np.bool_)


def _by_layer(graph: TaskGraph, work: Bool) -> StepGradients:
    """One gradient per layer, ready with its last backward work."""
    sizes = gradient_bytes(graph)
    tasks = np.flatnonzero(work & (sizes.take(graph.layer) > 0))
    steps = step_of(graph)
    key = steps[tasks] * len(graph.layers) + graph.layer[tasks]
    _, place = np.unique(key[::-1], return_index=True)
    last = np.sort(tasks[::-1][place])
    last = last[np.argsort(steps[last], kind="stable")]
    layer = graph.layer[last].astype(np.int64)
    # A layer's gradient is numbered by its order in the first step that contains it.
    number = np.full(len(graph.layers), -1, dtype=np.int64)
    distinct, first = np.unique(layer, return_index=True)
    number[distinct[np.argsort(first)]] = np.arange(len(distinct))
    return _certain(steps[last], number[layer], last, sizes[layer], layer)


def _spread(graph: TaskGraph, work: Bool, total_bytes: float) -> StepGradients:
    """Equal gradients, the k-th of n ready after k / n of the time of the backward work."""
    count = min(max(math.ceil(total_bytes / PIECE_BYTES), 1), MOST_PIECES)
    parts = []
    steps_of = step_of(graph)
    for step in np.unique(steps_of[work]).tolist():
        tasks = np.flatnonzero(work & (steps_of == step))
        ready = tasks[at_share(graph.duration_ns[tasks], np.arange(1, count + 1) / count)]
        parts.append((np.full(count, step), np.arange(count), ready))
    steps, rows, ready = (np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True))
    sizes = np.full(len(steps), round(total_bytes / count), dtype=np.int64)
    return _certain(steps, rows, ready, sizes, np.full(len(steps), -1, dtype=np.int64))


def at_share(duration_ns: Int64, share: Array) -> Int64:
    """Return the positions of the tasks at whose ends the given shares of the total time have passed."""
    over = np.cumsum(duration_ns.astype(np.float64))
    place = np.searchsorted(over, share * over[-1] - 0.5, side="left")
    return np.asarray(np.minimum(place, len(over) - 1), dtype=np.int64)


def bucket_of(graph: TaskGraph, gradients: StepGradients, bucket_mb: float | None) -> Int64:
    """Return the bucket number of each row's gradient, shape (n,), in the order of sending.

    The recorded buckets, else DDP's rule: a bucket is full at 25 MiB or more, the first one at 1 MiB. ``bucket_mb``
    (MiB) is the limit of all buckets, like ``bucket_cap_mb``. Raises WhatifError unless it is above 0.
    """
    if bucket_mb is not None and not 0 < bucket_mb <= 1e6:
        raise WhatifError(f"distributed: expected bucket_mb above 0 and up to 1,000,000, got {bucket_mb}.")
    size = np.zeros(int(gradients.row.max()) + 1, dtype=np.int64)
    size[gradients.row] = gradients.size_bytes
    recorded = _recorded_buckets(graph, size) if bucket_mb is None and bool((gradients.layer >= 0).any()) else None
    if recorded is not None:
        return recorded[gradients.row]
    cap_bytes = CAP_BYTES if bucket_mb is None else bucket_mb * MEBIBYTE
    limit_bytes = FIRST_BYTES if bucket_mb is None else cap_bytes
    number, filled = 0, 0
    numbers = np.zeros(len(size), dtype=np.int64)
    for row, bytes_ in enumerate(size.tolist()):
        numbers[row] = number
        filled += bytes_
        if filled >= limit_bytes:
            number, filled, limit_bytes = number + 1, 0, cap_bytes
    return numbers[gradients.row]


def _recorded_buckets(graph: TaskGraph, size: Int64) -> Int64 | None:
    """The recorded bucket of each gradient in the recorder's list; None if one of them has no bucket."""
    ddp, gradients = graph.info.recorded.ddp, graph.info.recorded.gradients
    if ddp is None or ddp.buckets is None:
        return None
    numbers = {parameter: number for number, bucket in enumerate(ddp.buckets) for parameter in bucket.parameters}
    found = np.array([numbers.get(gradient.name, -1) for gradient in gradients], dtype=np.int64)
    return found if len(found) >= len(size) and not (found[: len(size)][size > 0] < 0).any() else None
