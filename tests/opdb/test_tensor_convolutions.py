"""Convolutions on tensor cores: their kinds, what their layout costs, and what changes it around them."""

from __future__ import annotations

import numpy as np
import pytest

from whatif.graph.described import Described
from whatif.hardware.gpu import load_gpu
from whatif.hardware.roofline import memory_gbyte_s
from whatif.opdb.importers.described import operators_of
from whatif.opdb.rows import Operators
from whatif.opdb.tensor_convolutions import (
    FACTORS,
    NHWC,
    converted,
    kinds,
    layout_changes,
    tensor_convolutions,
)

A100, P100 = load_gpu("A100-SXM-80"), load_gpu("P100-SXM2-16")


def conv(
    channels: int = 256, outputs: int = 256, *, groups: int = 1, kernel: int = 3, stride: int = 1, phase: str = "fwd"
) -> Described:
    sizes = {
        "batch": 64, "in_channels": channels, "out_channels": outputs, "in_h": 28, "in_w": 28, "kernel_h": kernel,
        "kernel_w": kernel, "stride_h": stride, "stride_w": stride, "padding_h": kernel // 2, "padding_w": kernel // 2,
        "dilation_h": 1, "dilation_w": 1, "groups": groups,
    }  # fmt: skip
    return Described("conv", "conv2d", "fp16", tuple(sizes.items()), phase)


def table(*whats: Described) -> Operators:
    ((_, ops),) = operators_of(whats)
    return ops


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (conv(), "dense"),
        (conv(kernel=1), "dense 1x1"),
        (conv(groups=256), "depthwise 3"),
        (conv(groups=256, kernel=5, stride=2), "depthwise 5 strided"),
        (conv(groups=256, kernel=9), "depthwise large"),
        (conv(groups=32), "grouped"),
        (conv(groups=4), "grouped, wide"),
        (conv(128, 128, groups=4), "grouped, few"),
        (conv(128, 128, groups=8), "grouped, odd"),
        (conv(192, 192, groups=32), "grouped, odd"),
        (conv(160, 160, groups=20), "grouped, uneven"),
        (conv(64, 128, groups=2), "grouped, wide"),
        (conv(256, 512, groups=32), "grouped, unequal"),
        (conv(3, 64), "dense"),
        (conv(252, 256), "dense, by 8 bytes"),
        (conv(251, 256, kernel=1), "dense, by 4 bytes"),
        (conv(254, 256), "dense, by 4 bytes"),
        (conv(256, 251), "dense"),
        (converted(conv(252, 252), "tf32", ""), "dense"),
    ],
)
def test_kinds(what: Described, kind: str) -> None:
    assert list(FACTORS)[kinds(table(what))[0]] == kind


def test_some_kinds_are_slow_in_nhwc() -> None:
    """cuDNN has no kernels in NHWC for wide groups, few of them, and large depthwise kernels."""
    slow, fast = (conv(groups=4), conv(groups=256, kernel=9)), (conv(groups=256, kernel=5), conv(groups=32))
    for whats, least, most in ((slow, 3.0, 30.0), (fast, 0.0, 1.0)):
        nchw, nhwc = (
            tensor_convolutions(A100, table(*(converted(what, "fp16", layout) for what in whats)))[0]
            for layout in ("", NHWC)
        )
        assert ((least < nhwc / nchw) & (nhwc / nchw < most)).all()


def test_channels_that_tensor_cores_do_not_load_whole_are_slow_in_nhwc() -> None:
    """ReXNet-100, of 27 or 38 channels, takes longer in NHWC than in NCHW; ReXNetR-130, of multiples of 8, less."""
    whole, half, odd = tensor_convolutions(
        A100, table(*(converted(conv(n, n, kernel=1), "fp16", NHWC) for n in (64, 60, 62)))
    )[0]
    assert whole < half < odd
    assert odd / whole > 3
    # Where the arithmetic takes longer than the loads, they matter less.
    products = tensor_convolutions(A100, table(*(converted(conv(n, n), "fp16", NHWC) for n in (512, 510))))[0]
    assert products[1] / products[0] < 1.5


def test_ranges_hold_and_other_formats_have_no_answer() -> None:
    t, low, high = tensor_convolutions(A100, table(conv(), conv(groups=256)))
    assert ((low < t) & (t < high)).all()
    assert np.isnan(tensor_convolutions(A100, table(converted(conv(), "fp32", "")))[0]).all()
    assert np.isnan(tensor_convolutions(P100, table(conv()))[0]).all()


def test_a_depthwise_convolution_is_bound_by_its_bytes() -> None:
    t, _, _ = tensor_convolutions(A100, table(converted(conv(groups=256), "fp16", NHWC)))
    moved = 2 * (2 * 64 * 256 * 28 * 28 + 256 * 9)
    assert t[0] == pytest.approx(FACTORS["depthwise 3"][1] * moved / 1e9 / memory_gbyte_s(A100))


def test_both_gradients_take_as_long_as_each() -> None:
    both, dgrad, wgrad = tensor_convolutions(A100, table(*(conv(phase=phase) for phase in ("bwd", "dgrad", "wgrad"))))[
        0
    ]
    assert both == pytest.approx(dgrad + wgrad, rel=0.2)


def test_transposes_stand_around_dense_convolutions_in_nchw_alone() -> None:
    size = 64 * 256 * 28 * 28 * 2
    assert layout_changes(A100, conv()) == (("nchwToNhwc", size), ("nhwcToNchw", size))
    assert len(layout_changes(A100, conv(phase="wgrad"))) == 2
    for what in (conv(groups=256), conv(groups=8), converted(conv(), "fp16", NHWC), converted(conv(), "fp32", "")):
        assert layout_changes(A100, what) == ()
    assert layout_changes(P100, conv()) == ()
    assert layout_changes(load_gpu("MI300X"), conv()) == ()
