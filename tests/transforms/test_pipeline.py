"""Pipelines: steps drawn by hand with exact nanoseconds, the papers' bubbles, what they keep and refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import replace
from tests.transforms.layer_graphs import Call, network
from tests.transforms.pipelines import FREE, LINK, changed, equal_layers, tasks_of
from whatif import TaskGraph, WhatifError, simulate
from whatif.graph.memory import LayerMemory, Memory, peak
from whatif.hardware.cluster.links import GLOO_MESSAGE_NS
from whatif.models.exchange import gloo
from whatif.models.layers.memory_effects import with_batch
from whatif.models.parallel.pipeline_memory import stage_memories
from whatif.models.parallel.pipeline_schedule import (
    SCHEDULES,
    Pass,
    in_possible_order,
    most_in_flight,
    needed,
    order,
)


def test_two_stages_in_turn_by_hand() -> None:
    """Of a micro-batch: forward (F) 1,002,000, backward (B) 2,002,000, message 1,000 + 100,000; times in us.

    ::

        stage 0: GPU      1|F0 1003|F1 2005|          4209|B0 6211|  7213|B1 9215|u 9217.5
        stage 0 to 1               1003|s0 1104|  2005|s1 2106|
        stage 1: GPU                    1104|F0 2106|B0 4108|F1 5110|B1 7112|u
        stage 1 to 0                                        4108|b0 4209|  7112|b1 7213|
        stage 0: CPU      |F0|send|F1|send|recv|B0|recv|B1|u
    """
    graph = changed(equal_layers(2), f"stages=2,micro_batches=2,schedule=1f1b,{LINK}")
    assert tasks_of(graph, "stage 0: GPU") == [
        ("forward 0", 1_000, 1_003_000), ("forward 1", 1_003_000, 2_005_000), ("backward 0", 4_209_000, 6_211_000),
        ("backward 1", 7_213_000, 9_215_000), ("update", 9_215_000, 9_217_500),
    ]  # fmt: skip
    assert tasks_of(graph, "stage 1: GPU") == [
        ("forward 0", 1_104_000, 2_106_000), ("backward 0", 2_106_000, 4_108_000), ("forward 1", 4_108_000, 5_110_000),
        ("backward 1", 5_110_000, 7_112_000), ("update", 7_112_000, 7_114_500),
    ]  # fmt: skip
    assert tasks_of(graph, "network: stage 0 to 1") == [("send", 1_003_000, 1_104_000), ("send", 2_005_000, 2_106_000)]
    assert tasks_of(graph, "network: stage 1 to 0") == [("send", 4_108_000, 4_209_000), ("send", 7_112_000, 7_213_000)]
    assert tasks_of(graph, "stage 0: CPU") == [
        ("forward 0", 0, 1_000), ("c10d::send", 1_000, 56_000), ("forward 1", 56_000, 57_000),
        ("c10d::send", 57_000, 112_000), ("c10d::recv_", 112_000, 167_000), ("backward 0", 167_000, 168_000),
        ("c10d::recv_", 168_000, 223_000), ("backward 1", 223_000, 224_000), ("update", 224_000, 224_500),
    ]  # fmt: skip
    assert simulate(graph).step_times_ns("span") == (9_216_500,)


def test_all_forward_passes_first_by_hand() -> None:
    """As above: the last micro-batch comes back first.

    ::

        stage 0: GPU      1|F0 1003|F1 2005|               5211|B1 7213|B0 9215|u
        stage 1: GPU              1104|F0 2106|F1 3108|B1 5110|B0 7112|u
    """
    graph = changed(equal_layers(2), f"stages=2,micro_batches=2,schedule=gpipe,{LINK}")
    assert tasks_of(graph, "stage 1: GPU")[:4] == [
        ("forward 0", 1_104_000, 2_106_000), ("forward 1", 2_106_000, 3_108_000), ("backward 1", 3_108_000, 5_110_000),
        ("backward 0", 5_110_000, 7_112_000),
    ]  # fmt: skip
    assert tasks_of(graph, "stage 0: GPU")[2:4] == [
        ("backward 1", 5_211_000, 7_213_000), ("backward 0", 7_213_000, 9_215_000),
    ]  # fmt: skip


def test_recomputing_comes_before_each_backward_pass() -> None:
    graph = changed(equal_layers(2), f"stages=2,micro_batches=2,schedule=gpipe,recompute=true,{FREE}")
    lengths = {(name, end - start) for name, start, end in tasks_of(graph, "stage 1: GPU")}
    assert lengths == {
        ("forward 0", 1_002_000), ("forward 1", 1_002_000), ("backward 0", 3_004_000), ("backward 1", 3_004_000),
        ("update", 2_500),
    }  # fmt: skip


def test_a_host_bound_stage_takes_its_launches() -> None:
    """Kernels of 2 us, launches of 2,000: one micro-batch after the other leaves the CPU; times in us.

    ::

        stage 0: CPU  |F0 2000|send 2055|F1 4055|send 4110|recv 4165|B0 6165|recv 6220|B1 8220|u 9220
        stage 0: GPU       2000|F0 2002|   4055|F1|            6165|B0|           8220|B1| 9220|u
    """
    graph = changed(equal_layers(2, work_ns=0, launch_ns=2_000_000), f"stages=2,micro_batches=2,{FREE}")
    starts = [start for _, start, _ in tasks_of(graph, "stage 0: GPU")]
    assert starts == [2_000_000, 4_055_000, 6_165_000, 8_220_000, 9_220_000]


def test_on_a_cpu_calls_and_work_follow_one_another() -> None:
    """Over TCP 0.5 GB/s carry 0.475 bytes/ns: 47,500 bytes take 100,000, latency 1,000; a call takes c; times in us.

    ::

        stage 0: CPU  |F0 1002|send|F1|send|recv 2004+3c|  4208+2c|B0 6210+2c|recv|  7212+4c|B1|u
        stage 1: CPU  |recv c|  1103+c|F0|B0 4107+c|send|recv|F1|B1 7111+3c|send|u
    """
    recorded = equal_layers(2, on_cpu=True)
    graph = changed(recorded, "stages=2,micro_batches=2,bandwidth=0.5GB/s,latency_us=1,activation_mb=0.095")
    c = round(float(gloo.one_way_ns(recorded, [47_500])[0]))
    assert c > GLOO_MESSAGE_NS / 2
    assert tasks_of(graph, "stage 0: CPU") == [
        ("forward 0", 0, 1_002_000), ("c10d::send", 1_002_000, 1_002_000 + c),
        ("forward 1", 1_002_000 + c, 2_004_000 + c), ("c10d::send", 2_004_000 + c, 2_004_000 + 2 * c),
        ("c10d::recv_", 2_004_000 + 2 * c, 2_004_000 + 3 * c), ("backward 0", 4_208_000 + 2 * c, 6_210_000 + 2 * c),
        ("c10d::recv_", 6_210_000 + 2 * c, 6_210_000 + 3 * c), ("backward 1", 7_212_000 + 4 * c, 9_214_000 + 4 * c),
        ("update", 9_214_000 + 4 * c, 9_216_500 + 4 * c),
    ]  # fmt: skip
    assert tasks_of(graph, "stage 1: CPU")[:4] == [
        ("c10d::recv_", 0, c), ("forward 0", 1_103_000 + c, 2_105_000 + c),
        ("backward 0", 2_105_000 + c, 4_107_000 + c), ("c10d::send", 4_107_000 + c, 4_107_000 + 2 * c),
    ]  # fmt: skip


def unequal(count: int, forward_ns: list[int], backward_ns: list[int], micro: int) -> TaskGraph:
    """Layers with the given times of a micro-batch, 2,000 of each independent of its size."""
    calls = [
        Call(f"Linear_{i}", 2_000 + micro * (f - 2_000), 2_000 + micro * (b - 2_000), 1_000)
        for i, (f, b) in enumerate(zip(forward_ns, backward_ns, strict=True))
    ]
    assert len(calls) == count
    return network(calls)


@pytest.mark.parametrize(
    ("schedule", "first", "second", "third"),
    [
        ("gpipe",
         "F0 0 1, F1 1 2, F2 2 3, F3 3 4, B3 26 28, B2 31 33, B1 36 38, B0 41 43",
         "F0 1.5 4.5, F1 4.5 7.5, F2 7.5 10.5, F3 10.5 13.5, B3 20.5 25.5, B2 25.5 30.5, B1 30.5 35.5, B0 35.5 40.5",
         "F0 5 7, F1 8 10, F2 11 13, F3 14 16, B3 16 20, B2 20 24, B1 24 28, B0 28 32"),
        ("1f1b",
         "F0 0 1, F1 1 2, F2 2 3, B0 17 19, F3 19 20, B1 25 27, B2 33 35, B3 40 42",
         "F0 1.5 4.5, F1 4.5 7.5, B0 11.5 16.5, F2 16.5 19.5, B1 19.5 24.5, F3 24.5 27.5, B2 27.5 32.5, B3 34.5 39.5",
         "F0 5 7, B0 7 11, F1 11 13, B1 13 17, F2 20 22, B2 22 26, F3 28 30, B3 30 34"),
    ],
)  # fmt: skip
def test_three_unequal_stages_by_hand(schedule: str, first: str, second: str, third: str) -> None:
    """Forward 1, 3 and 2 ms a micro-batch, backward 2, 5 and 4, messages 0.5; the first launch comes 0.001 before.

    As in "F1 4.5 7.5": the forward pass of micro-batch 1 from 4.5 to 7.5 ms.
    """
    graph = unequal(3, [1_000_000, 3_000_000, 2_000_000], [2_000_000, 5_000_000, 4_000_000], 4)
    link = "bandwidth=1GB/s,latency_us=1,activation_mb=1.996"
    found = changed(graph, f"stages=3,micro_batches=4,schedule={schedule},{link}")
    for stage, drawn in enumerate((first, second, third)):
        expected = []
        for one in drawn.split(", "):
            what, start, end = one.split()
            name = f"{'forward' if what[0] == 'F' else 'backward'} {what[1:]}"
            expected.append((name, round(float(start) * 1e6) + 1_000, round(float(end) * 1e6) + 1_000))
        assert tasks_of(found, f"stage {stage}: GPU")[:-1] == expected


def test_the_interleaved_order_by_hand() -> None:
    """Two stages of two chunks, four micro-batches: part 2 is chunk 1 of stage 0, part 3 that of stage 1.

    Megatron-LM's warm-up is 2 (p - 1 - k) + (v - 1) p passes: 4 and 2.
    """
    orders = [
        " ".join(f"{'B' if one.backward else 'F'}{one.micro_batch}/{one.part}" for one in passes)
        for passes in order("interleaved", 2, 4, 2)
    ]
    assert orders == [
        "F0/0 F1/0 F0/2 F1/2 F2/0 B0/2 F3/0 B1/2 F2/2 B0/0 F3/2 B1/0 B2/2 B3/2 B2/0 B3/0",
        "F0/1 F1/1 F0/3 B0/3 F1/3 B1/3 F2/1 B0/1 F3/1 B1/1 F2/3 B2/3 F3/3 B3/3 B2/1 B3/1",
    ]


@given(st.sampled_from(SCHEDULES), st.integers(2, 4), st.integers(1, 3), st.integers(1, 900), st.data())
@settings(max_examples=40, deadline=None)
def test_every_pass_begins_when_its_stage_and_its_message_are_there(
    schedule: str, stages: int, groups: int, message_us: int, data: st.DataObject
) -> None:
    """Against the recurrence over the orders: a stage does one pass at a time, a link one message at a time."""
    micro, parts = groups * stages, stages * (2 if schedule == "interleaved" else 1)
    lengths = st.lists(st.integers(300, 3_000), min_size=parts, max_size=parts)
    forward, backward = ([1_000 * us for us in data.draw(lengths)] for _ in range(2))
    link = f"bandwidth=1GB/s,latency_us=0,activation_mb={message_us * micro / 1e3}"
    graph = unequal(parts, forward, backward, micro)
    found = changed(graph, f"stages={stages},micro_batches={micro},schedule={schedule},{link}")
    orders = order(schedule, stages, micro, 2)
    free_ns = [1_000] * stages
    link_free_ns: dict[tuple[int, int], int] = {}
    arrived_ns: dict[Pass, int] = {}
    expected: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    for one in in_possible_order(orders):
        stage, before = one.part % stages, needed(one, parts - 1)
        start_ns = max(free_ns[stage], arrived_ns[before] if before else 0)
        end_ns = start_ns + (backward if one.backward else forward)[one.part]
        free_ns[stage] = end_ns
        expected[stage].append((start_ns, end_ns))
        after = one.part + (-1 if one.backward else 1)
        arrived_ns[one] = end_ns
        if 0 <= after < parts:
            way = stage, after % stages
            sent_ns = max(end_ns, link_free_ns.get(way, 0)) + 1_000 * message_us
            arrived_ns[one] = link_free_ns[way] = sent_ns
    for stage in range(stages):
        passes = tasks_of(found, f"stage {stage}: GPU")[:-1]
        assert [(start, end) for _, start, end in passes] == expected[stage]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro"), [(2, 1), (2, 4), (3, 5), (4, 4), (4, 16), (8, 3)])
def test_the_bubble_of_equal_stages_is_that_of_the_papers(schedule: str, stages: int, micro: int) -> None:
    """(p - 1) / m of the ideal time m (f + b): Huang et al. §2.3 and Narayanan et al. (SC 2021) §2.2.1."""
    graph = changed(equal_layers(stages, work_ns=micro * 10_000_000),
                    f"stages={stages},micro_batches={micro},schedule={schedule},{FREE}")  # fmt: skip
    ideal_ns = micro * (10_002_000 + 20_002_000)
    update_ns = round(5_000 / stages)
    assert simulate(graph).step_times_ns("span") == (round(ideal_ns * (1 + (stages - 1) / micro)) + update_ns,)


@pytest.mark.parametrize(("stages", "micro", "chunks"), [(2, 2, 2), (2, 4, 2), (4, 4, 2), (4, 8, 3), (4, 16, 4)])
def test_chunks_make_the_bubble_smaller(stages: int, micro: int, chunks: int) -> None:
    """(p - 1) / (v m) of the ideal time: Narayanan et al. (SC 2021) §2.2.2."""
    spec = f"stages={stages},micro_batches={micro},schedule=interleaved,chunks={chunks},{FREE}"
    graph = changed(equal_layers(stages * chunks, work_ns=micro * 10_000_000), spec)
    ideal_ns = chunks * micro * (10_002_000 + 20_002_000)
    bubble = (stages - 1) / (chunks * micro)
    assert simulate(graph).step_times_ns("span") == (round(ideal_ns * (1 + bubble)) + round(5_000 / stages),)


def test_every_step_takes_as_long_by_every_clock() -> None:
    """m (f + b) (1 + (p - 1) / m) and the first stage's update, 2,500; the CPU runs ahead of the GPU."""
    graph = changed(equal_layers(2, steps=6), f"stages=2,micro_batches=2,{FREE}")
    step_ns = 3 * (1_002_000 + 2_002_000) + 2_500
    timeline = simulate(graph)
    assert timeline.step_times_ns("gpu") == (step_ns,) * 5
    assert timeline.step_times_ns("span") == (6 * step_ns,)
    on_cpu = changed(equal_layers(2, steps=6, on_cpu=True), f"stages=2,micro_batches=2,{FREE}")
    assert len(set(simulate(on_cpu).step_times_ns("mark")[:-1])) == 1


# -- memory ---------------------------------------------------------------------------------------------------------


def kept_by_stages(
    memory: Memory, part: list[int], orders: list[list[Pass]], *, recompute: bool = False
) -> list[Memory]:
    """Return what equal stages keep of four micro-batches; ``part`` is that of each row of the memory."""
    flights = [most_in_flight(passes) for passes in orders]
    shares = np.full(len(orders), 1 / len(orders))
    micro = with_batch(memory, 1 / 4)
    return stage_memories(memory, micro, np.array(part), flights, 4, shares, shares, 1 / 4, recompute=recompute)


def test_what_the_stages_keep() -> None:
    """Four layers of 100 bytes of activations and 40 of gradients, one a stage, four micro-batches of 25.

    Stage k of 1F1B has 4 - k micro-batches in flight, each stage of GPipe all four. The first one has the batch.
    """
    rows = tuple(LayerMemory(f"Linear_{i}", activations=100, gradients=40, input=100) for i in range(4))
    memory = Memory(parameters=160, optimizer_state=320, inputs=100, layers=rows)
    resident = 40 + 80 + 40 + 40  # parameters, state, the gradients that add up, and the one that is added
    for schedule, kept in (("1f1b", [100, 75, 50, 25]), ("gpipe", [100, 100, 100, 100])):
        orders = order(schedule, 4, 4, 1)
        stages = kept_by_stages(memory, [0, 1, 2, 3], orders)
        assert [peak(stage).total - resident for stage in stages] == [100 + kept[0], *kept[1:]]
    # Megatron-LM's warm-up, 2 (p - 1 - k) + (v - 1) p, and the pass that follows it.
    stages = kept_by_stages(memory, [0, 1, 2, 3], order("interleaved", 2, 4, 2))
    assert [sum(row.activations for row in stage.layers) for stage in stages] == [25 * (4 + 1), 25 * (2 + 1)]

    found = changed(equal_layers(4, memory=memory), "stages=4,micro_batches=4")
    assert found.info.memory is not None
    assert peak(found.info.memory).total == resident + 200
    assert any("`memory` reports stage 0" in note for note in found.notes)


def test_a_stage_has_its_frozen_parameters() -> None:
    """Parameters were shared out by gradients: the last of two stages, which alone trains, had those of both."""
    rows = (LayerMemory("Linear_0", 100, 0, input=100), LayerMemory("Linear_1", 0, 40, input=100))
    memory = Memory(parameters=400, optimizer_state=80, inputs=0, layers=rows)
    layers = [
        {"name": "Linear_0", "type": "Linear", "parameters": 90, "gradient_bytes": 0},
        {"name": "Linear_1", "type": "Linear", "parameters": 10, "gradient_bytes": 40},
    ]
    found = changed(equal_layers(2, memory=memory, metadata={"layers": layers}), "stages=2,micro_batches=1")
    assert found.info.memory is not None
    assert found.info.memory.parameters == 360
    assert any("`memory` reports stage 0" in note for note in found.notes)


def test_recomputing_keeps_the_input_of_a_stage() -> None:
    """Two layers a stage: of each micro-batch in flight 25 bytes stay instead of 50."""
    rows = tuple(LayerMemory(f"Linear_{i}", 100, 40, kept_input=100, input=100) for i in range(4))
    memory = Memory(parameters=160, optimizer_state=320, inputs=100, layers=rows)
    orders = order("gpipe", 2, 4, 1)
    plain, less = (kept_by_stages(memory, [0, 0, 1, 1], orders, recompute=again) for again in (False, True))
    assert [sum(row.activations for row in stage.layers) for stage in plain] == [200, 200]
    assert [sum(row.activations for row in stage.layers) for stage in less] == [100, 100]


# -- what does not apply ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("stages=0", "expected from 1 to 10,000 stages, got 0"),
        ("stages=5", "expected at most 4 stages"),
        ("stages=2,schedule=interleaved,chunks=3", "expected at most 4 stages"),
        ("micro_batches=0", "expected 1 micro-batch or more, got 0"),
        ("stages=2,micro_batches=33", "at most as many micro-batches as the 32 samples"),
        ("schedule=zigzag", "expected one of 1f1b, gpipe, interleaved, got 'zigzag'"),
        ("stages=2,schedule=interleaved,micro_batches=3", "a multiple of the 2 stages"),
        ("stages=2,schedule=interleaved,chunks=0", "expected 1 chunk"),
        ("stages=2,activation_mb=-1", "expected activation_mb from 0 to 10,000,000, got -1"),
        ("stages=2,latency_us=-1", "expected latency_us from 0"),
    ],
)
def test_nonsense_gets_one_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(WhatifError) as error:
        changed(equal_layers(4, batch_size=32), spec)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("pipeline:")


def test_no_backward_pass_is_refused() -> None:
    graph = network([Call("Linear_0", 10_000), Call("Linear_1", 10_000)])
    with pytest.raises(WhatifError, match=r"^pipeline: expected a recording whose steps have a forward and a backward"):
        changed(graph, "stages=2")


def test_several_backward_passes_are_refused() -> None:
    twice = equal_layers(2, steps=2)
    phase = np.where(
        (twice.phase == whatif.Phase.UPDATE) & (twice.step == 0), whatif.Phase.UNKNOWN, twice.phase
    ).astype(np.int8)
    graph = twice.replace(phase=phase, step=np.zeros_like(twice.step), info=replace(twice.info, n_steps=1))
    with pytest.raises(WhatifError, match=r"^pipeline: expected one backward pass a step, got 2"):
        changed(graph, "stages=2")


def test_unknown_activations_are_asked_for() -> None:
    graph = equal_layers(2)
    graph = graph.replace(size_bytes=np.full(len(graph), -1))
    with pytest.raises(WhatifError, match="pipeline:activation_mb=12"):
        changed(graph, "stages=2,micro_batches=2")
    changed(graph, "stages=2,micro_batches=2,activation_mb=1")


def test_one_stage_stays_and_stages_are_refused() -> None:
    graph = equal_layers(2)
    alone = changed(graph, "stages=1")
    assert len(alone) == len(graph)
    assert "nothing changes" in alone.notes[-1]
    with pytest.raises(WhatifError, match="a pipeline's stages"):
        changed(changed(graph, "stages=2,micro_batches=2"), "stages=2,micro_batches=2")
