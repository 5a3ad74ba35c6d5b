"""Half precision: what stays, what halves, what the matrix units speed up, and by how much at most."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whatif.graph.kernels import DTYPES, KernelFamily, classify_kernel
from whatif.hardware.gpu import (
    Gpu,
    find_gpu,
    gpu_names,
    load_gpu,
)
from whatif.models.durations.half_precision import half_precision_ratio

F = KernelFamily
MS = 1_000_000


def ratio(
    family: KernelFamily,
    dtype: str = "fp32",
    duration_ns: int = MS,
    gpu: Gpu | None = None,
    flops: int = -1,
    size_bytes: int = -1,
    target: Literal["fp16", "bf16"] = "fp16",
) -> tuple[float, float, float]:
    """One kernel, in a step whose other matrix products are fp32."""
    columns = [[family, F.GEMM], [DTYPES.index(dtype), DTYPES.index("fp32")], [flops, -1], [size_bytes, -1]]
    arrays = [np.array(column) for column in (*columns, [duration_ns, 100 * MS])]
    centre, low, high = half_precision_ratio(arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], gpu, target)
    return float(centre[0]), float(low[0]), float(high[0])


V100, T2080, A100, H100 = (load_gpu(name) for name in ("V100-SXM2-32", "RTX2080Ti", "A100-SXM-80", "H100-SXM-80"))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8", "fp64", "int"])
@pytest.mark.parametrize("family", list(F))
def test_other_formats_stay(family: KernelFamily, dtype: str) -> None:
    assert ratio(family, dtype, gpu=V100) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("family", [F.COPY, F.MEMSET, F.COMMUNICATION, F.OPTIMIZER])
def test_master_weights_and_transfers_stay(family: KernelFamily) -> None:
    assert ratio(family, "fp32", gpu=V100) == (1.0, 1.0, 1.0)


def test_memory_bound_kernels_halve_above_the_floor() -> None:
    # 2 us stay, the other 8 of 10 us halve.
    assert ratio(F.ELEMENTWISE, duration_ns=10_000, gpu=V100)[0] == pytest.approx(0.6)
    assert ratio(F.ELEMENTWISE, gpu=V100)[0] == pytest.approx(0.5, abs=0.002)
    assert ratio(F.ELEMENTWISE, duration_ns=1_500, gpu=V100) == (1.0, 1.0, 1.0)


def test_autocast_keeps_layer_norm_and_indexing_in_fp32() -> None:
    assert ratio(F.LAYER_NORM, gpu=V100)[0] == 1.0
    assert ratio(F.INDEXING, gpu=V100)[0] == 1.0
    assert ratio(F.NORMALIZATION, gpu=V100)[0] < 0.51 < 0.75 < ratio(F.SOFTMAX, gpu=V100)[0]


def test_daydream_stands_between_its_two_devices() -> None:
    """Daydream, section 5.1: three times; peaks have the ratio 8 on V100 and 4 on RTX 2080 Ti."""
    volta, turing = ratio(F.GEMM, gpu=V100)[0], ratio(F.GEMM, gpu=T2080)[0]
    assert volta < 1 / 3 < turing
    assert np.sqrt(volta * turing) == pytest.approx(1 / 3, rel=0.02)


def test_tf32_gains_at_most_its_peak_ratio_of_two() -> None:
    centre, low, high = ratio(F.CONVOLUTION, "tf32", gpu=A100)
    assert 0.5 <= low < centre < high <= 1.0
    # An unnamed convolution is one in TF32 on Ampere, and in fp32 on Volta.
    assert ratio(F.CONVOLUTION, "", gpu=A100)[0] == centre
    assert ratio(F.CONVOLUTION, "", gpu=V100)[0] < 1 / 3


def test_devices_without_the_units_gain_nothing() -> None:
    assert ratio(F.GEMM, gpu=load_gpu("GTX1080Ti"))[0] == 1.0
    assert ratio(F.GEMM, gpu=V100, target="bf16")[0] == 1.0
    assert 0.5 < ratio(F.GEMM, gpu=load_gpu("P100-SXM2-16"))[0] < 1.0


def test_an_unknown_device_widens_the_range() -> None:
    unknown, volta = ratio(F.GEMM, gpu=None), ratio(F.GEMM, gpu=V100)
    assert unknown[2] - unknown[1] > volta[2] - volta[1]


def test_known_work_is_bound_by_the_kernels_own_efficiency() -> None:
    """A 4096^3 product at 80 % of the V100's 15.7 TFLOP/s: 0.7 of 80 % of 125 TFLOP/s, so 5.57 times faster."""
    flops = 2 * 4096**3
    duration_ns = int(flops / (0.8 * 15.7e3))
    centre, low, high = ratio(F.GEMM, duration_ns=duration_ns, gpu=V100, flops=flops, size_bytes=3 * 4 * 4096**2)
    assert 1 / centre == pytest.approx(0.7 * 125 / 15.7, rel=0.01)
    assert 1 / high == pytest.approx(0.45 * 125 / 15.7, rel=0.01)
    # The best shapes reach 80 % of the peak, and no more.
    assert 1 / low == pytest.approx(0.95 * 125 / 15.7, rel=0.01)


def test_known_work_is_bound_by_memory() -> None:
    """A matrix-vector product moves 4 GB in fp32: at 900 GB/s and 88 % of it, half of them take 2.53 ms."""
    centre, _, _ = ratio(F.GEMM, duration_ns=5 * MS, gpu=V100, flops=2 * 10**9, size_bytes=4 * 10**9)
    assert centre == pytest.approx(2e9 / (900 * 0.88) / (5 * MS), rel=0.01)


def test_a_small_matrix_kernel_keeps_its_latency() -> None:
    assert ratio(F.GEMM, duration_ns=2_000, gpu=H100, flops=10**6)[0] == 1.0
    assert ratio(F.GEMM, duration_ns=6_000, gpu=H100, flops=10**8)[0] >= 1 / 3


def test_a_step_that_is_half_already_keeps_its_unnamed_and_fp32_kernels() -> None:
    family = np.array([F.GEMM, F.FUSED, F.ELEMENTWISE, F.GEMM])
    dtype = np.array([DTYPES.index(name) for name in ("bf16", "", "fp32", "fp32")])
    duration_ns = np.array([50, 20, 20, 10]) * MS
    none = np.full(4, -1)
    centre, _, _ = half_precision_ratio(family, dtype, none, none, duration_ns, H100)
    assert centre[:3].tolist() == [1.0, 1.0, 1.0]
    assert centre[3] < 0.5


def test_no_kernels_no_ratios() -> None:
    none = np.zeros(0, np.int64)
    assert all(len(column) == 0 for column in half_precision_ratio(none, none, none, none, none, V100))


ROW = st.tuples(
    st.sampled_from(list(F)),
    st.integers(0, len(DTYPES) - 1),
    st.integers(-1, 10**15),
    st.integers(-1, 10**12),
    st.integers(0, 10**12),
)


@given(st.lists(ROW, max_size=20), st.none() | st.sampled_from(gpu_names()), st.sampled_from(["fp16", "bf16"]))
def test_ratios_are_ordered_and_sane(rows: list[tuple[int, ...]], name: str | None, target: Literal["fp16"]) -> None:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    gpu = None if name is None else load_gpu(name)
    centre, low, high = half_precision_ratio(columns[0], columns[1], columns[2], columns[3], columns[4], gpu, target)
    assert np.isfinite([centre, low, high]).all()
    assert (low >= 0).all()
    assert (low <= centre).all()
    assert (centre <= high).all()
    assert (centre <= 1.0).all()
    assert (high <= 1.3).all()


@pytest.mark.parametrize(
    ("file", "slowest", "fastest"),
    [
        # fp32 ResNet-50 on V100: published mixed-precision speedups are 2 to 3.3 times.
        ("kineto-resnet50-v100/num_workers_0.2021-06.pt.trace.json.gz", 2.0, 3.3),
        # TF32 VGG-13 on H100: half of the operations gain at most 2.
        ("triosim-vgg13-h100/vgg13_bs512_adam.json.gz", 1.3, 2.2),
        # Daydream, figure 5: CNNs on RTX 2080 Ti, GPU part only.
        ("param-2080ti/resnet_kineto.json.gz", 1.5, 3.0),
        # Half already.
        ("modded-nanogpt-8xh100/current.rank0.json.gz", 1.0, 1.0),
        ("harryjmoss-a100-batch/bs64.run0.pt.trace.json.gz", 1.0, 1.02),
    ],
)
def test_recorded_steps_speed_up_plausibly(shared_traces: Path, file: str, slowest: float, fastest: float) -> None:
    loaded = json.loads(gzip.decompress((shared_traces / file).read_bytes()).decode("utf-8", "replace"))
    device = loaded["deviceProperties"][0]
    gpu = find_gpu(device["name"], device["totalGlobalMem"])
    assert gpu is not None
    kernels = [event for event in loaded["traceEvents"] if str(event.get("cat")).lower() == "kernel"]
    found = [classify_kernel(event["name"]) for event in kernels]
    family = np.array([item[0] for item in found])
    dtype = np.array([DTYPES.index(item[1]) for item in found])
    duration_ns = np.array([int(event["dur"] * 1000) for event in kernels])
    none = np.full(len(kernels), -1)
    on_gpu = family != F.COMMUNICATION
    centre, _, _ = half_precision_ratio(family, dtype, none, none, duration_ns, gpu)
    speedup = duration_ns[on_gpu].sum() / (centre * duration_ns)[on_gpu].sum()
    assert slowest <= speedup <= fastest
