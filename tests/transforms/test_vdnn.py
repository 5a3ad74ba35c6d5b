"""vDNN: by hand, its prefetch policy against the paper's, on random networks, on real recordings, and its memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.transforms.layer_graphs import Call, network
from tests.transforms.test_rebatchnorm import layers
from whatif import TaskGraph, Timeline, WhatifError, load_transform, simulate
from whatif.graph.memory import LayerMemory, Memory, peak
from whatif.models.layers.feature_maps import input_bytes
from whatif.models.layers.layer_calls import layer_calls
from whatif.models.layers.offload import PREFETCH, PREFETCH_NAME, find_prefetch_layer

OFFLOAD, FETCH = "vDNN offload", "vDNN prefetch"


def three() -> TaskGraph:
    """Three convolutions, times in us; each launch takes 1 us and the GPU is never idle.

    ::

        forward   | conv_0 10 | relu_0 4 | conv_1 10 | relu_1 4 | conv_2 10 |
        backward  | conv_2 20 | relu_1 4 | conv_1 20 | relu_0 4 | conv_0 10 | update 5
    """
    return network(
        [
            Call("Conv2d_0", 10_000, 10_000), Call("ReLU_0", 4_000, 4_000), Call("Conv2d_1", 10_000, 20_000),
            Call("ReLU_1", 4_000, 4_000), Call("Conv2d_2", 10_000, 20_000),
        ]
    )  # fmt: skip


def offloaded(graph: TaskGraph, **options: object) -> tuple[TaskGraph, Timeline]:
    transform = load_transform("vdnn", **options)
    changed = transform(graph).check()
    return changed, simulate(changed, transform.schedule)


def starts_us(timeline: Timeline, name: str) -> list[float]:
    return [start / 1e3 for start in timeline.start_ns[timeline.graph.select(name=name)].tolist()]


def test_copies_that_take_as_long_as_their_layer_cost_only_a_launch() -> None:
    """126 kB over 12.6 GB/s (an unknown link) take 10 us; conv_2 is needed at once and stays.

    ::

        us        0    1    2         12     16        26      30      40                60
        compute        |c0-------|    |r0----|c1-------|r1-----|c2-----|c2 backward------| ...
        copies              |o0-------|      |o1-------|               |p1-----|
    """
    changed, timeline = offloaded(three(), mb=0.126)
    assert starts_us(timeline, OFFLOAD) == [2, 16]
    # c0 from 1 to 11; r0 waits until o0 is done.
    assert starts_us(timeline, "clamp_min") == [12, 26]
    assert starts_us(timeline, "^Conv2d_2") == [30, 40]
    # conv_1's map comes back with the backward work of conv_2, conv_0's with that of conv_1.
    assert starts_us(timeline, FETCH) == [40, 64]
    assert timeline.makespan_ns == 103_000
    assert simulate(three()).makespan_ns == 102_000
    assert changed.size_bytes[changed.select(name=OFFLOAD)].tolist() == [126_000, 126_000]


def test_copies_that_take_longer_stop_the_compute_stream_where_memory_is_freed() -> None:
    """189 kB take 15 us: r0 from 17, r1 from 36, and all behind them 10 us later than without any copy, and 1."""
    _, timeline = offloaded(three(), mb=0.189)
    assert starts_us(timeline, OFFLOAD) == [2, 21]
    assert starts_us(timeline, "clamp_min") == [17, 36]
    assert starts_us(timeline, FETCH) == [50, 74]
    assert timeline.makespan_ns == 113_000


def test_without_sync_copies_queue_behind_one_another_and_compute_goes_on() -> None:
    _, timeline = offloaded(three(), mb=0.189, sync=False)
    assert starts_us(timeline, OFFLOAD) == [2, 17]
    assert starts_us(timeline, FETCH) == [39, 63]
    assert timeline.makespan_ns == 102_000


def test_a_late_prefetch_delays_the_backward_work_that_needs_it() -> None:
    """504 kB take 40 us: o0 2 to 42, o1 to 82; p1 82 to 122, conv_1 backward from 122; p0 to 162, conv_0 from 162."""
    _, timeline = offloaded(three(), mb=0.504, sync=False)
    assert starts_us(timeline, OFFLOAD) == [2, 42]
    assert starts_us(timeline, FETCH) == [82, 122]
    assert starts_us(timeline, "^Conv2d_1") == [15, 122]
    assert starts_us(timeline, "^Conv2d_0") == [1, 162]
    assert timeline.makespan_ns == 177_000


def test_the_layers_are_those_that_are_named() -> None:
    changed, _ = offloaded(three(), mb=0.126, layers="Conv2d_1|ReLU_0")
    copied = changed.select(name=OFFLOAD)
    assert [changed.layers[code] for code in changed.layer[copied].tolist()] == ["ReLU_0", "Conv2d_1"]
    with pytest.raises(WhatifError, match="layers 'Linear'"):
        offloaded(three(), layers="Linear")


def test_the_size_of_a_map_follows_from_what_is_moved() -> None:
    """BN_0 moves 20 MB, so 10 MB flow in and out; pooling reads what the ReLU wrote; conv_1 its 7 less 4 of output."""
    graph = network(
        [
            Call("Conv2d_0", 10_000, 10_000, 13_000_000), Call("BatchNorm2d_0", 4_000, 4_000, 20_000_000),
            Call("ReLU_0", 4_000, 4_000, 20_000_000), Call("MaxPool2d_0", 4_000, 4_000),
            Call("Conv2d_1", 10_000, 10_000, 7_000_000), Call("BatchNorm2d_1", 4_000, 4_000, 8_000_000),
            Call("Linear_0", 4_000, 4_000), Call("Conv2d_2", 10_000, 10_000),
        ]
    )  # fmt: skip
    calls = layer_calls(graph)
    megabytes = [size / 1e6 for size in input_bytes(graph, calls)[~calls.backward].tolist()]
    assert megabytes[:7] == [3, 10, 10, 10, 3, 4, 4]
    assert megabytes[7] < 0  # unknown


def test_memory_of_the_recording_comes_first_and_is_smaller_afterwards() -> None:
    """In MB: each ReLU keeps what it writes, which the next convolution reads; conv_0 keeps the batch."""
    rows = tuple(
        LayerMemory(name, activations, 0, kept_input=kept, input=flows_in)
        for name, activations, kept, flows_in in (
            ("Conv2d_0", 8_000_000, 8_000_000, 8_000_000), ("ReLU_0", 6_000_000, 0, 6_000_000),
            ("Conv2d_1", 0, 0, 6_000_000), ("ReLU_1", 4_000_000, 0, 4_000_000), ("Conv2d_2", 0, 0, 4_000_000),
        )
    )  # fmt: skip
    graph = network(
        [
            Call("Conv2d_0", 10_000, 10_000), Call("ReLU_0", 4_000, 4_000), Call("Conv2d_1", 10_000, 20_000),
            Call("ReLU_1", 4_000, 4_000), Call("Conv2d_2", 10_000, 20_000),
        ],
        memory=Memory(parameters=1_000_000, optimizer_state=0, inputs=0, layers=rows),
    )  # fmt: skip
    changed, _ = offloaded(graph)
    assert changed.size_bytes[changed.select(name=FETCH)].tolist() == [6_000_000, 8_000_000]
    memory = changed.info.memory
    assert memory is not None
    assert [row.activations for row in memory.layers] == [0, 0, 0, 4_000_000, 0]
    # conv_1's map is there from conv_2's backward work on, beside the one of conv_2.
    assert [row.backward_workspace for row in memory.layers] == [8e6, 14e6, 14e6, 6e6, 6e6]
    assert [row.forward_workspace for row in memory.layers] == [8e6, 6e6, 6e6, 0, 0]
    assert graph.info.memory is not None
    assert (peak(graph.info.memory).total, peak(memory).total) == (19_000_000, 15_000_000)


def test_a_cpu_has_nothing_to_offload_to() -> None:
    with pytest.raises(WhatifError, match="recording of a GPU"):
        offloaded(network([Call("Conv2d_0", 10_000, 10_000)], on_cpu=True))


@pytest.mark.parametrize("options", [{"mb": 0.0}, {"mb": float("nan")}, {"mb": 1e30}, {"layers": "("}, {}])
def test_what_makes_no_sense_is_one_sentence(options: dict[str, object]) -> None:
    with pytest.raises(WhatifError) as error:
        offloaded(three(), **options)  # without mb: the sizes are unknown
    assert "\n" not in str(error.value)


def test_twice_is_once() -> None:
    changed, _ = offloaded(three(), mb=1.0)
    again = load_transform("vdnn:mb=1")(changed)
    assert any("already" in note for note in again.notes)
    assert len(again) == len(changed)


# -- the policy -----------------------------------------------------------------------------------------------------


def paper_prefetch(current: int, offloaded: list[bool], prefetched: list[bool], types: list[str]) -> int:
    """The loop of vDNN's figure 10, as it is described there: a slow twin."""
    layer = current - 1
    while layer >= 0:
        if offloaded[layer] and not prefetched[layer]:
            return layer
        if types[layer] == "CONV":
            return -1
        layer -= 1
    return -1


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=12), st.integers(0, 12))
def test_the_layer_to_prefetch_is_that_of_the_paper(rows: list[tuple[bool, bool, bool]], current: int) -> None:
    current = min(current, len(rows))
    offloaded, prefetched, conv = ([row[column] for row in rows] for column in range(3))
    waiting = [out and not back for out, back in zip(offloaded, prefetched, strict=True)]
    expected = paper_prefetch(current, offloaded, prefetched, ["CONV" if c else "RELU" for c in conv])
    assert find_prefetch_layer(current, waiting, conv) == expected


@settings(max_examples=60, deadline=None)
@given(layers, st.sampled_from(["conv", "all", ".*"]), st.booleans(), st.integers(1, 3), st.integers(0, 20_000),
       st.booleans())  # fmt: skip
def test_on_any_network_each_map_leaves_and_returns_in_time(
    calls: list[Call], which: str, sync: bool, steps: int, launch_ns: int, named: bool
) -> None:
    graph = network(calls, steps=steps, launch_ns=launch_ns, named=named)
    try:
        changed, timeline = offloaded(graph, layers=which, sync=sync, mb=0.05)
    except WhatifError:
        return
    kept = ~changed.select(name="vDNN|cudaMemcpyAsync")
    assert changed.duration_ns[kept].tolist() == graph.duration_ns.tolist()
    out, back = (np.flatnonzero(changed.select(name=name)) for name in (OFFLOAD, FETCH))
    assert len(out) == len(back)
    # A map returns with the work that fetches it, never before, and only after it left.
    column = changed.attached[PREFETCH]
    fetcher = {int(column[task]): task for task in np.flatnonzero(column > 0)}
    for task in back.tolist():
        assert timeline.start_ns[task] >= timeline.start_ns[fetcher[-int(column[task])]]
    assert sorted(changed.layer[out].tolist()) == sorted(changed.layer[back].tolist())
    assert timeline.end_ns[out].min() <= timeline.start_ns[back].min()
    assert timeline.makespan_ns >= simulate(graph).makespan_ns
    # Larger maps are never faster.
    assert offloaded(graph, layers=which, sync=sync, mb=0.5)[1].makespan_ns >= timeline.makespan_ns


def test_when_another_what_if_removes_what_fetches_the_step_still_ends() -> None:
    transform = load_transform("vdnn:mb=0.126")
    changed = transform(three())
    gone = changed.remove(changed.select(name="^Conv2d_2 backward$"))
    timeline = simulate(gone.check(), transform.schedule)
    assert len(starts_us(timeline, FETCH)) == 2


# -- real recordings ------------------------------------------------------------------------------------------------


def test_vgg_on_an_h100_copies_more_than_it_computes(shared_traces: Path) -> None:
    """All convolutions but the first read what an earlier layer made: 6.6 GB at 224 x 224 and batch 512, and so on."""
    graph = whatif.read(shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz")
    prediction = whatif.apply(graph, "vdnn:sync=false")
    copied = prediction.graph.size_bytes[prediction.graph.select(name=OFFLOAD)]
    maps = 512 * 4 * np.array(
        [3 * 224**2, 64 * 224**2, 64 * 112**2, 128 * 112**2, 128 * 56**2, 256 * 56**2, 256 * 28**2, 512 * 28**2,
         512 * 14**2, 512 * 14**2]
    )  # fmt: skip
    assert len(copied) in (9, 10)
    assert copied.sum() == pytest.approx(maps.sum(), rel=0.25)
    # Both ways over the link of the data sheet, and compute cannot hide it.
    at_least_ms = 2 * copied.sum() / 63e9 * 1e3
    assert prediction.predicted_ms > max(prediction.baseline_ms, at_least_ms)
    assert prediction.low_ms <= prediction.predicted_ms <= prediction.high_ms


def test_a_trace_without_layers_uses_its_operators(shared_traces: Path) -> None:
    """ResNet-50 has 53 convolutions; the last one's map is fetched by what is behind it."""
    graph = whatif.read(shared_traces / "kineto-resnet50-v100" / "num_workers_4.2021-06.pt.trace.json.gz")
    prediction = whatif.apply(graph, "vdnn")
    for name in (OFFLOAD, FETCH):
        copies = prediction.graph.select(name=name)
        assert np.bincount(prediction.graph.step[copies], minlength=6).tolist() == [53] * 6
    assert prediction.predicted_ms > prediction.baseline_ms
    assert PREFETCH_NAME in prediction.graph.names
