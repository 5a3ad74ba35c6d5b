"""Which kernels stay fp32 in a recorded step under autocast: number formats propagated along kernel names.

Source: PyTorch's autocast op reference (docs/source/amp.rst). Look-ups and the operators on the fp32 list write fp32;
products write half; all others keep the widest format that they read. A recording does not contain which tensors a
kernel reads, so each kernel is assumed to read the output of the one before it, and an addition of two tensors also the
residual stream. That is fp32 in models with look-ups, or with layer norms and no batch norm. Predicted steps have exact
shares (``whatif.graph.recorded.AUTOCAST_SHARE``).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from whatif.graph.kernels import MATRIX_FAMILIES, KernelFamily
from whatif.graph.structure_cache import of_columns
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Phase, among
from whatif.models.durations.forms import of_batches

_Kind = Literal["single", "at once", "add", "copy", ""]
# Names of kernels and operators on the fp32 list; "at once": reads half and writes fp32 in one kernel.
_SINGLE = re.compile(
    r"(?<![a-z])(exp|log|log1p|log2|pow|rsqrt|reciprocal|softplus|vector_norm|norm)(?![a-z0-9])|pow_tensor"
)
_AT_ONCE = re.compile(r"sum_functor|aten::(sum|prod|cumsum)(?![a-z])")
_COPY = re.compile(r"direct_copy|copy_device_to_device|DtoD|aten::(clone|copy_|contiguous)(?![a-z])")
_ADD = re.compile(r"CUDAFunctor_add<.*char ?\*, \(unsigned long\)3>|aten::add(?![a-z])")


class Flow(NamedTuple):
    """Masks, shape (n_tasks,): kernels that still move fp32, those that add half to it, casts of inputs, and copies."""

    stays: Bool
    widens: Bool
    casts: Bool
    copies: Bool


@of_columns("phase", "family", "name", "names", "operator")
def flow_of(graph: TaskGraph) -> Flow | None:
    """Return the flow of a GPU step whose residual stream is fp32; None for others, which are half throughout."""
    gpu = graph.on_gpu.mask & among(graph.phase, (Phase.FORWARD, Phase.BACKWARD))
    family = graph.family
    product = gpu & among(family, MATRIX_FAMILIES)
    if not product.any() or not _keeps_a_stream(graph, gpu, product):
        return None
    n = len(graph)
    stays, widens, casts, copies = (np.zeros(n, dtype=np.bool_) for _ in Flow._fields)
    ids = np.flatnonzero(gpu)
    # Attention reads the outputs of the products before it, and the product after it reads its own.
    apart = np.zeros(n, dtype=np.bool_)
    apart[ids] = (family[ids] == KernelFamily.ATTENTION) | of_batches(graph, ids)
    kinds = [_kind(graph.names[code]) for code in graph.name[ids].tolist()]
    single, step, was_product, before = True, -2, False, -1
    rows = zip(ids.tolist(), kinds, family[ids].tolist(), graph.step[ids].tolist(), product[ids].tolist(), strict=True)
    for task, kind, of, now, is_product in rows:
        if now != step:
            single, step = True, now
        if is_product:
            # Consecutive products multiply the same input: queries, keys and values.
            casts[task] = casts[before] and not (apart[before] or apart[task]) if was_product else single
            single, before = False, task
        elif of in _LOOK_UPS:
            single = True
        elif kind == "at once" or of == KernelFamily.SOFTMAX:
            stays[task] = single
            single = True
        elif kind == "single" or of == KernelFamily.LAYER_NORM:
            casts[task] = not single
            stays[task] = single = True
        else:
            widens[task] = kind == "add" and not single
            single = single or kind == "add"
            stays[task] = single
            copies[task] = kind == "copy"
        was_product = is_product
    return Flow(stays, widens, casts, copies)


_LOOK_UPS = (KernelFamily.INDEXING,)


def _keeps_a_stream(graph: TaskGraph, gpu: Bool, product: Bool) -> bool:
    first = int(np.flatnonzero(product)[0])
    looks_up = bool((gpu & among(graph.family, _LOOK_UPS))[:first].any())
    family = graph.family[np.flatnonzero(gpu)]
    return looks_up or bool((family == KernelFamily.LAYER_NORM).any() and (family != KernelFamily.NORMALIZATION).all())


@lru_cache(maxsize=4096)
def _kind(name: str) -> _Kind:
    spoken = name.replace("_kernel", " ")
    if _AT_ONCE.search(name):
        return "at once"
    if _SINGLE.search(spoken):
        return "single"
    if _COPY.search(name):
        return "copy"
    return "add" if _ADD.search(name) else ""
