"""Communication what-ifs on steps drawn by hand, with exact nanoseconds, as properties, and on real recordings.

The recorded GPU is a V100, whose copies move 720 bytes/ns (0.8 of 900 GB/s), so that a gradient of 3.6 MB is copied,
read and written, in 10,000 ns; a launch costs 1,000 ns, that of a copy 1,300, and a call of an all-reduce 55,000.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build, names
from whatif import Frontier, Phase, TaskGraph, TaskKind, Thread, ThreadKind, Timeline, WhatifError, simulate
from whatif.baseline import Baseline
from whatif.breakdown import breakdown
from whatif.models.collective_tasks import all_reduces
from whatif.models.priority import by_priority

V100 = "Tesla V100-SXM2-32GB"
GRADIENT = 3_600_000


def rows(*sizes: int) -> list[dict[str, Any]]:
    """The recorder's list of gradients: the last layer's is ready first."""
    last = len(sizes)
    return [
        {"name": f"{last - i}.weight", "layer": f"layer{last - i}", "bytes": size, "dtype": "float32"}
        for i, size in enumerate(sizes)
    ]


def two_layers(steps: int = 1, *, kernel_ns: int = 10_000, update: bool = True, **metadata: Any) -> TaskGraph:
    """Forward takes ``kernel_ns`` a layer, backward twice that, the update half; every launch 1,000.

    ::

        us      0    1    2    3    4    5          11         21                  41                  61   66
        CPU     |lf1-|lf2-|lb2-|lb1-|lu--|
        stream       |f1---------|f2--------|b2------------------|b1-----------------|u---|
    """
    info = {"metadata": {"grad_ready_order": rows(GRADIENT, GRADIENT), **metadata}, "gpu": V100, "n_steps": steps}
    build = Build(CPU, STREAM, **info)
    for step in range(steps):
        for name, phase, layer, length in (
            ("f1", Phase.FORWARD, "layer1", 1.0), ("f2", Phase.FORWARD, "layer2", 1.0),
            ("b2", Phase.BACKWARD, "layer2", 2.0), ("b1", Phase.BACKWARD, "layer1", 2.0), ("u", Phase.UPDATE, "", 0.5),
        ):  # fmt: skip
            if name == "u" and not update:
                continue
            call = build.task(0, 1_000, f"launch {name}", phase=phase, step=step, layer=layer)
            work = build.task(1, round(kernel_ns * length), name, phase=phase, step=step, layer=layer)
            build.edge(call, work, 0, whatif.DependencyKind.LAUNCH)
    return build.graph()


def on_cpu(steps: int = 1) -> TaskGraph:
    """One thread does it all: 10,000 a forward and 20,000 a backward operator, 5,000 for the update.

    Copies count a third of the 7.2 MB that they move, here at 2,400 bytes/ns, and 2,000 for the call: 3,000.
    """
    metadata = {"grad_ready_order": rows(GRADIENT, GRADIENT), "rates": {"copy_gbyte_s": 2400.0}}
    build = Build(CPU, metadata=metadata, n_steps=steps)
    for step in range(steps):
        for name, phase, layer, length in (
            ("f1", Phase.FORWARD, "layer1", 10_000), ("f2", Phase.FORWARD, "layer2", 10_000),
            ("b2", Phase.BACKWARD, "layer2", 20_000), ("b1", Phase.BACKWARD, "layer1", 20_000),
            ("u", Phase.UPDATE, "", 5_000),
        ):  # fmt: skip
            build.task(0, length, name, TaskKind.CPU_OP, phase=phase, step=step, layer=layer)
    return build.graph()


def apply(graph: TaskGraph, *specs: str) -> TaskGraph:
    for spec in specs:
        graph = whatif.load_transform(spec)(graph).check()
    return graph


def drawn(timeline: Timeline, thread: str) -> list[tuple[str, int, int]]:
    """Name, start and end of what a thread runs, in order."""
    graph = timeline.graph
    found = [
        (start, end, name)
        for name, code, start, end in zip(
            names(graph), graph.thread.tolist(), timeline.start_ns.tolist(), timeline.end_ns.tolist(), strict=True
        )
        if graph.threads[code].name == thread
    ]
    return [(name, start, end) for start, end, name in sorted(found)]


# -- distributed ----------------------------------------------------------------------------------------------------

# Two workers: a ring of two sends S bytes of a bucket of S; at 36 GB/s that is 100,000 ns for each gradient.
RING = "distributed:workers=2,bandwidth=36GB/s,latency_us=0"


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
    told = {"source": "ddp", "buckets": [{"bytes": 2 * GRADIENT, "parameters": ["1.weight", "2.weight"]}]}
    graph = apply(two_layers(ddp=told), RING)
    assert graph.size_bytes[all_reduces(graph)].tolist() == [2 * GRADIENT]
    missing = {"buckets": [{"parameters": ["2.weight"]}]}  # tells nothing of the other one: the rule decides
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
    """The thread copies (3,000), calls (55,000), and waits behind its backward pass; gloo sends beside it over TCP.

    ::

        us      0   10   20       40 43      98       118 121      176     203      206     309      312  317
        CPU     |f1--|f2--|b2------|c-|call---|b1------|c-|call-----|      |back-----|      |back-----|u---|
        network                               |all-reduce 2----------------|all-reduce 1----|
    """
    timeline = simulate(apply(on_cpu(), RING))
    assert drawn(timeline, "network") == [("all-reduce", 98_000, 203_263), ("all-reduce", 203_263, 308_526)]
    assert drawn(timeline, "CPU")[4:] == [
        ("c10d::allreduce_", 43_000, 98_000), ("b1", 98_000, 118_000), ("copy gradient into bucket", 118_000, 121_000),
        ("c10d::allreduce_", 121_000, 176_000), ("copy bucket into gradient", 203_263, 206_263),
        ("copy bucket into gradient", 308_526, 311_526), ("u", 311_526, 316_526),
    ]  # fmt: skip
    parts = breakdown(timeline, "span")
    assert parts.communication_ms == pytest.approx((203_263 - 176_000 + 308_526 - 206_263) / 1e6)
    assert parts.cpu_only_ms + parts.communication_ms == pytest.approx(0.316526)
    assert parts.gpu_busy_ms == 0
    assert not timeline.graph.on_gpu.any()  # what is sent from a CPU makes no GPU of it
    timeline = simulate(apply(on_cpu(), f"{RING},gradient_as_bucket_view=true"))
    assert drawn(timeline, "CPU")[-1] == ("u", 308_526, 313_526)


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
    bare = two_layers()
    bare.info.metadata.clear()
    with pytest.raises(WhatifError, match=r"does not tell the gradients .* distributed:gradient_mb=102"):
        apply(bare, "distributed")
    graph = apply(bare, "distributed:gradient_mb=7.2,workers=2,bandwidth=36GB/s,latency_us=0")
    assert graph.size_bytes[all_reduces(graph)].sum() == pytest.approx(7_200_000, abs=8)
    layers = [{"name": f"layer{i}", "type": "Linear", "gradient_bytes": GRADIENT} for i in (1, 2)]
    told = two_layers(grad_ready_order=[], layers=layers)
    assert drawn(simulate(apply(told, RING)), "network") == drawn(simulate(apply(two_layers(), RING)), "network")


def test_what_is_distributed_already_stays() -> None:
    once = apply(two_layers(), RING)
    again = apply(once, RING)
    assert again.notes[-1].endswith("nothing changes")
    assert again.duration_ns is once.duration_ns
    alone = apply(two_layers(), "distributed:workers=1")
    assert alone.notes == ("distributed: one worker has nobody to exchange gradients with; nothing changes",)


# -- p3 -------------------------------------------------------------------------------------------------------------

SLICED = {"grad_ready_order": rows(400_000, 400_000)}
SERVERS = "p3:workers=2,bandwidth=1GB/s,latency_us=0"


def used(graph: TaskGraph, spec: str) -> dict[str, int]:
    """The starts of the second step's forward kernels under the schedule of ``spec``."""
    transform = whatif.load_transform(spec)
    timeline = simulate(transform(graph).check(), transform.schedule)
    kernels = drawn(timeline, "stream 7")
    return {name: start for name, start, _ in kernels[len(kernels) // 2 :] if name.startswith("f")}


def test_p3_by_hand() -> None:
    """Slices of 200,000 ns; a server beside each of two workers has every other slice.

    ::

        us        301       401       501       701       901      1001      1101
        stream  b2-|b1-------|                             |f1-------|        |f2---
        send       |push 2b----------|push 1b---|pull 1a---|pull 2a-----------|
        receive    |push 2a----------|push 1a---|pull 1b---|pull 2b-----------|
    """
    graph = two_layers(2, kernel_ns=100_000, **SLICED)
    durations = np.where(graph.select(name="^b"), 100_000, graph.duration_ns)
    graph = graph.with_duration(np.ones(len(graph), dtype=np.bool_), durations)
    assert used(graph, SERVERS) == {"f1": 901_000, "f2": 1_101_000}
    # The baseline: whole gradients in turn; layer 2's lies here (301 to 1101), layer 1's there (401 to 801 to 1201).
    assert used(graph, f"{SERVERS},priority=false") == {"f1": 1_201_000, "f2": 1_301_000}
    # Two machines of their own: nothing but pushes is sent and nothing but pulls received, 1.6 MB in all.
    alone = apply(graph, f"{SERVERS},servers=2")
    send = alone.duration_ns[alone.thread == len(alone.threads) - 2]
    assert send.tolist() == [200_000] * 8
    # One machine for two workers takes twice as long for a slice.
    assert set(apply(graph, f"{SERVERS},servers=1").duration_ns[alone.kind == TaskKind.COMMUNICATION]) == {400_000}


def test_servers_update_the_weights() -> None:
    graph = apply(two_layers(2, **SLICED), SERVERS)
    assert not graph.select(name="^u$|^launch u$").any()


def test_big_arrays_are_split_over_the_servers() -> None:
    """MXNet's rule: an array of more than a million parameters has a part on each server, a small one a place."""
    graph = apply(two_layers(2, grad_ready_order=rows(8_000_001, 400_000)), "p3:workers=4,priority=false")
    pushes = graph.size_bytes[graph.select(name="^push$") & (graph.step == 0)]
    assert sorted(pushes.tolist()) == [400_000, 2_000_000, 2_000_000, 2_000_000, 2_000_001]


def test_each_link_carries_as_much_as_in_a_ring() -> None:
    """Daydream §6.6's cluster of four: 2 (n - 1) / n of the gradients over each link, in either direction."""
    four = SERVERS.replace("workers=2", "workers=4")
    graph = apply(two_layers(2, grad_ready_order=rows(4_000_000, 4_000_000)), f"{four},slice_size=100kB")
    for channel in (len(graph.threads) - 2, len(graph.threads) - 1):
        carried = graph.duration_ns[(graph.thread == channel) & (graph.step == 0)].sum()
        assert carried == 2 * 3 / 4 * 8_000_000


# -- blueconnect, dgc, bandwidth ------------------------------------------------------------------------------------

EIGHT = "distributed:workers=8,bandwidth=1GB/s,latency_us=14,bucket_mb=100,gradient_as_bucket_view=true"
STAGES = "blueconnect:factors=4x2,inner_bandwidth=4GB/s"


def communication(graph: TaskGraph) -> list[tuple[str, int, int]]:
    """Name, duration and size of each transfer, in order."""
    tasks = np.flatnonzero(graph.kind == TaskKind.COMMUNICATION).tolist()
    columns = (names(graph), graph.duration_ns.tolist(), graph.size_bytes.tolist())
    return [(columns[0][task], columns[1][task], columns[2][task]) for task in tasks]


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


# -- as properties --------------------------------------------------------------------------------------------------


@st.composite
def training(draw: st.DrawFn) -> TaskGraph:
    """Steps of layers with random kernels and gradients, some of them without work or without a gradient."""
    layers = draw(st.integers(1, 5))
    steps = draw(st.integers(2, 3))
    sizes = [draw(st.integers(0, 9_000_000)) for _ in range(layers)]
    sizes[0] = max(sizes[0], 1)
    on_gpu = draw(st.booleans())
    build = Build(
        CPU, STREAM, metadata={"grad_ready_order": rows(*sizes)}, gpu=V100 if on_gpu else None, n_steps=steps,
        launch_lag_ns=draw(st.integers(0, 3_000)), queue_depth=draw(st.sampled_from([0, 3])),
    )  # fmt: skip
    time = st.integers(0, 2_000_000)
    for step in range(steps):
        order = [(Phase.FORWARD, i) for i in range(1, layers + 1)]
        order += [(Phase.BACKWARD, i) for i in range(layers, 0, -1)] + [(Phase.UPDATE, 0)]
        for phase, layer in order:
            for kernel in range(draw(st.integers(0 if layer > 1 else 1, 2))):
                columns: dict[str, Any] = {"phase": phase, "step": step, "layer": f"layer{layer}" if layer else ""}
                if not on_gpu:
                    build.task(0, draw(time), f"{step} {phase.name} {layer} {kernel}", TaskKind.CPU_OP, **columns)
                    continue
                name = f"{step} {phase.name} {layer} {kernel}"
                call = build.task(0, draw(st.integers(0, 5_000)), f"launch {name}", **columns)
                work = build.task(1, draw(time), name, **columns)
                build.edge(call, work, build.info.launch_lag_ns, whatif.DependencyKind.LAUNCH)
    return build.graph()


def kept_order(before: TaskGraph, after: TaskGraph) -> None:
    """Every old dependency holds in the new graph, between tasks of the same (distinct) names."""
    old, new = names(before), names(after)
    place = {name: number for number, name in enumerate(new)}
    pairs = {(int(s), int(t)) for s, t in zip(after.dependencies.source, after.dependencies.target, strict=True)}
    for source, target in zip(before.dependencies.source.tolist(), before.dependencies.target.tolist(), strict=True):
        if old[source] in place and old[target] in place:
            assert (place[old[source]], place[old[target]]) in pairs
    for thread in range(len(before.threads)):
        kept = [old[task] for task in np.flatnonzero(before.thread == thread) if old[task] in place]
        assert kept == [new[task] for task in np.flatnonzero(after.thread == thread) if new[task] in set(kept)]


ANY_LINK = st.sampled_from([("1Gbps", "2Gbps"), ("10Gbps", "11Gbps"), ("100Mbps", "3GB/s")])


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
    expected = (
        20_000_000 if "gradient_mb" in options else sum(r["bytes"] for r in graph.info.metadata["grad_ready_order"])
    )
    assert sent == pytest.approx(expected * graph.info.n_steps, rel=1e-4)


@settings(max_examples=60, deadline=None)
@given(training(), ANY_LINK)
def test_stages_and_compression_keep_the_step(graph: TaskGraph, links: tuple[str, str]) -> None:
    exchanged = [apply(graph, f"distributed:workers=8,bandwidth={link}") for link in links]
    for spec in ("blueconnect:factors=2x4", "blueconnect:factors=2x2x2,shared=false", "dgc"):
        slow, fast = (apply(g, spec) for g in exchanged)
        kept_order(graph, slow)
        if spec == "dgc":  # the channels of the stages choose what is ready first, which may choose badly
            assert simulate(fast).makespan_ns <= simulate(slow).makespan_ns


def overhead_ns(graph: TaskGraph, spec: str) -> int:
    transform = whatif.load_transform(spec)
    return simulate(transform(graph).check(), transform.schedule).makespan_ns


@settings(max_examples=60, deadline=None)
@given(training(), st.sampled_from(["", ",servers=1", ",servers=3"]), st.booleans())
def test_p3_keeps_the_step_and_gains_with_bandwidth(graph: TaskGraph, servers: str, priority: bool) -> None:
    spec = f"p3:workers=3{servers},priority={priority},bandwidth="
    changed = apply(graph, f"{spec}1Gbps")
    kept_order(graph, changed)
    updates = graph.select(phase=Phase.UPDATE)
    without = graph.remove(updates) if updates.any() else graph
    slow, fast, free = (overhead_ns(graph, f"{spec}{link}") for link in ("1Gbps", "4Gbps", "900TB/s,latency_us=0"))
    # A link that is free sooner may begin a slice just before a more urgent one is there: at most that slice is lost.
    largest = int(changed.duration_ns[changed.kind == TaskKind.COMMUNICATION].max())
    assert fast <= slow + largest
    assert free <= fast
    assert free <= simulate(without).makespan_ns + 1_000


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4_000_000), min_size=1, max_size=1), st.integers(0, 3))
def test_a_larger_slice_never_lowers_the_overhead_of_a_gradient(sizes: list[int], doublings: int) -> None:
    """Without latency: the pull of a slice runs beside the push of the next one, so that small slices fill the pipe."""
    graph = two_layers(2, grad_ready_order=[{**row, "layer": "layer1"} for row in rows(*sizes)])
    spec = "p3:workers=2,servers=2,latency_us=0,bandwidth=1GB/s,slice_size={}B"
    small, large = (overhead_ns(graph, spec.format(50_000 * 2**n)) for n in (doublings, doublings + 1))
    assert small <= large + 1_000  # whole nanoseconds of every slice


# -- the schedule ---------------------------------------------------------------------------------------------------


def slowly(frontier: Frontier) -> int:
    """Algorithm 7's Schedule as a search: the earliest start, channels last and the lowest first, the most urgent."""
    threads, urgency = frontier.graph.threads, frontier.graph.attached["priority"]

    def key(task: int) -> tuple[int, int, int, int, int]:
        start, ready, thread = frontier.start_ns(task), frontier.ready_ns[task], frontier.thread[task]
        free = not threads[thread].ordered
        return start, 1 + thread if free else 0, -int(urgency[task]) if free else ready, ready, task

    return min(frontier.ready_ns, key=key)


@settings(max_examples=60, deadline=None)
@given(training(), st.sampled_from(["", ",servers=2", ",slice_size=900kB"]), st.data())
def test_the_schedule_is_algorithm_7s(graph: TaskGraph, options: str, data: st.DataObject) -> None:
    changed = apply(graph, f"p3:bandwidth=10Gbps{options}")
    urgency = np.array(data.draw(st.lists(st.integers(-3, 3), min_size=len(changed), max_size=len(changed))))
    changed = changed.attach(priority=urgency)
    fast, slow = simulate(changed, by_priority), simulate(changed, slowly)
    np.testing.assert_array_equal(fast.start_ns, slow.start_ns)


# -- options that make no sense -------------------------------------------------------------------------------------


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


def test_p3_wants_a_step_that_follows() -> None:
    with pytest.raises(WhatifError, match="two steps or more"):
        apply(two_layers(1), "p3")


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


# -- real recordings ------------------------------------------------------------------------------------------------


@cache
def baseline(path: Path) -> Baseline:
    return Baseline.of(whatif.read(path))


@pytest.mark.parametrize("model", ["resnet50", "vgg19", "bert-base"])
def test_cpu_recordings_scale_with_the_network(own_traces: Path, model: str) -> None:
    before = baseline(own_traces / "campaign_cpu" / f"{model}--baseline.trace.json.gz")
    told = sum(row["bytes"] for row in before.graph.info.metadata["grad_ready_order"])
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
    assert predicted[0] > told * 8 / 0.95 / 1e5
    assert predicted[-1] < 1.15 * before.step_ns / 1e6


def test_gpu_recordings_scale_with_the_network(shared_traces: Path) -> None:
    """ResNet-50 on a V100 (102 MB of gradients): hidden at 100 Gbit/s, and not at 10."""
    before = baseline(shared_traces / "kineto-resnet50-v100" / "num_workers_4.2021-06.pt.trace.json.gz")
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
    before = baseline(shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz")
    after = whatif.apply(before, "distributed:gradient_mb=532,bandwidth=25Gbps")
    assert after.predicted_ms == pytest.approx(before.step_ns / 1e6 + after.breakdown.communication_ms, rel=0.02)


def test_recorded_all_reduces_go_in_stages(shared_traces: Path) -> None:
    before = baseline(shared_traces / "hta" / "v100_allreduce_rank1of2.json.gz")
    assert whatif.apply(before, "distributed").predicted_ms == before.step_ns / 1e6
    with pytest.raises(WhatifError, match="expected factors whose product is 2 workers, got 2x2"):
        whatif.apply(before, "blueconnect:factors=2x2,bandwidth=25Gbps")
    before = baseline(shared_traces / "param-dlrm-8xv100" / "rank0.json.gz")
    with pytest.raises(WhatifError, match="how large its all-reduces are"):
        whatif.apply(before, "blueconnect")
    after = whatif.apply(before, "blueconnect:bandwidth=25Gbps")
    for stage in ("reduce-scatter among 4", "reduce-scatter among 2", "all-gather among 2", "all-gather among 4"):
        assert int(after.graph.select(name=f"^{stage}$").sum()) == int(all_reduces(before.graph).sum()) == 3
    assert not all_reduces(after.graph).any()


def test_kernels_that_run_any_collective_are_told_apart(shared_traces: Path) -> None:
    """RCCL has one kernel for all; its arguments tell the collective, its size, and the header who takes part."""
    before = baseline(shared_traces / "tracelens-h100-mi300" / "mi300.resnet_act_checkpoint_ddp_train.json.gz")
    tasks = all_reduces(before.graph)
    assert before.graph.size_bytes[tasks].tolist() == 3 * [5_746_640, 17_632_384]
    with pytest.raises(WhatifError, match="product is 8 workers, got 2x2"):
        whatif.apply(before, "blueconnect:factors=2x2")
    # What part of an all-reduce was waiting nobody knows: up to all of it, and then nothing is gained.
    recorded_ns = before.graph.duration_ns[tasks]
    sparse = whatif.apply(before, "dgc")
    exchange = sparse.graph.select(name="^sparse all-gather$")
    assert sparse.graph.high_ns[exchange].tolist() == recorded_ns.tolist()
    assert sparse.predicted_ms < 0.7 * before.step_ns / 1e6 < before.step_ns / 1e6 <= sparse.high_ms
    on_gpu = sparse.graph.on_gpu[sparse.graph.select(name="compress gradients$")]
    assert on_gpu.all()
    assert len(on_gpu) == 12


# -- what recordings leave out --------------------------------------------------------------------------------------


def test_an_empty_bucket_costs_its_latency() -> None:
    """A frozen layer's gradient of no bytes fills a bucket of its own: 14 latencies flat, 8 in stages, 7 as lists."""
    graph = apply(two_layers(grad_ready_order=rows(GRADIENT, 0)), "distributed:workers=8")
    assert communication(graph)[1] == ("all-reduce", 14 * 14_000, 0)
    assert [part[1:] for part in communication(apply(graph, "blueconnect"))[4:]] == [
        (3 * 14_000, 0), (14_000, 0), (14_000, 0), (3 * 14_000, 0)
    ]  # fmt: skip
    assert communication(apply(graph, "dgc"))[1] == ("sparse all-gather", 7 * 14_000, 0)


def test_gradients_of_layers_without_backward_work_are_not_told() -> None:
    layers = [{"name": "head", "type": "Linear", "gradient_bytes": GRADIENT}]
    for spec in ("distributed", "p3"):
        with pytest.raises(WhatifError, match="does not tell the gradients"):
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


def test_compression_and_stages_exclude_one_another() -> None:
    graph = apply(two_layers(), EIGHT)
    for first, second in (("dgc", "blueconnect"), ("blueconnect", "dgc")):
        with pytest.raises(WhatifError, match=f"{second}: expected .* of {first}; name one of the two"):
            apply(graph, first, second)


def test_a_recording_of_one_of_several_workers_on_cpus_communicates_already() -> None:
    """gloo sends beside the recorded threads, so that no task tells it: the recorder does."""
    graph = on_cpu(2)
    graph.info.metadata["ddp"] = {"source": "ddp", "world_size": 4}
    for spec in ("distributed", "p3"):
        assert apply(graph, spec).notes[-1].endswith("nothing changes")


def test_latencies_of_slices_may_overlap() -> None:
    """Four slices a step of 200,000 each way, 100,000 of latency each: at the lower end only the bytes take time."""
    graph = apply(two_layers(2, **SLICED), SERVERS.replace("latency_us=0", "latency_us=100") + ",servers=2")
    sent = graph.kind == TaskKind.COMMUNICATION
    assert set(graph.duration_ns[sent].tolist()) == {300_000}
    assert set(graph.low_ns[sent].tolist()) == {200_000}
    assert set(graph.high_ns[sent].tolist()) == {402_000}


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
