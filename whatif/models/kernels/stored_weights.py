"""Products bound by reading their stored weights: a forward pass of few rows, such as a decoding step.

Sources: Williams et al., "Roofline", CACM 2009; Pope et al., "Efficiently Scaling Transformer Inference", MLSys 2023,
§2.1 (weights are loaded once for the whole batch, the cache of keys and values for each sequence).
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from whatif.graph.described import DTYPE_BYTES
from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Float64, Phase, among
from whatif.hardware.roofline import memory_gbyte_s
from whatif.models.durations.estimator import device, shortest_kernel_ns
from whatif.models.durations.memory_rate import memory_gbyte_s as copy_gbyte_s
from whatif.models.durations.occupancy import matrix_flops_per_ns
from whatif.models.kernels.whole_graphs import check_kernels_known
from whatif.runtime.errors import WhatifError

# Products of activations with weights, as named in recordings; a batched one multiplies two activations.
_OF_WEIGHTS = ("mm", "linear")
# A step reads weights if the products whose weights take longer than their arithmetic have this share of its time.
MOST = 0.5
# A CPU's product of several rows packs the weights before it multiplies; with one row it reads them unpacked. The time
# over that of one row is PACKED + A_ROW * rows. Measured with torch 2.13 on one core (AMD EPYC, fp32) for six shapes
# that fit no cache: 1.4 to 2.2 times with 2 and 4 rows, 1.6 to 2.6 with 8, 2.1 to 3.5 with 16, 5.1 to 7.7 with 64.
PACKED, A_ROW = 1.8, 0.07
_ONEDNN_CONVOLUTIONS = r"aten::mkldnn_convolution$|aten::convolution_backward$"
# The batch-independent time of a CPU's convolution, in copies of its weights at the recorded copy rate: forward it
# packs them, backward it packs them and unpacks their gradient. Measured on one core (AMD EPYC, torch 2.13 with oneDNN,
# fp32; ten shapes of 0.1 to 9 MB, batches 2 to 16, weights in the cache): medians 1.1 and 4.3. With nothing in the
# cache they are 2.9 and 8.5.
CONVOLUTION_COPIES = {False: 1.0, True: 4.0}  # backward or not
# FLOPs per byte of an unknown GPU: an A100's in half precision.
_UNKNOWN_FLOPS_PER_BYTE = 200.0


class StoredWeights(Struct, frozen=True):
    """The products of stored weights: ``tasks``, shape (n_tasks,), and the sizes of each, in the order of the tasks."""

    tasks: Bool
    rows: Float64
    inputs: Float64
    outputs: Float64
    value_bytes: Float64
    # FLOPs in the time of one byte, NaN on a CPU.
    flops_per_byte: Float64

    def time_ratio(self, batch: float = 1.0, weights: float = 1.0) -> Float64:
        """Return the time with ``batch`` times the rows and a share of the ``weights`` over that as recorded."""
        rows = np.maximum(self.rows * batch, 1)
        return self._time(rows, weights) / self._time(self.rows, 1.0)

    def bytes_ratio(self, batch: float) -> Float64:
        """Return the same ratio for the bytes moved."""
        return self._bytes(np.maximum(self.rows * batch, 1), 1.0) / self._bytes(self.rows, 1.0)

    @property
    def bound_by_weights(self) -> Bool:
        """Mask of the products that take longer to read weights than to compute."""
        on_gpu = 2 * self.rows / self.value_bytes < self.flops_per_byte
        return np.where(np.isnan(self.flops_per_byte), A_ROW * self.rows < PACKED, on_gpu)

    def _time(self, rows: Float64, weights: float) -> Float64:
        """Relative time: in bytes on a GPU, in products of one row on a CPU."""
        computing = 2 * rows * self.inputs * self.outputs * weights / self.flops_per_byte
        on_gpu = np.maximum(computing, self._bytes(rows, weights))
        on_cpu = np.where(rows < 2, 1.0, PACKED + A_ROW * rows) * weights
        return np.where(np.isnan(self.flops_per_byte), on_cpu, on_gpu)

    def _bytes(self, rows: Float64, weights: float) -> Float64:
        moved = self.inputs * self.outputs * weights + rows * (self.inputs + self.outputs * weights)
        return np.asarray(moved * self.value_bytes, dtype=np.float64)


def packing_ns(graph: TaskGraph) -> Float64:
    """Return the time independent of the rows of a CPU's product or convolution, ns, shape (n_tasks,): packing weights.

    For training steps, by the recording's copy rate; 0 for all other tasks. A product (forward, input gradient, and
    weight gradient, which writes as many values as the forward one reads) takes one copy of its weights: on one busy
    core (AMD EPYC, torch 2.13, fp32; six shapes, 16 rows against 32 to 128) the median was 1.0 copies, half of them 0.5
    to 1.3. For convolutions see ``CONVOLUTION_COPIES``.
    """
    if graph.has_gpu or forward_only(graph):
        return np.zeros(len(graph))
    value_bytes = np.array([DTYPE_BYTES.get(name, 4.0) for name in DTYPES])[graph.dtype]
    copied = value_bytes * (_product_weights(graph) + _convolution_weights(graph))
    return np.asarray(copied / copy_gbyte_s(graph, None), dtype=np.float64)  # 1 GB/s is 1 byte/ns


def _sizes(graph: TaskGraph) -> Float64:
    """The m, n, k and bytes per value of each operator that multiplies by weights, one row each; NaN for others."""
    sizes = np.full((len(graph.info.operators) + 1, 4), np.nan)  # the last row: tasks without an operator
    for row, op in enumerate(graph.info.operators):
        of = dict(op.integers)
        if op.family == "matmul" and op.name in _OF_WEIGHTS and of.get("batch") == 1:
            sizes[row] = of["m"], of["n"], of["k"], DTYPE_BYTES.get(op.dtype, 4.0)
    return sizes


def _product_weights(graph: TaskGraph) -> Float64:
    """The number of weights that each product packs, shape (n_tasks,)."""
    copied = np.zeros(len(graph))
    sizes = _sizes(graph)
    products = np.flatnonzero(graph.on_cpu & (graph.family == KernelFamily.GEMM) & (sizes[graph.called, 0] > 0))
    rows, outputs, inner, _ = sizes[graph.called[products]].T
    # The rows of a layer's input: those of its forward product.
    of_layer = np.full(len(graph.layers), -1.0)
    forward = graph.phase[products] == Phase.FORWARD
    of_layer[graph.layer[products[forward]]] = rows[forward]
    layer_rows = of_layer[graph.layer[products]]
    values = np.where(rows == layer_rows, inner * outputs, np.where(inner == layer_rows, rows * outputs, 0))
    copied[products] = np.where(layer_rows > 0, values, 0)
    return copied


def _convolution_weights(graph: TaskGraph) -> Float64:
    """The weights that each convolution packs and unpacks, shape (n_tasks,), divided among its tasks.

    PyTorch's own convolutions (``_slow_conv2d``) multiply image by image and do not count.
    """
    weights = np.zeros(len(graph.info.operators) + 1)
    for row, op in enumerate(graph.info.operators):
        of = dict(op.integers)
        if op.family == "conv" and "in_channels" in of:
            weights[row] = of["in_channels"] // of["groups"] * of["out_channels"] * of["kernel_h"] * of["kernel_w"]
    packs = graph.on_cpu & graph.select(name=_ONEDNN_CONVOLUTIONS)
    tasks = np.flatnonzero(packs & (weights[graph.called] > 0) & (graph.operator >= 0))
    backward = graph.phase[tasks] == Phase.BACKWARD
    copies = np.where(backward, CONVOLUTION_COPIES[True], CONVOLUTION_COPIES[False])
    time_ns = graph.duration_ns[tasks].astype(np.float64)
    _, call = np.unique(graph.operator[tasks], return_inverse=True)
    call_ns = np.maximum(np.bincount(call, weights=time_ns), 1)
    copied = np.zeros(len(graph))
    copied[tasks] = copies * weights[graph.called[tasks]] * time_ns / call_ns[call]
    return copied


def forward_only(graph: TaskGraph) -> bool:
    """Whether the recording has neither a backward pass nor an update."""
    trains = among(graph.phase, [Phase.BACKWARD, Phase.UPDATE]) | graph.in_optimizer
    return len(graph) > 0 and graph.info.optimizer is None and not trains.any()


def stored_weights(graph: TaskGraph) -> StoredWeights | None:
    """Return the products of a recording bound by reading weights; None for other recordings.

    That is a recording of forward passes alone whose products, by the recorded shapes, have few rows.
    """
    if not forward_only(graph):
        return None
    sizes = _sizes(graph)
    products = graph.on_device.mask & (graph.family == KernelFamily.GEMM)
    tasks = products & np.isfinite(sizes[graph.called, 0])
    if not tasks.any():
        return None
    rows, outputs, inputs, value_bytes = sizes[graph.called[tasks]].T
    flops_per_byte = np.full(int(tasks.sum()), np.nan)
    if graph.has_gpu:
        gpu = device(graph)
        flops_per_byte[:] = _UNKNOWN_FLOPS_PER_BYTE
        if gpu is not None:
            flops_per_byte = matrix_flops_per_ns(graph.dtype[tasks], gpu) / memory_gbyte_s(gpu)
    found = StoredWeights(tasks, rows, inputs, outputs, value_bytes, flops_per_byte)
    time_ns = graph.duration_ns[tasks]
    bound_ns = float(time_ns[found.bound_by_weights].sum())
    return found if bound_ns >= MOST * float(graph.duration_ns[products].sum()) else None


def check_sizes_known(graph: TaskGraph, what_if: str) -> None:
    """Raise WhatifError if a GPU's forward passes have products of unknown size, which might have few rows."""
    check_kernels_known(graph, what_if)
    products = graph.on_gpu.mask & (graph.family == KernelFamily.GEMM) & (graph.duration_ns > shortest_kernel_ns(graph))
    known = bool((products & ((graph.called >= 0) | (graph.flops > 0))).any())
    if forward_only(graph) and products.any() and not known:
        raise WhatifError(
            f"{what_if}: expected the shapes of the products of a forward pass, which may read their weights once for "
            f"any batch, got none in {graph.info.path or 'this recording'}; record with torch.profiler, "
            "record_shapes=True."
        )
