"""``blueconnect``, ``dgc`` and ``bandwidth`` on steps drawn by hand, and on real recordings."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

import whatif
from tests.helpers import CPU, STREAM, Build, apply, baseline_of
from tests.transforms.communication_graphs import (
    ANY_LINK,
    EIGHT,
    GRADIENT,
    RING,
    SERVERS,
    SLICED,
    STAGES,
    V100,
    communication,
    drawn,
    kept_order,
    rows,
    training,
    two_layers,
)
from whatif import Phase, TaskGraph, TaskKind, WhatifError, simulate
from whatif.models.exchange.collective_tasks import all_reduces, exchange_tasks

pytestmark = pytest.mark.usefixtures("round_v100", "equal_gpus")


def test_blueconnect_by_hand() -> None:
    """7.2 MB among 8: 12.6 ms in a ring. Among 4 at 4 GB/s: 3/4 of 1.8 ms; among 2 over the shared link: 1/2 of 7.2 ms.

    A step of a ring waits 14,000: 14 of them flat, 3 among four, one among two.
    """
    graph = apply(two_layers(), EIGHT)
    assert communication(graph) == [("all-reduce", 12_600_000 + 14 * 14_000, 7_200_000)]
    stages = apply(graph, STAGES)
    inner, outer = 1_350_000 + 3 * 14_000, 3_600_000 + 14_000
    assert communication(stages) == [
        ("reduce-scatter among 4", inner, 7_200_000), ("reduce-scatter among 2", outer, 1_800_000),
        ("all-gather among 2", outer, 1_800_000), ("all-gather among 4", inner, 7_200_000),
    ]  # fmt: skip
    lonely = communication(apply(graph, f"{STAGES},shared=false"))
    assert lonely[1] == ("reduce-scatter among 2", 900_000 + 14_000, 1_800_000)
    before, after = simulate(graph), simulate(stages)
    # Four calls instead of one: the first stage starts no later, each of the others once it is called and its turn.
    (reduced,) = drawn(before, "network")
    first, last = drawn(after, "network, stage 1 of 4 workers")
    assert first[1] == reduced[1]
    assert last[2] == first[1] + 2 * (inner + outer)
    assert drawn(after, "stream 7")[-1] == ("u", last[2], last[2] + 5_000)


def test_stages_of_several_buckets_run_at_once() -> None:
    """The second bucket's first stage runs while the first one's second stage does: each has a channel of its own."""
    graph = apply(two_layers(), EIGHT.replace("bucket_mb=100", "bucket_mb=1"), STAGES)
    timeline = simulate(graph)
    inner, outer = drawn(timeline, "network, stage 1 of 4 workers"), drawn(timeline, "network, stage 2 of 2 workers")
    assert [name for name, _, _ in outer].count("reduce-scatter among 2") == 2
    assert inner[1][1] < outer[0][2]  # bucket 2 in its nodes, bucket 1 between them
    for one, next_one in pairwise(inner):
        assert one[2] <= next_one[1]


def test_blueconnect_wants_all_reduces_and_factors_that_fit() -> None:
    with pytest.raises(WhatifError, match="name distributed before it"):
        apply(two_layers(), "blueconnect")
    with pytest.raises(WhatifError, match="product is 8 workers, got 2x2"):
        apply(two_layers(), EIGHT, "blueconnect:factors=2x2")
    once = apply(two_layers(), EIGHT, STAGES)
    assert apply(once, STAGES).notes[-1] == "blueconnect: the all-reduces are in stages already; nothing changes"


def test_dgc_by_hand() -> None:
    """Of 7.2 MB in 1,800,000 values 0.1 % go to 7 others with their places: 100,800 bytes at 1 GB/s, in 7 steps."""
    graph = apply(two_layers(), EIGHT, "dgc")
    assert communication(graph) == [("sparse all-gather", 100_800 + 7 * 14_000, 8 * 1_800 * 8)]
    timeline = simulate(graph)
    tasks = {name: (start, end) for name, start, end in drawn(timeline, "stream 7")}
    compress, decompress = tasks["compress gradients"], tasks["decompress gradients"]
    assert compress[1] - compress[0] == 11 * 7_200_000 / 720
    (exchange,) = drawn(timeline, "network")
    assert exchange[1] >= compress[1]
    assert decompress[0] == exchange[2]
    # Cleared, and 8 × 1,800 entries: 8 bytes read, 4 read and 4 written each.
    assert decompress[1] - decompress[0] == round((7_200_000 + 8 * 1_800 * 16) / 720)
    assert tasks["u"][0] == decompress[1]


def test_dgc_wants_all_reduces_of_known_size() -> None:
    with pytest.raises(WhatifError, match="name distributed before it"):
        apply(two_layers(), "dgc")
    with pytest.raises(WhatifError, match="got 4 where there are 8"):
        apply(two_layers(), EIGHT, "dgc:workers=4")
    once = apply(two_layers(), EIGHT, "dgc")
    assert apply(once, "dgc").notes[-1] == "dgc: the gradients are compressed already; nothing changes"


@pytest.mark.parametrize("others", [[], [STAGES], ["dgc"]])
def test_bandwidth_knows_what_distributed_put_in(others: list[str]) -> None:
    """Twice the bandwidth after the fact is distributed with twice the bandwidth, ranges and latencies included."""
    graph = two_layers(2)
    fast = [spec.replace("=1GB/s", "=2GB/s").replace("=4GB/s", "=8GB/s") for spec in (EIGHT, *others)]
    after, at_once = apply(graph, EIGHT, *others, "bandwidth:factor=2"), apply(graph, *fast)
    for column in ("duration_ns", "low_ns", "high_ns"):
        np.testing.assert_allclose(getattr(after, column), getattr(at_once, column), atol=1)


def test_bandwidth_knows_what_p3_put_in() -> None:
    graph = two_layers(2, **SLICED)
    after, at_once = apply(graph, SERVERS, "bandwidth"), apply(graph, SERVERS.replace("=1GB/s", "=2GB/s"))
    np.testing.assert_array_equal(after.duration_ns, at_once.duration_ns)


@settings(max_examples=60, deadline=None)
@given(training(), ANY_LINK)
def test_stages_and_compression_keep_the_step(graph: TaskGraph, links: tuple[str, str]) -> None:
    exchanged = [apply(graph, f"distributed:workers=8,bandwidth={link}") for link in links]
    for spec in ("blueconnect:factors=2x4", "blueconnect:factors=2x2x2,shared=false", "dgc"):
        slow, fast = (apply(g, spec) for g in exchanged)
        kept_order(graph, slow)
        if spec == "dgc" and graph.on_gpu.any():
            assert simulate(fast).makespan_ns <= simulate(slow).makespan_ns


@pytest.mark.parametrize(
    "spec",
    ["blueconnect:factors=8", "blueconnect:factors=1x8", "blueconnect:factors=axb", "blueconnect:factors=",
     "blueconnect:factors=0x4", "blueconnect:bandwidth=3", "dgc:sparsity_pct=100", "dgc:sparsity_pct=-1",
     "dgc:sparsity_pct=nan", "dgc:workers=1", "bandwidth:factor=0", "bandwidth:factor=nan", "bandwidth:factor=1e-300"],
)  # fmt: skip
def test_options_that_make_no_sense_after_distributed_are_one_sentence(spec: str) -> None:
    with pytest.raises(WhatifError) as error:
        apply(two_layers(2), "distributed", spec)
    assert "\n" not in str(error.value)


def test_recorded_all_reduces_go_in_stages(shared_traces: Path) -> None:
    before = baseline_of(shared_traces / "hta" / "v100_allreduce_rank1of2.json.gz")
    with pytest.raises(WhatifError, match="record one worker, or set the number"):
        whatif.apply(before, "distributed")
    with pytest.raises(WhatifError, match="expected factors whose product is 2 workers, got 2x2: set them"):
        whatif.apply(before, "blueconnect:factors=2x2,bandwidth=25Gbps")
    before = baseline_of(shared_traces / "param-dlrm-8xv100" / "rank0.json.gz")
    sizeless = before.graph.replace(size_bytes=np.full_like(before.graph.size_bytes, -1))
    with pytest.raises(WhatifError, match="lacks the sizes of its all-reduces"):
        whatif.apply(sizeless, "blueconnect")
    after = whatif.apply(before, "blueconnect:bandwidth=25Gbps")
    for stage in ("reduce-scatter among 4", "reduce-scatter among 2", "all-gather among 2", "all-gather among 4"):
        assert int(after.graph.select(name=f"^{stage}$").sum()) == int(all_reduces(before.graph).sum()) == 3
    assert not all_reduces(after.graph).any()


def test_kernels_that_run_any_collective_are_classified(shared_traces: Path) -> None:
    """RCCL has one kernel for all collectives; its arguments hold kind and size, and the header the ranks."""
    before = baseline_of(shared_traces / "tracelens-h100-mi300" / "mi300.resnet_act_checkpoint_ddp_train.json.gz")
    tasks = all_reduces(before.graph)
    assert before.graph.size_bytes[tasks].tolist() == 3 * [5_746_640, 17_632_384]
    with pytest.raises(WhatifError, match="product is 8 workers, got 2x2"):
        whatif.apply(before, "blueconnect:factors=2x2")
    # Most of these all-reduces waits for peers, which fewer bytes do not shorten.
    recorded_ns = before.graph.duration_ns[tasks]
    sparse = whatif.apply(before, "dgc")
    exchange = sparse.graph.select(name="^sparse all-gather$")
    assert sparse.graph.high_ns[exchange].tolist() == recorded_ns.tolist()
    assert 0.9 * before.step_ns / 1e6 < sparse.predicted_ms < before.step_ns / 1e6
    assert sparse.predicted_ms < sparse.high_ms
    on_gpu = sparse.graph.on_gpu[sparse.graph.select(name="compress gradients$")]
    assert on_gpu.all()
    assert len(on_gpu) == 12


def test_an_empty_bucket_costs_its_latency() -> None:
    """A frozen layer's gradient of no bytes fills a bucket of its own: 14 latencies flat, 8 in stages, 7 as lists."""
    one_layer = two_layers(grad_ready_order=rows(GRADIENT, 0))
    graph = apply(one_layer, "distributed:workers=8,bandwidth=25Gbps,algorithm=ring")
    assert communication(graph)[1] == ("all-reduce", 14 * 14_000, 0)
    assert [part[1:] for part in communication(apply(graph, "blueconnect:bandwidth=25Gbps"))[4:]] == [
        (3 * 14_000, 0), (14_000, 0), (14_000, 0), (3 * 14_000, 0)
    ]  # fmt: skip
    assert communication(apply(graph, "dgc"))[1] == ("sparse all-gather", 7 * 14_000, 0)


def test_compression_and_stages_exclude_one_another() -> None:
    graph = apply(two_layers(), EIGHT)
    for first, second in (("dgc", "blueconnect"), ("blueconnect", "dgc")):
        with pytest.raises(WhatifError, match=f"{second}: expected .* of {first}; name one of the two"):
            apply(graph, first, second)


def test_calls_of_collectives_may_be_cheaper_than_under_the_profiler() -> None:
    for specs in ([RING], [EIGHT, "blueconnect"]):
        graph = apply(two_layers(), *specs)
        calls = graph.select(name=r"^c10d::allreduce_$|^stage of an all-reduce$")
        assert set(graph.low_ns[calls].tolist()) == {20_000}
        assert set(graph.high_ns[calls].tolist()) == set(graph.duration_ns[calls].tolist()) == {55_000}
        assert int(calls.sum()) == (2 if len(specs) == 1 else 4)


def test_collectives_on_the_stream_of_the_other_kernels() -> None:
    """Nobody records who waits for whom within a stream; dgc leaves what was called before the recording alone.

    ::

        CPU       |forward|call|
        stream 7  |all-reduce|b2|all-reduce|u|
    """
    name, sent = "ncclDevKernel_AllReduce_Sum_f32_RING_LL", {"size_bytes": GRADIENT, "phase": Phase.BACKWARD}
    build = Build(CPU, STREAM, gpu=V100)
    build.task(1, 1_000, name, TaskKind.COMMUNICATION, **sent)
    build.task(0, 1_000, "forward", TaskKind.CPU_OP, phase=Phase.FORWARD)
    build.task(1, 10_000, "b2", phase=Phase.BACKWARD)
    call = build.task(0, 1_000, "launch all-reduce", phase=Phase.BACKWARD)
    build.edge(call, build.task(1, 50_000, name, TaskKind.COMMUNICATION, **sent), 0, whatif.DependencyKind.LAUNCH)
    build.task(1, 5_000, "u", phase=Phase.UPDATE)
    stages = simulate(apply(build.graph(), "blueconnect:factors=2x2"))
    starts, ends = ({name: task[at] for task in drawn(stages, "stream 7") for name in task[:1]} for at in (1, 2))
    inner = drawn(stages, "network, stage 1 of 2 workers")
    assert inner[0][1] == 0
    assert starts["b2"] >= inner[1][2]  # the gather of the first one
    assert inner[2][1] >= ends["b2"]
    assert starts["u"] >= inner[3][2]
    changed = apply(build.graph(), "dgc:workers=8")
    assert [task[0] for task in drawn(simulate(changed), "stream 7")] == [
        name, "b2", "compress gradients", "sparse all-gather", "decompress gradients", "u",
    ]  # fmt: skip
    assert (changed.thread[changed.on_cpu] == 0).all()


@pytest.mark.parametrize(
    ("spec", "calls"),
    [("distributed", {"c10d::allreduce_"}), ("p3", {"sending and receiving"}), ("fsdp", set())],
)
def test_the_exchange_on_a_cpu_is_also_its_work_there(spec: str, calls: set[str], own_traces: Path) -> None:
    """Scaling the collectives alone kept the step: 93.5 ms with 10 Gbit/s, or without a network."""
    recorded = whatif.read(own_traces / "transformer_cpu.json.gz")
    graph = whatif.load_transform(f"{spec}:workers=4,bandwidth=10Gbps")(recorded)
    tasks = exchange_tasks(graph)
    assert tasks[graph.kind == TaskKind.COMMUNICATION].all()
    called = tasks & (graph.kind != TaskKind.COMMUNICATION)
    assert {graph.names[name] for name in graph.name[called]} == calls
    assert (graph.start_ns[called] < 0).all()
    alone, both = (simulate(graph.scale(chosen, 0.0)).step_ns_by("mark") for chosen in (tasks & ~called, tasks))
    assert both < 0.85 * alone if calls else both == alone
