"""The work of a step that grows with the batch, and its parts that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec import structs

from whatif.graph.kernels import KernelFamily
from whatif.graph.recorded import AUTOCAST_CASTS
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    Float64,
    Int64,
    Phase,
    TaskKind,
    among,
)
from whatif.models.durations.estimator import Estimates, Source, device, shortest_kernel_ns
from whatif.models.durations.measured import task_batch_ratio
from whatif.models.durations.occupancy import filled, latency_ns, roofline_ns
from whatif.models.durations.work_done import with_work
from whatif.models.kernels.stored_weights import packing_ns, stored_weights
from whatif.models.layers.calls import launches_of
from whatif.simulation.transfers import grown_ns, of_activations, parts_of, with_parts

# Operators of the backward pass on parameters and their gradients, independent of the batch.
_PARAMETER_WORK = r"AccumulateGrad|aten::detach|ToCopyBackward0"
# An optimizer adds up the rows of a sparse gradient; the update is of the rows that the batch reads.
_SPARSE_UPDATE = r"^aten::_coalesce$"
# Uncertainty of the change: products fill the machine better or worse at another size; our estimate.
SPREAD = 0.1
# The share of a kernel's time beyond latency and known work that may also grow. Our estimate.
HIDDEN_SHARE = 0.5
# Uncertainty for products of stored weights: of the change, and of the time (kernels of another shape); our estimate.
WEIGHTS_SPREAD, WEIGHTS_KERNEL_SPREAD = 0.3, 0.05


def batch_tasks(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the tasks whose work grows with the batch.

    GPU kernels and copies (CPU operators without a GPU) of the forward and backward passes, and of loading on a GPU,
    without work on parameters and gradients, memsets and collectives. Updates with sparse gradients grow as well.
    """
    passes = among(graph.phase, [Phase.FORWARD, Phase.BACKWARD])
    if (graph.select(name=_SPARSE_UPDATE, phase=Phase.UPDATE) & graph.in_optimizer).any():
        passes = passes | (graph.select(phase=Phase.UPDATE) & graph.in_optimizer).mask
    fixed = graph.select(name=_PARAMETER_WORK) | (graph.family == KernelFamily.OPTIMIZER)
    if graph.has_gpu:
        work = graph.on_gpu & ~among(graph.kind, [TaskKind.MEMSET, TaskKind.COMMUNICATION])
        passes = passes | graph.select(phase=Phase.DATA)
    else:
        work = graph.select(kind=TaskKind.CPU_OP)
    return np.asarray(passes & work & ~fixed, dtype=np.bool_)


def work_at_batch(graph: TaskGraph, tasks: Bool, factor: float) -> TaskGraph:
    """Scale the work of ``tasks`` to ``factor`` times the samples; products read their stored weights once.

    Transfers between the parts of a model grow as well.
    """
    graph = _transfers_at_batch(graph, factor)
    weights = stored_weights(graph)
    result = with_work(graph, tasks, factor, wider=True)
    if weights is None:
        return result
    moved = graph.size_bytes.copy()
    known = weights.tasks & tasks & (moved >= 0)
    moved[known] = np.rint(moved[known] * weights.bytes_ratio(factor)[known[weights.tasks]])
    return result.replace(size_bytes=np.where(known, moved, result.size_bytes))


def _transfers_at_batch(graph: TaskGraph, factor: float) -> TaskGraph:
    sent = of_activations(graph)
    if not sent.any():
        return graph
    size = graph.size_bytes.copy()
    size[sent] = np.where(size[sent] >= 0, np.rint(size[sent] * factor), size[sent])
    duration_ns, low_ns, high_ns = (
        grown_ns(graph, sent, column[sent].astype(np.float64), factor)
        for column in (graph.duration_ns, graph.low_ns, graph.high_ns)
    )
    graph = with_parts(graph, sent, parts_of(graph, sent).grown(factor))
    return graph.with_duration(sent, duration_ns, low_ns=low_ns, high_ns=high_ns).replace(size_bytes=size)


class _Fixed(NamedTuple):
    """The part of each task's time that no batch changes, ns: estimate, lower bound, and whether it is modelled."""

    centre_ns: Float64
    least_ns: Float64
    modelled: Bool


def at_batch(graph: TaskGraph, tasks: Bool, factor: float, *, cut_weights: bool = False) -> Estimates:
    """Return estimated durations (ns, with a range) of ``tasks``, a mask, with ``factor`` times the samples.

    Operators measured alone at other batches follow their measurement. Others have a fixed and a proportional part. On
    a CPU the operator's call is fixed, as is packing the weights of a product that trains them. A GPU kernel that fills
    a share s of the device could do 1/s of the work in hardly more time, so of its time beyond latency only the share s
    is proportional, or its roofline time if that is longer. If neither is known, all but the shortest kernel's time is
    proportional. Products of stored weights, as in decoding, read them once for any batch (``stored_weights.py``), or
    with ``cut_weights`` a share ``factor`` of them for all rows. Samples may share the rows of a sparse gradient: an
    update may stay as it is.
    """
    ids = np.flatnonzero(tasks)
    fixed = _fixed(graph, ids)
    measured, off = (column[ids] for column in task_batch_ratio(graph, factor))
    known = np.isfinite(measured)

    def at_new_size(time_ns: Int64, fixed_ns: Float64) -> Float64:
        kept_ns = np.minimum(time_ns, fixed_ns)
        return np.where(known, time_ns * measured, kept_ns + (time_ns - kept_ns) * factor)

    now_ns = graph.duration_ns[ids]
    duration_ns = at_new_size(now_ns, fixed.centre_ns)
    spread_ns = np.abs(duration_ns - now_ns) * SPREAD + np.where(known, off, 0) * duration_ns
    ends = [at_new_size(time[ids], part) for time in (graph.low_ns, graph.high_ns) for part in fixed[:2]]
    low_ns, high_ns = np.minimum(ends[0], ends[1]), np.maximum(ends[2], ends[3])
    source = np.where(known, Source.MEASURED, np.where(fixed.modelled, Source.ROOFLINE, Source.ASSUMED))
    ratio = _ratio_of_reading(graph, factor, cut_weights=cut_weights)[ids]
    reads = np.isfinite(ratio) & (cut_weights | ~known)
    if reads.any():
        beyond_ns = np.maximum(now_ns - shortest_kernel_ns(graph), 0)
        duration_ns = np.where(reads, now_ns - beyond_ns + beyond_ns * ratio, duration_ns)
        spread = WEIGHTS_SPREAD * np.abs(duration_ns - now_ns) + WEIGHTS_KERNEL_SPREAD * duration_ns
        spread_ns, scale = np.where(reads, spread, spread_ns), duration_ns / np.maximum(now_ns, 1)
        low_ns = np.where(reads, graph.low_ns[ids] * scale, low_ns)
        high_ns = np.where(reads, graph.high_ns[ids] * scale, high_ns)
        source = np.where(reads, Source.ROOFLINE, source)
    low_ns, high_ns = np.maximum(low_ns - spread_ns, 0), high_ns + spread_ns
    update = graph.phase[ids] == Phase.UPDATE
    low_ns = np.where(update, np.minimum(low_ns, graph.low_ns[ids]), low_ns)
    high_ns = np.where(update, np.maximum(high_ns, graph.high_ns[ids]), high_ns)
    found = Estimates.of(duration_ns, source, low_ns, high_ns)
    # What is measured at another batch has all of the weights.
    settled = known | (reads & cut_weights)
    return _by_database(graph, ids, factor, settled, found) if graph.has_gpu else found


def _ratio_of_reading(graph: TaskGraph, factor: float, *, cut_weights: bool) -> Float64:
    """The time of products that read stored weights over the recorded one, shape (n_tasks,); NaN of all others."""
    ratio = np.full(len(graph), np.nan)
    weights = stored_weights(graph)
    if weights is not None:
        ratio[weights.tasks] = weights.time_ratio(weights=factor) if cut_weights else weights.time_ratio(factor)
    return ratio


def _by_database(graph: TaskGraph, ids: Int64, factor: float, known: Bool, model: Estimates) -> Estimates:
    """The estimates, but for operators that were measured on the recorded GPU in both sizes: their ratio.

    In a predicted step, other memory-bound kernels scale as their bytes, from which they were predicted.
    """
    from whatif.models.durations import changed_operators, forms

    found = changed_operators.at_batch(graph, ids, factor)
    if graph.info.is_predicted:
        rest = np.flatnonzero(~found.known)
        found.put(rest, forms.moving(graph, ids[rest], factor=factor))
    return changed_operators.measured_first(graph, ids, found, ~known, model)


def _fixed(graph: TaskGraph, ids: Array) -> _Fixed:
    if not graph.has_gpu:
        fixed_ns = np.maximum(float(shortest_kernel_ns(graph)), packing_ns(graph)[ids])
        return _Fixed(fixed_ns, fixed_ns, np.zeros(len(ids), dtype=np.bool_))
    gpu = device(graph)
    share, duration_ns = filled(graph, gpu, ids), graph.duration_ns[ids].astype(np.float64)
    known, kernel = np.isfinite(share), graph.kind[ids] == TaskKind.KERNEL
    beyond_ns = np.maximum(duration_ns - np.where(known, latency_ns(graph, gpu), shortest_kernel_ns(graph)), 0)
    most_ns = np.maximum(duration_ns - shortest_kernel_ns(graph), 0)
    grows_ns = np.maximum(np.where(known, np.minimum(share, 1), 1) * beyond_ns, roofline_ns(graph, gpu, ids))
    centre_ns = np.where(kernel, np.minimum(grows_ns, most_ns), most_ns)
    hidden_ns = np.where(kernel, np.maximum(beyond_ns - centre_ns, 0), 0)
    fixed_ns = duration_ns - centre_ns
    return _Fixed(fixed_ns, fixed_ns - HIDDEN_SHARE * hidden_ns, kernel & known)


def launches_kernels(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the CPU calls that launch kernels; they do not depend on the batch size."""
    return launches_of(graph, graph.kind == TaskKind.KERNEL)


def with_batch_size(graph: TaskGraph, factor: float, *, wider: bool = False) -> TaskGraph:
    """Return the graph with the recorded number of samples per step times ``factor``; it may be unknown.

    ``wider``: each pass takes all samples at once, which changes the recorded input shape and drops the recorded peak
    memory. Durations stay; see ``at_batch``.
    """
    info, recorded = graph.info, graph.info.recorded
    samples = max(round(info.batch_size * factor), 1) if info.batch_size else None
    if wider:
        shape = recorded.input_shape
        if samples and shape and shape[0] == info.batch_size:
            shape = (samples, *shape[1:])
        recorded = structs.replace(recorded, input_shape=shape, peak_memory_bytes=None)
        if AUTOCAST_CASTS in graph.attached:
            graph = graph.attach(**{AUTOCAST_CASTS: graph.attached[AUTOCAST_CASTS] * factor})
    batch_factor = info.batch_factor * (1.0 if samples else factor)
    return graph.replace(info=replace(info, batch_size=samples, batch_factor=batch_factor, recorded=recorded))
