"""Recordings of several workers on other numbers of them, and what a slower link may do to a step."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build, apply, extra_data, replace, with_metadata
from tests.transforms.communication_graphs import training
from tests.transforms.sharded_steps import blocks
from whatif import DependencyKind, Phase, TaskGraph, TaskKind, WhatifError, simulate
from whatif.graph.recorded import StepTimes
from whatif.graph.types import Int64, ProcessGroup
from whatif.ingest.ranks.read import read_ranks
from whatif.models.durations.estimator import described
from whatif.prediction.baseline import Baseline
from whatif.prediction.transform import load_transform
from whatif.questions.sweep.scaling import scaling

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"
A_NS, B_NS = 1_000, 0.01


def taken_ns(size: int, workers: int) -> int:
    """What a ring takes of the network that the steps below were recorded on."""
    return round(2 * (workers - 1) * A_NS + 2 * (workers - 1) / workers * size * B_NS)


def recorded(workers: int, waits: tuple[int, ...] = (0, 0, 0), name: str = ALL_REDUCE) -> TaskGraph:
    """Steps of one kernel, two collectives one behind the other, the first of which waits, and an update."""
    build = Build(CPU, STREAM, gpu="Tesla V100-SXM2-32GB", n_steps=len(waits), workers=workers)
    for step, wait_ns in enumerate(waits):
        for what, phase, length, size in (
            ("b", Phase.BACKWARD, 10_000, -1),
            (name, Phase.BACKWARD, taken_ns(1_000_000, workers) + wait_ns, 1_000_000),
            (name, Phase.BACKWARD, taken_ns(9_000_000, workers), 9_000_000),
            ("u", Phase.UPDATE, 5_000, -1),
        ):
            call = build.task(0, 100, f"launch {what}", phase=phase, step=step)
            kind = TaskKind.COMMUNICATION if what == name else None
            work = build.task(1, length, what, kind, phase=phase, step=step, size_bytes=size)
            build.edge(call, work, 0, DependencyKind.LAUNCH)
    graph = build.graph()
    return graph.replace(start_ns=np.arange(len(graph), dtype=np.int64))


def lengths(graph: TaskGraph) -> list[int]:
    return graph.duration_ns[graph.kind == TaskKind.COMMUNICATION].tolist()


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (4, 3)])
def test_collectives_of_a_ring_are_issued_again_exactly(before: int, after: int) -> None:
    """Of the two sizes the fit finds a round's and a byte's time, so that another ring is exact.

    A tree, which is less than a ring's rounds where there are many workers, is left out by so few.
    """
    found = apply(recorded(before), f"distributed:workers={after}")
    assert lengths(found) == pytest.approx(3 * [taken_ns(1_000_000, after), taken_ns(9_000_000, after)], rel=0.01)
    assert found.info.workers == after


def test_waiting_for_peers_stays() -> None:
    found = lengths(apply(recorded(2, (0, 7_000, 3_000)), "distributed:workers=4"))
    assert np.subtract(found[::2], taken_ns(1_000_000, 4)).tolist() == pytest.approx([0, 7_000, 3_000], abs=200)


def test_a_second_what_if_knows_what_was_waited() -> None:
    graph = recorded(2, (0, 7_000, 3_000))
    spec = "distributed:workers=4,bandwidth=8Gbps,latency_us=0,algorithm=ring"
    once = apply(graph, spec)
    assert lengths(apply(once, spec)) == lengths(once)
    assert lengths(apply(apply(graph, "distributed:workers=8"), spec)) == lengths(once)


def test_one_worker_sends_nothing_and_as_many_change_nothing() -> None:
    graph = recorded(4)
    alone = apply(graph, "distributed:workers=1")
    assert not (alone.kind == TaskKind.COMMUNICATION).any()
    assert lengths(apply(graph, "distributed:workers=4")) == lengths(graph)


def test_as_many_workers_update_what_they_updated() -> None:
    """A note said that each worker updates 1 times its parameters, and unchanged updates counted as estimates."""
    graph = whatif.read(extra_data("traces", "modded-nanogpt-8xh100", "current.rank0.json.gz"))
    for what_if in ("fsdp:workers=8", "zero:workers=8"):
        answer = whatif.apply(graph, what_if)
        assert answer.predicted_ms == answer.baseline_ms
        assert not described(answer.graph)
        assert not any("updates" in note for note in answer.notes)
    assert any("updates 0.5 times the parameters" in note for note in whatif.apply(graph, "fsdp:workers=16").notes)


def test_the_recorded_exchange_is_not_said_to_be_another_one() -> None:
    """All-reduces for four workers were the answer to fsdp, without a word."""
    sentence = "fsdp: the recorded exchange stays (all_reduce); to predict another one, record one worker"
    assert sentence in apply(recorded(2), "fsdp:workers=4").notes
    for asked in ("fsdp:workers=1", "distributed:workers=4"):
        assert not any("exchange stays" in note for note in apply(recorded(2), asked).notes)


def test_one_worker_meets_nobody_whatever_a_collective_without_a_name_does() -> None:
    graph = recorded(4)
    first = np.flatnonzero(graph.kind == TaskKind.COMMUNICATION)[0]
    name = np.where(graph.name == graph.name[first], len(graph.names), graph.name).astype(graph.name.dtype)
    name[first + 1 :] = graph.name[first + 1 :]
    graph = graph.replace(names=(*graph.names, "ncclDevKernel_Generic(ncclDevKernelArgs)"), name=name)
    found = apply(graph, "distributed:workers=1")
    assert not (found.kind == TaskKind.COMMUNICATION).any()
    assert not any("as recorded" in note for note in found.notes)
    other = apply(graph, "distributed:workers=2")
    assert any("ncclDevKernel_Generic stays as recorded on 4 workers" in note for note in other.notes)


def test_collectives_without_a_size_follow_the_bytes_of_a_ring_and_a_note_says_so() -> None:
    graph = recorded(8)
    small = np.flatnonzero(graph.size_bytes == 1_000_000)
    graph = graph.replace(size_bytes=np.where(graph.size_bytes == 1_000_000, -1, graph.size_bytes))
    before_ns = graph.duration_ns[small]
    for options, end in (("", ""), (",bandwidth=1Gbps", "; the network that is asked for does not change it")):
        found = apply(graph, f"distributed:workers=64{options}")
        assert found.duration_ns[small] / before_ns == pytest.approx((63 / 64) / (7 / 8), rel=1e-3)
        assert (
            "distributed: the sizes of 3 of 6 collectives, 16 % of their time, are not recorded; their time is scaled "
            f"by the bytes that pass each link of a ring{end}"
        ) in found.notes


def test_another_network_is_its_own_model() -> None:
    found = apply(recorded(2), "distributed:workers=4,bandwidth=8Gbps,latency_us=0,algorithm=ring")
    assert lengths(found) == 3 * [1_500_000, 13_500_000]


def test_another_network_needs_the_sizes() -> None:
    graph = recorded(2)
    unknown = graph.replace(size_bytes=np.full(len(graph), -1))
    with pytest.raises(WhatifError, match="collectives of known size for another network"):
        apply(unknown, "distributed:workers=4,bandwidth=8Gbps")
    assert lengths(apply(unknown, "distributed:workers=4")) != lengths(unknown)


def test_what_is_no_collective_of_all_is_named() -> None:
    with pytest.raises(WhatifError, match="got ncclDevKernel_SendRecv alone"):
        apply(recorded(2, name="ncclDevKernel_SendRecv(ncclDevKernelArgs)"), "distributed:workers=4")
    untold = recorded(2)
    untold = untold.replace(info=replace(untold.info, workers=None))
    with pytest.raises(WhatifError, match="its number of workers"):
        apply(untold, "distributed:workers=4")


def in_groups(graph: TaskGraph, *groups: ProcessGroup) -> tuple[TaskGraph, list[Int64]]:
    """The graph with its smaller and its larger collectives in these groups, and the ids of either."""
    among = [np.flatnonzero(graph.size_bytes == size) for size in (1_000_000, 9_000_000)]
    group = np.full(len(graph), -1, dtype=graph.group.dtype)
    for number, tasks in enumerate(among):
        group[tasks] = number
    return graph.replace(group=group, info=replace(graph.info, groups=groups)), among


def test_a_collective_of_a_part_of_the_workers_stays() -> None:
    """One rank's recording contains the size of each process group: those of a tensor-parallel pair stay."""
    graph, (pair, everybody) = in_groups(recorded(4), ProcessGroup("pair", "", 2), ProcessGroup("all", "", 4))
    found = apply(graph, "distributed:workers=8")
    assert found.duration_ns[pair].tolist() == graph.duration_ns[pair].tolist()
    assert found.duration_ns[everybody].tolist() != graph.duration_ns[everybody].tolist()
    assert "AllReduce_Sum_f32_RING_LL among 2 stays as recorded on 4 workers, 13 % of the time" in " ".join(found.notes)
    # A second what-if knows of it: two workers are no reason to take the pair for all of them.
    again = apply(apply(graph, "distributed:workers=2"), "distributed:workers=8")
    assert again.duration_ns[pair].tolist() == graph.duration_ns[pair].tolist()


def test_of_two_groups_of_one_size_that_of_most_bytes_has_the_gradients() -> None:
    """Two ranks for data and two for tensor parallelism: DDP records the size of its group, not which one it is."""
    groups = ProcessGroup("tensor", "[0, 1]", 2), ProcessGroup("data", "[0, 2]", 2)
    graph, (pair, gradients) = in_groups(recorded(4), *groups)
    graph = with_metadata(graph, ddp={"source": "ddp", "world_size": 2, "buckets": []})
    found = apply(graph, "distributed:workers=4")
    assert found.duration_ns[pair].tolist() == graph.duration_ns[pair].tolist()
    assert (found.duration_ns[gradients] > graph.duration_ns[gradients]).all()


def test_groups_of_a_part_alone_are_refused() -> None:
    graph, _ = in_groups(recorded(8), ProcessGroup("tensor", "", 2), ProcessGroup("data", "", 4))
    with pytest.raises(WhatifError, match=r"among all 8 workers in .*, got .*LL among 2, .*LL among 4 alone"):
        apply(graph, "distributed:workers=16")


def test_a_recording_of_two_ranks_comes_back_from_four() -> None:
    graph = whatif.read(extra_data("traces", "hta", "v100_allreduce_rank1of2.json.gz"))
    measured = whatif.apply(graph).predicted_ms
    assert whatif.apply(graph, "distributed:workers=2").predicted_ms == pytest.approx(measured, rel=0.02)
    four = whatif.apply(graph, "distributed:workers=4")
    assert four.predicted_ms > measured
    back = whatif.apply(four.graph, "distributed:workers=2", calibrated=False).predicted_ms
    assert back == pytest.approx(measured, rel=0.02)


def test_ranks_on_cpus_scale(own_traces: Path) -> None:
    graph = read_ranks([own_traces / "ranks_cpu" / "even"]).graph
    found = scaling(Baseline.of(graph), [load_transform("distributed")], (1, 2, 4, 8))
    steps = [row.step_ms or 0.0 for row in found.rows]
    assert steps == sorted(steps)
    assert found.rows[1].step_ms == pytest.approx(79.6, rel=0.01)  # as recorded
    assert found.rows[1].samples_per_s == pytest.approx(1e3 * 32 / steps[1])


@pytest.mark.parametrize("now", ["100Gbps", "10Gbps", "0.01Gbps"])
def test_another_bandwidth_later_is_that_bandwidth_at_once_on_cpus(own_traces: Path, now: str) -> None:
    """The CPU's part of a sum over gloo was recorded as latency: from 100 Gbps the step was 2 % longer than at 0.1."""
    graph = read_ranks([own_traces / "ranks_cpu" / "even"]).graph
    factor = 0.1 / float(now.removesuffix("Gbps"))
    later = whatif.apply(graph, f"distributed:workers=4,bandwidth={now}", f"bandwidth:factor={factor}")
    at_once = whatif.apply(graph, "distributed:workers=4,bandwidth=0.1Gbps")
    assert later.predicted_ms == pytest.approx(at_once.predicted_ms, rel=1e-3)


def test_four_hosts_of_the_lab_from_two_and_the_reverse(own_traces: Path) -> None:
    """Ground truth: steps over rate-limited links, measured without the profiler; docs/scaling.md shows the table.

    As the recorder writes it into a recording, each starts from its own step without the profiler.
    """
    folder, rows, errors = own_traces / "lab_ranks_cpu", [], []
    for model, rate in itertools.product(("gpt2", "vgg"), (200, 1000)):
        names = {hosts: f"ranks-{model}-{rate}mbit-{hosts}" for hosts in (2, 4)}
        records = {n: json.loads((folder / f"{name}.json").read_text()) for n, name in names.items()}
        measured = {n: one["median_ms"] for n, one in records.items()}
        for before, after in ((2, 4), (4, 2)):
            graph = read_ranks([folder / names[before]]).graph
            untraced = StepTimes(*(records[before][name] for name in ("median_ms", "q25_ms", "q75_ms")))
            recorded = replace(graph.info.recorded, untraced_step=untraced)
            info = replace(graph.info, recorded=recorded, untraced_step_ns=round(1e6 * measured[before]))
            answer = whatif.apply(graph.replace(info=info), f"distributed:workers={after}")
            error = 100 * (answer.predicted_ms / measured[after] - 1)
            errors.append(abs(error))
            rows.append(
                f"| {model} | {rate:,} Mbit/s | {before} to {after} | {answer.baseline_ms:.1f} ms | "
                f"{answer.predicted_ms:.1f} ms | {measured[after]:.1f} ms | {error:+.1f} % |"
            )
    assert np.median(errors) <= 4
    assert max(errors) <= 10
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
    missing = [row for row in rows if row not in page]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    "parts",
    [
        ("triosim-vgg13-h100", "vgg13_bs512_adam.json.gz"),
        ("kineto-resnet50-v100", "num_workers_4.2021-06.pt.trace.json.gz"),
        ("hta", "v100_allreduce_rank1of2.json.gz"),
    ],
)
def test_up_to_16384_workers_the_step_only_grows_and_the_answer_is_quick(parts: tuple[str, ...]) -> None:
    baseline = Baseline.of(whatif.read(extra_data("traces", *parts)))
    counts = [2**power for power in range(15)]
    begin_s = time.process_time()
    found = scaling(baseline, [load_transform("distributed")], [16384])
    assert time.process_time() - begin_s <= 2
    found = scaling(baseline, [load_transform("distributed")], counts)
    steps = [row.step_ms or 0.0 for row in found.rows]
    assert steps == sorted(steps)


@given(
    graph=training(),
    what_if=st.sampled_from(["distributed", "zero", "zero:stage=1", "zero:stage=3", "fsdp"]),
    workers=st.integers(2, 40),
    gbps=st.sampled_from([0.1, 1, 10, 100]),
    algorithm=st.sampled_from(["auto", "ring", "tree"]),
)
@settings(max_examples=60, deadline=None)
def test_half_of_any_link_makes_no_step_shorter(
    graph: TaskGraph, what_if: str, workers: int, gbps: float, algorithm: str
) -> None:
    join = "," if ":" in what_if else ":"
    found = [
        apply(graph, f"{what_if}{join}workers={workers},bandwidth={rate}Gbps,algorithm={algorithm}")
        for rate in (gbps, gbps / 2)
    ]
    steps = [simulate(changed).makespan_ns for changed in found]
    # The time of each task is rounded to whole ns.
    assert steps[1] >= steps[0] - len(found[0])


@pytest.mark.parametrize("what_if", ["distributed", "zero", "zero:stage=3", "fsdp"])
def test_half_of_either_level_of_a_cluster_makes_no_step_shorter(what_if: str, tmp_path: Path) -> None:
    graph = blocks(steps=2)
    join = "," if ":" in what_if else ":"
    found = []
    for number, (inner, outer) in enumerate([("100GB/s", "25Gbps"), ("50GB/s", "25Gbps"), ("100GB/s", "12.5Gbps")]):
        path = tmp_path / f"cluster{number}.toml"
        path.write_text(CLUSTER.format(inner=inner, outer=outer), encoding="utf-8")
        found.append(simulate(apply(graph, f"{what_if}{join}cluster={path}")).makespan_ns)
    assert min(found) == found[0]


CLUSTER = """
[[level]]
workers = 4
bandwidth = "{inner}"
latency_us = 2

[[level]]
workers = 4
bandwidth = "{outer}"
latency_us = 10
"""
