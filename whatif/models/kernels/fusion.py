"""The effect of a compiler on a step: fewer kernels, less traffic between them, less CPU work.

Source: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
Compilation", ASPLOS 2024, §4 (Inductor fuses pointwise work and reductions and calls libraries for the rest).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from whatif.graph.kernels import KernelFamily
from whatif.graph.order import each_once
from whatif.graph.remove import STAYS, contract
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Array,
    Bool,
    DependencyKind,
    Int64,
    Phase,
    TaskKind,
    among,
)
from whatif.models.durations.estimator import CPU_OPERATOR_NS, Source, mark, shortest_kernel_ns
from whatif.models.kernels.fp8 import CAST_NAME, SCALE_NAME
from whatif.models.kernels.launches import (
    counted_ns,
    first_of,
    launching_threads,
    start_up,
    stays_outside,
    stretches,
    with_doubt_in_start_up,
)
from whatif.models.kernels.mixed_precision import WEIGHT_CAST_NAME
from whatif.models.kernels.stored_masks import with_stored_masks
from whatif.models.layers.columns import named, with_values
from whatif.runtime.errors import WhatifError

FUSED_NAME, REGION_NAME = "fused (torch.compile)", "compiled region (guards, wrapper)"
PASSES = (Phase.FORWARD, Phase.BACKWARD)
_NORMALIZATIONS = (KernelFamily.LAYER_NORM, KernelFamily.NORMALIZATION)
_REDUCTIONS = (KernelFamily.REDUCTION, KernelFamily.SOFTMAX, *_NORMALIZATIONS)
_FUSED_FAMILIES = (KernelFamily.ELEMENTWISE, KernelFamily.CAST, *_REDUCTIONS)
# The first reduction of an explicit softmax: Inductor computes maximum and sum in one loop over a row
# (torch/_inductor/config.py, online_softmax).
_MAXIMUM = r"reduce_kernel.*MaxOps"
# Kernels of other what-ifs that cannot share a loop with their neighbours: a weight has another shape, and Transformer
# Engine's casts belong to layers that the compiler calls unchanged.
_ALONE = (WEIGHT_CAST_NAME, CAST_NAME, SCALE_NAME)
# What nn.RNN, nn.LSTM and nn.GRU call; their cells call others, and are compiled.
_RECURRENT = r"^aten::(rnn_tanh|rnn_relu|lstm|gru)$"
# What .item(), a branch on a tensor, and a mask as an index or in torch.where call.
_READS_VALUES = r"^aten::(_local_scalar_dense|nonzero)$"
# Inductor's config.max_fusion_size.
LONGEST_CHAIN = 64
# Tensors whose sizes differ by a larger factor share no loop; a tensor and its mask, or two operands, differ by less.
# Our estimate.
LARGEST_SIZE_RATIO = 4
# The traffic left of a chain's kernels other than the largest: none of a unary one (input and output stay in the
# chain), a third of a binary one (its other operand), half if the backward pass needs the result. The middle is our
# estimate. On a CPU arithmetic counts as well as traffic, so that less is saved and the range is wider.
KEPT_ON_GPU, KEPT_ON_CPU = (0.25, 0.0, 0.5), (0.5, 0.2, 1.0)
# A normalization's time in Inductor's loops over that in ATen's, channels-last, at least and at most, in networks of
# convolutions on a CPU. Measured with torch 2.13 on an Intel Xeon: of batch norms with their activations 0.4 to 1.1
# forward and 0.4 to 1.2 backward, the most in a MobileNet's depthwise blocks; of a U-Net's group norms 1.6 both ways.
NORM_LOOPS = (0.4, 1.7)
# The time of the generated Python per kernel, without its launch: 3.8 to 5.8 us (tritonbench pull request 1017, on a
# GB200: 6.8 us without and 9.1 with 19 arguments, of which the driver takes 3.0 and 3.3).
WRAPPER_NS = (5_000, 2_000, 10_000)
# Once per region: 37 us (the same), 35 to 40 (PyTorch pull request 190390); guards of the model as well, 0.3 ms for the
# 290 parameters of a Llama (vLLM pull request 11216), 0.9 for a Qwen3 8B (PyTorch issue 191753).
REGION_NS, GUARD_OF_LAYER_NS = (40_000, 20_000, 120_000), (1_000, 300, 3_000)
# torch.compile's bookkeeping for its CUDA graphs: 0.13 ms per graph (PyTorch issue 150488).
GRAPH_TREE_NS = (128_000, 40_000, 200_000)


class Fused(Struct, frozen=True):
    """Counts of kernels (on a CPU: operators) of all steps before and after, and of compiled regions."""

    before: int
    after: int
    steps: int
    regions: int
    start_up_ns: int  # CPU time of counted steps that counts as start-up work and stays


def fuse(graph: TaskGraph) -> tuple[TaskGraph, Fused]:
    """Return the graph with compiled forward and backward passes, and counts of what was fused.

    Chains of consecutive elementwise work, casts, reductions and normalizations on a stream become one kernel each,
    with at most one reduction; a wait of the CPU for the GPU, another stream, a change of size and all other work end a
    chain. The CPU's work between two remaining launches takes no longer than the generated code. If layers are known,
    only their work is compiled; gradients are accumulated as before. Raises WhatifError if gradients are differentiated
    again.
    """
    if graph.info.differentiates_gradients:
        raise WhatifError(
            f"compile: expected gradients that are not differentiated again, got {graph.info.path or 'a recording'} "
            "with create_graph=True, which torch.compile does not support, or torch.func.grad, which it does but this "
            "what-if does not model; record the step without it, for example without a gradient penalty."
        )
    on_gpu = graph.has_gpu
    compiled = _compiled(graph)
    number, _ = stretches(graph, by_phase=True, breaks=_graph_breaks(graph, compiled))
    work = _work(graph, compiled, on_gpu=on_gpu)
    order = graph.by_thread[work[graph.by_thread]].astype(np.int64)
    launch = graph.launch_of.astype(np.int64)
    of_cpu = launch if on_gpu else np.arange(len(graph), dtype=np.int64)
    threads = launching_threads(graph) if on_gpu else np.ones(len(graph.threads), dtype=np.bool_)
    host = compiled & graph.on_cpu & threads.take(graph.thread) & ~stays_outside(graph) & ~work
    staying = start_up(graph, host)
    chain = _chains(graph, order, of_cpu, number, compiled & ~staying[of_cpu])
    graph = graph if on_gpu else _with_loops_of_norms(with_stored_masks(graph, order), order)
    fate = np.full(len(graph), STAYS, dtype=np.int64)
    heads, sizes, graph = _with_fused_times(graph, order, chain, KEPT_ON_GPU if on_gpu else KEPT_ON_CPU)
    gone = np.ones(len(order), dtype=np.bool_)
    gone[heads] = False
    head_of = np.repeat(order[heads], sizes)
    fate[order[gone]] = head_of[gone]
    if on_gpu:  # the kernels of one graph launch have the same call
        calls, heirs = launch[order[gone]], launch[head_of[gone]]
        fate[calls[calls != heirs]] = heirs[calls != heirs]

    inside = compiled[order] & (of_cpu[order] >= 0) & among(graph.kind[order], [TaskKind.KERNEL, TaskKind.CPU_OP])
    left = np.zeros(len(graph), dtype=np.bool_)
    left[of_cpu[order[inside & ~gone]]] = True
    graph = _with_short_wrapper(graph, left, host & (fate == STAYS) & ~left & ~staying, number)
    graph = with_doubt_in_start_up(graph, staying)
    fused = Fused(
        before=int(inside.sum()), after=int((inside & ~gone).sum()), steps=len(each_once(graph.step[order[inside]])),
        regions=len(each_once(number[of_cpu[order[inside]]])), start_up_ns=counted_ns(graph, staying),
    )  # fmt: skip
    ways = tuple(way for way in graph.info.execution if way not in ("eager", "compiled"))
    graph = graph.replace(info=replace(graph.info, execution=("compiled", *ways)))
    return contract(graph, fate), fused


def without_norms(graph: TaskGraph, name: str) -> TaskGraph:
    """Return the graph with a note that the what-if ``name`` finds no batch normalization, or no separate one."""
    reason = "the recording has no batch normalization"
    if "compiled" in graph.info.execution:
        reason = f"no batch normalization has a kernel of its own in compiled code: put {name} before compile"
    return graph.unchanged(f"{name}: {reason}; nothing changes")


def add_regions(graph: TaskGraph, *, graph_trees: bool) -> TaskGraph:
    """Insert the CPU time of entering each compiled region: one for each pass of a step and each stretch between waits.

    ``graph_trees``: a region is a CUDA graph, and torch.compile's checks before its launch are included.
    """
    compiled = _compiled(graph)
    on_gpu = graph.has_gpu
    kernels = among(graph.kind, [TaskKind.KERNEL, TaskKind.CPU_OP])
    work = np.flatnonzero(_work(graph, compiled, on_gpu=on_gpu) & compiled & kernels)
    calls = graph.launch_of[work[graph.launch_of[work] >= 0]] if on_gpu else work
    number, count = stretches(graph, by_phase=True, breaks=_graph_breaks(graph, compiled))
    launches = np.zeros(count, dtype=np.bool_)
    launches[number[calls]] = True
    host = np.flatnonzero(compiled & graph.on_cpu)
    first = first_of(number[host], host, count, -1)
    first = np.sort(first[launches & (first >= 0)])
    forward = graph.phase[first] == Phase.FORWARD
    n_layers = len(graph.layers) - 1
    centre, low, high = (
        region + guard * n_layers * forward + (trees if graph_trees else 0)
        for region, guard, trees in zip(REGION_NS, GUARD_OF_LAYER_NS, GRAPH_TREE_NS, strict=True)
    )
    graph = graph.with_duration(
        first, graph.duration_ns[first] + centre, low_ns=graph.low_ns[first] + low, high_ns=graph.high_ns[first] + high
    )
    return named(mark(graph, first, Source.PAPER), {REGION_NAME: first[graph.kind[first] == TaskKind.GAP]})


def fused_ns(time_ns: npt.ArrayLike, starts: Array, floor_ns: int, kept: float) -> npt.NDArray[np.float64]:
    """Return the time of the kernel that replaces each run of kernels, ns, shape (n,).

    ``starts`` (n,) are the runs' first positions. Above the start-up floor it takes the time of the longest kernel and
    the share ``kept`` of the others', in total never more than before.
    """
    recorded = np.asarray(time_ns, dtype=np.float64)
    above = np.maximum(recorded - floor_ns, 0)
    longest, together = np.maximum.reduceat(above, starts), np.add.reduceat(above, starts)
    fused = floor_ns + longest + kept * (together - longest)
    return np.asarray(np.minimum(fused, np.add.reduceat(recorded, starts)), dtype=np.float64)


def _compiled(graph: TaskGraph) -> Bool:
    """The tasks of both passes that torch.compile(model) compiles: those of layers, if layers are known.

    Recurrent layers stay: at nn.RNN, nn.LSTM and nn.GRU Dynamo breaks the graph (torch._dynamo.config.allow_rnn).
    """
    passes = among(graph.phase, PASSES)
    in_layer = graph.layer > 0
    if not (in_layer & passes).any():
        return passes
    backward_cpu = graph.on_cpu & (graph.phase == Phase.BACKWARD)
    recurrent = in_layer & np.isin(graph.layer, graph.layer[graph.select(name=_RECURRENT)])
    compiled: Bool = passes & (in_layer | backward_cpu) & ~recurrent & ~graph.select(name="AccumulateGrad")
    return compiled


def _graph_breaks(graph: TaskGraph, compiled: Bool) -> Bool:
    """The tasks on a CPU that read a tensor's values, where Dynamo breaks the graph; with a GPU the waits show them."""
    reads = graph.select(name=_READS_VALUES, phase=Phase.FORWARD) & compiled
    return reads.mask & (not graph.has_gpu)


def _work(graph: TaskGraph, compiled: Bool, *, on_gpu: bool) -> Bool:
    """Computing tasks: all on the GPU; on a CPU the operators of compiled code that last longer than a call."""
    if on_gpu:
        return graph.on_gpu.mask
    idle = among(graph.family, [KernelFamily.OTHER, -1])
    work: Bool = compiled & (graph.kind == TaskKind.CPU_OP) & ~idle & (graph.duration_ns >= CPU_OPERATOR_NS)
    return work


def _chains(graph: TaskGraph, order: Int64, of_cpu: Int64, number: Int64, compiled: Bool) -> Int64:
    """The positions in ``order`` (tasks, thread by thread) where a chain begins; an unfused task is a chain."""
    if not len(order):
        return np.empty(0, dtype=np.int64)
    family = graph.family[order]
    fusable = among(family, _FUSED_FAMILIES) & compiled[order] & (of_cpu[order] >= 0)
    calls = of_cpu[order]
    fusable &= ~np.array([name in _ALONE for name in graph.names], dtype=np.bool_)[graph.name[order]]
    alone = np.ones(len(order), dtype=np.bool_)
    if graph.has_gpu:
        fusable &= graph.kind[order] == TaskKind.KERNEL
        alone = (np.bincount(graph.launch_of[graph.launch_of >= 0], minlength=len(graph)) == 1)[calls]
    bound = graph.dependencies.kind != DependencyKind.LAUNCH
    waits, awaited = (np.zeros(len(graph), dtype=np.bool_) for _ in range(2))
    waits[graph.dependencies.target[bound]] = True
    awaited[graph.dependencies.source[bound]] = True
    before, after = order[:-1], order[1:]
    size = graph.size_bytes[order]
    reduces = among(family, _REDUCTIONS)
    known = (size[:-1] > 0) & (size[1:] > 0) & ~reduces[:-1] & ~reduces[1:]
    alike = ~known | (
        np.maximum(size[:-1], size[1:]) <= LARGEST_SIZE_RATIO * np.maximum(np.minimum(size[:-1], size[1:]), 1)
    )
    joined = (
        fusable[:-1] & fusable[1:] & alike & ~waits[after] & ~awaited[before]
        & (graph.thread[before] == graph.thread[after]) & (graph.phase[before] == graph.phase[after])
        & ((calls[:-1] == calls[1:]) | (alone[:-1] & alone[1:]))
        & (graph.thread[calls[:-1]] == graph.thread[calls[1:]]) & (number[calls[:-1]] == number[calls[1:]])
    )  # fmt: skip
    begins = np.append(True, ~joined)
    first = np.flatnonzero(begins)
    run = np.cumsum(begins) - 1
    # A second reduction needs the first one's result: it begins a new kernel, except the sum of a softmax.
    counted = reduces & ~graph.select(name=_MAXIMUM).mask[order]
    reductions = np.cumsum(counted)
    ahead: Int64 = (reductions - counted)[first][run]
    part = np.maximum(reductions - ahead - 1, 0) + (np.arange(len(order)) - first[run]) // LONGEST_CHAIN
    begins[1:] |= (part[1:] != part[:-1]) & (run[1:] == run[:-1])
    return np.flatnonzero(begins)


def _with_fused_times(
    graph: TaskGraph, order: Int64, begins: Int64, kept: tuple[float, float, float]
) -> tuple[Int64, Int64, TaskGraph]:
    """The chains' first positions and lengths, and the graph in which each longer chain's head is the fused kernel."""
    sizes = np.diff(np.append(begins, len(order)))
    longer = sizes > 1
    if not longer.any():
        return begins, sizes, graph
    floor_ns = shortest_kernel_ns(graph)
    members = order[np.repeat(longer, sizes)]
    starts = np.cumsum(sizes[longer]) - sizes[longer]
    centre, low, high = (
        fused_ns(time_ns[members], starts, floor_ns, share)
        for time_ns, share in zip((graph.duration_ns, graph.low_ns, graph.high_ns), kept, strict=True)
    )
    heads = order[begins[longer]]
    graph = with_values(graph, heads, family=int(KernelFamily.FUSED), size_bytes=-1, flops=-1, measured=-1, called=-1)
    graph = mark(graph.with_duration(heads, centre, low_ns=low, high_ns=high), heads, Source.ASSUMED)
    return begins, sizes, named(graph, {FUSED_NAME: heads})


def _with_loops_of_norms(graph: TaskGraph, operators: Int64) -> TaskGraph:
    """Return the graph with the range of Inductor's loops for the normalizations among ``operators`` (on a CPU)."""
    if not (graph.family == KernelFamily.CONVOLUTION).any():
        return graph
    norms = operators[among(graph.family[operators], _NORMALIZATIONS)]
    low_ns, high_ns = (column[norms] * by for column, by in zip((graph.low_ns, graph.high_ns), NORM_LOOPS, strict=True))
    return graph.with_duration(norms, graph.duration_ns[norms], low_ns=low_ns, high_ns=high_ns)


def _with_short_wrapper(graph: TaskGraph, left: Bool, overhead: Bool, number: Int64) -> TaskGraph:
    """Limit the ``overhead`` before each call in ``left`` to the time of the generated code."""
    order = graph.by_thread[(overhead | left)[graph.by_thread]]
    if not len(order):
        return graph
    same = (number[order[1:]] == number[order[:-1]]) & (graph.thread[order[1:]] == graph.thread[order[:-1]])
    run = np.cumsum(np.append(False, left[order[:-1]] | ~same))
    is_overhead = overhead[order]
    chosen, run = order[is_overhead], run[is_overhead]
    total_ns = np.bincount(run, weights=graph.duration_ns[chosen])[run]
    centre, low, high = (np.minimum(most / np.maximum(total_ns, 1), 1.0) for most in WRAPPER_NS)
    return graph.scale(chosen, centre, low=low, high=high)
