"""The share of a GPU's peak that a step's products use: MFU and HFU, of recordings and predictions alike.

Source: Chowdhery et al., "PaLM" (2022), appendix B: MFU counts the model's FLOPs once, HFU those of recomputed forward
passes too, and of the scores that the backward pass of a fused attention computes again.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Bool, Float64, Phase
from whatif.hardware.gpu import Gpu
from whatif.models.durations.occupancy import RATE_DTYPES

CONVENTION = (
    "matrix products; a multiply-add counts as two, causal attention as half if one fused kernel computes it, which "
    "skips what the mask hides, else in full (eager); MFU excludes recomputation; rates above the peak (Winograd, FFT) "
    "count as the peak"
)
# The scores are one of five products in the backward pass of a fused attention (FlashAttention, algorithm 4), of equal
# size where keys are as long as values.
_SCORES_AGAIN = 1 / 5


class Utilization(Struct, frozen=True):
    """TFLOP of one step, of the model and recomputed, MFU and HFU in percent (None without a GPU or shapes)."""

    tflop: float
    recomputed_tflop: float
    mfu_pct: float | None
    hfu_pct: float | None


def utilization(graph: TaskGraph, gpu: Gpu | None, clock: str, step_ns: float) -> Utilization:
    """Return the use of ``gpu`` in the steady steps of a graph, each of which takes ``step_ns`` by ``clock``."""
    chosen, n_steps = counted(graph, clock)
    flops = np.where(chosen & (graph.flops > 0), graph.flops, 0).astype(np.float64)
    scores = (graph.family == KernelFamily.ATTENTION) & (graph.phase == Phase.BACKWARD)
    again = np.where(graph.recomputed, 1.0, _SCORES_AGAIN * scores)  # the recomputed share of each kernel
    mfu_pct = hfu_pct = None
    if gpu is not None and step_ns > 0 and graph.has_gpu and flops.sum() > 0:
        ns = np.minimum(at_peak(graph, gpu, flops)[0], graph.duration_ns)
        model_ns, recomputed_ns = (float((ns * share).sum()) / n_steps for share in (1 - again, again))
        mfu_pct, hfu_pct = 100 * model_ns / step_ns, 100 * (model_ns + recomputed_ns) / step_ns
    tflop = [float((flops * share).sum()) / n_steps / 1e12 for share in (1 - again, again)]
    return Utilization(tflop[0], tflop[1], mfu_pct, hfu_pct)


def counted(graph: TaskGraph, clock: str) -> tuple[Bool, int]:
    """Return a mask of the kernels of the steady steps (operators on a CPU), and the number of steps."""
    steady, n_steps = steady_tasks(graph, clock)
    return steady & (graph.kind == graph.kernel_kind) & graph.of_clock.mask, n_steps


def steady_tasks(graph: TaskGraph, clock: str) -> tuple[Bool, int]:
    """Return a mask of the tasks of the steady steps, and the number of steps; the whole span is one step."""
    first, last = graph.info.steady
    if clock == "span" or last <= first:
        return np.ones(len(graph), dtype=np.bool_), 1
    return (graph.step >= first) & (graph.step < last), last - first


def at_peak(graph: TaskGraph, gpu: Gpu, flops: Float64) -> tuple[Float64, Array]:
    """Return the time of ``flops``, shape (n_tasks,), at the data sheet's peaks, ns, and each task's format.

    Formats are positions in ``RATE_DTYPES``. fp32 work faster than the fp32 peak counts as TF32.
    """
    peaks = np.array([gpu.matrix_tflops(name) for name in RATE_DTYPES]) * 1e3  # 1 TFLOP/s is 1,000 FLOPs/ns
    dtypes = graph.dtype.astype(np.int64)
    fp32, tf32 = DTYPES.index("fp32"), DTYPES.index("tf32")
    single = (dtypes == fp32) | (dtypes == 0)
    if gpu.tf32_by_default:
        dtypes = np.where(single & (graph.family == KernelFamily.CONVOLUTION), tf32, dtypes)
        dtypes = np.where(single & (flops > peaks[fp32] * graph.duration_ns), tf32, dtypes)
    return flops / peaks[dtypes], dtypes
