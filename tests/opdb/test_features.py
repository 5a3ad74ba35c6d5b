"""The inputs of learned estimators: reference time and features by hand; stand-ins do the same work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whatif.graph.described import FAMILIES
from whatif.hardware.gpu import load_gpu
from whatif.opdb.data_sheet import bound_s
from whatif.opdb.features import LEARNABLE, Sheet, features, reference_s, sheet_of
from whatif.opdb.rows import Operators, operators
from whatif.opdb.stand_ins import stand_ins
from whatif.opdb.work import work

# A device of round numbers: 10 SMs, 1 TFLOP/s, 100 GB/s, 1 MB of cache.
SHEET = Sheet(sm_count=10, tflops={"fp32": 1.0}, memory_gbyte_s=100.0, l2_mbyte=1.0)


def some(family: str, seed: int = 0, count: int = 20, **texts: str) -> Operators:
    random = np.random.default_rng(seed)
    integers = {name: random.integers(1, 300, count) for name in FAMILIES[family].attributes}
    if family == "conv":
        integers |= {f"kernel_{a}": np.full(count, 3) for a in "hw"} | {f"dilation_{a}": np.ones(count) for a in "hw"}
        integers |= {f"stride_{a}": np.ones(count) for a in "hw"} | {f"padding_{a}": np.ones(count) for a in "hw"}
        integers |= {"groups": np.ones(count)}
    name = {"matmul": "linear", "conv": "conv2d", "elementwise": "add", "normalization": "softmax"}
    columns = {"name": name.get(family, family), "dtype": "fp32", **texts}
    return operators(family, integers, **columns)  # type: ignore[arg-type]


def called(ops: Operators, name: str) -> float:
    x, names = features(ops, SHEET, ("linear",), across=False)
    return float(x[0, names.index(name)])


def test_the_reference_of_a_product_by_hand() -> None:
    """1000 x 256 x 512 on ten SMs: 262 MFLOP take 262 us.

    Tiles of 128x128 are 8 by 2: two waves of ten, 20 tiles for 15.6 of use (1.28). Tiles of 64x64 are 16 by 4: seven
    waves, 70 tiles for 62.5 (1.12), the least of all seven tilings. Memory takes 20 us, and the floor is 3 us.
    """
    ops = operators("matmul", {"batch": 1, "m": 1000, "n": 256, "k": 512}, name="linear", dtype="fp32")
    assert work(ops)[0][0] == 2 * 1000 * 256 * 512
    wanted_s = 2 * 1000 * 256 * 512 / 1e12
    assert called(ops, "log2 waves 128x128") == 1.0
    assert 2 ** called(ops, "log2 executed 128x128") == pytest.approx(1.28)
    assert 2 ** called(ops, "log2 executed 64x64") == pytest.approx(1.12)
    best = 2 ** called(ops, "log2 best share")
    tilings = [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 32)]
    by_hand = []
    for rows, columns in tilings:
        tiles = -(-1000 // rows) * -(-256 // columns)
        by_hand.append(-(-tiles // 10) * 10 * rows * columns / (1000 * 256))
    assert best == pytest.approx(min(by_hand))
    assert reference_s(ops, SHEET, launch=False)[0] == pytest.approx(wanted_s * best + 3e-6)
    assert reference_s(ops, SHEET, launch=True)[0] == pytest.approx(wanted_s * best + 20e-6)
    assert called(ops, "two in m") == 3.0  # 1000 = 8 x 125
    assert called(ops, "two in n") == 8.0


def test_an_elementwise_operator_is_its_bytes() -> None:
    ops = operators("elementwise", {"elements": 10**6, "tensors": 2}, name="add", dtype="fp32")
    assert reference_s(ops, SHEET, launch=False)[0] == pytest.approx(12e6 / 100e9 + 3e-6)
    assert 2 ** called(ops, "log2 share of cache") == pytest.approx(12)


def test_formats_are_what_they_say() -> None:
    """Operators that may run in tf32 are looked up as tf32; a Volta has none, and runs them as fp32."""
    a100, v100 = load_gpu("A100-SXM-40"), load_gpu("V100-PCIE-32")
    for family in ("conv", "matmul"):
        assert sheet_of(a100, family).tflops["fp32"] == a100.fp32_tflops
        assert sheet_of(a100, family).tflops["tf32"] == a100.tf32_tensor_tflops
        assert sheet_of(v100, family).tflops["tf32"] == v100.fp32_tflops


def test_products_count_with_what_a_device_sustains() -> None:
    """A P4 sustains 3.0 of its 5.5 TFLOP/s; an H100's file gives no such rate, and its SMs do more than any other's."""
    p4, h100 = load_gpu("P4"), load_gpu("H100-SXM-80")
    assert sheet_of(p4, "matmul").tflops["fp32"] == 3.0
    assert sheet_of(p4, "conv").tflops["fp32"] == 5.5
    ops = some("matmul", count=1)
    of = {}
    for gpu in (p4, h100):
        x, names = features(ops, sheet_of(gpu, "matmul"), ("linear",), across=True)
        of[gpu.name] = 2 ** x[0, names.index("log2 peak of an SM")]
    assert of["P4"] == pytest.approx(3.0 / 20)
    assert of["H100-SXM-80"] == pytest.approx(h100.fp32_tflops / 132)


def test_the_blocks_of_a_winograd_kernel_by_hand() -> None:
    """2 images, 40 channels out, 20x20: 2 x 2 x 3 x 2 = 24 blocks on ten SMs are three waves, of 16 channels each."""
    integers = {"batch": 2, "in_channels": 16, "out_channels": 40, "in_h": 20, "in_w": 20, "kernel_h": 3, "kernel_w": 3,
                "stride_h": 1, "stride_w": 1, "padding_h": 1, "padding_w": 1, "dilation_h": 1, "dilation_w": 1,
                "groups": 1}  # fmt: skip
    ops = operators("conv", integers, name="conv2d", dtype="fp32")
    assert 2 ** called(ops, "log2 fused waves") == pytest.approx(3)
    assert 2 ** called(ops, "log2 fused waves of channels") == pytest.approx(48)
    assert 2 ** called(ops, "log2 products of tiles") == pytest.approx(36 * 2 * 25 * 16 * 40)
    assert 2 ** called(ops, "log2 whole 6") == pytest.approx(24 * 24 / 400)


@pytest.mark.parametrize("family", LEARNABLE)
@pytest.mark.parametrize("across", [False, True])
def test_features_are_finite_and_of_each_operator_alone(family: str, across: bool) -> None:
    ops, sheet = some(family), sheet_of(load_gpu("T4"), family)
    x, names = features(ops, sheet, ("a", "linear", "add"), across=across)
    assert x.shape == (20, len(names)) == (20, len(set(names)))
    assert np.isfinite(x).all()
    alone = [
        features(ops.take(np.array([row])), sheet, ("a", "linear", "add"), across=across)[0][0] for row in range(20)
    ]
    assert np.array_equal(x, np.array(alone))
    assert {"log2 ridge"} <= set(names) if across else "log2 ridge" not in names
    assert (reference_s(ops, sheet, launch=False) >= 3e-6).all()


@given(st.integers(0, 1000), st.sampled_from(["matmul", "elementwise", "normalization"]))
def test_the_reference_is_not_under_what_a_device_can_do(seed: int, family: str) -> None:
    gpu = load_gpu("V100-PCIE-32")
    ops = some(family, seed)
    assert (reference_s(ops, sheet_of(gpu, family), launch=False) >= bound_s(gpu, ops, cold=True)).all()


def test_stand_ins_by_hand() -> None:
    ops = operators("elementwise", {"elements": [8, 8, 8, 8], "tensors": [2, 2, 1, 1]},
                    name=["sub", "add", "exp", "no such"], dtype="fp32")  # fmt: skip
    known, spoken, extra = stand_ins(ops, ("add", "relu"), "fp32", "fwd", ("",))
    assert known.tolist() == [True, True, True, False]
    assert spoken.texts["name"].decoded()[:3] == ["add", "add", "relu"]
    assert extra[:3].tolist() == [0.05, 0.0, 0.05]
    half = operators("matmul", {"batch": 1, "m": 8, "n": 8, "k": 8}, name=["linear", "mm", "bmm"], dtype="fp16")
    known, spoken, extra = stand_ins(half, ("linear",), "bf16", "fwd", ("",))
    assert known.tolist() == [True, True, False]
    assert set(spoken.dtypes) == {"bf16"}
    assert spoken.texts["name"].decoded() == ["linear", "linear", "bmm"]
    assert extra[:2] == pytest.approx([0.1, 0.15])
    assert not stand_ins(half, ("linear",), "fp32", "fwd", ("",))[0].any()
    assert not stand_ins(some("conv", layout="nhwc"), ("conv2d",), "fp32", "fwd", ("nchw",))[0].any()
    assert stand_ins(some("conv"), ("conv2d",), "fp32", "fwd", ("nchw",))[0].all()


@pytest.mark.parametrize("phase", ["dgrad", "wgrad"])
def test_a_gradient_of_a_convolution_is_a_forward_pass_of_as_many_flops(phase: str) -> None:
    ops = some("conv", phase=phase)
    known, spoken, extra = stand_ins(ops, ("conv2d",), "fp32", "fwd", ("",))
    assert known.all()
    assert (extra == 0.4).all()
    assert work(spoken)[0] == pytest.approx(work(ops)[0])
    swapped = spoken.integers["in_channels"].tolist() == ops.integers["out_channels"].tolist()
    assert swapped == (phase == "dgrad")
    assert not stand_ins(some("conv", phase="bwd"), ("conv2d",), "fp32", "fwd", ("",))[0].any()
