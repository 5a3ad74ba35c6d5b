"""Restructured batch normalization: by hand, on random networks, on real recordings, and against the paper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.transforms.layer_graphs import Call, network, times_us, work_order
from whatif import Phase, TaskGraph, load_transform, simulate
from whatif.graph.kernels import KernelFamily


def block(**options: bool) -> TaskGraph:
    """A block with a residual connection; launches of 1 us run ahead. Times in us, normalization in capitals.

    ::

        forward   | conv_0 20 | BN_0 10 | relu_0 4 | conv_1 20 | BN_1 12 | add 6 | relu_1 4 |
        backward  | relu_1 5 | BN_1 16 | conv_1 40 | relu_0 5 | BN_0 14 | conv_0 40 | update 5
    """
    return network(
        [
            Call("Conv2d_0", 20_000, 40_000), Call("BatchNorm2d_0", 10_000, 14_000), Call("ReLU_0", 4_000, 5_000),
            Call("Conv2d_1", 20_000, 40_000), Call("BatchNorm2d_1", 12_000, 16_000), Call("Add_0", 6_000),
            Call("ReLU_1", 4_000, 5_000),
        ],
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("named", [True, False])
def test_the_relu_behind_a_normalization_goes_and_normalization_halves(named: bool) -> None:
    changed = load_transform("rebatchnorm")(block(named=named)).check()
    assert work_order(changed) == [
        "Conv2d_0", "BatchNorm2d_0", "Conv2d_1", "BatchNorm2d_1", "add", "clamp_min", "threshold_backward",
        "BatchNorm2d_1 backward", "Conv2d_1 backward", "BatchNorm2d_0 backward", "Conv2d_0 backward", "update",
    ]  # fmt: skip
    assert times_us(changed, "BatchNorm") == [5, 6, 8, 7]
    assert times_us(changed, "Conv2d") == [20, 20, 40, 40]
    # 1 us to the first launch, then the stream is never idle: 201 us before, less 9 of ReLU and 26 of normalization.
    assert simulate(block(named=named)).makespan_ns == 202_000
    assert simulate(changed).makespan_ns == 202_000 - 9_000 - 26_000
    # Two launches went with their kernels.
    assert changed.select(name="cudaLaunchKernel").sum() == 12


def test_the_print_removes_every_relu() -> None:
    changed = load_transform("rebatchnorm:activations=all")(block())
    assert times_us(changed, "BatchNorm") == [5, 6, 8, 7]
    assert not (changed.select(name="clamp_min") | changed.select(name="threshold")).any()
    assert simulate(changed).makespan_ns == 202_000 - 18_000 - 26_000


def test_the_range_is_what_the_paper_saw() -> None:
    """7 % measured and 17.5 % claimed where 12.7 % were predicted: so much of each gain, that of the ReLUs included."""
    changed = load_transform("rebatchnorm")(block())
    low, high = (simulate(changed.replace(duration_ns=column)) for column in (changed.low_ns, changed.high_ns))
    assert high.makespan_ns == pytest.approx(202_000 - (9_000 + 26_000) * 7 / 12.7, abs=4)
    assert low.makespan_ns == pytest.approx(202_000 - 9_000 - 26_000 * 17.5 / 12.7, abs=4)


def test_on_a_cpu_operators_change() -> None:
    changed = load_transform("rebatchnorm")(block(on_cpu=True))
    assert times_us(changed, "BatchNorm") == [5, 6, 8, 7]
    assert len(times_us(changed, "clamp_min")) == 1


def test_a_relu_that_is_called_twice_goes_where_it_follows_a_normalization() -> None:
    """One ReLU layer behind a normalization and behind an addition, as residual blocks of torchvision have it."""
    graph = network(
        [
            Call("BatchNorm2d_0", 10_000, 14_000), Call("ReLU_0", 4_000, 5_000), Call("Conv2d_1", 20_000, 40_000),
            Call("Add_0", 6_000), Call("ReLU_0", 3_000, 2_000),
        ]
    )  # fmt: skip
    changed = load_transform("rebatchnorm")(graph)
    assert times_us(changed, "clamp_min") == [3]
    assert times_us(changed, "threshold") == [2]


def test_twice_is_once_and_nothing_is_nothing() -> None:
    once = load_transform("rebatchnorm")(block())
    twice = load_transform("rebatchnorm")(once)
    assert (twice.duration_ns == once.duration_ns).all()
    assert any("already" in note for note in twice.notes)
    plain = network([Call("Conv2d_0", 20_000, 40_000), Call("ReLU_0", 4_000, 5_000)])
    same = load_transform("rebatchnorm")(plain)
    assert same.duration_ns is plain.duration_ns
    assert any("nothing changes" in note for note in same.notes)


layers = st.lists(
    st.builds(
        Call,
        st.tuples(
            st.sampled_from(["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "Linear", "Add"]), st.integers(0, 3)
        ).map("{0[0]}_{0[1]}".format),
        st.integers(0, 50_000), st.integers(0, 50_000), st.integers(-1, 10**8),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(layers, st.booleans(), st.booleans(), st.integers(1, 3), st.integers(0, 20_000))
def test_on_any_network_it_only_saves(calls: list[Call], named: bool, on_cpu: bool, steps: int, launch_ns: int) -> None:
    graph = network(calls, named=named, on_cpu=on_cpu, steps=steps, launch_ns=launch_ns)
    changed = load_transform("rebatchnorm")(graph).check()
    assert simulate(changed).makespan_ns <= simulate(graph).makespan_ns
    every = load_transform("rebatchnorm:activations=all")(graph).check()
    assert simulate(every).makespan_ns <= simulate(changed).makespan_ns
    # What is neither normalized nor activated stays as it is.
    for name in ("Conv2d", "MaxPool2d", "Linear", "add", "update"):
        assert times_us(changed, f"^{name}") == times_us(graph, f"^{name}")


def test_resnet50_loses_the_activations_inside_its_blocks(shared_traces: Path) -> None:
    """33 of its 49 ReLUs follow a normalization, 16 an addition; six recorded steps, layers not named."""
    graph = whatif.read(shared_traces / "kineto-resnet50-v100" / "num_workers_4.2021-06.pt.trace.json.gz")
    changed = load_transform("rebatchnorm")(graph).check()
    for name, phase in (("clamp_min", Phase.FORWARD), ("threshold", Phase.BACKWARD)):
        before, after = (
            np.bincount(g.step[g.on_gpu & g.select(name=name, phase=phase)], minlength=6) for g in (graph, changed)
        )
        assert before.tolist() == [49] * 6
        assert after.tolist() == [16] * 6
    norm = graph.on_gpu & (graph.family == KernelFamily.NORMALIZATION)
    assert changed.duration_ns[changed.on_gpu & (changed.family == KernelFamily.NORMALIZATION)].sum() == pytest.approx(
        graph.duration_ns[norm].sum() / 2, rel=1e-6
    )


def test_densenet_gains_about_what_the_paper_predicts(own_traces: Path) -> None:
    """Daydream §6.4 predicts 12.7 % for DenseNet-121 (Caffe, RTX 2080 Ti); this one is smaller and ran on a CPU."""
    graph = whatif.read(own_traces / "campaign_cpu" / "densenet121--baseline.trace.json.gz")
    prediction = whatif.apply(graph, "rebatchnorm")
    gain, least, most = (
        100 * (1 - ms / prediction.baseline_ms)
        for ms in (prediction.predicted_ms, prediction.high_ms, prediction.low_ms)
    )
    assert 10 < gain < 16
    # 7 % were measured where 12.7 % were predicted, and 17.5 % claimed.
    assert least < 0.6 * gain
    assert most > 1.3 * gain
