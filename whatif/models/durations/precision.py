"""Estimated durations of kernels in another number format: fp16, bf16, TF32 and fp8.

Sources: ``whatif/models/durations/forms.py`` for times; PyTorch, "TensorFloat-32 on Ampere" (CUDA semantics:
convolutions use TF32 by default, matrix products do not); Micikevicius et al., "FP8 Formats for Deep
Learning", 2022.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from msgspec import structs

from whatif.graph.edit import as_ids
from whatif.graph.kernels import DTYPES, MATRIX_FAMILIES, KernelFamily, classify_kernel
from whatif.graph.order import each_once
from whatif.graph.recorded import AUTOCAST_SHARE
from whatif.graph.selection import Tasks
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Bool, Float64, Int8, among
from whatif.models.durations import forms
from whatif.models.durations.estimator import Estimates, Source, device
from whatif.models.durations.format_flow import flow_of
from whatif.models.durations.half_precision import bytes_left, is_half, runs_in_fp32

Precision = Literal["fp16", "bf16", "tf32", "fp8"]

_FP32, _TF32, _FP16, _BF16 = (DTYPES.index(name) for name in ("fp32", "tf32", "fp16", "bf16"))


def in_precision(graph: TaskGraph, tasks: Tasks, target: Precision) -> Estimates:
    """Estimate the GPU ``tasks`` with their operands in ``target``.

    Tasks that the switch cannot change keep their time and source. fp16 and bf16: all kinds of kernels, as autocast
    does. TF32: the matrix kernels in fp32. fp8: the products. The casts that it needs are not included.
    """
    ids = as_ids(graph, tasks)
    formats, half = matrix_dtype(graph), target in ("fp16", "bf16")
    family, duration_ns = graph.family[ids], graph.duration_ns[ids].astype(np.float64)
    changes = runs_in_fp32(family, formats[ids], duration_ns) if half else _switches(family, formats[ids], target)
    matrix = changes & among(family, MATRIX_FAMILIES)
    # Measured fp8 products include the casts of their operands (aiconfigurator's take 10 us more than those in bf16 at
    # 197 rows of 768), which `fp8` adds as separate tasks: use the data sheet instead.
    sheet = target == "fp8"
    changed = forms.in_form(graph, ids, formats, dtype=target, sheet=sheet)
    of_layout = (family == KernelFamily.LAYOUT) & half
    known = np.isfinite(changed.ratio) & (matrix | of_layout)
    parts = [(known, changed.take(known))]
    rest = np.flatnonzero(matrix & ~known)
    parts.append((rest, forms.usual(graph, ids[rest], formats, dtype=target, sheet=sheet)))
    if half:
        moves = np.flatnonzero(changes & ~matrix & ~known)
        left = _left(graph, ids[moves])
        smaller = np.flatnonzero(np.logical_or.reduce([share != 1 for share in left]))
        moves = moves[smaller]
        parts.append((moves, forms.in_traffic(graph, ids[moves], left.take(smaller, axis=1))))
    return forms.estimates(graph, ids, parts)


# The uncertainty, log, of a byte share from the flow of formats, because of caches. Our estimate.
_FLOW_SPREAD = 1.1


# Families whose kernels take the format of their inputs; those that stay fp32 only by name may be half after all.
_FOLLOW = (KernelFamily.ELEMENTWISE, KernelFamily.REDUCTION, KernelFamily.POOLING, KernelFamily.SOFTMAX)
_STAYS = (1.0, 0.6, 1.05)
# An addition of half to an fp32 stream moves 10 of 12 bytes, to a mask that it repeats 6 of 8.
_WIDENS = 0.8


def _left(graph: TaskGraph, tasks: Array) -> Float64:
    """The byte share of ``tasks`` (ids) under autocast and its range, shape (3, n): as attached, else by family."""
    left = bytes_left(graph.family[tasks])
    attached = graph.attached.get(AUTOCAST_SHARE)
    if attached is None:
        flow = flow_of(graph)
        if flow is not None:
            stays = flow.stays[tasks] & among(graph.family[tasks], _FOLLOW)
            left[:, stays] = np.array(_STAYS)[:, None]
            left[0, stays & flow.widens[tasks]] = _WIDENS
        return left
    share = attached[tasks]
    spread = np.where(share == 1, 1.0, _FLOW_SPREAD)
    return np.where(share > 0, np.stack([share, share / spread, share * spread]), left)


def _switches(family: Int8, dtype: Int8, target: Precision) -> Bool:
    """Mask of the tasks that a switch to TF32 or fp8 changes, shape (n,)."""
    if target == "tf32":
        members: tuple[KernelFamily, ...] = (KernelFamily.GEMM, KernelFamily.CONVOLUTION, KernelFamily.RNN)
        return np.asarray(among(family, members) & (dtype == _FP32), dtype=np.bool_)
    return np.asarray((family == KernelFamily.GEMM) & among(dtype, (_FP32, _TF32, _FP16, _BF16)), dtype=np.bool_)


def matrix_dtype(graph: TaskGraph) -> Int8:
    """Return the format in which each kernel multiplies, shape (n_tasks,), positions in `kernels.DTYPES`.

    On NVIDIA's devices with TF32 a convolution of fp32 tensors runs in it, unless the kernel's name says fp32.
    """
    gpu = device(graph)
    if gpu is None or not gpu.tf32_by_default:
        return graph.dtype
    doubtful = (graph.family == KernelFamily.CONVOLUTION) & (graph.dtype == _FP32)
    if not doubtful.any():
        return graph.dtype
    table = np.zeros(len(graph.names), dtype=np.bool_)
    for code in each_once(graph.name[doubtful]).tolist():
        table[code] = classify_kernel(graph.names[code])[1] != "fp32"
    return np.where(doubtful & table.take(graph.name), _TF32, graph.dtype).astype(np.int8)


def switches(graph: TaskGraph, tasks: Tasks, estimates: Estimates) -> Bool:
    """Return a mask, shape (n_tasks,), of those of ``tasks`` that ``in_precision`` estimated in the new format."""
    changed = np.zeros(len(graph), dtype=np.bool_)
    changed[tasks] = estimates.source != Source.RECORDED
    return changed


def gets_faster(graph: TaskGraph, tasks: Tasks, estimates: Estimates) -> Bool:
    """Return a mask, shape (n_tasks,), of those of ``tasks`` whose estimate is below their present duration."""
    faster = np.zeros(len(graph), dtype=np.bool_)
    faster[tasks] = estimates.duration_ns < graph.duration_ns[tasks]
    return faster


def no_longer(graph: TaskGraph, tasks: Tasks, estimates: Estimates) -> Estimates:
    """Return the estimates of ``tasks``, capped at the present ranges: the library may keep its kernel."""
    return structs.replace(estimates, high_ns=np.minimum(estimates.high_ns, graph.high_ns[tasks]))


def note_without_shapes(graph: TaskGraph, tasks: Bool, name: str) -> TaskGraph:
    """Return the graph, with a note of the what-if ``name`` if no task of the mask has an operator with shapes."""
    if (graph.called[tasks] >= 0).any():
        return graph
    return graph.note(
        f"{name}: this recording has no shapes, so usual operators of the kinds in its names stand in; record with "
        "record_shapes=True, or with `whatif collect`, for a narrower range"
    )


def with_autocast(graph: TaskGraph, target: Literal["fp16", "bf16"]) -> TaskGraph:
    """Record that the step runs under autocast."""
    return with_reported_precision(graph, autocast={"fp16": "float16", "bf16": "bfloat16"}[target])


def with_reported_precision(graph: TaskGraph, **formats: str) -> TaskGraph:
    """Set ``formats`` in the recorder's precision metadata (``instrumentation/metadata.py``), if there is any."""
    recorded = graph.info.recorded
    if recorded.precision is None:
        return graph
    recorded = structs.replace(recorded, precision=recorded.precision.with_formats(formats), peak_memory_bytes=None)
    return graph.replace(info=replace(graph.info, recorded=recorded))


def with_dtype(graph: TaskGraph, tasks: Bool, target: Precision) -> TaskGraph:
    """Record that ``tasks`` (a mask) now compute in ``target``; narrower formats stay."""
    changed = tasks & ~is_half(graph.dtype) if target in ("fp16", "bf16") else tasks
    dtype = graph.dtype.copy()
    dtype[changed] = DTYPES.index(target)
    return graph.replace(dtype=dtype)
