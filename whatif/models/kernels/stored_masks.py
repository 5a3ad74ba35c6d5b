"""The time of Inductor's CPU loops for the masks that the backward pass reads.

Source: torch 2.13 with gcc 12. A mask is stored as one bool per element, and ATen's vector code (`vec_mask.h`) converts
them one by one. Writing one took 16 to 22 ns on an Intel Xeon of 2.8 GHz and reading it 2 to 8, in layers measured
alone; about 12 on an AMD EPYC, by the whole step of VGG-19's twin in `traces/campaign_cpu_5`. The stored masks were
found in Inductor's loops for fourteen pairs of layers: dropout's; a leaky ReLU's after a product (after a normalization
it is recomputed); and a ReLU's after a product and before maximum pooling or dropout (else the next product keeps its
output, which gives the mask). A ReLU6 stores one as well, but is not counted: recordings lack its size.
"""

from __future__ import annotations

import numpy as np

from whatif.graph.described import DTYPE_BYTES
from whatif.graph.kernels import DTYPES, MATRIX_FAMILIES
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Bool, Float64, Int64, Phase, among
from whatif.models.durations.estimator import Source, mark

# ns per element: between the two processors; from less, if a compiler vectorizes the conversion, to the most measured.
WRITE_NS, READ_NS = (15.0, 4.0, 22.0), (5.0, 1.0, 8.0)

_RELU, _LEAKY = r"^aten::(relu|clamp_min)_?$", r"^aten::leaky_relu_?$"
_RELU_BACKWARD, _LEAKY_BACKWARD = r"^aten::threshold_backward$", r"^aten::leaky_relu_backward$"
# Dropout draws its mask, divides it by the kept share, and multiplies: nine operators later with torch 2.13.
_DRAWS, _MULTIPLIES, _LONGEST_DROPOUT = r"^aten::bernoulli_$", r"^aten::mul_?$", 12
# Operators that do not keep the ReLU's output, which would give the mask, for the backward pass; and theirs there.
_LOSES_SIGNS, _LOSES_SIGNS_BACKWARD = r"max_pool\dd|dropout", rf"max_pool\dd|{_MULTIPLIES}"


def with_stored_masks(graph: TaskGraph, operators: Int64) -> TaskGraph:
    """Return the graph in which ``operators`` (ids on the CPU, thread by thread) include the time of stored masks.

    Operators of unknown size stay unchanged, and so does a step without a backward pass.
    """
    if not (graph.phase[operators] == Phase.BACKWARD).any():
        return graph
    called = graph.called[operators]
    begins = np.append(True, called[1:] != called[:-1])[: len(operators)]
    heads, run = operators[begins], np.cumsum(begins) - 1
    products = among(graph.family[heads], MATRIX_FAMILIES)
    ahead, behind = np.append(False, products)[run], np.append(products, False)[run + 1]
    loses = np.append(graph.select(name=_LOSES_SIGNS).mask[heads], False)[run + 1]
    lost = np.append(False, graph.select(name=_LOSES_SIGNS_BACKWARD).mask[heads])[run]
    write = ahead & (_sized(graph, operators, _LEAKY) | (_sized(graph, operators, _RELU) & loses))
    read = behind & (_sized(graph, operators, _LEAKY_BACKWARD) | (_sized(graph, operators, _RELU_BACKWARD) & lost))
    write[_of_dropout(graph, operators)] = True
    for masked, costs in ((write, WRITE_NS), (read, READ_NS)):
        tasks = operators[masked]
        elements = _elements(graph, tasks)
        centre, low, high = (
            present[tasks] + cost * elements
            for present, cost in zip((graph.duration_ns, graph.low_ns, graph.high_ns), costs, strict=True)
        )
        graph = mark(graph.with_duration(tasks, centre, low_ns=low, high_ns=high), tasks, Source.ASSUMED)
    return graph


def _of_dropout(graph: TaskGraph, operators: Int64) -> Int64:
    """The positions of the products with a drawn mask."""
    products = np.flatnonzero(_sized(graph, operators, _MULTIPLIES))
    drawn = np.flatnonzero(graph.select(name=_DRAWS).mask[operators])
    at = np.append(products, len(operators) + _LONGEST_DROPOUT)[np.searchsorted(products, drawn)]
    return at[at - drawn < _LONGEST_DROPOUT]


def _sized(graph: TaskGraph, operators: Int64, pattern: str) -> Bool:
    return graph.select(name=pattern).mask[operators] & (graph.size_bytes[operators] > 0)


def _elements(graph: TaskGraph, tasks: Array) -> Float64:
    """The number of elements of each of ``tasks`` (ids), whose tensors have one shape."""
    tensors = np.where(graph.select(name=f"{_MULTIPLIES}|{_RELU_BACKWARD}|{_LEAKY_BACKWARD}").mask[tasks], 3, 2)
    size = np.array([DTYPE_BYTES.get(dtype, 4.0) for dtype in DTYPES])[graph.dtype[tasks]]
    return np.asarray(graph.size_bytes[tasks] / size / tensors, dtype=np.float64)
