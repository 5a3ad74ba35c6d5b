"""Estimated durations of new compute kernels: products that a what-if adds.

Source: ``whatif/hardware/roofline.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.hardware.roofline import MatrixWork, compute_share, kernel_floor_ns, memory_share
from whatif.models.durations.estimator import Estimates, Source, device
from whatif.models.durations.memory_rate import UNKNOWN_MEMORY_GBYTE_S
from whatif.runtime.errors import WhatifError

# The peaks assumed for an unknown device: Volta's (V100 data sheet), FLOP/ns, and the factor of their range.
_UNKNOWN_FLOPS_PER_NS = {"fp32": 15.7e3, "fp64": 7.8e3}
_UNKNOWN_HALF_FLOPS_PER_NS, _UNKNOWN_SPREAD = 125e3, 3.0
# The number of kernels of a family that makes their share of the peak usable, and the percentiles of its range.
_ENOUGH, _LOW_PERCENTILE, _HIGH_PERCENTILE = 3, 10, 90
# Without such kernels: the best shapes reach the sustained rate, most shapes half of it. Our estimate.
_USUAL, _SLOW = 0.5, 0.2
# More than the peak is Winograd or damage.
_MOST = 1.0
_WORK: dict[KernelFamily, MatrixWork] = {
    KernelFamily.CONVOLUTION: "conv_backward", KernelFamily.ATTENTION: "attention", KernelFamily.RNN: "rnn",
}  # fmt: skip


class Share(NamedTuple):
    """Share of the peak of the matrix units: centre, and the ends of a nominal 90 % range."""

    centre: npt.ArrayLike
    low: npt.ArrayLike
    high: npt.ArrayLike


def computing(
    graph: TaskGraph, flops: npt.ArrayLike, size_bytes: npt.ArrayLike, family: KernelFamily, dtype: str,
    share: Share | None = None,
) -> Estimates:  # fmt: skip
    """Estimate new matrix kernels with ``flops`` operations on ``size_bytes`` in total, shape (n,), in ``dtype``.

    Uses the roofline of the recorded GPU at the share of its peak that the recording's kernels of that family and
    format reach; without such kernels the usual share, or ``share``. Raises WhatifError on a CPU, which has no peak in
    a data sheet.
    """
    if not graph.has_gpu:
        raise WhatifError("expected the recording of a GPU to estimate a new kernel by its roofline, got one of a CPU.")
    gpu = device(graph)
    recorded = None if share else recorded_share(graph, family, dtype)
    source = Source.ROOFLINE if recorded else Source.PAPER
    ceiling = compute_share(gpu, dtype, _WORK.get(family, "matmul")).centre
    reached = share or recorded or Share(ceiling * _USUAL, ceiling * _SLOW, ceiling)
    if gpu is None:
        peak, memory = _UNKNOWN_FLOPS_PER_NS.get(dtype, _UNKNOWN_HALF_FLOPS_PER_NS), UNKNOWN_MEMORY_GBYTE_S
        spread, source = _UNKNOWN_SPREAD, Source.ASSUMED
    else:
        peak, memory, spread = gpu.matrix_tflops(dtype) * 1e3, gpu.memory_gbyte_s, 1.0
    bandwidth, floor_ns = memory_share(gpu), kernel_floor_ns(gpu)
    work, moved = (np.atleast_1d(np.asarray(column, dtype=np.float64)) for column in (flops, size_bytes))
    centre, slow, fast = (
        np.maximum(np.maximum(work / (peak * np.asarray(of) * by), moved / (memory * at * by)), floor_ns)
        for of, at, by in (
            (reached.centre, bandwidth.centre, 1.0),
            (reached.low, bandwidth.low, 1 / spread),
            (reached.high, bandwidth.high, spread),
        )
    )
    return Estimates.of(centre, source, fast, slow)


def recorded_share(graph: TaskGraph, family: KernelFamily, dtype: str) -> Share | None:
    """Return the time-weighted share of the peak that the recorded kernels of a family and format reach.

    None if the device is unknown, or fewer than three of them have known FLOPs.
    """
    gpu = device(graph)
    if gpu is None:
        return None
    like = graph.on_gpu & (graph.family == family) & (graph.dtype == DTYPES.index(dtype))
    like &= (graph.flops > 0) & (graph.duration_ns > 0)
    if np.count_nonzero(like) < _ENOUGH:
        return None
    most = graph.duration_ns[like] * gpu.matrix_tflops(dtype) * 1e3
    each = np.minimum(graph.flops[like] / most, _MOST)
    centre = min(float(graph.flops[like].sum(dtype=np.float64) / most.sum()), _MOST)
    low, high = np.percentile(each, [_LOW_PERCENTILE, _HIGH_PERCENTILE])
    return Share(centre, min(float(low), centre), max(float(high), centre))
