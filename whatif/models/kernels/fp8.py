"""The work that fp8 training adds to a step: casts of the operands of linear layers. Used by ``fp8``.

Sources: NVIDIA Transformer Engine, "Using FP8 with Transformer Engine" (delayed scaling: each operand is cast with a
scale from the maxima of earlier steps; the cast finds the new maximum in the same pass; scales are updated once per
pass); Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
"""

from __future__ import annotations

import numpy as np

from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Int64, Phase
from whatif.models.durations.estimator import Estimates, Source, moving, shortest_kernel_ns
from whatif.models.kernels.attention import unfused_attention
from whatif.models.kernels.mixed_precision import before_each, first_of_operator
from whatif.models.kernels.stored_weights import stored_weights
from whatif.models.layers.calls import operator_cost_ns, put_in

CAST_NAME, SCALE_NAME = "cast to fp8 (and its maximum)", "update of fp8 scales"
# A cast writes a tensor and its transpose for the backward pass: NVIDIA's units take fp8 operands in one layout only.
_BYTES_WRITTEN = 2
# Operands of one product differ in size; a third of its traffic is the mean of its three. Our estimate.
_CAST_LOW, _CAST_HIGH = 0.5, 2.0
_UNKNOWN_HIGH = 10.0


def operand_bytes(graph: TaskGraph) -> Int64:
    """Return the bytes per value of each task's operands, shape (n_tasks,); 2 if the format is unknown."""
    sizes = {"fp32": 4, "tf32": 4, "fp64": 8, "fp8": 1}
    return np.array([sizes.get(name, 2) for name in DTYPES], dtype=np.int64)[graph.dtype]


def linear_products(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the GPU's forward and backward products, without those of an attention."""
    products = graph.on_gpu & (graph.family == KernelFamily.GEMM) & ~graph.select(phase=Phase.UPDATE)
    mask: Bool = products.mask.copy()
    for attention in unfused_attention(graph):
        mask[attention.products] = False
    return mask


def chosen_for_fp8(graph: TaskGraph) -> str:
    """Return a note on the share of the products' time that already runs in fp8 (its layers were chosen), or ""."""
    products = linear_products(graph)
    in_fp8_ns = int(graph.duration_ns[products & (graph.dtype == DTYPES.index("fp8"))].sum())
    if not in_fp8_ns:
        return ""
    share = in_fp8_ns / int(graph.duration_ns[products].sum())
    return (
        f"{100 * share:.0f} % of the products' time runs in fp8 already, in layers that were chosen for it; "
        "`whatif apply fp8` predicts all the others"
    )


def add_fp8_casts(graph: TaskGraph, switched: Bool, read: Int64) -> TaskGraph:
    """Insert casts before the products ``switched`` (a mask); ``read``: bytes per value of each task's old operands.

    Two before each forward product, for input and weight, and one before every other backward product, for the gradient
    that two products read. Scales are updated once per pass and step. Decoding, bound by reading weights, stores them
    cast: only the input is cast before each product, with its own scale.
    """
    products = first_of_operator(graph, switched)
    stored = stored_weights(graph)
    if stored is not None:
        values = np.zeros(len(graph))
        values[stored.tasks] = stored.rows * stored.inputs
        moved = values[products] * (read[products] + 1)
        casts = moving(graph, np.maximum(moved, 1))
        return put_in(graph, before_each(graph, products, casts, CAST_NAME, operator_cost_ns(graph)))
    forward = products[graph.phase[products] == Phase.FORWARD]
    backward = products[graph.phase[products] == Phase.BACKWARD][::2]
    around = np.concatenate([forward, forward, backward])
    if not len(around):
        return graph
    size = graph.size_bytes[around]
    known = size > 0
    estimates = moving(graph, np.where(known, size / 3 * (1 + _BYTES_WRITTEN / read[around]), 0))
    casts = Estimates.of(
        estimates.duration_ns, np.where(known, estimates.source, Source.ASSUMED), estimates.low_ns * _CAST_LOW,
        np.where(known, estimates.high_ns * _CAST_HIGH, shortest_kernel_ns(graph) * _UNKNOWN_HIGH),
    )  # fmt: skip
    first = np.concatenate([tasks[np.unique(graph.step[tasks], return_index=True)[1]] for tasks in (forward, backward)])
    floor_ns = np.full(len(first), shortest_kernel_ns(graph))
    scales = Estimates.of(floor_ns, Source.ASSUMED, floor_ns, 3 * floor_ns)
    call_ns = operator_cost_ns(graph)
    lots = ((around, casts, CAST_NAME), (first, scales, SCALE_NAME))
    return put_in(graph, [new for lot in lots for new in before_each(graph, *lot, call_ns)])
