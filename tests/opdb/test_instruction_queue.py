"""Pei et al.'s abstract instruction queue: each equation by hand, what has to hold of any layer, and real times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import replace
from tests.opdb.builders import indexed
from tests.paper.pei_layers import linear_s, moving_s, pool_s
from whatif.hardware.gpu import load_gpu
from whatif.opdb.analytic import analytic_answers
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.instruction_queue import Units, kernel_s, product_s, stream_s, units_of
from whatif.opdb.queue_layers import conv_s, fft_s, im2col_s, queue_s
from whatif.opdb.rows import operators
from whatif.opdb.work import work

# 10 multiprocessors of 128 lanes and 32 load and store units at 1 GHz; its memory never counts.
UNITS = Units(10, 128, 32, 1e9, 96 * 1024, 1e18)


def vec(value: float) -> np.ndarray:
    return np.array([float(value)])


def kernel(units: Units, blocks: float, loads: float, shared: float, computes: float, stores: float) -> float:
    found = kernel_s(
        units, vec(blocks), loads=vec(loads), shared=vec(shared), computes=vec(computes), stores=vec(stores),
        moved_bytes=vec(0),
    )  # fmt: skip
    return float(found[0]) * units.clock_hz


def conv(batch: int, c_in: int, c_out: int, side: int, kernel_side: int = 3, stride: int = 1) -> dict[str, np.ndarray]:
    sizes = {"batch": batch, "in_channels": c_in, "out_channels": c_out, "in_h": side, "in_w": side, "groups": 1}
    for axis in "hw":
        sizes |= {f"kernel_{axis}": kernel_side, f"stride_{axis}": stride}
        sizes |= {f"padding_{axis}": kernel_side // 2, f"dilation_{axis}": 1}
    return {name: vec(value) for name, value in sizes.items()}


def test_a_kernel_bound_by_computing() -> None:
    """Equations 13 to 19: m = 4; C_b = 5 + 1 + 92 + ceil(101 / 4) + 3 = 127; 21 blocks on 10 SMs are 3 rounds."""
    assert UNITS.m == 4
    assert kernel(UNITS, 21, 5, 2, 101, 3) == pytest.approx(127 * 3 + 374)
    # One block more than whole rounds costs a round.
    assert kernel(UNITS, 20, 5, 2, 101, 3) == pytest.approx(127 * 2 + 374)


def test_a_kernel_bound_by_storage() -> None:
    """Equations 7 to 12: 50 shared loads outlast ceil(101 / 4) cycles of computing: C_b = 5 + 50 + 3."""
    assert kernel(UNITS, 21, 5, 50, 101, 3) == pytest.approx(58 * 3 + 374)


def test_half_as_many_load_store_units_take_twice_as_long() -> None:
    """64 lanes and 16 units, as on a P100: m stays 4, and each instruction takes two cycles."""
    small = replace(UNITS, lanes=64, load_store_units=16)
    assert small.m == 4
    assert kernel(small, 10, 5, 50, 101, 3) == pytest.approx(2 * 58 + 374)


def test_dop_stretches_blocks_and_bytes_are_a_floor() -> None:
    assert kernel(replace(UNITS, dop=0.5), 10, 5, 50, 101, 3) == pytest.approx(58 / 0.5 + 374)
    slow = replace(UNITS, memory_byte_s=1e9)
    found = kernel_s(slow, vec(1), loads=vec(1), shared=vec(0), computes=vec(0), stores=vec(1), moved_bytes=vec(5e6))
    assert float(found[0]) == pytest.approx(5e-3)


def test_the_units_of_a_gpu() -> None:
    """The P40's: 30 multiprocessors, m = 128 / 32; a V100's tensor cores have 8 times the lanes of its fp32."""
    p40 = units_of(load_gpu("P40"))
    assert p40 is not None
    assert (p40.multiprocessors, p40.m) == (30, pytest.approx(4))
    fp32, fp16 = (units_of(load_gpu("V100-SXM2-16"), dtype) for dtype in ("fp32", "fp16"))
    assert fp32 is not None
    assert fp16 is not None
    assert fp16.lanes / fp32.lanes == pytest.approx(125 / 15.7)
    assert units_of(load_gpu("MI300X")) is None


def test_a_large_product_reaches_the_peak_and_never_exceeds_it() -> None:
    size = vec(4096)
    t = product_s(UNITS, vec(1), size, size, size, element_bytes=4, moved_bytes=vec(0))
    peak = 2 * 4096**3 / (2 * UNITS.lanes * UNITS.multiprocessors * UNITS.clock_hz)
    assert 1.0 <= float(t[0]) / peak < 1.25


def test_the_search_cuts_long_sums() -> None:
    """A weight gradient: 64 x 64 outputs are one tile for one SM, unless the sum of 100,000 is cut among blocks."""
    t = product_s(UNITS, vec(1), vec(64), vec(64), vec(100_000), element_bytes=4, moved_bytes=vec(0))
    alone = 2 * 64 * 64 * 100_000 / (2 * UNITS.lanes * UNITS.clock_hz)
    assert float(t[0]) < 0.5 * alone


sizes = st.tuples(
    st.integers(1, 64), st.integers(1, 300), st.integers(1, 300), st.integers(3, 60), st.sampled_from((1, 3, 5, 7))
)


@settings(max_examples=40)
@given(sizes, st.sampled_from(("fwd", "dgrad", "wgrad", "bwd")))
def test_more_of_everything_never_takes_less(size: tuple[int, int, int, int, int], phase: str) -> None:
    batch, c_in, c_out, side, kernel_side = size
    one = float(im2col_s(UNITS, conv(*size), phase if phase != "bwd" else "fwd")[0])
    assert np.isfinite(one)
    assert one > 0
    if phase != "bwd":
        twice = float(im2col_s(UNITS, conv(2 * batch, c_in, c_out, side, kernel_side), phase)[0])
        assert twice >= one * (1 - 1e-9)
    units = replace(UNITS, multiprocessors=20)
    assert float(conv_s(units, conv(*size), phase)[0]) <= float(conv_s(UNITS, conv(*size), phase)[0]) * (1 + 1e-9)


def test_the_faster_of_im2col_and_fft_answers() -> None:
    """Large kernels are transformed, 1 x 1 and strided ones never: an FFT of those does not exist."""
    large = conv(32, 64, 192, 27, 5)
    assert float(fft_s(UNITS, large)[0]) < float(im2col_s(UNITS, large)[0])
    assert conv_s(UNITS, large)[0] == fft_s(UNITS, large)[0]
    strided = conv(32, 64, 192, 27, 5, stride=2)
    assert np.isinf(fft_s(UNITS, strided)[0])
    assert conv_s(UNITS, strided)[0] == im2col_s(UNITS, strided)[0]
    pointwise = conv(32, 256, 64, 56, 1)
    assert conv_s(UNITS, pointwise)[0] == im2col_s(UNITS, pointwise)[0]
    # Half the bytes an element: no FFT in that format.
    assert conv_s(UNITS, large, element_bytes=2)[0] == im2col_s(UNITS, large, element_bytes=2)[0]
    assert conv_s(UNITS, large, "bwd")[0] == pytest.approx(
        float(conv_s(UNITS, large, "dgrad")[0] + conv_s(UNITS, large, "wgrad")[0])
    )


def test_an_fft_of_the_whole_image_is_one_tile() -> None:
    """27 + 5 - 1 = 31 points fit 32; tiles of any size may be faster, never slower."""
    layer = conv(32, 64, 192, 27, 5)
    assert np.isfinite(fft_s(UNITS, layer, tiled=False)[0])
    assert fft_s(UNITS, layer)[0] <= fft_s(UNITS, layer, tiled=False)[0]


def test_layers_that_only_move_follow_their_bytes() -> None:
    """10 GB/s: ReLU moves 8 bytes an element forward and 12 backward; batch normalization 4 + 8, and 8 + 12."""
    units = replace(UNITS, memory_byte_s=1e10)
    million = vec(1e6)
    moved = {("relu", "fwd"): 8, ("relu", "bwd"): 12, ("batch_norm", "fwd"): 12, ("batch_norm", "bwd"): 20,
             ("residual", "fwd"): 12, ("update", "fwd"): 20}  # fmt: skip
    for (kind, phase), bytes_each in moved.items():
        assert float(moving_s(units, kind, million, phase)[0]) == pytest.approx(bytes_each * 1e6 / 1e10)
    assert float(pool_s(units, million, million / 4)[0]) == pytest.approx(5e6 / 1e10)
    assert float(stream_s(units, read_bytes=vec(4e6), written_bytes=vec(0))[0]) == pytest.approx(4e6 / 1e10)
    forward, backward = (float(linear_s(units, vec(64), vec(512), vec(1024), phase)[0]) for phase in ("fwd", "bwd"))
    assert backward > forward


def test_what_it_does_not_know_is_nan() -> None:
    integers = {name: column.astype(np.int64) for name, column in conv(8, 64, 64, 28).items()}
    for dtype, gpu, known in (
        ("fp32", "T4", True),
        ("fp16", "T4", False),
        ("fp8", "H100-SXM-80", False),
        ("fp32", "MI300X", False),
    ):
        ops = operators("conv", integers, name="conv2d", dtype=dtype)
        assert np.isfinite(queue_s(load_gpu(gpu), ops)).all() == known
        t, low, high = analytic_answers(load_gpu(gpu), ops, launch=False)
        assert (low <= t).all()
        assert (t <= high).all()
    rows = operators("normalization", {"rows": 8, "columns": 8}, name="softmax", dtype="fp32")
    assert np.isnan(queue_s(load_gpu("T4"), rows)).all()


def test_the_model_of_convolutions_can_be_chosen() -> None:
    integers = {name: column.astype(np.int64) for name, column in conv(8, 64, 64, 28).items()}
    ops = operators("conv", integers, name="conv2d", dtype="fp32")
    gpu = load_gpu("V100-PCIE-32")
    queue = analytic_answers(gpu, ops, launch=False, conv_law="queue")[0][0]
    roofline = analytic_answers(gpu, ops, launch=False, conv_law="roofline")[0][0]
    assert queue == pytest.approx(queue_s(gpu, ops)[0] + 2e-6)
    assert roofline != queue
    assert work(ops)[0][0] / 15.7e12 < roofline
    for name, t in (("queue", queue), ("roofline", roofline)):
        answers = Estimator(indexed(), gpu.name, conv_law=name).estimate(ops)
        assert answers.answered_by[0] == AnswerSource.ANALYTIC
        assert answers.t_s[0] == pytest.approx(t)
