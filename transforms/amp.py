"""AMP: train in mixed precision (autocast, and a loss scaler for fp16).

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; Daydream (USENIX ATC 2020) §5.1 and Algorithm 3.
Model:  each operator that autocast's lists change takes the ratio of the op database's times in half precision and as
        recorded, on the recorded GPU, down to the data sheet (whatif/models/durations/forms.py); half-precision work,
        the update and communication stay. The tensors that stay fp32 are known for a predicted step's operators
        (instrumentation/trace_module/formats.py); in a recording they follow from the names of its kernels
        (format_flow.py). With `matrix_speedup` or `memory_speedup` (3 and 2 in the paper) it is exactly Daydream's
        Algorithm 3: every GPU task, including update and communication. Added: casts of weights and of fp32 results,
        forward and backward, with their launches, and for fp16 the unscaling of the gradients and the CPU's wait for
        it. On a CPU recording always bf16: operators measured alone (`whatif collect --measure-operators`)
        take the ratio of their two times, the others follow the recorded (else a typical) ratio of bf16 to fp32 rates.
        Inference on a CPU and decoding (few rows) store the weights in half precision, so none is cast. Ignored: a
        larger batch that fits afterwards.
Effort: small: torch.autocast around the forward pass, and for fp16 a torch.amp.GradScaler; in inference
        model.to(torch.bfloat16).
"""

from typing import Literal

import numpy as np

from whatif import Phase, TaskGraph, WhatifError
from whatif.models import change_memory, in_half
from whatif.models.durations.estimator import device, put
from whatif.models.durations.half_precision import runs_half_already
from whatif.models.durations.precision import (
    gets_faster,
    in_precision,
    note_without_shapes,
    switches,
    with_autocast,
    with_dtype,
)
from whatif.models.kernels.autocast import autocast_on_cpu
from whatif.models.kernels.mixed_precision import add_casts, is_matrix
from whatif.models.layers.offload import PREFETCH

PLACE = "formats"


def transform(
    graph: TaskGraph,
    *,
    matrix_speedup: float | None = None,
    memory_speedup: float | None = None,
    target: Literal["fp16", "bf16"] = "fp16",
) -> TaskGraph:
    """Shrink the kernels of forward and backward pass, add casts and the loss scaler."""
    matrix, on_gpu = is_matrix(graph), graph.has_gpu
    if matrix_speedup is not None or memory_speedup is not None:
        speedups = [
            3.0 if matrix_speedup is None else matrix_speedup,
            2.0 if memory_speedup is None else memory_speedup,
        ]
        if not min(speedups) > 0:
            raise WhatifError(f"amp: expected speedups above 0, got {speedups[0]} and {speedups[1]}.")
        work = graph.on_gpu if on_gpu else graph.on_cpu & (graph.family >= 0)
        graph = graph.scale(work & matrix, 1 / speedups[0]).scale(work & ~matrix, 1 / speedups[1])
        return with_autocast(graph, target if on_gpu else "bf16")

    tasks = np.flatnonzero((graph.on_gpu if on_gpu else graph.family >= 0) & ~graph.select(phase=Phase.UPDATE))
    if runs_half_already(graph.family[tasks], graph.dtype[tasks], graph.duration_ns[tasks]):
        return graph.unchanged("amp: the matrix kernels run in half precision already; nothing changes")
    if not on_gpu:
        return with_autocast(change_memory(autocast_on_cpu(graph), in_half), "bf16")
    estimates = in_precision(graph, tasks, target)
    if not (gets_faster(graph, tasks, estimates) & matrix).any():
        return graph.unchanged(f"amp: no matrix kernel gets faster in {target}; nothing changes")
    half = switches(graph, tasks, estimates)
    graph = note_without_shapes(graph, half & matrix, "amp")
    if PREFETCH in graph.attached:
        graph = graph.note("amp: put it before vdnn, whose copies otherwise keep their recorded size")
    graph = with_autocast(change_memory(with_dtype(put(graph, tasks, estimates), half, target), in_half), target)
    gpu = device(graph)
    if gpu is None:
        graph = graph.note(f"amp: {graph.info.gpu or 'the GPU'} is not in whatif/hardware/gpus, so the range is wide")
    return add_casts(graph, half & matrix, gpu, loss_scaler=target == "fp16")
