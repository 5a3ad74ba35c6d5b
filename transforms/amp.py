"""AMP: train an fp32 step in mixed precision (autocast, and a loss scaler for fp16).

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; Daydream (USENIX ATC 2020) §5.1 and Algorithm 3.
Model:  each kernel by its kind and its own roofline in half precision on the recorded GPU (whatif/half_precision.py);
        kernels that are half already, the update and communication stay. With `matrix_speedup` and `memory_speedup`
        given, as Daydream does it: products and convolutions that much faster, everything else on the GPU likewise.
        Added: a cast of each weight a step with its launch, and for fp16 the unscaling of the gradients and the
        CPU's wait for it. On a CPU recording the matrix operators follow the recorded (else a typical) ratio of bf16
        to fp32 rates. Ignored: a larger batch that fits afterwards.
"""

from typing import Literal

import numpy as np

from whatif import Phase, TaskGraph
from whatif.half_precision import cpu_half_precision_ratio, half_precision_ratio
from whatif.hardware import find_gpu
from whatif.mixed_precision import add_casts, add_loss_scaler, is_matrix


def transform(
    graph: TaskGraph,
    *,
    matrix_speedup: float | None = None,
    memory_speedup: float | None = None,
    target: Literal["fp16", "bf16"] = "fp16",
) -> TaskGraph:
    """Shrink the kernels of forward and backward pass, add casts and the loss scaler."""
    gpu = find_gpu(graph.info.gpu, graph.info.gpu_memory_bytes) if graph.info.gpu else None
    matrix = is_matrix(graph)
    on_gpu = bool(graph.on_gpu.any())
    if matrix_speedup is not None or memory_speedup is not None:
        work = graph.on_gpu if on_gpu else graph.on_cpu & (graph.family >= 0)
        graph = graph.scale(work & matrix, 1 / (matrix_speedup or 3.0))
        return graph.scale(work & ~matrix, 1 / (memory_speedup or 2.0))

    work = (graph.on_gpu if on_gpu else graph.family >= 0) & ~graph.select(phase=Phase.UPDATE)
    family, dtype, duration_ns = graph.family[work], graph.dtype[work], graph.duration_ns[work]
    if on_gpu:
        ratio, low, high = half_precision_ratio(
            family, dtype, graph.flops[work], graph.size_bytes[work], duration_ns, gpu, target
        )
    else:
        target = "bf16"
        ratio, low, high = cpu_half_precision_ratio(family, dtype, graph.info.metadata.get("rates"))
    if np.all(ratio[matrix[work]] == 1):
        return graph.note("amp: the matrix kernels run in half precision already (or there are none); nothing changes")
    changed = np.zeros(len(graph), dtype=np.bool_)
    changed[work] = ratio < 1
    graph = graph.with_duration(work, duration_ns * ratio, low_ns=duration_ns * low, high_ns=duration_ns * high)
    if on_gpu and gpu is None:
        graph = graph.note(f"amp: {graph.info.gpu or 'the GPU'} is not in whatif/gpus, so the range is wide")
    graph = add_casts(graph, changed & matrix, gpu)
    return add_loss_scaler(graph, gpu) if target == "fp16" else graph
