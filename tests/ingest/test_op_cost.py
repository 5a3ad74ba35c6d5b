"""Work of operators, counted by hand, and hostile shapes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whatif.ingest.op_cost import _RULES, OpCost, op_cost

F, H, B, S = "float", "c10::Half", "c10::BFloat16", "Scalar"
L = "ScalarList"

BY_HAND: list[tuple[str, list[Any], list[str], OpCost | None]] = [
    # (4096 x 64) @ (64 x 2798): 2 m n k operations; m k + k n + m n elements of 4 bytes.
    (
        "aten::mm",
        [[4096, 64], [64, 2798]],
        [F, F],
        OpCost(2 * 4096 * 64 * 2798, 4 * (4096 * 64 + 64 * 2798 + 4096 * 2798), "fp32"),
    ),
    (
        "aten::addmm",
        [[128], [8192, 17], [17, 128], [], []],
        [H, H, H, S, S],
        OpCost(2 * 8192 * 17 * 128, 2 * (128 + 8192 * 17 + 17 * 128 + 8192 * 128), "fp16"),
    ),
    (
        "aten::bmm",
        [[512, 128, 128], [512, 128, 16]],
        [H, H],
        OpCost(2 * 512 * 128 * 128 * 16, 2 * 512 * (128 * 128 + 128 * 16 + 128 * 16), "fp16"),
    ),
    # The added matrix is fp32: it counts with its own size, the products are half.
    (
        "aten::baddbmm",
        [[512, 1, 129], [512, 1, 16], [512, 16, 129], [], []],
        [F, H, H, S, S],
        OpCost(2 * 512 * 16 * 129, 512 * (4 * 129 + 2 * (16 + 16 * 129 + 129)), "fp16"),
    ),
    (
        "aten::matmul",
        [[1024, 96, 50], [50, 15]],
        [F, F],
        OpCost(2 * 1024 * 96 * 50 * 15, 4 * (1024 * 96 * 50 + 50 * 15 + 1024 * 96 * 15), "fp32"),
    ),
    # linear transposes its weight: (out, in).
    (
        "aten::linear",
        [[128, 64, 17], [128, 17], [128]],
        [B, B, B],
        OpCost(2 * 128 * 64 * 17 * 128, 2 * (128 * 64 * 17 + 128 * 17 + 128 + 128 * 64 * 128), "bf16"),
    ),
    # Both gradients: each as many products as the forward convolution, 10 x 512 x 7 x 7 outputs of 512 x 3 x 3.
    (
        "aten::convolution_backward",
        [[10, 512, 7, 7], [10, 512, 7, 7], [512, 512, 3, 3], [], [], [], [], [], [], [], []],
        [B, B, B, L, L, L, L, S, L, S, L],
        OpCost(
            2 * (2 * 10 * 512 * 49 * 512 * 9),
            2 * (2 * 10 * 512 * 49 + 512 * 512 * 9 + 10 * 512 * 49 + 10 * 512 * 49 + 512 * 512 * 9),
            "bf16",
        ),
    ),
    # A depthwise one: each output sums over one channel.
    (
        "aten::convolution_backward",
        [[2, 32, 8, 8], [2, 32, 8, 8], [32, 1, 3, 3]],
        [F, F, F],
        OpCost(2 * (2 * 2 * 32 * 64 * 9), 4 * (4 * 2 * 32 * 64 + 2 * 32 * 9), "fp32"),
    ),
    # Old traces name no types: operations, but no bytes. Input before gradient here.
    (
        "aten::cudnn_convolution_backward",
        [[32, 512, 7, 7], [32, 2048, 7, 7], [2048, 512, 1, 1], [], []],
        [],
        OpCost(2 * (2 * 32 * 2048 * 49 * 512), None, ""),
    ),
    (
        "aten::cudnn_convolution_backward_input",
        [[], [32, 512, 7, 7], [512, 512, 3, 3], []],
        ["IntList", F, F, ""],
        OpCost(2 * 32 * 512 * 49 * 512 * 9, None, "fp32"),
    ),
    # Attention: two products of 197 x 197 x 64 for each of 4 x 12 heads, in both layouts.
    (
        "aten::_scaled_dot_product_flash_attention",
        [[4, 12, 197, 64]] * 3 + [[], []],
        [B, B, B, S, S],
        OpCost(2 * 2 * 48 * 197 * 197 * 64, 2 * 4 * (48 * 197 * 64), "bf16"),
    ),
    (
        "aten::_flash_attention_forward",
        [[4, 197, 12, 64]] * 3 + [[], []],
        [B, B, B, "", ""],
        OpCost(2 * 2 * 48 * 197 * 197 * 64, 2 * 4 * (48 * 197 * 64), "bf16"),
    ),
    # Backward: five products; reads the gradient, the output, q, k, v and writes three gradients.
    (
        "aten::_scaled_dot_product_flash_attention_backward",
        [[4, 12, 197, 64]] * 5,
        [B] * 5,
        OpCost(5 * 2 * 48 * 197 * 197 * 64, 2 * 8 * (48 * 197 * 64), "bf16"),
    ),
    # Packed sequences: the lengths are not in the shapes.
    ("aten::_flash_attention_forward", [[788, 12, 64]] * 3, [B, B, B], None),
    ("aten::add", [[64, 1, 8256], [64, 1, 8256], []], [F, F, S], OpCost(None, 3 * 4 * 64 * 8256, "fp32")),
    ("aten::add_", [[64, 64, 1, 82], [1, 64, 1, 1], []], [H, H, S], OpCost(None, 2 * (2 * 64 * 64 * 82 + 64), "fp16")),
    ("aten::relu_", [[32, 64]], [F], OpCost(None, 2 * 4 * 32 * 64, "fp32")),
    ("aten::masked_fill", [[128, 64], [128, 1], []], [H, "bool", S], OpCost(None, 128 + 2 * 2 * 128 * 64, "fp16")),
    ("aten::threshold_backward", [[5, 128], [5, 128], []], [F, F, S], OpCost(None, 3 * 4 * 5 * 128, "fp32")),
    # An out argument is written, not read.
    ("aten::clamp_min", [[5, 128], [], [5, 128]], [F, S, F], OpCost(None, 2 * 4 * 5 * 128, "fp32")),
    ("aten::copy_", [[64, 128], [64, 128], []], ["bool", F, S], OpCost(None, 64 * 128 * (1 + 4), "int")),
    ("aten::fill_", [[64, 128], []], [F, S], OpCost(None, 4 * 64 * 128, "fp32")),
    (
        "aten::cudnn_batch_norm",
        [[64, 17, 128], [17], [17], [17], [17], [], [], []],
        [F, F, F, F, F, S, S, S],
        OpCost(None, 4 * (2 * 64 * 17 * 128 + 4 * 17), "fp32"),
    ),
    ("aten::native_dropout", [[512, 4096], [], []], [F, S, S], OpCost(None, 512 * 4096 * (4 + 4 + 1), "fp32")),
    (
        "aten::max_pool2d_with_indices_backward",
        [[10, 64, 56, 56], [10, 64, 112, 112], [], [], [], [], [], [10, 64, 56, 56]],
        [B, B, L, L, L, L, S, "long int"],
        OpCost(None, 640 * (56 * 56 * (2 + 8) + 112 * 112 * 2), "bf16"),
    ),
    (
        "aten::embedding",
        [[30522, 512], [1, 141], [], [], []],
        [B, "long int", S, S, S],
        OpCost(None, 141 * 8 + 2 * 2 * 141 * 512, "bf16"),
    ),
    # Without stride and padding the output of a forward convolution is unknown.
    ("aten::convolution", [[64, 4, 8256], [64, 4, 1], [64]], [H, H, H], None),
    ("aten::max_pool2d", [[32, 64, 112, 112], [], [], [], [], []], [F], None),
    ("aten::mm", [[4096, 64], [65, 2798]], [F, F], None),
    ("aten::view", [[4096, 64]], [F], None),
    ("ProfilerStep#3", [], [], None),
]


@pytest.mark.parametrize(("name", "dims", "types", "cost"), BY_HAND, ids=[case[0] for case in BY_HAND])
def test_by_hand(name: str, dims: list[Any], types: list[str], cost: OpCost | None) -> None:
    assert op_cost(name, dims, types) == cost


def test_a_forward_convolution_uses_its_concrete_stride_and_padding() -> None:
    """The first layer of ResNet: 7 x 7, stride 2, padding 3: 224 -> 112."""
    dims = [[32, 3, 224, 224], [64, 3, 7, 7], [], [], [], [], [], [], []]
    types = [F, F, "", L, L, L, S, L, S]
    options = ["[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1"]
    out = 32 * 64 * 112 * 112
    expected = OpCost(2 * out * 3 * 49, 4 * (32 * 3 * 224 * 224 + 64 * 3 * 49 + out), "fp32")
    assert op_cost("aten::convolution", dims, types, ["", "", "", *options]) == expected
    # cuDNN's own operator has no bias and takes the padding first.
    swapped = ["", "", "[3, 3]", "[2, 2]", "[1, 1]", "1", "False", "False", "True"]
    assert op_cost("aten::cudnn_convolution", dims, [F, F, L, L, L, S, S, S, S], swapped) == expected
    transposed = ["", "", "", "[2, 2]", "[3, 3]", "[1, 1]", "True", "[0, 0]", "1"]
    assert op_cost("aten::convolution", dims, types, transposed) is None


def test_a_transposed_convolution_multiplies_each_input_with_its_weights() -> None:
    """Two groups of 4 -> 3 channels, 4 x 4, stride 2, padding 1: 5 -> 10, and 11 with an output padding of 1."""
    dims = [[2, 8, 5, 5], [8, 3, 4, 4], [], [], [], [], [], [], []]
    types = [F, F, "", L, L, L, S, L, S]
    for added, size in ((0, 10), (1, 11)):
        options = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "True", f"[{added}, {added}]", "2"]
        moved = 4 * (2 * 8 * 25 + 8 * 3 * 16 + 2 * 6 * size * size)
        assert op_cost("aten::convolution", dims, types, options) == OpCost(2 * 2 * 8 * 25 * 3 * 16, moved, "fp32")


def test_the_output_mask_drops_the_input_gradient_of_a_first_layer() -> None:
    dims = [[2, 8, 4, 4], [2, 3, 4, 4], [8, 3, 3, 3], [], [], [], [], [], [], [], []]
    types = [F, F, F, L, L, L, L, S, L, S, L]
    both = op_cost("aten::convolution_backward", dims, types)
    weight_only = op_cost("aten::convolution_backward", dims, types, [""] * 10 + ["[False, True, False]"])
    assert both is not None
    assert weight_only is not None
    assert both.flops == 2 * (weight_only.flops or 0) == 2 * (2 * 2 * 8 * 16 * 27)


@pytest.mark.parametrize(
    ("dims", "types"),
    [
        (None, None),
        ({}, []),
        ("[[1,2]]", "x"),
        ([[2**40, 2**40], [2**40, 2]], [F, F]),
        ([[-1, 4], [4, 4]], [F, F]),
        ([[float("nan"), 4], [4, 4]], [F, F]),
        ([[True, 4], [4, 4]], [F, F]),
        ([[2] * 99, [4, 4]], [F, F]),
        ([[[4, 4]], [4, 4]], [F, F]),
        ([[4], []], [F]),
        ([[0, 0]], [F]),
        ([[4, 4], None], [None, 3]),
    ],
)
def test_hostile_shapes_are_unknown(dims: Any, types: Any) -> None:
    assert op_cost("aten::mm", dims, types) is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([F, H, "long int", "[1, 1]", "False", ""]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=30,
)
SHAPES = st.lists(st.lists(st.integers(0, 9) | st.integers(), max_size=5), max_size=8)


@given(st.sampled_from(sorted(_RULES)), JSON | SHAPES, JSON | st.lists(st.sampled_from([F, H, "bool", S])), JSON)
def test_nothing_raises_and_no_work_is_negative_or_absurd(name: str, dims: Any, types: Any, concrete: Any) -> None:
    cost = op_cost(f"aten::{name}", dims, types, concrete)
    if cost is not None:
        assert cost.flops is not None or cost.bytes is not None
        assert 0 <= (cost.flops or 0) <= 2**62
        assert 0 <= (cost.bytes or 0) <= 2**62


def test_vgg13_of_a_recording_computes_what_the_network_does(shared_traces: Path) -> None:
    """VGG-13 at 224 x 224 has 11.3 G multiply-adds an image (Simonyan and Zisserman); batch 512, forward only."""
    path = shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz"
    flops = 0
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        args = event.get("args") or {}
        if event["name"] in ("aten::cudnn_convolution", "aten::addmm") and "Input Dims" in args:
            cost = op_cost(event["name"], args["Input Dims"], args["Input type"], args["Concrete Inputs"])
            assert cost is not None
            assert cost.flops is not None
            flops += cost.flops
    assert flops / 2 / 512 == pytest.approx(11.3e9, rel=0.01)
