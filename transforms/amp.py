"""AMP: train an fp32 step in mixed precision (autocast, and a loss scaler for fp16).

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; Daydream (USENIX ATC 2020) §5.1 and Algorithm 3.
Model:  each kernel by its kind and its own roofline in half precision on the recorded GPU (whatif/half_precision.py);
        kernels that are half already, the update and communication stay. Given `matrix_speedup` or `memory_speedup`
        (3 and 2 in the paper) it is Daydream's Algorithm 3 to the letter: every GPU task, update and communication
        included. Added: casts of weights and of fp32 results, forward and backward, with their launches, and for fp16
        the unscaling of the gradients and the CPU's wait for it. On a CPU recording always bf16: operators that were
        measured alone (`whatif collect --measure-operators`) take the ratio of their two times, the others follow the
        recorded (else a typical) ratio of bf16 to fp32 rates. Ignored: a larger batch that fits afterwards.
"""

from typing import Literal

import numpy as np

from whatif import Phase, TaskGraph, WhatifError
from whatif.autocast import autocast_on_cpu
from whatif.half_precision import half_precision_ratio, is_half, runs_half_already
from whatif.hardware import find_gpu
from whatif.kernels import DTYPES
from whatif.mixed_precision import add_casts, add_loss_scaler, is_matrix


def transform(
    graph: TaskGraph,
    *,
    matrix_speedup: float | None = None,
    memory_speedup: float | None = None,
    target: Literal["fp16", "bf16"] = "fp16",
) -> TaskGraph:
    """Shrink the kernels of forward and backward pass, add casts and the loss scaler."""
    matrix, on_gpu = is_matrix(graph), bool(graph.on_gpu.any())
    if matrix_speedup is not None or memory_speedup is not None:
        speedups = [
            3.0 if matrix_speedup is None else matrix_speedup,
            2.0 if memory_speedup is None else memory_speedup,
        ]
        if not min(speedups) > 0:
            raise WhatifError(f"amp: expected speedups above 0, got {speedups[0]} and {speedups[1]}.")
        work = graph.on_gpu if on_gpu else graph.on_cpu & (graph.family >= 0)
        return graph.scale(work & matrix, 1 / speedups[0]).scale(work & ~matrix, 1 / speedups[1])

    gpu = find_gpu(graph.info.gpu, graph.info.gpu_memory_bytes) if graph.info.gpu else None
    work = (graph.on_gpu if on_gpu else graph.family >= 0) & ~graph.select(phase=Phase.UPDATE)
    family, dtype, duration_ns = graph.family[work], graph.dtype[work], graph.duration_ns[work]
    if runs_half_already(family, dtype, duration_ns):
        return graph.note("amp: the matrix kernels run in half precision already; nothing changes")
    if not on_gpu:
        return autocast_on_cpu(graph)
    ratio, low, high = half_precision_ratio(
        family, dtype, graph.flops[work], graph.size_bytes[work], duration_ns, gpu, target
    )
    if np.all(ratio[matrix[work]] == 1):
        return graph.note(f"amp: no matrix kernel gets faster in {target}; nothing changes")
    changed = np.zeros(len(graph), dtype=np.bool_)
    changed[work] = ratio < 1
    low_ns, high_ns = graph.low_ns[work] * low, graph.high_ns[work] * high
    graph = graph.with_duration(work, duration_ns * ratio, low_ns=low_ns, high_ns=high_ns)
    graph = graph.replace(
        dtype=np.where(changed & ~is_half(graph.dtype), DTYPES.index(target), graph.dtype).astype(np.int8)
    )
    if gpu is None:
        graph = graph.note(f"amp: {graph.info.gpu or 'the GPU'} is not in whatif/gpus, so the range is wide")
    graph = add_casts(graph, changed & matrix, gpu)
    return add_loss_scaler(graph, gpu) if target == "fp16" else graph
