"""Stragglers and classes of workers: by hand, by order statistics, as properties, and on real recordings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build, names
from tests.transforms.layer_graphs import Call, network
from whatif import DependencyKind, Phase, TaskGraph, TaskKind, Thread, ThreadKind, WhatifError, load_transform, simulate
from whatif.models.exchange.replicate import classes, replicate
from whatif.models.exchange.stragglers import slowest_of
from whatif.prediction.predict import Baseline
from whatif.simulation.steps import step_ns

NCCL = Thread("stream 8", ThreadKind.STREAM, 0, 8)


def two_reductions(steps: int = 1, **info: Any) -> TaskGraph:
    """Two backward kernels, an all-reduce of each beside the next work, an update behind both; launches of 1.

    ::

        ns       0   1   2   3   4  5
        CPU      |lb1|lr1|lb2|lr2|lu|
        stream 7     |b1 20-----|b2 20-----|       |u 10|
        stream 8                |r1 15--|  |r2 15--|
    """
    build = Build(CPU, STREAM, NCCL, n_steps=steps, **info)
    for step in range(steps):
        ids = {}
        for name, stream, length, kind in (
            ("b1", 1, 20, TaskKind.KERNEL), ("r1", 2, 15, TaskKind.COMMUNICATION), ("b2", 1, 20, TaskKind.KERNEL),
            ("r2", 2, 15, TaskKind.COMMUNICATION), ("u", 1, 10, TaskKind.KERNEL),
        ):  # fmt: skip
            phase = Phase.UPDATE if name == "u" else Phase.BACKWARD
            call = build.task(0, 1, f"l{name}", phase=phase, step=step)
            ids[name] = build.task(stream, length, name, kind, phase=phase, step=step)
            build.edge(call, ids[name], kind=DependencyKind.LAUNCH)
        for source, target in (("b1", "r1"), ("b2", "r2"), ("r2", "u")):
            build.edge(ids[source], ids[target], kind=DependencyKind.EVENT)
    return build.graph()


def times_of(graph: TaskGraph, rank: int, kinds: tuple[TaskKind, ...]) -> dict[str, tuple[int, int]]:
    timeline = simulate(graph)
    ranks = np.array([thread.rank for thread in graph.threads])[graph.thread]
    chosen = np.flatnonzero((ranks == rank) & np.isin(graph.kind, kinds)).tolist()
    return {names(graph)[i]: (int(timeline.start_ns[i]), int(timeline.end_ns[i])) for i in chosen}


def test_a_slower_gpu_holds_up_both_reductions() -> None:
    """Twice the time of the GPU of worker 1: its kernels end at 41, 81 and, behind the sum, at 116.

    ::

        ns        1         21        41        61        81   96 106 116
        worker 0  |b1-------|b2-------|                        |u-|
                                      |r1-|                |r2-|
        worker 1  |b1-----------------|b2-----------------|     |u-----|
    """
    graph = classes(two_reductions(), [1.0, 2.0], slowed="gpu").check()
    work = (TaskKind.KERNEL, TaskKind.COMMUNICATION)
    assert times_of(graph, 0, work) == {
        "b1": (1, 21), "b2": (21, 41), "r1": (41, 56), "r2": (81, 96), "u": (96, 106),
    }  # fmt: skip
    assert times_of(graph, 1, work) == {
        "b1": (1, 41), "b2": (41, 81), "r1": (41, 56), "r2": (81, 96), "u": (96, 116),
    }  # fmt: skip


def test_the_slowest_of_three_classes_is_met_by_all() -> None:
    """GPUs that take 1, 1.5 and 3 times as long: the third's kernels end at 61, 121, and its update at 166.

    ::

        ns        1      21     31     41    61          121  136 146 151 166
        worker 0  |b1----|b2-----------|                       |u---|
        worker 1  |b1-----------|b2----------|                 |u-------|
        worker 2  |b1------------------------|b2---------|     |u------------|
        all                                  |r1 76|     |r2---|
    """
    graph = classes(two_reductions(), [1.0, 1.5, 3.0], slowed="gpu").check()
    for rank, factor in enumerate((1.0, 1.5, 3.0)):
        assert times_of(graph, rank, (TaskKind.COMMUNICATION,)) == {"r1": (61, 76), "r2": (121, 136)}
        end = 1 + round(20 * factor)
        assert times_of(graph, rank, (TaskKind.KERNEL,)) == {
            "b1": (1, end), "b2": (end, 2 * end - 1), "u": (136, 136 + round(10 * factor)),
        }  # fmt: skip


def test_each_reduction_waits_for_another_of_three_workers() -> None:
    """b1 and b2 take 20 and 20, 50 and 5, 5 and 100: the second worker is last at r1 (51), the third at r2 (106)."""
    graph = two_reductions()
    workers = [graph]
    for lengths in ((50, 5), (5, 100)):
        duration_ns = graph.duration_ns.copy()
        for name, length in zip(("b1", "b2"), lengths, strict=True):
            duration_ns[graph.select(name=f"^{name}$")] = length
        workers.append(graph.replace(duration_ns=duration_ns, low_ns=duration_ns, high_ns=duration_ns))
    found = replicate(workers, graph.kind == TaskKind.COMMUNICATION).check()
    for rank in range(3):
        assert times_of(found, rank, (TaskKind.COMMUNICATION,)) == {"r1": (51, 66), "r2": (106, 121)}
        assert times_of(found, rank, (TaskKind.KERNEL,))["u"] == (121, 131)


def test_other_times_on_merged_workers_are_those_of_a_new_graph() -> None:
    graph = two_reductions()
    classes(graph, [1.0, 2.0], slowed="gpu")  # kept for what follows
    for factors in ([1.0, 30.0], [1.0, 2.0, 3.0], [2.0, 1.0]):
        kept, new = classes(graph, factors, high=[40.0] * len(factors)), two_reductions()
        new = classes(new, factors, high=[40.0] * len(factors))
        for name in ("duration_ns", "low_ns", "high_ns", "thread", "name"):
            assert getattr(kept, name).tolist() == getattr(new, name).tolist()
        assert simulate(kept).end_ns.tolist() == simulate(new).end_ns.tolist()
    step = classes(graph.replace(step=graph.step + 1), factors)
    assert step.step.max() == graph.step.max() + 1


def test_three_classes_are_this_worker_the_slowest_of_its_like_and_of_the_others() -> None:
    """Eight workers, three of them twice as slow, all with 10 % jitter: 1, the slowest of five, twice that of three."""
    found = load_transform("straggler:count=3,slowdown=2,jitter_pct=10,what=gpu")(two_reductions(workers=8))
    kernels = found.select(name="^b1$")
    expected = [20.0, 20 * slowest_of(5, 10).mean, 40 * slowest_of(3, 10).mean]
    assert found.duration_ns[kernels].tolist() == pytest.approx(expected, abs=0.51)


def test_a_slower_cpu_holds_up_what_it_launches() -> None:
    """Launches of 30 instead of 1: b1 from 30, r1 from 60, b2 from 90, r2 from 120, the update from 150 on."""
    graph = classes(two_reductions(), [1.0, 30.0], slowed="cpu")
    transfers = {"r1": (60, 75), "r2": (120, 135)}
    assert times_of(graph, 0, (TaskKind.COMMUNICATION,)) == transfers
    assert times_of(graph, 0, (TaskKind.KERNEL,))["u"] == (135, 145)
    assert times_of(graph, 1, (TaskKind.KERNEL,))["u"] == (150, 160)


def test_the_transform_is_the_same_and_noted() -> None:
    graph = two_reductions(steps=5, workers=8)
    found = load_transform("straggler:slowdown=2,what=gpu")(graph).check()
    assert simulate(found).step_times_ns("gpu") == simulate(classes(graph, [1, 2], slowed="gpu")).step_times_ns("gpu")
    assert found.notes == ("straggler: the slowest of 8 workers takes 2 times as long as this one",)


def test_hubs_have_one_dependency_in_and_one_out_for_each_worker() -> None:
    graph = classes(two_reductions(), [1.0, 2.0, 3.0])
    hubs = np.flatnonzero(np.array([thread.rank < 0 for thread in graph.threads])[graph.thread])
    assert len(hubs) == 2
    for hub in hubs.tolist():
        assert (graph.dependencies.target == hub).sum() == 3
        assert (graph.dependencies.source == hub).sum() == 3
    assert len(graph) == 3 * (len(two_reductions()) + 2) + 2


def test_what_follows_changes_all_workers() -> None:
    """Transfers of half the time, and kernels of no time at all, whoever runs them."""
    slow = load_transform("straggler:slowdown=2,what=gpu")(two_reductions())
    faster = load_transform("bandwidth:factor=3")(slow)
    assert set(faster.duration_ns[faster.kind == TaskKind.COMMUNICATION].tolist()) == {5}
    free = load_transform("scale:name=^b1$,factor=0")(slow)
    assert free.duration_ns[free.select(name="^b1$")].tolist() == [0, 0]


# -- order statistics -----------------------------------------------------------------------------------------------


def test_the_slowest_of_two_and_three_has_a_closed_form() -> None:
    """For small s the lognormal is 1 + s z, and E max z of 2 and 3 is 1 / sqrt(pi) and 1.5 / sqrt(pi)."""
    for workers, expected in ((2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi))):
        assert (slowest_of(workers, 0.1).mean - 1) / 0.001 == pytest.approx(expected, rel=0.003)
    assert slowest_of(1, 20.0).mean == 1.0
    assert slowest_of(1000, 0.0) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("workers", "jitter_pct"), [(2, 10.0), (8, 5.0), (64, 20.0), (1000, 5.0)])
def test_the_slowest_of_many_is_that_of_drawn_times(workers: int, jitter_pct: float) -> None:
    variance = math.log1p((jitter_pct / 100) ** 2)
    drawn = np.random.default_rng(7).normal(-variance / 2, math.sqrt(variance), (4_000, workers))
    slowest = np.exp(drawn).max(axis=1)
    found = slowest_of(workers, jitter_pct)
    assert found.mean == pytest.approx(slowest.mean(), rel=0.005)
    assert [found.low, found.high] == pytest.approx(np.quantile(slowest, [0.05, 0.95]).tolist(), rel=0.01)


@given(st.integers(1, 10**6), st.floats(0.1, 100))
@settings(max_examples=25, deadline=None)
def test_more_workers_are_never_faster(workers: int, jitter_pct: float) -> None:
    few, many = slowest_of(workers, jitter_pct), slowest_of(2 * workers, jitter_pct)
    assert few.mean <= many.mean + 1e-12
    assert few.low <= few.high
    assert few.mean >= 1 - 1e-12


def test_jitter_slows_by_the_mean_of_the_slowest() -> None:
    """One all-reduce behind one kernel of a millisecond: it begins when the slowest of 100 has come."""
    build = Build(CPU, STREAM, NCCL, workers=100)
    _, kernel = build.launch(0, 1_000_000, "b")
    other = build.task(0, 0, "lr")
    reduced = build.task(2, 10_000, "r", TaskKind.COMMUNICATION)
    build.edge(other, reduced, kind=DependencyKind.LAUNCH)
    build.edge(kernel, reduced, kind=DependencyKind.EVENT)
    graph = load_transform("straggler:count=0,jitter_pct=5")(build.graph())
    expected = slowest_of(100, 5)
    assert times_of(graph, 0, (TaskKind.COMMUNICATION,))["r"][0] == round(1e6 * expected.mean)
    low, high = (simulate(graph.replace(duration_ns=bound)).makespan_ns for bound in (graph.low_ns, graph.high_ns))
    assert [low, high] == pytest.approx([1e6 * expected.low + 1e4, 1e6 * expected.high + 1e4], abs=1)


# -- properties -----------------------------------------------------------------------------------------------------

layers = st.lists(st.tuples(st.integers(2, 40), st.integers(2, 80)), min_size=2, max_size=6)


@given(layers, st.lists(st.floats(0.2, 5), min_size=1, max_size=4), st.booleans())
@settings(max_examples=30, deadline=None)
def test_classes_of_any_network(drawn: list[tuple[int, int]], factors: list[float], on_cpu: bool) -> None:
    calls = [Call(f"Linear_{i}", 1_000 * f, 1_000 * b, 1_000) for i, (f, b) in enumerate(drawn)]
    rows = [{"name": f"{i}", "layer": f"Linear_{i}", "bytes": 400_000} for i in reversed(range(len(drawn)))]
    graph = network(calls, steps=2, on_cpu=on_cpu, metadata={"grad_ready_order": rows})
    graph = load_transform("distributed:workers=4,bucket_mb=0.5")(graph)
    alone = simulate(graph)
    same = classes(graph, [1.0] * len(factors)).check()
    assert simulate(same).step_times_ns("span") == alone.step_times_ns("span")
    mixed = classes(graph, [1.0, *factors]).check()
    found = simulate(mixed).step_times_ns("span")[0]
    assert found >= alone.step_times_ns("span")[0]
    slower = classes(graph, [1.0, *factors, max(factors) * 1.5])
    assert simulate(slower).step_times_ns("span")[0] >= found
    # As many of one kind as there may be: one stands for all.
    doubled = classes(graph, [1.0, *factors, *factors])
    assert simulate(doubled).step_times_ns("span")[0] == found


# -- what does not apply ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("slowdown=0.5", "expected a slowdown from 1 to 1,000, got 0.5"),
        ("slowdown=nan", "expected a slowdown from 1 to 1,000"),
        ("jitter_pct=-1", "expected jitter_pct from 0 to 200, got -1"),
        ("count=8", "expected a count from 0 to 7"),
        ("count=-1", "expected a count from 0 to 7"),
        ("workers=1", "expected a count from 0 to 0"),
        ("what=disk", "expected one of all, gpu, cpu, got 'disk'"),
    ],
)
def test_nonsense_gets_one_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(WhatifError) as error:
        load_transform(f"straggler:{spec}")(two_reductions(workers=8))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_steps_that_do_not_communicate_wait_for_nobody() -> None:
    with pytest.raises(WhatifError, match=r"^straggler: .* first name a transform that adds communication"):
        load_transform("straggler")(network([Call("Linear_0", 10, 10)]))


def test_it_is_asked_once() -> None:
    graph = load_transform("straggler")(two_reductions())
    with pytest.raises(WhatifError, match=r"^straggler: expected the steps of one worker"):
        load_transform("straggler")(graph)


def test_no_difference_changes_nothing() -> None:
    graph = two_reductions()
    found = load_transform("straggler:slowdown=1")(graph)
    assert "nothing changes" in found.notes[-1]
    assert found.duration_ns is graph.duration_ns


def test_workers_have_the_same_tasks() -> None:
    with pytest.raises(WhatifError, match="same tasks"):
        replicate([two_reductions(), two_reductions(2)], np.zeros(10, dtype=np.bool_))


# -- real recordings --------------------------------------------------------------------------------------------------


def test_a_real_rank_with_a_slower_peer(shared_traces: Path) -> None:
    """A V100 of two: equal peers change nothing; one whose CPU is slower holds a host-bound step up by as much."""
    baseline = Baseline.of(whatif.read(shared_traces / "hta" / "v100_allreduce_rank1of2.json.gz"))
    same = classes(baseline.graph, [1.0, 1.0])
    found = step_ns(simulate(same).step_times_ns("gpu"), same, "gpu")
    assert found == pytest.approx(baseline.step_ns, rel=1e-9)
    slower = [whatif.apply(baseline, f"straggler:slowdown={factor},what=cpu").speedup for factor in (1.1, 1.5, 2)]
    assert [1 / speedup for speedup in slower] == pytest.approx([1.1, 1.5, 2], rel=0.02)


def test_a_real_cpu_step_made_distributed(own_traces: Path) -> None:
    baseline = Baseline.of(whatif.read(own_traces / "resnet18_cifar_cpu.json.gz"))
    alone = whatif.apply(baseline, "distributed:workers=8").predicted_ms
    one, thousand = (
        whatif.apply(baseline, f"distributed:workers={n}", "straggler:count=0,jitter_pct=5").predicted_ms
        for n in (8, 1000)
    )
    assert alone < one < thousand
    one_slow = whatif.apply(baseline, "distributed:workers=8", "straggler:slowdown=1.5")
    assert one_slow.predicted_ms == pytest.approx(1.5 * alone, rel=0.03)
    assert one_slow.low_ms <= one_slow.predicted_ms <= one_slow.high_ms
