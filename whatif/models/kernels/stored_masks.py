"""What the loops of Inductor on a CPU take for the masks that the backward pass reads.

Source: measured with torch 2.13 and gcc 12 on an Intel Xeon. A mask is stored as one bool an element, and ATen's vector
code (`vec_mask.h`) converts them one by one. Which masks are stored was read from the loops that Inductor wrote for
fourteen pairs of layers: a rectifier's behind a product (behind a normalization it is computed again), of a plain ReLU
only where maximum pooling or dropout follows (else the next product needs the ReLU's output, which tells it); and
dropout's.
"""

from __future__ import annotations

import numpy as np

from whatif.graph.described import DTYPE_BYTES
from whatif.graph.kernels import DTYPES, MATRIX_FAMILIES
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Bool, Float64, Int64, Phase, among
from whatif.models.durations.estimator import Source, mark

# ns an element; from less, where a compiler vectorizes the conversion, to what slower processors take.
WRITE_NS, READ_NS = (12.0, 3.0, 18.0), (5.0, 1.0, 8.0)

_RELU, _OTHER_RECTIFIER = r"^aten::(relu|clamp_min)_?$", r"^aten::(leaky_relu|hardtanh)_?$"
_RECTIFIER_BACKWARD = r"^aten::(threshold|leaky_relu|hardtanh)_backward$"
_LOSES_SIGNS = r"max_pool\dd|dropout"
# Dropout draws its mask, divides it by the share that stays, and multiplies.
_DRAWS, _MULTIPLIES, _LONGEST_DROPOUT = r"^aten::bernoulli_$", r"^aten::mul_?$", 6


def with_stored_masks(graph: TaskGraph, operators: Int64) -> TaskGraph:
    """Return the graph in which ``operators`` (ids on the CPU, thread by thread) take longer by the masks they store.

    Operators whose sizes the recording does not tell stay as they are, and so does a step without a backward pass.
    """
    if not (graph.phase[operators] == Phase.BACKWARD).any():
        return graph
    write, read = _written(graph, operators), np.zeros(len(operators), dtype=np.bool_)
    # Each backward pass goes through its rectifiers the other way round.
    ahead = np.flatnonzero(_sized(graph, operators, f"{_RELU}|{_OTHER_RECTIFIER}"))
    back = np.flatnonzero(_sized(graph, operators, _RECTIFIER_BACKWARD))
    step = graph.step[operators]
    forward, backward = ahead[np.argsort(step[ahead], kind="stable")], back[np.lexsort((-back, step[back]))]
    if np.array_equal(step[forward], step[backward]):
        read[backward] = write[forward]
    for masked, costs in ((write, WRITE_NS), (read, READ_NS)):
        tasks = operators[masked]
        elements = _elements(graph, tasks)
        centre, low, high = (
            present[tasks] + cost * elements
            for present, cost in zip((graph.duration_ns, graph.low_ns, graph.high_ns), costs, strict=True)
        )
        graph = mark(graph.with_duration(tasks, centre, low_ns=low, high_ns=high), tasks, Source.ASSUMED)
    return graph


def _written(graph: TaskGraph, operators: Int64) -> Bool:
    """The operators that write a mask, as positions' mask, shape (n,)."""
    called = graph.called[operators]
    begins = np.append(True, called[1:] != called[:-1])[: len(operators)]
    heads, run = operators[begins], np.cumsum(begins) - 1
    before = np.append(-1, graph.family[heads])[run]
    loses = np.append(graph.select(name=_LOSES_SIGNS).mask[heads], False)[run + 1]
    behind_product = among(before, MATRIX_FAMILIES)
    written = _sized(graph, operators, _OTHER_RECTIFIER) | (_sized(graph, operators, _RELU) & loses)
    written &= behind_product & (graph.phase[operators] == Phase.FORWARD)
    products = np.flatnonzero(_sized(graph, operators, _MULTIPLIES))
    drawn = np.flatnonzero(graph.select(name=_DRAWS).mask[operators])
    at = np.append(products, len(operators) + _LONGEST_DROPOUT)[np.searchsorted(products, drawn)]
    written[at[at - drawn <= _LONGEST_DROPOUT]] = True
    return np.asarray(written)


def _sized(graph: TaskGraph, operators: Int64, pattern: str) -> Bool:
    return graph.select(name=pattern).mask[operators] & (graph.size_bytes[operators] > 0)


def _elements(graph: TaskGraph, tasks: Array) -> Float64:
    """The elements of each of ``tasks`` (ids), whose tensors have one shape."""
    tensors = np.where(graph.select(name=f"{_MULTIPLIES}|{_RECTIFIER_BACKWARD}").mask[tasks], 3, 2)
    size = np.array([DTYPE_BYTES.get(dtype, 4.0) for dtype in DTYPES])[graph.dtype[tasks]]
    return np.asarray(graph.size_bytes[tasks] / size / tensors, dtype=np.float64)
