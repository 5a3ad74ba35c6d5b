"""The work that mixed precision adds to a step: casts of weights, and the loss scaler. Used by ``amp``.

Sources: Micikevicius et al., "Mixed Precision Training", ICLR 2018, §3.1 (fp32 master weights, cast every step) and
§3.2 (loss scaling); PyTorch's autocast caches a weight's cast for one forward pass, GradScaler unscales all gradients
and reads on the CPU once per step whether any is infinite.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from whatif.graph.described import Described
from whatif.graph.insert import NewTasks, synchronizing
from whatif.graph.kernels import DTYPES, MATRIX_FAMILIES, KernelFamily
from whatif.graph.order import places
from whatif.graph.recorded import AUTOCAST_CASTS
from whatif.graph.structure_cache import of_columns
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Bool,
    Change,
    Float64,
    Int64,
    Phase,
    TaskKind,
    among,
)
from whatif.hardware.gpu import MATRIX_DTYPES, Gpu
from whatif.hardware.roofline import kernel_floor_ns, sustained_tflops
from whatif.models.durations.estimator import SYNC_CALL_NS, Estimates, Source, shortest_kernel_ns
from whatif.models.durations.format_flow import flow_of
from whatif.models.durations.forms import of_batches, of_convolutions
from whatif.models.durations.memory_rate import cast_gbyte_s, memory_gbyte_s
from whatif.models.kernels.stored_weights import forward_only, stored_weights
from whatif.models.layers.calls import Lot, last_gpu_before, launches_of, operator_cost_ns, put_in, task_before
from whatif.runtime.errors import WhatifError

# A cast reads 4 bytes and writes 2; unscaling reads and writes 4.
CAST_BYTES, UNSCALE_BYTES = 6, 8
# On a CPU the rate counts the bytes that an fp32 copy writes: 4 of the 12 that it moves, as the overwritten line is
# fetched first. A cast moves 4 + 2 + 2.
CPU_CAST_BYTES = 4 * 8 / 12
CAST_NAME, WEIGHT_CAST_NAME = "cast (autocast)", "cast of a weight (autocast)"
SYNC_CALL = "cudaStreamSynchronize"
# Casting an fp32 result reads 4 bytes and writes 2; computing it read and wrote 4.
INPUT_CAST_SHARE = 6 / 8
# Casts in a recording without shapes and parameters take this factor less or more: the least multiple of 0.5 that holds
# 90 % of those in language models (``benchmarks/without_shapes.py``; 2 to 2.5 with each model left out).
UNKNOWN_CASTS = 2.5
# Families that autocast computes in fp32 (PyTorch's autocast op reference); the next product casts its input.
_FP32_FAMILIES = (KernelFamily.LAYER_NORM, KernelFamily.SOFTMAX, KernelFamily.REDUCTION)


def parameters(graph: TaskGraph) -> int | None:
    """Return the number of parameters of the model, from the recording's layer table; None without one."""
    return _total(layer.parameters for layer in graph.info.recorded.layers)


def product_parameters(graph: TaskGraph) -> int | None:
    """Return the number of parameters of products, which autocast casts, without those of embeddings and norms.

    A linear layer without parameters shares an embedding's (tied weights), which then counts.
    """
    layers = graph.info.recorded.layers
    tied = any(layer.type == "Linear" and layer.parameters == 0 for layer in layers)
    others = ("Norm",) if tied else ("Norm", "Embedding")
    return _total(layer.parameters for layer in layers if not any(word in layer.type for word in others))


def _total(counts: Iterable[int | None]) -> int | None:
    return sum(count for count in counts if count is not None) or None


def add_casts(graph: TaskGraph, matrix: Bool, gpu: Gpu | None, *, loss_scaler: bool = False) -> TaskGraph:
    """Insert autocast's casts around the tasks of the mask ``matrix``, and the work of a GPU's loss scaler."""
    if stores_weights_cast(graph):
        graph = graph.note(
            "amp: the weights are stored in half precision once (model.to(torch.bfloat16) or model.half()); "
            "torch.autocast would cast them again in each forward pass, which can take longer than it saves"
        )
    call_ns = operator_cost_ns(graph) if graph.has_gpu else 0
    lots = _casts(graph, matrix, gpu, call_ns)
    if AUTOCAST_CASTS in graph.attached:
        lots += _attached_casts(graph, gpu, call_ns)
    if loss_scaler:
        if Change.UPDATES_IN_BACKWARD in graph.info.changes:
            raise WhatifError(
                "amp: expected an update after the backward pass, whose gradients the loss scaler of fp16 reads all "
                "first, got that of optimizer_in_backward inside of it; say amp:target=bf16, which needs none."
            )
        begins = update_begins(graph)
        lots += _loss_scaler(graph, matrix, begins, gpu, call_ns)
        updates = graph.on_gpu & (graph.phase == Phase.UPDATE)
        if not len(begins) and "cuda_graph" in graph.info.execution and updates.any():
            graph = graph.note(
                "amp: the update lies in a CUDA graph, in which the CPU cannot wait for the loss scaler's result, so "
                "the scaler is not counted; put amp before cuda_graph, or say target=bf16, which needs none"
            )
    return put_in(graph, lots)


def stores_weights_cast(graph: TaskGraph) -> bool:
    """Whether weights are assumed to be stored in the format in which they are multiplied, without casts.

    A forward pass alone never changes its weights. If it reads them for few rows, and on any CPU, casting them on each
    call would take longer than half precision saves.
    """
    return stored_weights(graph) is not None or (not graph.has_gpu and forward_only(graph))


def _casts(graph: TaskGraph, matrix: Bool, gpu: Gpu | None, call_ns: int) -> list[Lot]:
    """Insert autocast's casts around the tasks of the mask ``matrix``, forward and backward.

    Forward: one of the weight before every matrix operator, and one of the input if autocast kept the operator before
    it in fp32 (layer normalisation, softmax, reductions); it takes three quarters of that operator's time, 6 bytes per
    value instead of 8. Backward: as many, of the gradients. Biases are not counted. The weights' bytes are spread over
    their casts; if unknown, the operators' shapes or times tell them. Stored weights (``stores_weights_cast``) are not
    cast.
    """
    first = first_of_operator(graph, matrix)
    forward = first[graph.phase[first] == Phase.FORWARD]
    backward = first[graph.phase[first] == Phase.BACKWARD]
    if not len(forward):
        return []
    count = product_parameters(graph)
    per_step = max(len(forward) / max(graph.info.n_steps, 1), 1)
    cast_bytes = CAST_BYTES if graph.has_gpu else CPU_CAST_BYTES
    weight_ns: Float64 | float = count * cast_bytes / cast_gbyte_s(graph, gpu) / per_step if count else 0.0
    if not count and gpu is not None:
        weight_ns = _weights_by_time(graph, gpu, forward) * cast_bytes / cast_gbyte_s(graph, gpu)
    known = bool(count) or bool((graph.called[forward] >= 0).any())
    before = task_before(graph, forward)
    fp32 = among(graph.family[before], _FP32_FAMILIES)
    flow = flow_of(graph) if graph.has_gpu else None
    if AUTOCAST_CASTS in graph.attached:
        fp32 = np.zeros(len(before), dtype=np.bool_)
    elif flow is not None:
        before = _last_but(graph, matrix | flow.copies, before)
        fp32 = flow.casts[forward]
    input_ns = graph.duration_ns[before[fp32]] * INPUT_CAST_SHARE
    cast_ns = np.concatenate([np.full(len(forward), weight_ns), input_ns])
    weights = forward[:0] if stores_weights_cast(graph) else forward
    cast_ns = cast_ns[len(forward) - len(weights) :]
    around = np.concatenate([weights, forward[fp32]])
    if flow is not None and AUTOCAST_CASTS not in graph.attached:
        # Operators on the fp32 list cast their inputs, too.
        others = np.flatnonzero(flow.casts & ~matrix & (graph.phase == Phase.FORWARD))
        around = np.concatenate([around, others])
        cast_ns = np.append(cast_ns, graph.duration_ns[others] * INPUT_CAST_SHARE)
    of_weight = np.arange(len(around)) < len(weights)
    back, of = _spread(graph, around, backward)
    around = np.concatenate([around, back])
    cast_ns, of_weight = np.append(cast_ns, cast_ns[of]), np.append(of_weight, of_weight[of])
    low_ns = high_ns = cast_ns
    if graph.has_gpu:
        floor_ns = shortest_kernel_ns(graph)
        cast_ns = np.maximum(cast_ns, floor_ns)
        low_ns = cast_ns if known else np.maximum(cast_ns / UNKNOWN_CASTS, floor_ns)
        high_ns = cast_ns * (2 if known else UNKNOWN_CASTS)
    source = Source.ROOFLINE if count else Source.ASSUMED
    return [
        lot
        for name, of in ((WEIGHT_CAST_NAME, of_weight), (CAST_NAME, ~of_weight))
        if of.any()
        for lot in before_each(
            graph, around[of], Estimates.of(cast_ns[of], source, low_ns[of], high_ns[of]), name, call_ns
        )
    ]


def _weights_by_time(graph: TaskGraph, gpu: Gpu, products: Int64) -> Float64:
    """The number of weights that ``products`` (ids) multiply.

    For unknown shapes a square matrix, with twice as many rows. A convolution of unknown shapes has few, and a batch of
    products (bmm) multiplies activations.
    """
    names = [DTYPES[code] for code in graph.dtype[products].tolist()]
    rates = {name: sustained_tflops(gpu, name if name in MATRIX_DTYPES else "fp32") for name in set(names)}
    beyond_ns = np.maximum(graph.duration_ns[products] - kernel_floor_ns(gpu), 0)
    flops = beyond_ns * 1e3 * np.array([rates[name] for name in names])
    square = np.where(of_convolutions(graph, products) | of_batches(graph, products), 0.0, (flops / 4) ** (2 / 3))
    known = [_weights(op) for op in graph.info.operators] + [np.nan]
    weights = np.array(known)[graph.called[products]]
    return np.asarray(np.where(np.isfinite(weights), weights, square), dtype=np.float64)


def _weights(op: Described) -> float:
    """The number of weights of a product or convolution; NaN for all others, and 0 for products of two activations."""
    c = dict(op.integers)
    if op.family == "conv":
        return c["out_channels"] * c["in_channels"] // max(c["groups"], 1) * c["kernel_h"] * c["kernel_w"]
    if op.family == "matmul":
        return c["n"] * c["k"] if op.name in ("linear", "mm") else 0.0
    return np.nan


def _last_but(graph: TaskGraph, passed: Bool, before: Int64) -> Int64:
    """The last GPU task up to each of ``before`` (ids) that is not ``passed``.

    Consecutive products read its output. A copy has no size of its own, and is often of another operand: a product of
    attention's weights follows the copy of its values.
    """
    others = np.flatnonzero(graph.on_gpu.mask & ~passed)
    at = np.searchsorted(others, before, side="right") - 1
    return np.where(at >= 0, others[np.maximum(at, 0)], before)


def _attached_casts(graph: TaskGraph, gpu: Gpu | None, call_ns: int) -> list[Lot]:
    """The casts of a predicted step's activations and their gradients, by its flow of formats."""
    elements = graph.attached[AUTOCAST_CASTS]
    around = np.flatnonzero((elements > 0) & graph.on_gpu.mask)
    if not len(around):
        return []
    cast_ns = np.maximum(elements[around] * CAST_BYTES / cast_gbyte_s(graph, gpu), shortest_kernel_ns(graph))
    return before_each(graph, around, Estimates.of(cast_ns, Source.ROOFLINE, cast_ns, cast_ns), CAST_NAME, call_ns)


def _spread(graph: TaskGraph, forward: Int64, backward: Int64) -> tuple[Int64, Int64]:
    """Return tasks of ``backward`` and the positions in ``forward`` that they belong to, in steps that have both.

    They are spread evenly, in order, over the step's backward tasks, of which there are about two per forward one.
    """
    of = np.lexsort((forward, graph.step[forward]))
    backward = backward[np.argsort(graph.step[backward], kind="stable")]
    step, step_of_backward = graph.step[forward[of]], graph.step[backward]
    begin, end = (np.searchsorted(step_of_backward, step, side) for side in ("left", "right"))
    first, last = (np.searchsorted(step, step, side) for side in ("left", "right"))
    way = (np.arange(len(step)) - first) / np.maximum(last - first - 1, 1)
    place = begin + ((end - begin - 1) * way).astype(np.int64)
    both = end > begin
    return backward[place[both]], of[both]


def before_each(graph: TaskGraph, around: Int64, estimates: Estimates, name: str, call_ns: int) -> list[Lot]:
    """Return a new task before each of the tasks ``around``: a kernel with its launch, or one more in a CUDA graph.

    ``estimates`` has one row per task of ``around``; ``call_ns`` is the CPU time of the operator that launches one. In
    a CPU recording it is an operator.
    """
    if not graph.has_gpu:
        new = NewTasks(task_before(graph, around), name, TaskKind.CPU_OP, estimates.duration_ns)
        return [(new, estimates.source)]
    launched = graph.launch_of[around] >= 0
    alone = _launches_one(graph)[graph.launch_of[around]]
    lots: list[Lot] = []
    for chosen in (launched & alone, launched & ~alone):
        if not chosen.any():
            continue
        tasks, of = around[chosen], estimates.source[chosen]
        new = NewTasks(
            task_before(graph, tasks), name, TaskKind.KERNEL, estimates.duration_ns[chosen],
            thread=graph.thread[tasks], low_ns=estimates.low_ns[chosen], high_ns=estimates.high_ns[chosen],
            family=int(KernelFamily.CAST), layer=graph.layer[tasks], phase=graph.phase[tasks], step=graph.step[tasks],
        )  # fmt: skip
        launch = graph.launch_of[tasks]
        # A graph launch starts one more kernel without an extra call.
        by: dict[str, Any] = {"launched_by": launch}
        if alone[chosen].all():
            by = {"launched_after": task_before(graph, launch), "launch_ns": np.full(len(launch), call_ns)}
        lots.append((replace(new, **by), of))
    return lots


@of_columns()
def _launches_one(graph: TaskGraph) -> Bool:
    """Mask of the tasks that launch one other, shape (n_tasks,)."""
    calls = graph.launch_of[np.flatnonzero(graph.launch_of >= 0)]
    return np.asarray(np.bincount(calls, minlength=len(graph)) == 1, dtype=np.bool_)


def _loss_scaler(graph: TaskGraph, matrix: Bool, begins: Int64, gpu: Gpu | None, call_ns: int) -> list[Lot]:
    """Make each step unscale its gradients and wait for the result before the update, which starts with ``begins``."""
    if not len(begins) or not graph.has_gpu:
        return []
    count = parameters(graph)
    values = float(count or 0)
    if not count and gpu is not None:
        products = first_of_operator(graph, matrix & (graph.phase == Phase.FORWARD))
        values = float(_weights_by_time(graph, gpu, products).sum()) / max(graph.info.n_steps, 1)
    unscale_ns = max(values * UNSCALE_BYTES / memory_gbyte_s(graph, gpu), shortest_kernel_ns(graph))
    before = task_before(graph, begins)
    last_kernel = last_gpu_before(graph, begins)
    unscale = NewTasks(
        last_kernel, "unscale gradients", TaskKind.KERNEL, unscale_ns,
        high_ns=unscale_ns * (2 if count else UNKNOWN_CASTS if values else 10), phase=Phase.UPDATE,
        family=int(KernelFamily.OPTIMIZER), launched_after=before, launch_ns=call_ns,
    )  # fmt: skip
    # The CPU reads the result on the stream that computes it.
    reads = synchronizing(before, call_ns=SYNC_CALL_NS, name=SYNC_CALL, stream=int(graph.thread[last_kernel[0]]))
    return [(unscale, Source.ROOFLINE if count and gpu else Source.ASSUMED), (reads, Source.RECORDED)]


@of_columns("phase")
def update_begins(graph: TaskGraph) -> Int64:
    """Return the first CPU task of the update after each backward pass, shape (n_updates,)."""
    backward = graph.phase == Phase.BACKWARD
    # A CUDA graph that holds both passes is a forward call.
    is_backward = (graph.on_cpu & backward).mask | launches_of(graph, graph.on_gpu & backward)
    main = graph.on_cpu & (graph.thread == 0)
    update = np.flatnonzero(main & (graph.phase == Phase.UPDATE))
    passes = np.flatnonzero(is_backward)
    n_backward = places(passes, update, side="right")
    first = np.diff(n_backward, prepend=0) > 0
    begins, last_backward = update[first], passes[n_backward[first] - 1]
    # No other phase lies between a backward pass and its update.
    forward = np.flatnonzero(main & (graph.phase == Phase.FORWARD))
    n_forward = [np.searchsorted(forward, tasks, side="right") for tasks in (begins, last_backward)]
    begins = begins[n_forward[0] == n_forward[1]]
    # Updates that a CUDA graph launched with the passes do not begin after it.
    calls = np.flatnonzero(launches_of(graph, graph.on_gpu & (graph.phase == Phase.UPDATE)))
    last = np.full(int(graph.step.max(initial=-1)) + 2, -1, dtype=np.int64)
    np.maximum.at(last, graph.step[calls] + 1, calls)
    return np.asarray(begins[last[graph.step[begins] + 1] >= begins], dtype=np.int64)


def first_of_operator(graph: TaskGraph, matrix: Bool) -> Int64:
    """Return the first task of each operator among the matrix tasks: an operator may run several kernels."""
    tasks = np.flatnonzero(matrix)
    known = graph.operator[tasks] >= 0
    first = np.unique(graph.operator[tasks[known]], return_index=True)[1]
    return np.sort(np.concatenate([tasks[known][first], tasks[~known]]))


def is_matrix(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of products, convolutions, attention and recurrent layers."""
    return among(graph.family, MATRIX_FAMILIES)
