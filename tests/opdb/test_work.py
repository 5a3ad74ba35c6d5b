"""FLOPs and bytes by hand, and against what the reader of traces counts for the same operators."""

from __future__ import annotations

import numpy as np
import pytest

from tests.opdb.builders import products
from whatif.graph.described import FAMILIES, Described
from whatif.hardware.gpu import load_gpu
from whatif.hardware.roofline import memory_share
from whatif.ingest.op_cost import op_cost
from whatif.ingest.operator_calls import describe
from whatif.opdb.data_sheet import (
    LAUNCH_FLOOR_S,
    UNDER_LOAD_S,
    analytic_s,
    bound_s,
    executed_over_asked,
    floor_s,
    memory_s,
    under_load_s,
)
from whatif.opdb.rows import Operators, operators
from whatif.opdb.work import work


def one(what: Described) -> Operators:
    return operators(what.family, dict(what.integers), name=what.name, dtype=what.dtype, phase=what.phase)


def test_a_product_by_hand() -> None:
    flops, moved = work(operators("matmul", {"batch": 2, "m": 3, "n": 4, "k": 5}, name="bmm", dtype="fp16"))
    assert flops.tolist() == [2 * 2 * 3 * 4 * 5]
    assert moved.tolist() == [2 * 2 * (3 * 5 + 5 * 4 + 3 * 4)]


def test_a_strided_grouped_convolution_by_hand() -> None:
    """4 to 8 channels in 2 groups, 7x7, kernel 3, stride 2, padding 1: 4x4 outputs, each of 2·9 products."""
    sizes = {"batch": 3, "in_channels": 4, "out_channels": 8, "in_h": 7, "in_w": 7, "kernel_h": 3, "kernel_w": 3,
             "stride_h": 2, "stride_w": 2, "padding_h": 1, "padding_w": 1, "dilation_h": 1, "dilation_w": 1,
             "groups": 2}  # fmt: skip
    flops, moved = work(operators("conv", sizes, name="conv2d", dtype="fp32"))
    assert flops.tolist() == [2 * 3 * 8 * 4 * 4 * 2 * 9]
    assert moved.tolist() == [4 * (3 * 4 * 7 * 7 + 8 * 2 * 9 + 3 * 8 * 4 * 4)]


def test_causal_attention_is_half() -> None:
    sizes = {"batch": 2, "query_length": 128, "key_length": 128, "heads": 4, "kv_heads": 2, "head_size": 64}
    whole, moved = work(operators("attention", {**sizes, "causal": 0}, name="attention", dtype="bf16"))
    half, _ = work(operators("attention", {**sizes, "causal": 1}, name="attention", dtype="bf16"))
    assert whole.tolist() == [4 * 2 * 4 * 128 * 128 * 64]
    assert half.tolist() == (whole / 2).tolist()
    assert moved.tolist() == [2 * 2 * 64 * 2 * (4 * 128 + 2 * 128)]


F = "float"
CALLS = [
    ("aten::mm", [[30, 20], [20, 7]], [F, F], []),
    ("aten::addmm", [[7], [30, 20], [20, 7], [], []], [F, F, F, "", ""], []),
    ("aten::bmm", [[6, 30, 20], [6, 20, 7]], ["c10::Half", "c10::Half"], []),
    ("aten::convolution", [[2, 3, 9, 11], [8, 3, 3, 5], [8], [], [], []], [F, F, F, "", "", ""],
     ["", "", "", "[2, 1]", "[1, 2]", "[1, 1]", "False", "[0, 0]", "1"]),
    ("aten::convolution_backward", [[2, 8, 4, 11], [2, 3, 7, 11], [8, 3, 3, 5], [], [], [], []],
     [F, F, F, "", "", "", ""],
     ["", "", "", "", "[2, 1]", "[1, 2]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, False]"]),
    ("aten::relu", [[4, 5]], [F], []),
    ("aten::_softmax", [[4, 5], [], []], [F, "", ""], ["", "-1", "False"]),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=[call[0] for call in CALLS])
def test_the_reader_of_traces_counts_the_same_flops(call: tuple[object, ...]) -> None:
    what, cost = describe(*call), op_cost(*call)
    assert what is not None
    assert cost is not None
    assert set(dict(what.integers)) == set(FAMILIES[what.family].attributes)
    flops, moved = work(one(what))
    assert flops[0] == (cost.flops or 0)
    if what.phase == "fwd":
        bias = 4 * 7 if call[0] == "aten::addmm" else 4 * 8 if call[0] == "aten::convolution" else 0
        assert moved[0] == (cost.bytes or 0) - bias


def test_the_analytic_estimate_by_hand() -> None:
    """V100-PCIE-16: 80 SMs, 14 TFLOP/s, 900 GB/s. 4096^3 in tiles of 128x128: 1024 tiles, 13 waves of 80."""
    gpu = load_gpu("V100-PCIE-16")
    ops = operators("matmul", {"batch": 1, "m": 4096, "n": 4096, "k": 4096}, name="mm", dtype="fp32")
    useful_s = 2 * 4096**3 / 14e12
    # 256x128: 512 tiles, 7 waves of 80 are 560; 128x128: 13 waves are 1040 of 1024 tiles. With each sum in 16 parts
    # there are 16,384 pieces of 128x128, 205 waves.
    executed = 205 * 80 / 16384
    assert executed < 1040 / 1024 < 560 / 512
    t, low, high = analytic_s(gpu, ops, launch=False)
    assert t[0] == pytest.approx(useful_s * executed / 0.8 + 2e-6)
    assert low[0] < t[0] < high[0]
    with_launch, _, _ = analytic_s(gpu, ops, launch=True)
    assert with_launch[0] - t[0] == pytest.approx(LAUNCH_FLOOR_S - floor_s(gpu))


def test_a_batch_of_products_takes_its_computing_and_its_moving_as_squares() -> None:
    """Attention's scores on a V100: 64 products of 1024 x 1024 x 64, in 1,024 tiles of 256x128 of 64 terms each."""
    gpu = load_gpu("V100-PCIE-16")
    sizes = {"batch": [1, 64], "m": [8192, 1024], "n": [8192, 1024], "k": 64}
    ops = operators("matmul", sizes, name="bmm", dtype="fp32")
    computing_s = 2 * 64 * 2**26 / 14e12 / 0.8 * executed_over_asked(gpu, ops)
    moving_s = memory_s(gpu, ops) / memory_share(gpu).centre
    longer = np.maximum(computing_s, moving_s)
    t, _, _ = analytic_s(gpu, ops, launch=False)
    assert t == pytest.approx([longer[0] + 2e-6, np.hypot(computing_s[1], moving_s[1]) + 2e-6])
    assert 0.3 < moving_s[1] / computing_s[1] < 1


def test_a_sustained_rate_takes_the_place_of_a_share_of_the_peak() -> None:
    """T4: 40 SMs, 8.1 TFLOP/s on paper, 4.1 sustained in fp32. 4096^3: 512 tiles of 256x128 are 13 waves of 40."""
    gpu = load_gpu("T4")
    ops = operators("matmul", {"batch": 1, "m": 4096, "n": 4096, "k": 4096}, name="mm", dtype=["fp32", "fp16"])
    flops, executed = 2 * 4096**3, 205 * 40 / 8192  # 512 tiles in 16 parts
    t, _, _ = analytic_s(gpu, ops, launch=False)
    assert t == pytest.approx([flops * executed / 4.1e12 + 2e-6, flops * executed / 65e12 / 0.8 + 2e-6])
    # Nothing is faster than the peak, but a cold card is faster than a warm one.
    assert bound_s(gpu, ops, cold=False) == pytest.approx([flops / 8.1e12, flops / 65e12])


def test_long_products_of_16_bits_find_the_clocks_of_a_training_step() -> None:
    """At the rate that an H100's file says, not at the peak: 1024^3 is too short, 8192^3 takes 1.4 ms."""
    sizes = {"batch": 1, "m": [4096, 8192, 8192, 8192], "n": 8192, "k": 8192}
    ops = operators("matmul", sizes, name="mm", dtype=["fp16", "fp16", "bf16", "fp32"])
    gpu = load_gpu("H100-SXM-80")
    assert gpu.bf16_sustained_tflops is not None
    rate = gpu.bf16_sustained_tflops * 1e12
    long_s = 2 * 8192**3 / rate
    assert long_s / 2 > UNDER_LOAD_S > 2 * 1024**3 / rate
    assert under_load_s(gpu, ops) == pytest.approx([long_s / 2, long_s, long_s, 0])
    short = operators("matmul", {"batch": 1, "m": 1024, "n": 1024, "k": 1024}, name="mm", dtype="fp16")
    assert under_load_s(gpu, short) == [0]
    # A device whose file gives no such rate; and what is no product.
    assert not under_load_s(load_gpu("V100-SXM2-32"), ops).any()
    add = operators("elementwise", {"elements": 10**9, "tensors": 2}, name="add", dtype="fp16")
    assert not under_load_s(gpu, add).any()


def test_the_bound_knows_caches_and_winograd() -> None:
    gpu = load_gpu("V100-PCIE-16")
    small = operators("elementwise", {"elements": 1000, "tensors": 2}, name="add", dtype="fp32")
    assert bound_s(gpu, small, cold=False)[0] == 0
    assert bound_s(gpu, small, cold=True)[0] == pytest.approx(12_000 / 900e9)
    large = operators("elementwise", {"elements": 10**8, "tensors": 2}, name="add", dtype="fp32")
    assert bound_s(gpu, large, cold=False)[0] == pytest.approx(1.2e9 / 900e9)
    sizes = {"batch": 64, "in_channels": 512, "out_channels": 512, "in_h": 56, "in_w": 56, "kernel_h": 3, "kernel_w": 3,
             "stride_h": [1, 2], "stride_w": [1, 2], "padding_h": 1, "padding_w": 1, "dilation_h": 1, "dilation_w": 1,
             "groups": 1}  # fmt: skip
    conv = operators("conv", sizes, name="conv2d", dtype="fp32")
    flops, _ = work(conv)
    assert bound_s(gpu, conv, cold=False) == pytest.approx(flops / 14e12 / np.array([4, 1]))
    # 7x7 taps of stride 1 may be transformed: four FLOPs a point and pair of channels instead of 98.
    large = operators("conv", {**sizes, "kernel_h": 7, "kernel_w": 7}, name="conv2d", dtype="fp32")
    assert bound_s(gpu, large, cold=False) == pytest.approx(work(large)[0] / 14e12 / np.array([24.5, 1]))


def test_attributes_of_every_family_are_distinguished() -> None:
    for family in FAMILIES.values():
        base = dict.fromkeys(family.attributes, 2)
        keys = {int(operators(family.name, base, name="x", dtype="fp32").keys[0])}
        for attribute in family.attributes:
            keys.add(int(operators(family.name, {**base, attribute: 3}, name="x", dtype="fp32").keys[0]))
        assert len(keys) == 1 + len(family.attributes)
    assert products([1]).described(0)["m"] == 1
