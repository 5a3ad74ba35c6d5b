"""Gist: by hand, on random networks, on real recordings, and its memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.transforms.layer_graphs import Call, network, times_us, work_order
from tests.transforms.test_rebatchnorm import layers
from whatif import DependencyKind, Phase, TaskGraph, WhatifError, load_transform, simulate
from whatif.graph.memory import LayerMemory, Memory

# One map of 1,843,200 fp32 values.
MAP = 7_372_800
# Half of the values at 4 + 1 bytes and 7,200 pointers of 4.
SPARSE = 4_636_800
ENCODE, DECODE = r"^encode \(Gist\)$", r"^decode \(Gist\)$"


def chain(**options: bool) -> TaskGraph:
    """A ReLU before a convolution, one before pooling, pooling before a convolution. Each map has the same size.

    ::

        forward  | conv_0 50 | relu_0 30 | conv_1 50 | relu_1 30 | pool_0 20 | conv_2 50 |
        backward | conv_2 90 | pool_0 20 | relu_1 30 | conv_1 90 | relu_0 30 | conv_0 90 | update 5
    """
    return network(
        [
            Call("Conv2d_0", 50_000, 90_000), Call("ReLU_0", 30_000, 30_000, 2 * MAP), Call("Conv2d_1", 50_000, 90_000),
            Call("ReLU_1", 30_000, 30_000, 2 * MAP), Call("MaxPool2d_0", 20_000, 20_000),
            Call("Conv2d_2", 50_000, 90_000, 3 * MAP),
        ],
        **options,
    )  # fmt: skip


def test_each_map_is_encoded_behind_its_last_use_and_decoded_before_its_next() -> None:
    changed = load_transform("gist:sparsity=0.5")(chain()).check()
    assert work_order(changed) == [
        "Conv2d_0", "clamp_min", "Conv2d_1", "encode (Gist)", "clamp_min", "MaxPool2d_0", "encode (Gist)",
        "Conv2d_2", "encode (Gist)",
        "decode (Gist)", "Conv2d_2 backward", "MaxPool2d_0 backward", "threshold_backward",
        "decode (Gist)", "Conv2d_1 backward", "threshold_backward", "Conv2d_0 backward", "update",
    ]  # fmt: skip


def moved_us(size_bytes: float) -> float:
    """Time of an unknown GPU to move the given bytes: 0.83 of 900 GB/s."""
    return size_bytes / (0.83 * 900e3)


def test_kernels_last_as_long_as_their_bytes_take() -> None:
    """conv_1 reads 2 maps to encode and writes the sparse one; to decode it reads that, clears a map and scatters half.

    conv_2 reads 3 x MAP less its weights and output, whose sizes are unknown: half of it, 1.5 maps. One bit a value: a
    map read, 1/32 written, nothing to decode.
    """
    graph = chain()
    changed = load_transform("gist:sparsity=0.5")(graph)
    encoded, decoded, bits = moved_us(2 * MAP + SPARSE), moved_us(SPARSE + 1.5 * MAP), moved_us(MAP * 33 / 32)
    assert times_us(changed, ENCODE) == pytest.approx([encoded, bits, 1.5 * encoded], abs=1e-3)
    assert times_us(changed, DECODE) == pytest.approx([1.5 * decoded, decoded], abs=1e-3)
    added_us = 2.5 * (encoded + decoded) + bits
    # Launches of 1 us run ahead of 50 us kernels and more: what is added is the time of the kernels.
    assert simulate(changed).makespan_ns - simulate(graph).makespan_ns == pytest.approx(added_us * 1e3, abs=5)
    assert changed.select(name="cudaLaunchKernel").sum() == graph.select(name="cudaLaunchKernel").sum() + 5


def test_lossy_encoding_takes_the_other_maps_that_are_kept() -> None:
    """All three keep their input, a MAP; in 8 bits a quarter: a map read and a quarter written."""
    graph = network(
        [
            Call("Conv2d_0", 50_000, 90_000), Call("BatchNorm2d_0", 30_000, 60_000, 2 * MAP),
            Call("Linear_0", 9_000, 9_000),
        ]
    )  # fmt: skip
    with pytest.raises(WhatifError, match="lossy=fp16"):
        load_transform("gist")(graph)
    changed = load_transform("gist:lossy=fp8")(graph)
    for name in (ENCODE, DECODE):
        assert times_us(changed, name) == pytest.approx([moved_us(1.25 * MAP)] * 3, abs=1e-3)
    halved = times_us(load_transform("gist:lossy=fp16")(graph), ENCODE)
    assert halved == pytest.approx([moved_us(1.5 * MAP)] * 3, abs=1e-3)


def test_half_precision_has_less_to_gain() -> None:
    half = chain().replace(dtype=chain().dtype * 0 + 3)  # fp16
    whole, halved = (load_transform("gist:sparsity=0.5,lossy=fp16")(graph) for graph in (chain(), half))
    # conv_0 keeps the batch, in half of its bytes; in half precision already nothing is left to do for it.
    expected = [moved_us(1.5 * MAP), moved_us(2 * MAP + MAP / 8 * 3 + 28_800)]
    assert times_us(whole, ENCODE)[:2] == pytest.approx(expected, abs=1e-3)
    # Twice as many values in the same bytes, and none of them gets shorter.
    assert times_us(halved, ENCODE)[0] == pytest.approx(moved_us(2 * MAP + MAP / 4 * 3 + 57_600), abs=1e-3)


def test_cusparse_may_take_three_times_as_long() -> None:
    changed = load_transform("gist:sparsity=0.5")(chain())
    encoded = changed.select(name=ENCODE)
    factor = changed.high_ns[encoded] / changed.duration_ns[encoded]
    assert factor.tolist() == pytest.approx([3 * factor[1], factor[1], 3 * factor[1]], rel=1e-3)


def test_on_a_cpu_encoding_is_an_operator() -> None:
    graph = chain(on_cpu=True)
    changed = load_transform("gist")(graph).check()
    assert (changed.select(name=ENCODE).sum(), changed.select(name=DECODE).sum()) == (3, 2)
    assert changed.on_cpu.all()
    assert simulate(changed).makespan_ns > simulate(graph).makespan_ns


def test_memory_keeps_the_encoded_maps() -> None:
    """ReLUs keep what they write; at no zeros left out of 32 values one bit each, so 1/32 of relu_1's map stays."""
    rows = (
        LayerMemory("Conv2d_0", 1_000, 0, kept_input=1_000, input=1_000), LayerMemory("ReLU_0", MAP, 0, input=MAP),
        LayerMemory("Conv2d_1", 0, 0, input=MAP), LayerMemory("ReLU_1", MAP, 0, input=MAP),
        LayerMemory("MaxPool2d_0", MAP // 2, 0, input=MAP), LayerMemory("Conv2d_2", MAP // 4, 0, input=MAP // 4),
    )  # fmt: skip
    graph = chain()
    graph = graph.replace(info=whatif.GraphInfo(memory=Memory(0, 0, 0, rows)))
    memory = load_transform("gist:sparsity=0.5")(graph).info.memory
    assert memory is not None
    kept = [row.activations for row in memory.layers]
    assert kept[:2] == [1_000, 4_636_800]
    assert kept[5] == pytest.approx(4_636_800 / 4, abs=1)
    assert sum(kept) < 0.7 * sum(row.activations for row in rows)


def test_twice_is_once() -> None:
    changed = load_transform("gist")(chain())
    again = load_transform("gist")(changed)
    assert len(again) == len(changed)
    assert any("already" in note for note in again.notes)


@pytest.mark.parametrize("spec", ["gist:sparsity=-0.1", "gist:sparsity=1.1", "gist:sparsity=nan"])
def test_a_sparsity_that_is_none_is_one_sentence(spec: str) -> None:
    with pytest.raises(WhatifError, match="sparsity from 0 to 1"):
        load_transform(spec)(chain())


@settings(max_examples=60, deadline=None)
@given(layers, st.floats(0, 1), st.sampled_from(["none", "fp16", "fp8"]), st.booleans(), st.booleans(),
       st.integers(0, 20_000))  # fmt: skip
def test_on_any_network_it_only_adds(
    calls: list[Call], sparsity: float, lossy: str, named: bool, on_cpu: bool, launch_ns: int
) -> None:
    graph = network(calls, named=named, on_cpu=on_cpu, steps=2, launch_ns=launch_ns)
    try:
        changed = load_transform("gist", sparsity=sparsity, lossy=lossy)(graph).check()
    except WhatifError:
        return
    kept = ~(changed.select(name="Gist") | (changed.start_ns < 0))
    assert changed.duration_ns[kept].tolist() == graph.duration_ns.tolist()
    assert simulate(changed).makespan_ns > simulate(graph).makespan_ns
    # Each map that is decoded was encoded in the same step, before.
    timeline = simulate(changed)
    for step in range(2):
        first, last = (timeline.start_ns[changed.select(name=name, step=step)] for name in (ENCODE, DECODE))
        assert len(last) <= len(first)
        assert not len(last) or first.min() < last.min()


@pytest.mark.parametrize(
    ("trace", "encoded"),
    [("kineto-resnet50-v100/num_workers_4.2021-06.pt.trace.json.gz", 49),
     ("triosim-vgg13-h100/vgg13_bs512_adam.json.gz", 14)],
)  # fmt: skip
def test_the_overhead_is_of_the_size_that_the_paper_reports(shared_traces: Path, trace: str, encoded: int) -> None:
    """Gist's abstract: 4 % on average over five networks, 1.8 times less memory."""
    prediction = whatif.apply(whatif.read(shared_traces / trace), "gist")
    slower = prediction.predicted_ms / prediction.baseline_ms - 1
    assert 0.01 < slower < 0.12
    graph = prediction.graph
    maps = (graph.select(name=ENCODE) & graph.on_gpu & (graph.step == graph.step.max())).sum()
    assert maps <= encoded
    assert (graph.phase[graph.select(name=DECODE)] == Phase.BACKWARD).all()


def test_kernels_whose_launch_was_not_recorded_are_encoded_from_the_cpu() -> None:
    graph = chain()
    unlaunched = graph.replace(dependencies=graph.dependencies.take(graph.dependencies.kind != DependencyKind.LAUNCH))
    changed = load_transform("gist:lossy=fp16")(unlaunched).check()
    encoded = changed.select(name=ENCODE) | changed.select(name=DECODE)
    assert encoded.any()
    assert changed.on_cpu[changed.launch_of[encoded]].all()
    assert (changed.thread[changed.launch_of[encoded]] == 0).all()
