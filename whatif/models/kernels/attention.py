"""Attention in a recording: its separate kernels, and the duration of one fused kernel instead.

Sources: Dao et al., "FlashAttention", NeurIPS 2022 (products are computed tile by tile, the score matrix never leaves
the multiprocessor, and the backward pass recomputes it); Dao, "FlashAttention-2", 2023 (50 to 73 % of the A100's peak);
Shah et al., "FlashAttention-3", 2024 (FlashAttention-2 reaches 35 % on the H100).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Int64, TaskKind, among
from whatif.hardware.roofline import MatrixWork, compute_share
from whatif.models.durations.computing import Share, computing
from whatif.models.durations.estimator import (
    Estimates,
    Source,
    device,
    put,
)
from whatif.models.durations.half_precision import is_half
from whatif.models.layers.columns import named, with_values

FUSED_NAME = "fused attention"
# Families between the products of an attention and its softmax: scale, mask, dropout, casts, copies.
_BETWEEN = (KernelFamily.ELEMENTWISE, KernelFamily.CAST, KernelFamily.LAYOUT, KernelFamily.FUSED)
_BACKWARD_SOFTMAX = r"(?i)soft_?max.*(backward|bwd|grad)"
# Sums up the parts of the product before it.
_REDUCES_PRODUCT = r"(?i)split_?k_?reduce"

# The fused kernels of the H100 recordings by others (16 to 96 thread blocks, sequences of 94 and 197) take 9 to 11 us,
# whatever their work: one block processes the whole sequence. Centre, and the ends of its range.
FLASH_FLOOR_NS = (9_000.0, 5_000.0, 12_000.0)
# Products of a fused backward pass, which recomputes the scores, over those of an unfused one (Dao et al., appendix B).
_REMADE = 5 / 4
# The uncertainty of the recorded products' time, for recordings without FLOPs: our estimate.
_UNKNOWN_SPREAD = 1.6


class Attention(NamedTuple):
    """One attention of a step: its kernels in order, the products among them, and whether it is a backward pass."""

    kernels: Int64
    products: Int64
    softmax: int
    backward: bool


def unfused_attention(graph: TaskGraph) -> list[Attention]:
    """Return every attention on the GPU that runs as products around a softmax, in stream order.

    Forward: a product, the softmax, a product; backward: two products on either side of it. Only elementwise kernels
    lie between them: a router's softmax is followed by something else, a loss's by the other pass.
    """
    order = graph.by_thread
    kernels = order[graph.kind[order] == TaskKind.KERNEL].astype(np.int64)
    if not len(kernels):
        return []
    family, thread, step, phase = (getattr(graph, name)[kernels] for name in ("family", "thread", "step", "phase"))
    reduces = graph.select(name=_REDUCES_PRODUCT)[kernels]
    passed = among(family, _BETWEEN) | reduces
    place = np.arange(len(kernels))
    before = np.maximum.accumulate(np.where(passed, -1, place))
    after = np.minimum.accumulate(np.where(passed, len(kernels), place)[::-1])[::-1]
    product = (family == KernelFamily.GEMM) & ~reduces
    backward = graph.select(name=_BACKWARD_SOFTMAX)[kernels]

    def neighbour(at: int, way: int) -> int:
        """The next product in one direction, -1 if something else comes first."""
        if not 0 <= at + way < len(kernels):
            return -1
        found = int(before[at + way] if way < 0 else after[at + way])
        alike = 0 <= found < len(kernels) and thread[found] == thread[at] and step[found] == step[at]
        return found if alike and product[found] else -1

    result = []
    for softmax in np.flatnonzero(family == KernelFamily.SOFTMAX).tolist():
        products = [neighbour(softmax, -1), neighbour(softmax, 1)]
        if backward[softmax] and min(products) >= 0:
            products = [neighbour(products[0], -1), *products, neighbour(products[1], 1)]
        if min(products) < 0 or (not backward[softmax] and phase[products[0]] != phase[products[1]]):
            continue
        last = products[-1]
        while last + 1 < len(kernels) and reduces[last + 1] and thread[last + 1] == thread[last]:
            last += 1
        inside = kernels[products[0] : last + 1]
        result.append(Attention(inside, kernels[products], int(kernels[softmax]), bool(backward[softmax])))
    return result


def fused_attention(graph: TaskGraph, found: list[Attention], *, causal: bool) -> Estimates:
    """Estimate one fused kernel for each attention of ``found``, shape (n,).

    If the products' FLOPs are recorded, they run at the share of the peak that the FlashAttention papers report, or in
    the time of the remaining reads and writes. Small problems do not reach that: if the recorded products are slower,
    the estimate is the geometric mean. Without FLOPs, and in fp32, for which PyTorch has another kernel, the products
    keep their time. A fused backward pass computes a fourth more of them. ``causal``: the masked half is omitted. Never
    longer than the kernels it replaces.
    """
    gpu = device(graph)
    backward = np.array([attention.backward for attention in found], dtype=np.bool_)
    more = np.where(backward, _REMADE, 1.0) * (0.5 if causal else 1.0)
    unfused_ns = np.array([graph.duration_ns[attention.kernels].sum() for attention in found], dtype=np.float64)
    products_ns, work = (
        np.array([column[attention.products].sum() for attention in found]) * more
        for column in (graph.duration_ns, graph.flops)
    )
    known = np.array([_work_is_known(graph, attention) for attention in found], dtype=np.bool_)
    centre, low, high = products_ns.copy(), products_ns / _UNKNOWN_SPREAD, products_ns * _UNKNOWN_SPREAD
    source = np.full(len(found), Source.ASSUMED)
    if gpu is not None and known.any():
        # Shape (3, n_known): centre, slow end, fast end.
        ways: list[MatrixWork] = ["attention_backward" if way else "attention" for way in backward[known]]
        dtype = DTYPES[graph.dtype[found[int(known.argmax())].products[0]]]
        shares = np.array([compute_share(gpu, dtype, way) for way in ways]).T
        moved = [_tensor_bytes(graph, attention) for attention, is_known in zip(found, known, strict=True) if is_known]
        flash = computing(graph, work[known], moved, KernelFamily.ATTENTION, dtype, Share(*shares))
        ends = (flash.duration_ns, flash.low_ns, flash.high_ns)
        at_best, fastest, slowest = (np.maximum(*pair) for pair in zip(ends, FLASH_FLOOR_NS, strict=True))
        centre[known] = np.sqrt(at_best * np.maximum(at_best, products_ns[known]))
        low[known], high[known] = fastest, np.maximum(slowest, products_ns[known])
        source[known] = Source.PAPER
    centre, low, high = (np.minimum(time_ns, unfused_ns) for time_ns in (centre, low, high))
    return Estimates.of(centre, source, low, high)


def _work_is_known(graph: TaskGraph, attention: Attention) -> bool:
    products = attention.products
    return bool((graph.flops[products] > 0).all() and is_half(graph.dtype[products]).all())


def _tensor_bytes(graph: TaskGraph, attention: Attention) -> float:
    """Bytes of the operands and results other than scores; each product has one score matrix. 0 if unknown."""
    products, softmax = graph.size_bytes[attention.products], int(graph.size_bytes[attention.softmax])
    if softmax < 0 or (products < 0).any():
        return 0.0
    # A softmax reads one score matrix and writes one; its backward pass reads two.
    scores = softmax / (3 if attention.backward else 2)
    return max(float(products.sum()) - len(products) * scores, 0.0)


def fuse(graph: TaskGraph, found: list[Attention], estimates: Estimates) -> TaskGraph:
    """Return the graph in which the first kernel of each attention becomes the fused one; the others are removed."""
    first = np.array([attention.kernels[0] for attention in found], dtype=np.int64)
    work = [graph.flops[attention.products] for attention in found]
    flops = [of.sum() if (of >= 0).all() else -1 for of in work]
    graph = with_values(graph, first, family=KernelFamily.ATTENTION, flops=flops, size_bytes=-1, warps=-1)
    graph = named(graph, {FUSED_NAME: first})
    rest = np.concatenate([attention.kernels[1:] for attention in found])
    return put(graph, first, estimates).remove(rest)
