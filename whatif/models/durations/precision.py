"""How long kernels take in another number format: the estimator's answers for fp16, bf16, TF32 and fp8.

Sources: ``whatif/models/durations/half_precision.py``; PyTorch, "TensorFloat-32 on Ampere" (CUDA semantics:
convolutions use TF32 unless told otherwise, matrix products do not); Micikevicius et al., "FP8 Formats for Deep
Learning", 2022.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from whatif.graph.edit import as_index
from whatif.graph.kernels import (
    DTYPES,
    MATRIX_FAMILIES,
    KernelFamily,
    classify_kernel,
)
from whatif.graph.selection import Tasks
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Int8, among
from whatif.hardware.gpu import Gpu
from whatif.models.durations.estimator import (
    Estimates,
    Source,
    device,
    scaled,
)
from whatif.models.durations.half_precision import (
    FEED_FROM_FP32,
    FEED_FROM_TENSOR_CORES,
    Switch,
    half_precision_ratio,
    is_half,
    matrix_ratios,
    work_is_known,
)

Precision = Literal["fp16", "bf16", "tf32", "fp8"]

_FP32, _TF32, _FP16, _BF16 = (DTYPES.index(name) for name in ("fp32", "tf32", "fp16", "bf16"))
# What is left of the bytes of a product of which both operands become fp8 and the result stays, or becomes, half.
_FP8_BYTES_LEFT = {"fp32": 4 / 12, "tf32": 4 / 12, "fp16": 4 / 6, "bf16": 4 / 6}


def in_precision(graph: TaskGraph, tasks: Tasks, target: Precision) -> Estimates:
    """Estimate the GPU ``tasks`` with their operands in ``target``.

    What the switch cannot change takes what it took, and keeps its source. fp16 and bf16: as autocast does it, all
    kinds of kernels. TF32: the matrix kernels in fp32. fp8: the products. Casts that come with it are new kernels.
    """
    gpu, tasks = device(graph), as_index(graph, tasks)
    if target in ("fp16", "bf16"):
        return _by_database(graph, tasks, target, _in_half(graph, tasks, gpu, target))
    dtype, family, duration = matrix_dtype(graph)[tasks], graph.family[tasks], graph.duration_ns[tasks]
    flops, size_bytes = graph.flops[tasks], graph.size_bytes[tasks]
    centre, low, high = (np.ones(len(dtype)) for _ in range(3))
    source = np.full(len(dtype), Source.RECORDED)
    for member, before in _switched(target):
        mask = (family == member) & (dtype == DTYPES.index(before))
        feed = FEED_FROM_FP32 if before == "fp32" else FEED_FROM_TENSOR_CORES
        # TF32 operands are fp32 in memory.
        switch = Switch(before, target, _FP8_BYTES_LEFT[before] if target == "fp8" else 1.0, feed)
        found = matrix_ratios(member, switch, flops[mask], size_bytes[mask], duration[mask].astype(np.float64), gpu)
        centre[mask], low[mask], high[mask] = found
        source[mask] = np.where(work_is_known(flops[mask], duration[mask], gpu), Source.ROOFLINE, Source.PAPER)
    model = scaled(graph, tasks, centre, source, low=np.minimum(low, centre), high=np.maximum(high, centre))
    # Measured products in fp8 hold the casts of their operands (aiconfigurator's take 10 us more than those in bf16 at
    # 197 rows of 768), which `fp8` adds as tasks of their own.
    return model if target == "fp8" else _by_database(graph, tasks, target, model)


def _by_database(graph: TaskGraph, tasks: npt.NDArray[Any], target: Precision, model: Estimates) -> Estimates:
    """The estimates, but for changed operators that were measured on the recorded GPU in both formats: their ratio."""
    from whatif.models.durations import changed_operators

    changes = model.source != Source.RECORDED
    if not changes.any():
        return model
    return changed_operators.measured_first(
        graph, tasks, changed_operators.in_format(graph, tasks, target), changes, model
    )


def _switched(target: Precision) -> list[tuple[KernelFamily, str]]:
    """The families and formats that a switch to TF32 or fp8 takes from."""
    if target == "tf32":
        return [(member, "fp32") for member in (KernelFamily.GEMM, KernelFamily.CONVOLUTION, KernelFamily.RNN)]
    return [(KernelFamily.GEMM, before) for before in _FP8_BYTES_LEFT]


def _in_half(graph: TaskGraph, tasks: npt.NDArray[Any], gpu: Gpu | None, target: Literal["fp16", "bf16"]) -> Estimates:
    family, dtype = graph.family[tasks], matrix_dtype(graph)[tasks]
    flops, duration = graph.flops[tasks], graph.duration_ns[tasks]
    centre, low, high = half_precision_ratio(family, dtype, flops, graph.size_bytes[tasks], duration, gpu, target)
    matrix = among(family, MATRIX_FAMILIES)
    # Daydream gives factors for matrix kernels and for those that are bound by memory; the others are our estimate.
    paper = matrix | (family == KernelFamily.ELEMENTWISE)
    source = np.where(paper, Source.PAPER, Source.ASSUMED)
    source[matrix & work_is_known(flops, duration, gpu)] = Source.ROOFLINE
    source[(low == 1) & (high == 1)] = Source.RECORDED
    return scaled(graph, tasks, centre, source, low=low, high=high)


def matrix_dtype(graph: TaskGraph) -> Int8:
    """Return the format in which each kernel multiplies, shape (n_tasks,), positions in `kernels.DTYPES`.

    On NVIDIA's devices with TF32 a convolution of fp32 tensors runs in it, unless the kernel's own name says fp32.
    """
    gpu = device(graph)
    if gpu is None or not gpu.tf32_by_default:
        return graph.dtype
    doubtful = (graph.family == KernelFamily.CONVOLUTION) & (graph.dtype == _FP32)
    if not doubtful.any():
        return graph.dtype
    table = np.zeros(len(graph.names), dtype=np.bool_)
    for code in np.unique(graph.name[doubtful]).tolist():
        table[code] = _named_dtype(graph.names[code]) != "fp32"
    return np.where(doubtful & table[graph.name], _TF32, graph.dtype).astype(np.int8)


@lru_cache(maxsize=4096)
def _named_dtype(name: str) -> str:
    return classify_kernel(name)[1]


def gets_faster(graph: TaskGraph, tasks: Tasks, estimates: Estimates) -> Bool:
    """Return a mask, shape (n_tasks,), of those of ``tasks`` whose estimate is below their present duration."""
    faster = np.zeros(len(graph), dtype=np.bool_)
    faster[tasks] = estimates.duration_ns < graph.duration_ns[tasks]
    return faster


def with_autocast(graph: TaskGraph, target: Literal["fp16", "bf16"]) -> TaskGraph:
    """Remember that the step runs under autocast."""
    return with_told_precision(graph, autocast={"fp16": "float16", "bf16": "bfloat16"}[target])


def with_told_precision(graph: TaskGraph, **formats: str) -> TaskGraph:
    """Remember ``formats`` in the recorder's words (``instrumentation/metadata.py``), where the recording tells any."""
    recorded = graph.info.recorded
    if recorded.precision is None:
        return graph
    recorded = replace(recorded, precision=recorded.precision.with_formats(formats), peak_memory_bytes=None)
    return graph.replace(info=replace(graph.info, recorded=recorded))


def with_dtype(graph: TaskGraph, tasks: Bool, target: Precision) -> TaskGraph:
    """Remember that ``tasks`` (a mask) compute in ``target`` now; what is narrower already stays."""
    changed = tasks & ~is_half(graph.dtype) if target in ("fp16", "bf16") else tasks
    return graph.replace(dtype=np.where(changed, DTYPES.index(target), graph.dtype).astype(np.int8))
