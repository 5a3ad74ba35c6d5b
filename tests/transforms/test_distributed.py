"""``distributed`` on steps drawn by hand, with exact nanoseconds, as properties, and on real recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build, apply, baseline_of, with_metadata
from tests.transforms.communication_graphs import (
    ANY_LINK,
    GRADIENT,
    RING,
    V100,
    drawn,
    kept_order,
    on_cpu,
    rows,
    training,
    two_layers,
)
from whatif import Phase, TaskGraph, TaskKind, Thread, ThreadKind, WhatifError, simulate
from whatif.models.exchange.collective_tasks import all_reduces
from whatif.models.exchange.stragglers import slowest_of
from whatif.simulation.breakdown import breakdown

pytestmark = pytest.mark.usefixtures("round_v100", "equal_gpus")


def test_distributed_by_hand() -> None:
    """Two buckets. The second all-reduce waits for the first one; the update for both, behind the copies back.

    ::

        us      1   11    21      41   51 59.3 60.3  80.3 90.3    159.3 169.3      259.3 269.3 274.3
        CPU     |l|l|l|l|call-----------|l|l|call------------|l|l|l|
        stream  |f1--|f2--|b2-----|c---|     |b1-----|c--|        |back-|          |back-|u---|
        network                         |all-reduce 2-------------|all-reduce 1----|
    """
    timeline = simulate(apply(two_layers(), RING))
    assert drawn(timeline, "stream 7") == [
        ("f1", 1_000, 11_000), ("f2", 11_000, 21_000), ("b2", 21_000, 41_000),
        ("copy gradient into bucket", 41_000, 51_000), ("b1", 60_300, 80_300),
        ("copy gradient into bucket", 80_300, 90_300), ("copy bucket into gradient", 159_300, 169_300),
        ("copy bucket into gradient", 259_300, 269_300), ("u", 269_300, 274_300),
    ]  # fmt: skip
    assert drawn(timeline, "network") == [("all-reduce", 59_300, 159_300), ("all-reduce", 159_300, 259_300)]
    assert drawn(timeline, "CPU") == [
        ("launch f1", 0, 1_000), ("launch f2", 1_000, 2_000), ("launch b2", 2_000, 3_000),
        ("cudaLaunchKernel", 3_000, 4_300), ("c10d::allreduce_", 4_300, 59_300), ("launch b1", 59_300, 60_300),
        ("cudaLaunchKernel", 60_300, 61_600), ("c10d::allreduce_", 61_600, 116_600),
        ("cudaLaunchKernel", 116_600, 117_900), ("cudaLaunchKernel", 117_900, 119_200), ("launch u", 119_200, 120_200),
    ]  # fmt: skip


def test_gradients_in_their_buckets_are_not_copied_back() -> None:
    timeline = simulate(apply(two_layers(), f"{RING},gradient_as_bucket_view=true"))
    assert drawn(timeline, "stream 7")[-2:] == [("copy gradient into bucket", 80_300, 90_300), ("u", 259_300, 264_300)]


def test_one_bucket_is_sent_when_the_last_gradient_is_there() -> None:
    """100 MiB hold both gradients: the call comes behind the copies of both, and nothing is hidden."""
    timeline = simulate(apply(two_layers(), f"{RING},bucket_mb=100"))
    # Without a call between them the GPU does not wait for the CPU: b1 ends at 71,000, its copy at 81,000.
    assert drawn(timeline, "network") == [("all-reduce", 81_000, 281_000)]
    assert drawn(timeline, "stream 7")[-1] == ("u", 301_000, 306_000)


def test_the_recorded_buckets_are_taken() -> None:
    """The recording says that one bucket holds both, though the rule would send two."""
    ddp = {"source": "ddp", "buckets": [{"bytes": 2 * GRADIENT, "parameters": ["1.weight", "2.weight"]}]}
    graph = apply(two_layers(ddp=ddp), RING)
    assert graph.size_bytes[all_reduces(graph)].tolist() == [2 * GRADIENT]
    missing = {"buckets": [{"parameters": ["2.weight"]}]}  # says nothing of the other one: the rule decides
    assert int(all_reduces(apply(two_layers(ddp=missing), RING)).sum()) == 2


def test_synchronised_all_reduces_start_behind_all_that_was_launched() -> None:
    """The CPU waits for the copy (51,000), returns 8,000 later, and calls: the all-reduce starts at 114,000."""
    timeline = simulate(apply(two_layers(), f"{RING},sync=true"))
    assert drawn(timeline, "network")[0] == ("all-reduce", 114_000, 214_000)
    first = [task for task in drawn(timeline, "CPU") if "ynchron" in task[0] or task[0] == "c10d::allreduce_"][:3]
    assert first == [
        ("cudaStreamSynchronize", 4_300, 6_300), ("cudaStreamSynchronize", 59_000, 59_000),
        ("c10d::allreduce_", 59_000, 114_000),
    ]  # fmt: skip


def test_a_step_waits_for_its_own_sums() -> None:
    """Three equal steps: the step time is that of one alone, because the update ends it."""
    timeline = simulate(apply(two_layers(3), RING))
    updates = [end for name, _, end in drawn(timeline, "stream 7") if name == "u"]
    assert updates[0] == 274_300
    # The CPU launches the next step meanwhile, so that its kernels follow at once: 60,000 of work and copies, then ...
    assert updates[2] - updates[1] == updates[1] - updates[0]
    assert len(drawn(timeline, "network")) == 6


def test_distributed_on_a_cpu_by_hand() -> None:
    """DDP's own work (500,000) before; a copy takes 3,000, its hook 5,000 more, a call 55,000.

    gloo takes 462,000 of the core for a bucket: two messages of 225,000, and 12,000 for the bytes, eight copies. That
    is more than the network needs, so all-reduces take as long, and what is behind a call is as much later.

    ::

        us      0   10    510 520       540 548  603      1065   1085 1093   1148    1610   1613   1616 1621
        CPU     |f1--|DDP--|f2--|b2-------|c--|call------------|b1----|c--|call------------|back--|back---|u---|
        network                                   |all-reduce 2|              |all-reduce 1|
    """
    timeline = simulate(apply(on_cpu(), RING))
    assert drawn(timeline, "network") == [("all-reduce", 603_000, 1_065_000), ("all-reduce", 1_148_000, 1_610_000)]
    assert drawn(timeline, "CPU") == [
        ("f1", 0, 10_000), ("DistributedDataParallel.forward", 10_000, 510_000), ("f2", 510_000, 520_000),
        ("b2", 520_000, 540_000), ("copy gradient into bucket", 540_000, 548_000),
        ("c10d::allreduce_", 548_000, 1_065_000), ("b1", 1_065_000, 1_085_000),
        ("copy gradient into bucket", 1_085_000, 1_093_000), ("c10d::allreduce_", 1_093_000, 1_610_000),
        ("copy bucket into gradient", 1_610_000, 1_613_000), ("copy bucket into gradient", 1_613_000, 1_616_000),
        ("u", 1_616_000, 1_621_000),
    ]  # fmt: skip
    assert not timeline.graph.on_gpu.any()  # what is sent from a CPU makes no GPU of it
    timeline = simulate(apply(on_cpu(), f"{RING},gradient_as_bucket_view=true"))
    assert drawn(timeline, "CPU")[-1] == ("u", 1_610_000, 1_615_000)


def test_a_slow_network_hides_what_gloo_takes_of_the_core() -> None:
    """At 1 GB/s over TCP 3.6 MB take 3,789,474 and 28,000 of latency; gloo takes 468,000 of the core meanwhile.

    The second bucket waits for the first: the step ends with the transfers, its copies and the update.
    """
    timeline = simulate(apply(on_cpu(), "distributed:workers=2,bandwidth=1GB/s"))
    first, last = drawn(timeline, "network")
    assert first == ("all-reduce", 603_000, 603_000 + 3_817_474)
    assert last == ("all-reduce", first[2], first[2] + 3_817_474)
    (_, begin, end) = drawn(timeline, "CPU")[5]
    assert end - begin == 55_000 + 450_000 + 12 * 1_500  # woken for every few packets: twelve copies instead of eight
    # The first bucket is copied back while the second one is on its way.
    assert drawn(timeline, "CPU")[-1] == ("u", last[2] + 3_000, last[2] + 8_000)
    parts = breakdown(timeline, "span")
    assert parts.cpu_only_ms + parts.communication_ms == pytest.approx((last[2] + 8_000) / 1e6)


def test_the_others_wait_for_the_slowest_worker() -> None:
    """Quartiles 13.49 % apart are those of a standard deviation of 10 %: of two the slower is 5.5 % later."""
    graph = with_metadata(on_cpu(), untraced_step_ms={"median": 100.0, "q25": 93.255, "q75": 106.745})
    slow = apply(graph, RING)
    assert slow.duration_ns[slow.select(name="^b2$")].tolist() == pytest.approx(
        [20_000 * slowest_of(2, 10).mean], rel=1e-4
    )
    assert slow.low_ns[slow.select(name="^b2$")].tolist() == [20_000]
    of_eight = apply(graph, RING.replace("workers=2", "workers=8"))
    assert of_eight.duration_ns[of_eight.select(name="^b2$")].tolist() == pytest.approx(
        [20_000 * slowest_of(8, 10).mean], rel=1e-3
    )
    for times in ({"median": 100.0}, {"median": "x", "q25": 1, "q75": 2}, 7, {"median": 0, "q25": 0, "q75": 0}):
        assert (
            apply(with_metadata(graph, untraced_step_ms=times), RING).duration_ns.max()
            == apply(on_cpu(), RING).duration_ns.max()
        )


def test_buffers_are_broadcast_before_the_forward_pass() -> None:
    """Batch normalization of 100 channels has three buffers, 808 bytes: 12,000 each, and two messages of 225,000."""
    graph = with_metadata(on_cpu(2), layers=[{"name": "norm", "type": "BatchNorm2d", "shapes": {"weight": [100]}}])
    timeline = simulate(apply(graph, RING))
    assert drawn(timeline, "network")[0] == ("broadcast of buffers", 546_000, 996_000)
    assert drawn(timeline, "CPU")[1:3] == [
        ("DistributedDataParallel.forward", 10_000, 546_000), ("f2", 996_000, 1_006_000)
    ]  # fmt: skip
    damaged = with_metadata(graph, layers=[{"type": "BatchNorm1d", "shapes": [3]}, {"type": "BatchNorm2d"}, 7])
    apply(damaged, RING)


def test_without_overlap_all_buckets_are_sent_behind_the_backward_pass() -> None:
    """Copies as before, both calls at the end: the first all-reduce begins when the second bucket's would have."""
    timeline = simulate(apply(two_layers(), f"{RING},overlap=false"))
    # Nothing delays b1, which ends at 61,000 behind a copy of 10,000; its own copy ends at 81,000.
    network = drawn(timeline, "network")
    assert network[0][1] >= 81_000
    assert network == [("all-reduce", network[0][1], network[0][1] + 100_000),
                       ("all-reduce", network[0][1] + 100_000, network[0][1] + 200_000)]  # fmt: skip


def test_the_fp16_hook_sends_half_and_casts() -> None:
    """DDP's fp16_compress_hook: 2.5 and 1.5 accesses of 3.6 MB at 720 bytes/ns, 12,500 and 7,500, around 50,000."""
    graph = apply(two_layers(), f"{RING},bucket_mb=100,compress=fp16")
    timeline = simulate(graph)
    stream = drawn(timeline, "stream 7")
    assert [name for name, _, _ in stream[4:]] == [
        "b1", "copy gradient into bucket", "cast bucket to fp16", "cast bucket from fp16", "copy bucket into gradient",
        "copy bucket into gradient", "u",
    ]  # fmt: skip
    cast, back = stream[6], stream[7]
    assert cast[2] - cast[1] == 25_000
    assert back[2] - back[1] == 15_000
    (sent,) = drawn(timeline, "network")
    assert sent[2] - sent[1] == 100_000  # both gradients in half the bytes
    assert sent[1] >= cast[2]
    assert back[1] == sent[2]
    assert graph.size_bytes[all_reduces(graph)].tolist() == [GRADIENT]
    assert apply(on_cpu(), f"{RING},compress=fp16").select(name="^cast bucket").sum() == 4
    # What the link carries is half of it, however fast it is.
    twice = apply(two_layers(), f"{RING},bucket_mb=100,compress=fp16", "bandwidth:factor=2")
    assert twice.duration_ns[all_reduces(twice)].tolist() == [50_000]


@pytest.mark.parametrize("specs", [[f"{RING},compress=fp16"], [RING, "dgc"]])
def test_every_bucket_comes_back_whether_it_is_copied_or_not(specs: list[str]) -> None:
    """With views only the last sum is waited for directly; the ones before it are decompressed all the same."""
    back = "^(cast bucket from fp16|decompress gradients)$"
    copied = apply(two_layers(2), *specs)
    viewed = apply(two_layers(2), f"{specs[0]},gradient_as_bucket_view=true", *specs[1:])
    assert viewed.select(name=back).sum() == copied.select(name=back).sum() == 4
    assert viewed.step[viewed.select(name=back)].tolist() == [0, 0, 1, 1]
    timeline = simulate(viewed)
    exchanged = viewed.select(name="^(all-reduce|sparse all-gather)$")
    for step in (0, 1):
        last_ns = timeline.end_ns[exchanged & (viewed.step == step)].max()
        # One stream: none of its first bucket's may stand before that is there.
        first_ns = timeline.end_ns[exchanged & (viewed.step == step)].min()
        starts_ns = sorted(timeline.start_ns[viewed.select(name=back) & (viewed.step == step)].tolist())
        assert starts_ns[0] >= first_ns
        assert starts_ns[1] >= last_ns


def test_the_note_names_the_network() -> None:
    note = apply(two_layers(), "distributed").notes[-1]
    assert "8 at 960 Gbit/s and 3.4 us (usual for V100-SXM2-32)" in note
    note = apply(two_layers(), "distributed:bandwidth=25Gbps").notes[-1]
    assert "8 at 25 Gbit/s and 14 us, auto" in note


def test_the_memory_of_the_buckets() -> None:
    """DDP's buckets are as large as the gradients, from step to step; a view makes the gradients' own copies go."""
    from dataclasses import replace

    from whatif.graph.memory import LayerMemory, Memory, peak

    layers = tuple(LayerMemory(f"layer{i}", 1_000, GRADIENT) for i in (1, 2))
    graph = two_layers(2)
    graph = graph.replace(info=replace(graph.info, memory=Memory(2 * GRADIENT, 0, 0, layers)))
    before, after, view = (
        peak(memory).total
        for memory in (
            graph.info.memory, apply(graph, RING).info.memory,
            apply(graph, f"{RING},gradient_as_bucket_view=true").info.memory,
        )
        if memory is not None
    )  # fmt: skip
    assert after == before + 2 * GRADIENT
    assert view < after
    assert view >= before


def test_samples_of_all_workers() -> None:
    from dataclasses import replace

    graph = two_layers(2)
    info = replace(
        graph.info, n_steps=2, batch_size=32, measured_step_ns={"span": (150_000,), "mark": (75_000, 75_000)}
    )
    graph = graph.replace(info=info)
    as_dict = whatif.apply(graph, RING, clock="mark").to_dict()
    rates = as_dict["samples_per_s"]
    assert rates["baseline"] == pytest.approx(32e3 / as_dict["baseline_ms"])
    assert rates["predicted"] == pytest.approx(64e3 / as_dict["predicted_ms"])
    assert whatif.apply(graph, RING, clock="span").to_dict()["samples_per_s"] is None


def test_a_cluster_gives_workers_and_links() -> None:
    """A preset of 8 GPUs in a node: the all-reduce stays on NVLink."""
    graph = apply(two_layers(), "distributed:cluster=dgx-a100,workers=8")
    slow = apply(two_layers(), "distributed:workers=8,bandwidth=1Gbps")
    assert graph.info.workers == 8
    assert graph.duration_ns[all_reduces(graph)].sum() < slow.duration_ns[all_reduces(slow)].sum() / 100


def test_accumulated_gradients_are_sent_once() -> None:
    graph = apply(two_layers(), "gradient_accumulation:passes=4", RING)
    assert int(all_reduces(graph).sum()) == 2
    assert graph.size_bytes[all_reduces(graph)].sum() == 2 * GRADIENT


def test_the_main_thread_waits_for_what_the_thread_of_autograd_does_more() -> None:
    """The main thread goes on when autograd's is done: behind the copies and calls that were put at its end."""
    build = Build(CPU, STREAM, Thread("autograd", ThreadKind.CPU), gpu=V100, metadata={"grad_ready_order": rows(90)})
    build.task(0, 1_000, "forward", TaskKind.CPU_OP, phase=Phase.FORWARD, step=0)
    call = build.task(2, 1_000, "launch b", phase=Phase.BACKWARD, step=0)
    kernel = build.task(1, 10_000, "b", phase=Phase.BACKWARD, step=0, layer="layer1")
    build.edge(call, kernel, 0, whatif.DependencyKind.LAUNCH)
    end = build.task(2, 1_000, "end of backward", phase=Phase.BACKWARD, step=0)
    build.edge(end, build.task(0, 0, "wait", TaskKind.WAIT, step=0), 0, whatif.DependencyKind.HANDOFF)
    build.task(0, 1_000, "update", TaskKind.CPU_OP, phase=Phase.UPDATE, step=0)
    timeline = simulate(apply(build.graph(), "distributed"))
    # Launch, copy in, call, the recorded end, and the copy back behind it.
    assert drawn(timeline, "autograd")[-1] == ("cudaLaunchKernel", 58_300, 59_600)
    assert drawn(timeline, "CPU")[-1] == ("update", 59_600, 60_600)


def test_distributed_needs_gradients_or_their_size() -> None:
    bare = two_layers(grad_ready_order=None)
    with pytest.raises(WhatifError, match=r"lacks the gradients .* distributed:gradient_mb=102"):
        apply(bare, "distributed")
    graph = apply(bare, "distributed:gradient_mb=7.2,workers=2,bandwidth=36GB/s,latency_us=0")
    assert graph.size_bytes[all_reduces(graph)].sum() == pytest.approx(7_200_000, abs=8)
    layers = [{"name": f"layer{i}", "type": "Linear", "gradient_bytes": GRADIENT} for i in (1, 2)]
    from_layers = two_layers(grad_ready_order=[], layers=layers)
    assert drawn(simulate(apply(from_layers, RING)), "network") == drawn(simulate(apply(two_layers(), RING)), "network")


def test_what_is_distributed_already_is_refused_and_one_worker_stays() -> None:
    with pytest.raises(WhatifError, match="exchange no gradients yet"):
        apply(two_layers(), RING, RING)
    alone = apply(two_layers(), "distributed:workers=1")
    assert alone.notes == ("distributed: one worker has no other to exchange gradients with; nothing changes",)


@settings(max_examples=60, deadline=None)
@given(training(), ANY_LINK, st.integers(2, 9), st.sampled_from(["", ",bucket_mb=4", ",gradient_as_bucket_view=true",
                                                                 ",sync=true", ",gradient_mb=20"]))  # fmt: skip
def test_distributed_keeps_the_step_and_is_never_slower_with_more_bandwidth(
    graph: TaskGraph, links: tuple[str, str], workers: int, options: str
) -> None:
    options = "" if "sync" in options and not graph.on_gpu.any() else options
    slow, fast = (apply(graph, f"distributed:workers={workers},bandwidth={link}{options}") for link in links)
    kept_order(graph, slow)
    assert simulate(fast).makespan_ns <= simulate(slow).makespan_ns
    assert simulate(slow).makespan_ns >= simulate(graph).makespan_ns
    sent = int(slow.size_bytes[all_reduces(slow)].sum())
    expected = 20_000_000 if "gradient_mb" in options else sum(r.size_bytes or 0 for r in graph.info.recorded.gradients)
    assert sent == pytest.approx(expected * graph.info.n_steps, rel=1e-4)


@pytest.mark.parametrize(
    "spec",
    ["distributed:workers=0", "distributed:workers=-3", "distributed:bandwidth=25", "distributed:bandwidth=0Gbps",
     "distributed:latency_us=-1", "distributed:latency_us=nan", "distributed:bucket_mb=0", "distributed:bucket_mb=nan",
     "distributed:gradient_mb=0", "distributed:gradient_mb=inf", "distributed:workers=1000000", "p3:workers=1",
     "p3:servers=0", "p3:slice_size=4", "p3:slice_size=1B", "p3:latency_us=-1", "p3:bandwidth=1",
     "p3:gradient_mb=-1", f"distributed:workers={10**400}"],
)  # fmt: skip
def test_options_that_make_no_sense_are_one_sentence(spec: str) -> None:
    with pytest.raises(WhatifError) as error:
        apply(two_layers(2), spec)
    assert "\n" not in str(error.value)


def test_inference_exchanges_nothing() -> None:
    build = Build(CPU, STREAM, gpu=V100)
    build.launch(1_000, 10_000, "k")
    for name in ("distributed", "p3"):
        with pytest.raises(WhatifError, match="backward pass, got none"):
            apply(build.graph(), f"{name}:gradient_mb=100")


def test_sync_is_for_a_gpu() -> None:
    with pytest.raises(WhatifError, match="got one of a CPU"):
        apply(on_cpu(), "distributed:sync=true")


@pytest.mark.parametrize(
    "metadata",
    [{"grad_ready_order": [{"name": "a", "layer": "layer1", "bytes": "many"}, 3, None, {"bytes": 10}]},
     {"ddp": {"buckets": [3, {"parameters": 4}, {}]}}, {"ddp": 3}, {"ddp": {"buckets": None, "world_size": "x"}}],
)  # fmt: skip
def test_damaged_metadata_is_no_traceback(metadata: dict[str, Any]) -> None:
    apply(two_layers(2, **metadata), "distributed")
    apply(two_layers(2, **metadata), "p3")


@pytest.mark.parametrize("model", ["resnet50", "vgg19", "bert-base"])
def test_cpu_recordings_scale_with_the_network(own_traces: Path, model: str) -> None:
    before = baseline_of(own_traces / "campaign_cpu" / f"{model}--baseline.trace.json.gz")
    gradient_bytes = sum(row.size_bytes or 0 for row in before.graph.info.recorded.gradients)
    predicted = []
    for rate in ("100Mbps", "1Gbps", "10Gbps", "100Gbps"):
        after = whatif.apply(before, f"distributed:workers=2,bandwidth={rate}")
        predicted.append(after.predicted_ms)
        parts = after.breakdown
        assert after.low_ms <= after.predicted_ms <= after.high_ms
        # What the CPU does not hide is what the step grew by, but for copies and calls.
        assert after.predicted_ms - after.baseline_ms >= parts.communication_ms - 0.01
        assert parts.cpu_only_ms + parts.communication_ms + parts.idle_ms == pytest.approx(after.predicted_ms)
    assert predicted == sorted(predicted, reverse=True)
    # At 100 Mbit/s the network bounds the step: nearly all of its bytes are exposed.
    assert predicted[0] > gradient_bytes * 8 / 0.95 / 1e5
    # Nothing but what copying, gloo's threads and DDP take of the core.
    assert predicted[-1] < 1.2 * before.step_ns / 1e6


def test_gpu_recordings_scale_with_the_network(shared_traces: Path) -> None:
    """ResNet-50 on a V100 (102 MB of gradients): hidden at 100 Gbit/s, and not at 10."""
    before = baseline_of(shared_traces / "kineto-resnet50-v100" / "num_workers_4.2021-06.pt.trace.json.gz")
    at = {rate: whatif.apply(before, f"distributed:gradient_mb=102,bandwidth={rate}Gbps") for rate in (10, 25, 100)}
    assert [p.breakdown.communication_ms for p in at.values()] == sorted(
        (p.breakdown.communication_ms for p in at.values()), reverse=True
    )
    ring_ms = 2 * 7 / 8 * 102e6 * 8 / 10e9 * 1e3
    assert ring_ms < at[10].predicted_ms < before.step_ns / 1e6 + ring_ms
    assert at[100].predicted_ms < 1.1 * before.step_ns / 1e6
    whole = whatif.apply(before, "distributed:gradient_mb=102,bandwidth=25Gbps,bucket_mb=1000")
    assert whole.predicted_ms > at[25].predicted_ms + 0.5 * 57  # nothing of its 57 ms is hidden


def test_one_iteration_without_marks_is_a_step(shared_traces: Path) -> None:
    before = baseline_of(shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz")
    after = whatif.apply(before, "distributed:gradient_mb=532,bandwidth=25Gbps")
    assert after.predicted_ms == pytest.approx(before.step_ns / 1e6 + after.breakdown.communication_ms, rel=0.02)


def test_gradients_of_layers_without_backward_work_are_unknown() -> None:
    layers = [{"name": "head", "type": "Linear", "gradient_bytes": GRADIENT}]
    for spec in ("distributed", "p3"):
        with pytest.raises(WhatifError, match="lacks the gradients"):
            apply(two_layers(2, grad_ready_order=[], layers=layers), spec)


@pytest.mark.parametrize("spec", [RING, f"{RING},sync=true", f"{RING},gradient_as_bucket_view=true"])
def test_kernels_whose_launch_was_not_recorded(spec: str) -> None:
    """Their copies are called behind what the CPU did before them, never on a stream; without a CPU nothing calls."""
    info = {"metadata": {"grad_ready_order": rows(GRADIENT, GRADIENT)}, "gpu": V100, "n_steps": 1}
    build = Build(CPU, STREAM, **info)
    build.task(0, 1_000, "forward", TaskKind.CPU_OP, phase=Phase.FORWARD, step=0)
    for layer in ("layer2", "layer1"):
        build.task(1, 20_000, f"b {layer}", phase=Phase.BACKWARD, step=0, layer=layer)
    changed = apply(build.graph(), spec)
    assert not (changed.on_cpu & (changed.thread == 1)).any()
    assert (changed.thread[changed.launch_of[all_reduces(changed)]] == 0).all()
    (copied, _) = [task for task in drawn(simulate(changed), "stream 7") if task[0] == "copy gradient into bucket"]
    assert copied[1] >= 20_000
    alone = Build(STREAM, **info)
    alone.task(0, 20_000, "b", phase=Phase.BACKWARD, step=0, layer="layer2")
    with pytest.raises(WhatifError, match="expected a recording with the CPU's calls"):
        apply(alone.graph(), spec)


def test_a_recording_of_one_of_several_workers_on_cpus_communicates_already() -> None:
    """gloo sends beside the recorded threads, so that no task shows it: the recorder does."""
    graph = with_metadata(on_cpu(2), ddp={"source": "ddp", "world_size": 4})
    for name in ("distributed", "p3", "parameter_server"):
        with pytest.raises(WhatifError, match=f"{name}: expected steps that exchange no gradients yet"):
            apply(graph, name)
