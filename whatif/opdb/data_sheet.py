"""Operator times from a data sheet alone: a lower bound for every kernel, and an estimate."""

from __future__ import annotations

import numpy as np

from whatif.graph.types import Bool, Float64
from whatif.hardware.gpu import Gpu
from whatif.hardware.roofline import (
    MatrixWork,
    kernel_floor_ns,
    memory_share,
    normalization_share,
    sustained_tflops,
    sustained_vector_tflops,
)
from whatif.opdb.rows import Operators
from whatif.opdb.work import work

# Winograd's F(4x4, 3x3) needs a quarter of the products (Lavin and Gray, "Fast Algorithms for Convolutional Neural
# Networks", CVPR 2016, section 4.2); larger tiles lose too much precision to be used.
WINOGRAD_SAVING, _WINOGRAD_TAPS = 4.0, 9
# Larger kernels are transformed (FFT): a tile of T x T points costs four FLOPs a point and pair of channels, and yields
# less than T x T outputs of 2 kh kw FLOPs each.
FFT_SAVING_A_TAP = 0.5
# F(2x2, 3x3), the same paper: what libraries mostly use.
WINOGRAD_USUAL = 2.25
# Formats without a rate on the data sheet, and the format at whose rate they compute.
_RATE_DTYPE = {"fp4": "fp8", "int8": "fp8", "int": "fp32", "unknown": "fp32"}
MATRIX_FAMILIES = ("matmul", "conv", "attention")
_WORK: dict[tuple[str, bool], MatrixWork] = {
    ("matmul", False): "matmul", ("matmul", True): "matmul_backward",
    ("conv", False): "conv", ("conv", True): "conv_backward",
    ("attention", False): "attention", ("attention", True): "attention_backward",
}  # fmt: skip


def compute_s(gpu: Gpu, ops: Operators, *, tf32: bool = False) -> Float64:
    """Return each operator's FLOPs over the device's peak in its format, seconds, shape (n,).

    With ``tf32`` fp32 products may run at the tf32 rate, as cuDNN's convolutions and fused attention do with PyTorch's
    default settings.
    """
    flops, _ = work(ops)
    rates = [rate_tflops(gpu, dtype, ops.family, tf32=tf32) for dtype in ops.texts["dtype"].table] or [1.0]
    return np.asarray(flops / 1e12 / np.array(rates)[ops.texts["dtype"].codes])


def memory_s(gpu: Gpu, ops: Operators) -> Float64:
    """Return each operator's compulsory bytes over the device's bandwidth, seconds, shape (n,)."""
    if ops.family == "collective":
        return np.zeros(len(ops))  # a link's bytes, not the memory's
    return np.asarray(work(ops)[1] / 1e9 / gpu.memory_gbyte_s)


def bound_s(gpu: Gpu, ops: Operators, *, cold: bool) -> Float64:
    """Return a lower bound on any kernel's time, seconds, shape (n,), from peak rates in the fastest format allowed.

    What fits the second-level cache may already be there, unless it was measured ``cold``. A convolution of stride 1
    and 3x3 or more may save multiplications.
    """
    compute = compute_s(gpu, ops, tf32=ops.family in ("conv", "attention"))
    if ops.family == "conv":
        taps = ops.integers["kernel_h"] * ops.integers["kernel_w"]
        saving = np.maximum(WINOGRAD_SAVING, FFT_SAVING_A_TAP * np.where(taps > _WINOGRAD_TAPS, taps, 0))
        compute = np.where(_may_save(ops), compute / saving, compute)
    memory = memory_s(gpu, ops)
    if not cold:
        memory = np.where(work(ops)[1] > gpu.l2_mbyte * 1e6, memory, 0.0)
    return np.asarray(np.maximum(compute, memory))


# Longer 16-bit products run at clocks lowered by their own power draw. Our estimate.
UNDER_LOAD_S = 1e-4


def under_load_s(gpu: Gpu, ops: Operators) -> Float64:
    """Return the time of long 16-bit products at the sustained rate from the GPU's file; 0 for all others.

    In short benchmarks they are faster than inside a training step.
    """
    if ops.family != "matmul" or gpu.bf16_sustained_tflops is None:
        return np.zeros(len(ops))
    found = sustained_s(gpu, ops)
    return np.asarray(np.where(ops.texts["dtype"].among("fp16", "bf16") & (found > UNDER_LOAD_S), found, 0.0))


def least_s(gpu: Gpu, ops: Operators) -> Float64:
    """Return the lower bound for estimates transferred from another board, seconds, shape (n,).

    It is the time at peak rates, and for products at the sustained rate from the GPU's file.
    """
    least = np.maximum(bound_s(gpu, ops, cold=False), under_load_s(gpu, ops))
    if ops.family != "matmul" or gpu.fp32_sustained_tflops is None:
        return least
    dtypes = ops.texts["dtype"]
    single = np.array([runs_at(dtype) == "fp32" for dtype in dtypes.table] or [False])[dtypes.codes]
    return np.asarray(np.where(single, np.maximum(least, sustained_s(gpu, ops)), least))


# With the launch in the time: a third of the time between events around a kernel on five GPUs (NeuSight's smallest
# times are 24 to 46 us). Our estimate.
LAUNCH_FLOOR_S = 20e-6
# Tile sizes of a matrix product, and the share of peak that operand traffic leaves to each: smaller
# ones load more for each multiplication. Our estimate.
_TILES = ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 0.9), (64, 64, 0.8), (64, 32, 0.65), (32, 32, 0.5))
# How many parts a library splits the sum into if a product's tiles would leave multiprocessors idle, and the least
# length of a part (CUTLASS, "Efficient GEMM in CUDA", parallelized reductions). Our estimate: with it the error on
# NeuSight's linear layers is 24 % and not 29 %.
_SPLITS, _LEAST_K = (1, 2, 4, 8, 16), 128
# Kernels are often slower than this estimate, hardly ever faster: clocks drop under load, libraries choose badly.
# Our estimate; docs/opdb.md says how often the range holds.
ANALYTIC_LOW_FACTOR, ANALYTIC_HIGH_FACTOR = 1.6, 2.5


def analytic_s(gpu: Gpu, ops: Operators, *, launch: bool) -> tuple[Float64, Float64, Float64]:
    """Return an estimate from the data sheet alone and its nominal 90 % range, seconds, shape (n,) each."""
    waves = executed_over_asked(gpu, ops)
    memory = memory_s(gpu, ops) / memory_share(gpu).centre
    if ops.family == "normalization":
        names = ops.texts["name"]
        memory = memory / np.array([normalization_share(gpu, name) for name in names.table] or [1.0])[names.codes]
    computing = sustained_s(gpu, ops) * waves
    centre = np.maximum(computing, memory)
    if ops.family == "matmul":
        # A batch of products only partly overlaps its traffic with its arithmetic. For sums of 64 terms
        # or fewer, where both take as long, NeuSight's times on five GPUs are 11 to 59 % over the longer of them, and
        # 12 % under to 30 % over this. For single products steps in half precision (NVIDIA's, timm's) speak against it.
        centre = np.where(ops.integers["batch"] > 1, np.hypot(computing, memory), centre)
    centre = centre + floor_s(gpu, launch=launch)
    saving = np.where(_may_save(ops), WINOGRAD_USUAL, 1.0)
    low = np.maximum(centre / ANALYTIC_LOW_FACTOR / saving, bound_s(gpu, ops, cold=False))
    return centre, np.minimum(low, centre), centre * ANALYTIC_HIGH_FACTOR


def executed_over_asked(gpu: Gpu, ops: Operators) -> Float64:
    """Return executed over requested work, shape (n,): whole tiles, in whole waves over all SMs.

    Assumes the best of the tiles that a library may choose from (tile and wave quantisation: NVIDIA, "Matrix
    Multiplication Background User's Guide"). Products only: which algorithm a convolution gets is not known, and the
    savings of Winograd's and the cost of whole tiles roughly cancel.
    """
    if ops.family != "matmul":
        return np.ones(len(ops))
    batch, m, n, k = (ops.integers[name].astype(np.float64) for name in ("batch", "m", "n", "k"))
    useful = np.maximum(batch * m * n, 1.0)
    # All choices at once; axes: tiles, splits, operators.
    rows, columns, share = np.array(_TILES).T[:, :, None, None]
    split = np.array(_SPLITS, dtype=np.float64)[:, None]
    allowed = np.where((split == 1) | (k >= split * _LEAST_K), 1.0, np.inf)
    waves = np.ceil(batch * np.ceil(m / rows) * np.ceil(n / columns) * split / gpu.sm_count)
    executed = waves * gpu.sm_count / split * rows * columns / share * allowed
    return np.asarray(np.maximum(executed.min(axis=(0, 1)) / useful, 1.0))


def answers_analytically(gpu: Gpu | None, ops: Operators) -> Bool:
    """Return a mask, shape (n,), of the operators that can be estimated from the data sheet."""
    if gpu is None or ops.family == "collective":
        return np.zeros(len(ops), dtype=np.bool_)
    flops, moved = work(ops)
    return np.asarray((flops > 0) | (moved > 0), dtype=np.bool_)


def floor_s(gpu: Gpu, *, launch: bool = False) -> float:
    """Return the duration of the shortest kernels on a device, or with ``launch`` that of their launch, seconds."""
    return LAUNCH_FLOOR_S if launch else kernel_floor_ns(gpu) / 1e9


def sustained_s(gpu: Gpu, ops: Operators) -> Float64:
    """Return each operator's FLOPs over the rate that the device sustains in its format, seconds, shape (n,)."""
    dtypes, phases = ops.texts["dtype"], ops.texts.get("phase")
    backward = np.zeros(len(ops), dtype=np.int64)
    if phases is not None and len(ops):
        backward = np.array([phase not in ("", "fwd") for phase in phases.table])[phases.codes].astype(np.int64)
    rates = [[_sustained_tflops(gpu, dtype, ops.family, way) for way in (False, True)] for dtype in dtypes.table]
    return np.asarray(work(ops)[0] / 1e12 / np.array(rates or [[1.0, 1.0]])[dtypes.codes, backward])


def _sustained_tflops(gpu: Gpu, dtype: str, family: str, backward: bool) -> float:
    known = runs_at(dtype)
    if family not in MATRIX_FAMILIES:
        return sustained_vector_tflops(gpu, "fp64" if known == "fp64" else "fp32")
    return sustained_tflops(gpu, known, _WORK[family, backward])


def _may_save(ops: Operators) -> Bool:
    """Mask of the convolutions whose algorithm may need fewer multiplications than their definition, shape (n,)."""
    if ops.family != "conv":
        return np.zeros(len(ops), dtype=np.bool_)
    c = ops.integers
    return np.asarray((c["kernel_h"] >= 3) & (c["kernel_w"] >= 3) & (c["stride_h"] == 1) & (c["stride_w"] == 1))


def runs_at(dtype: str) -> str:
    """Return the format at whose rate operators in ``dtype`` compute."""
    return _RATE_DTYPE.get(dtype, dtype)


def rate_tflops(gpu: Gpu, dtype: str, family: str, *, tf32: bool) -> float:
    """Return the device's peak for a family's operators in a number format, TFLOP/s; see ``compute_s`` for ``tf32``."""
    known = runs_at(dtype)
    if family not in MATRIX_FAMILIES:
        return gpu.vector_tflops("fp64" if known == "fp64" else "fp32")
    if tf32 and known == "fp32":
        return max(gpu.matrix_tflops("tf32"), gpu.matrix_tflops("fp32"))
    return gpu.matrix_tflops(known)
