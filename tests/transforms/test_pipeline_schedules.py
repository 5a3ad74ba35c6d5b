"""Pipelines: schedules and cuts, and what is true of any network."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, replace
from tests.transforms.layer_graphs import Call, network
from tests.transforms.pipelines import FREE, LINK, changed, equal_layers
from whatif import TaskKind, WhatifError, load_transform, simulate
from whatif.models.parallel.pipeline_schedule import (
    SCHEDULES,
    Pass,
    in_possible_order,
    most_in_flight,
    needed,
    order,
)
from whatif.models.parallel.stage_work import at_micro_batch
from whatif.models.parallel.stages import balanced, model_of
from whatif.prediction.predict import Baseline

counts = st.tuples(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))


@given(counts)
@settings(max_examples=60, deadline=None)
def test_every_schedule_runs_every_pass_once(drawn: tuple[str, int, int, int]) -> None:
    schedule, stages, groups, chunks = drawn
    micro, parts = groups * stages, stages * (chunks if schedule == "interleaved" else 1)
    orders = order(schedule, stages, micro, chunks)
    expected = {Pass(way, part, number) for way in (False, True) for part in range(parts) for number in range(micro)}
    assert len(orders) == stages
    for stage, passes in enumerate(orders):
        assert {one.part % stages for one in passes} == {stage}
    found = in_possible_order(orders)
    assert set(found) == expected
    assert len(found) == len(expected)
    place = {one: number for number, one in enumerate(found)}
    for one in found:
        before = needed(one, parts - 1)
        assert before is None or place[before] < place[one]


@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b_keeps_as_many_micro_batches_as_stages_are_behind(stages: int, micro: int) -> None:
    """GPipe keeps all of them (Narayanan et al., SC 2021, §2.2.1)."""
    for stage, passes in enumerate(order("1f1b", stages, micro, 1)):
        assert most_in_flight(passes) == {stage: min(stages - stage, micro)}
    for stage, passes in enumerate(order("gpipe", stages, micro, 1)):
        assert most_in_flight(passes) == {stage: micro}


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8), st.integers(1, 5), st.integers(0, 60), st.data())
@settings(max_examples=100, deadline=None)
def test_cuts_are_the_best_there_are(times: list[int], stages: int, message: int, data: st.DataObject) -> None:
    """Against all cuts: the slowest stage or message, then the sum of squares."""
    stages = min(stages, len(times))
    other = data.draw(st.lists(st.integers(1, 50), min_size=len(times), max_size=len(times)))
    messages = [data.draw(st.integers(0, message)) for _ in times]

    def cost(cuts: tuple[int, ...]) -> tuple[int, int]:
        ends = [0, *cuts, len(times)]
        each = [max(sum(times[a:b]), sum(other[a:b]), messages[a] if a else 0) for a, b in pairwise(ends)]
        return max(each), sum(one * one for one in each)

    arrays = [np.array(column, dtype=np.float64) for column in (times, other, messages)]
    found = balanced(arrays[:2], np.arange(len(times)), stages, arrays[2])
    best = min(cost(cuts) for cuts in combinations(range(1, len(times)), stages - 1))
    assert cost(tuple(found.tolist())) == best


def test_a_block_is_not_divided() -> None:
    calls = [Call(f"Linear_{i}", 10_000, 20_000, 1_000) for i in range(6)]
    graph = network(calls)
    names = ("", *(f"blocks.{i // 2}.{'ab'[i % 2]}" for i in range(6)))
    graph = graph.replace(layers=names)
    model = model_of(graph)
    assert model.part.tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(WhatifError, match=r"^pipeline: expected at most 3 stages .* got 4\.$"):
        changed(graph, "stages=4,micro_batches=1")


def test_even_stages_have_as_many_blocks_each() -> None:
    """Where the first of four blocks takes as long as the others together, times put one block ahead of the cut."""
    calls = [Call(f"Linear_{i}", 10_000, 60_000 if i < 2 else 20_000, 1_000) for i in range(8)]
    graph = network(calls)
    graph = graph.replace(layers=("", *(f"blocks.{i // 2}.{'ab'[i % 2]}" for i in range(8))))
    for spec, first in (("", "blocks.1.a"), (",even=true", "blocks.2.a")):
        notes = changed(graph, f"stages=2,micro_batches=1{spec}").notes
        assert any(f"cut before {first};" in note for note in notes), notes
    with pytest.raises(WhatifError, match=r"^pipeline: expected a number of stages .* divides the 4 .* got 3;"):
        changed(graph, "stages=3,micro_batches=1,even=true")


def test_a_container_is_divided_and_its_blocks_are_not() -> None:
    names = ["stages.0.0.a", "stages.0.0.b", "stages.0.1.a", "stages.0.1.b", "stages.1.0.a", "stages.1.0.b"]
    rows = [{"name": name, "type": "Linear"} for name in names]
    rows += [{"name": f"stages.{i}", "type": "Sequential"} for i in range(2)]
    rows += [{"name": name, "type": "Block"} for name in ("stages.0.0", "stages.0.1", "stages.1.0")]
    graph = network([Call(f"Linear_{i}", 10_000, 20_000, 1_000) for i in range(6)], metadata={"layers": rows})
    graph = graph.replace(layers=("", *names))
    assert model_of(graph).part.tolist() == [0, 0, 1, 1, 2, 2]


# -- properties -----------------------------------------------------------------------------------------------------

layers = st.lists(st.tuples(st.integers(2, 400), st.integers(2, 800)), min_size=4, max_size=10)


@given(layers, st.sampled_from(SCHEDULES), st.integers(1, 3), st.integers(1, 300), st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_network_becomes_a_pipeline(
    drawn: list[tuple[int, int]], schedule: str, groups: int, launch_us: int, on_cpu: bool
) -> None:
    calls = [Call(f"Linear_{i}", 1_000 * f, 1_000 * b, 1_000) for i, (f, b) in enumerate(drawn)]
    graph = network(calls, launch_ns=1_000 * launch_us, steps=2, on_cpu=on_cpu)
    micro = 2 * groups
    slow, fast = (
        changed(graph, f"stages=2,micro_batches={micro},schedule={schedule},activation_mb=1,bandwidth={rate}")
        for rate in ("1Gbps", "10Gbps")
    )
    parts = 4 if schedule == "interleaved" else 2
    assert int((slow.kind == TaskKind.COMMUNICATION).sum()) == 2 * 2 * (parts - 1) * micro
    assert simulate(fast).makespan_ns <= simulate(slow).makespan_ns
    # What all passes of a stage take is no less than its part of the work.
    work = slow.kind == (TaskKind.CPU_OP if on_cpu else TaskKind.KERNEL)
    total_ns = int(slow.duration_ns[work & ~slow.select(name="update")].sum())
    assert total_ns >= 2 * 1_000 * sum(f + b for f, b in drawn) - len(slow)
    assert simulate(slow).makespan_ns >= int(slow.duration_ns[work & (slow.thread == slow.thread[work][0])].sum())


def test_one_micro_batch_is_the_recorded_work() -> None:
    graph = equal_layers(4, steps=3)
    found = changed(graph, f"stages=4,micro_batches=1,{FREE}")
    assert graph.duration_ns[graph.on_gpu].sum() == found.duration_ns[found.on_gpu].sum()


def test_a_later_what_if_knows_the_messages() -> None:
    graph = changed(equal_layers(2), f"stages=2,micro_batches=2,{LINK}")
    faster = load_transform("bandwidth:factor=2")(graph)
    assert set(faster.duration_ns[faster.kind == TaskKind.COMMUNICATION].tolist()) == {51_000}


@given(st.lists(st.tuples(st.integers(2, 40), st.integers(2, 80)), min_size=2, max_size=8), st.integers(1, 60),
       st.integers(0, 9))  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_pass_takes_what_its_kernels_take(drawn: list[tuple[int, int]], launch_us: int, lag_us: int) -> None:
    """Host-bound, GPU-bound or in between: the sums of a pass end when the kernels of the recorded step do."""
    calls = [Call(f"Linear_{i}", 1_000 * f, 1_000 * b, 1_000) for i, (f, b) in enumerate(drawn)]
    graph = network(calls, launch_ns=1_000 * launch_us)
    graph = graph.replace(threads=(CPU, replace(STREAM, lag_ns=1_000 * lag_us)))
    timeline, model = simulate(graph), model_of(graph)
    part = np.where(model.position >= 0, 0, -1)
    work = at_micro_batch(graph, model, 1).of_parts(part, 1)
    for pieces, phase in (
        (work.forward, whatif.Phase.FORWARD), (work.forward.then(work.backward), whatif.Phase.BACKWARD)
    ):  # fmt: skip
        ended_ns = int(timeline.end_ns[graph.on_gpu & (graph.phase == phase)].max())
        assert pieces.start_lag_ns[0, 0] + pieces.gpu_ns[0, 0] == ended_ns + 1_000 * lag_us
        assert pieces.cpu_ns[0, 0] == timeline.end_ns[graph.on_cpu & (graph.phase == phase)].max()


def test_a_faster_link_never_gives_a_longer_step(shared_traces: Path) -> None:
    path = shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz"
    baseline = Baseline.of(whatif.read(path), calibrated=False)
    for spec in ("stages=4,micro_batches=8", "stages=2,micro_batches=4,schedule=gpipe"):
        steps_ms = [
            whatif.apply(baseline, f"pipeline:{spec},bandwidth={rate}Gbps").predicted_ms
            for rate in (1, 2, 5, 10, 25, 50, 100, 200, 400)
        ]
        assert steps_ms == sorted(steps_ms, reverse=True)
