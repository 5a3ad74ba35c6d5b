"""Distinguish gradients of weights and of inputs in the work of the backward pass."""

from __future__ import annotations

import numpy as np

from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Int64, Phase
from whatif.models.layers.layer_facts import gradient_bytes

# Bytes of a gradient's element: fp32, and 16-bit parameters.
_ELEMENT_BYTES = (4, 2)


def weight_gradients(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the backward work that computes the gradient of a weight.

    A matrix product is one if its result has as many elements as the weight of its layer, by the recorded shapes and
    the layer's gradient bytes (with or without a bias); a convolution is one if its operator computes only this
    gradient. Left out: sums of bias gradients, embeddings, and operators that compute both gradients at once, as a
    convolution does on a CPU. If the shapes fit both products of a layer, which then do equal work, the mask has one of
    them. Empty if the recording has no operator shapes or no layers (``whatif collect`` records both).
    """
    of_layer = gradient_bytes(graph).tolist()
    found = np.zeros(len(graph), dtype=np.bool_)
    backward = np.flatnonzero((graph.phase == Phase.BACKWARD) & (graph.called >= 0))
    if not len(backward):
        return found
    # A step repeats its operators, so each pair of operator and layer is checked once.
    pairs, inverse = np.unique(
        np.stack([graph.called[backward], graph.layer[backward]], axis=1), axis=0, return_inverse=True
    )
    found[backward] = np.array([_is_one(graph, row, of_layer[layer]) for row, layer in pairs.tolist()])[inverse.ravel()]
    products = np.array([operator.family == "matmul" for operator in graph.info.operators])
    return _one_of_two(graph, found, backward[products[graph.called[backward]]])


def _one_of_two(graph: TaskGraph, found: Bool, products: Int64) -> Bool:
    """Keep one product of two if both fit: with as many tokens as features they have the same shapes and work."""
    key = graph.step[products].astype(np.int64) * len(graph.layers) + graph.layer[products]
    order = np.argsort(key, kind="stable")
    for tasks in np.split(products[order], np.flatnonzero(np.diff(key[order])) + 1):
        call = np.where(graph.operator[tasks] >= 0, graph.operator[tasks], -tasks - 2)
        calls = np.unique(call, return_index=True)
        in_order = calls[0][np.argsort(calls[1])]
        if len(in_order) % 2 == 0 and found[tasks].all():
            found[tasks] = np.isin(call, in_order[1::2])
    return found


def _is_one(graph: TaskGraph, row: int, size_bytes: int) -> bool:
    operator = graph.info.operators[row]
    if operator.family != "matmul":
        return operator.phase == "wgrad"
    sizes = dict(operator.integers)
    m, n = sizes.get("m", 0), sizes.get("n", 0)
    # A layer stores its weight with either dimension first, and its bias has the size of the output.
    parameters = {m * n, m * n + m, m * n + n}
    return sizes.get("batch", 1) == 1 and size_bytes in {each * one for each in _ELEMENT_BYTES for one in parameters}
