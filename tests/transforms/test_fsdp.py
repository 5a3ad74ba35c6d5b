"""Fully sharded data parallel: by hand, as properties, and on real recordings.

A call of fully_shard's hooks takes 500 us; two workers gather or scatter a block in 100 us, and copy it in 10.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import apply, equal
from tests.transforms.sharded_steps import (
    BLOCK_BYTES,
    LINK,
    blocks,
    blocks_on_cpu,
    drawn,
    keeps_the_step,
    sent_bytes,
    training,
)
from whatif import TaskGraph, WhatifError, simulate
from whatif.graph.recorded import Layer
from whatif.prediction.predict import Baseline

pytestmark = pytest.mark.usefixtures("equal_gpus")

GATHER, SCATTER = "all-gather of parameters", "reduce-scatter of gradients"
COPY_IN, COPY_OUT = "copy gradients into their buffer", "copy parameters out of their buffer"
UNITS = r"unit=h\.[0-9]+"


def fsdp(graph: TaskGraph, options: str = "") -> TaskGraph:
    return apply(graph, f"fsdp:{LINK},{UNITS}" + (f",{options}" if options else ""))


def test_fsdp_by_hand() -> None:
    """Units are gathered ahead, two at once, and scattered behind; each call takes the CPU 500 us, a launch 1.

    ::

        us      1        501 503     1003 1005    1505    2005 2007       2508
        CPU     |gather 0|--|gather 1|--|gather 1|gather 0|-|scatter 1-----|-|scatter 0...
        network          |g0 601     |g1 1103  ..1611 g1 1711     2621 g0 2721       4641 s1 4741   6661 s0 6761
        stream               601 c|f0-----1611|c|f1---------2621|c|b1--------------4631|i c|b0--------6651|i    |u
    """
    timeline = simulate(fsdp(blocks()))
    assert drawn(timeline, "network") == [
        (GATHER, 501, 601), (GATHER, 1003, 1103), (GATHER, 1611, 1711), (GATHER, 2621, 2721),
        (SCATTER, 4641, 4741), (SCATTER, 6661, 6761),
    ]  # fmt: skip
    assert drawn(timeline, "stream 7") == [
        ("data", 1, 2), (COPY_OUT, 601, 611), ("f0", 611, 1611), (COPY_OUT, 1611, 1621), ("f1", 1621, 2621),
        (COPY_OUT, 2621, 2631), ("b1", 2631, 4631), (COPY_IN, 4631, 4641), (COPY_OUT, 4641, 4651),
        ("b0", 4651, 6651), (COPY_IN, 6651, 6661), ("u", 6761, 7013),  # 2 us of the update do not shrink
    ]  # fmt: skip
    calls = [row for row in drawn(timeline, "CPU") if row[0] == "call of a collective"]
    assert calls == [(calls[0][0], start, start + 500) for start in (1, 503, 1005, 1505, 2008, 2511)]


@pytest.mark.parametrize(
    ("prefetch", "second_gather", "end"),
    # Behind the scatter of the block before; before it; and before that block's backward work.
    [("none", (4741, 4841), 7213), ("post", (2621, 2721), 7013), ("pre", (2621, 2721), 7013)],
)
def test_a_gather_that_is_not_asked_for_early_waits_behind_a_scatter(
    prefetch: str, second_gather: tuple[int, int], end: int
) -> None:
    timeline = simulate(fsdp(blocks(), f"backward_prefetch={prefetch}"))
    gathers = [row[1:] for row in drawn(timeline, "network") if row[0] == GATHER]
    assert gathers[3] == second_gather
    assert drawn(timeline, "stream 7")[-1] == ("u", end - 252, end)


def test_the_limit_is_of_units_that_are_gathered_at_once() -> None:
    # One at a time: each gather waits until the unit before is let go, so that none runs beside work.
    timeline = simulate(fsdp(blocks(), "limit=1"))
    ends = {row[0]: row[2] for row in drawn(timeline, "stream 7")}
    gathers = [row[1] for row in drawn(timeline, "network") if row[0] == GATHER]
    assert gathers == [501, ends["f0"], ends["f1"], ends["b1"]]
    # With three the limit does nothing here but for the last, as the CPU's calls are what they wait for.
    assert [row[1] for row in drawn(simulate(fsdp(blocks(), "limit=3")), "network")][:3] == [501, 1003, 1505]


def test_what_stays_gathered_is_not_gathered_again() -> None:
    timeline = simulate(fsdp(blocks(), "reshard_after_forward=false"))
    assert [row[0] for row in drawn(timeline, "network")] == [GATHER, GATHER, SCATTER, SCATTER]


def test_the_root_is_gathered_first_and_scattered_last() -> None:
    graph = blocks({"embedding": 2 * BLOCK_BYTES, "h.0": BLOCK_BYTES})
    rows = drawn(simulate(fsdp(graph)), "network")
    lengths = [(name, end - start) for name, start, end in rows]
    # The root is twice as large: once forward, not again backward, and behind the whole backward pass.
    assert lengths == [(GATHER, 200), (GATHER, 100), (GATHER, 100), (SCATTER, 100), (SCATTER, 200)]


def test_half_sends_half_of_the_bytes() -> None:
    whole, half = (drawn(simulate(fsdp(blocks(), option)), "network") for option in ("half=false", "half=true"))
    assert [end - start for _, start, end in half] == [(end - start) // 2 for _, start, end in whole]


def test_a_step_gathers_what_the_step_before_has_updated() -> None:
    timeline = simulate(fsdp(blocks(steps=2)))
    updates = [end for name, _, end in drawn(timeline, "stream 7") if name == "u"]
    gathers = [start for name, start, _ in drawn(timeline, "network") if name == GATHER]
    assert updates[0] == 7013
    assert gathers[4] == updates[0]


def test_on_a_cpu_every_call_blocks_and_a_scatter_is_a_whole_all_reduce() -> None:
    timeline = simulate(fsdp(blocks_on_cpu()))
    rows = drawn(timeline, "network")
    assert [row[0] for row in rows] == [GATHER, GATHER, GATHER, SCATTER, GATHER, SCATTER]
    # Nothing runs beside anything: thread and network together fill the makespan.
    assert int(timeline.graph.duration_ns.sum()) == timeline.makespan_ns
    gathers, scatters = ([end - start for name, start, end in rows if name == one] for one in (GATHER, SCATTER))
    # Not the link: a message of 225 us, and 8 copies of half of the block at the 10 GB/s of a core; a sum is two of it.
    assert set(gathers) == {225 + 1584}
    assert set(scatters) == {2 * (225 + 1584)}
    slow = drawn(simulate(apply(blocks_on_cpu(), f"fsdp:workers=2,bandwidth=3.96Gbps,latency_us=0,{UNITS}")), "network")
    # Half of a block at 0.95 of 0.495 GB/s, which takes longer than gloo's work.
    lengths = [(name, end - start) for name, start, end in slow]
    assert lengths[0] == (GATHER, pytest.approx(1980 / 0.495 / 0.95, abs=1))
    assert lengths[3] == (SCATTER, pytest.approx(3960 / 0.495 / 0.95, abs=1))


# -- what the papers count -------------------------------------------------------------------------------------------


def test_three_times_the_parameters_are_sent_where_data_parallel_sends_two() -> None:
    """ZeRO, section 7: 3 psi for stage 3, and 2 psi for data parallel (an all-reduce is both of its halves)."""
    sizes = {f"h.{n}": (n + 1) * 1_000_000 for n in range(6)}
    psi = sum(sizes.values())
    share = 3 / 4
    found = sent_bytes(apply(blocks(sizes), f"fsdp:workers=4,{UNITS}"), 4)
    assert found == {GATHER: pytest.approx(2 * psi * share), SCATTER: pytest.approx(psi * share)}
    reduced = apply(blocks(sizes), "distributed:workers=4,bandwidth=144Gbps,latency_us=0")
    all_reduced = 2 * sum(sent_bytes(reduced, 4).values())
    assert sum(found.values()) == pytest.approx(1.5 * all_reduced)


def test_frozen_parameters_are_gathered_and_not_scattered() -> None:
    """LoRA: only what has gradients was gathered. Here h.0 is frozen but for 1 MB of 4, h.1 wholly, and so is `out`."""
    graph = blocks({"h.0": 1_000_000, "h.1": 0, "out": 0})
    layers = [Layer("h.0", "Linear", 1_000_000, 1_000_000), Layer("h.1", "Linear", 500_000, 0),
              Layer("out", "Linear", 250_000, 0)]  # fmt: skip
    gradients = [row for row in graph.info.recorded.gradients if row.size_bytes]
    recorded = msgspec.structs.replace(graph.info.recorded, layers=layers, gradients=gradients)
    graph = graph.replace(info=replace(graph.info, recorded=recorded))
    found = sent_bytes(apply(graph, f"fsdp:workers=4,{UNITS}"), 4)
    assert found == {GATHER: pytest.approx((2 * 6e6 + 1e6) * 3 / 4), SCATTER: pytest.approx(1e6 * 3 / 4)}


# -- properties ------------------------------------------------------------------------------------------------------


OPTIONS = st.sampled_from(
    [UNITS, "unit_size=20MB", f"{UNITS},backward_prefetch=none", f"{UNITS},backward_prefetch=post,limit=1",
     f"{UNITS},forward_prefetch=true", f"{UNITS},reshard_after_forward=false", "gradient_mb=300,unit_size=30MB"]
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(training(), OPTIONS, st.integers(2, 64))
def test_the_step_is_kept_and_more_bandwidth_is_never_slower(graph: TaskGraph, options: str, workers: int) -> None:
    slow, fast = (apply(graph, f"fsdp:workers={workers},bandwidth={rate}Gbps,{options}") for rate in (10, 400))
    for changed in (slow, fast):
        keeps_the_step(graph, changed)
    assert simulate(fast).makespan_ns <= simulate(slow).makespan_ns


@settings(max_examples=20, deadline=None)
@given(training(), OPTIONS)
def test_every_byte_is_gathered_and_scattered(graph: TaskGraph, options: str) -> None:
    changed = apply(graph, f"fsdp:workers=8,bandwidth=100Gbps,{options}")
    steps = np.unique(graph.step)
    listed = sum(row.size_bytes or 0 for row in graph.info.recorded.gradients)
    total = 300_000_000 if "gradient_mb" in options else listed
    for step in steps.tolist():
        mine = changed.step == step
        scattered = int(changed.size_bytes[mine & changed.select(name=f"^{SCATTER}$")].sum())
        gathered = int(changed.size_bytes[mine & changed.select(name=f"^{GATHER}$")].sum())
        n_passes = max(round(scattered / total), 1)  # once a pass; in pieces of whole bytes
        assert scattered == pytest.approx(n_passes * total, rel=1e-6, abs=1_000)
        assert scattered <= gathered <= 2 * scattered


def test_one_worker_changes_nothing() -> None:
    graph = blocks()
    changed = apply(graph, "fsdp:workers=1")
    assert equal(changed, graph)
    assert len(changed.notes) == 1


def test_twice_is_refused() -> None:
    with pytest.raises(WhatifError, match="exchange no gradients yet"):
        fsdp(fsdp(blocks()))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("fsdp:workers=0", "workers"), ("fsdp:limit=0", "limit"), ("fsdp:unit=nosuch", "no layer"),
        ("fsdp:unit=h.0,unit_size=4MB", "got both"), ("fsdp:backward_prefetch=sometimes", "backward_prefetch"),
        ("fsdp:algorithm=nosuch", "algorithm"), ("fsdp:gradient_mb=-1", "gradient_mb"), ("fsdp:unit=(", "regular"),
        (f"fsdp:gradient_mb=5,{UNITS}", "names its layers"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_one_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(WhatifError, match=sentence):
        apply(blocks(), spec)


def test_steps_without_gradients_are_one_sentence() -> None:
    graph = blocks()
    graph = graph.replace(info=whatif.GraphInfo())
    with pytest.raises(WhatifError, match="gradient_mb="):
        apply(graph, "fsdp")


# -- real recordings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gpt2-small", "bert-large", "resnet50", "vgg19"])
def test_cpu_recordings(own_traces: object, model: str) -> None:
    baseline = Baseline.of(whatif.read(f"{own_traces}/campaign_cpu/{model}--baseline.trace.json.gz"))
    slow, fast = (whatif.apply(baseline, f"fsdp:workers=2,bandwidth={rate}Gbps") for rate in (1, 10))
    assert slow.baseline_ms < fast.predicted_ms < slow.predicted_ms
    assert slow.low_ms <= slow.predicted_ms <= slow.high_ms
    parameters = sum(row.size_bytes or 0 for row in baseline.graph.info.recorded.gradients)
    found = sent_bytes(slow.graph, 2)
    assert found[SCATTER] == pytest.approx(parameters / 2, rel=0.01)
    assert parameters / 2 <= found[GATHER] <= parameters
    # Each byte that is gathered takes what a ring takes on that link, and each that is scattered twice that.
    transfer_ms = (found[GATHER] + 2 * found[SCATTER]) / (1e9 / 8 * 0.95) * 1e3
    assert slow.predicted_ms - slow.baseline_ms > transfer_ms


@pytest.mark.parametrize(
    "name", ["kineto-resnet50-v100/num_workers_4.2021-06.pt.trace.json.gz", "param-2080ti/resnet_kineto.json.gz",
             "triosim-vgg13-h100/vgg13_bs512_adam.json.gz", "edls-a4000/torch_profiler_trace.json.gz"]
)  # fmt: skip
def test_gpu_recordings(shared_traces: object, name: str) -> None:
    baseline = Baseline.of(whatif.read(f"{shared_traces}/{name}"))
    asked = ("pre", "post", "none")
    times = {
        how: whatif.apply(baseline, f"fsdp:gradient_mb=102,unit_size=10MB,backward_prefetch={how}").predicted_ms
        for how in asked
    }
    assert times["pre"] <= times["post"] * 1.01
    assert times["post"] <= times["none"]


NODES = """[cluster]
name = "nodes"
[[level]]
name = "node"
workers = 2
bandwidth = "158.4Gbps"
latency_us = 0
[[level]]
name = "machines"
bandwidth = "79.2Gbps"
latency_us = 0
shared = false
"""


def test_hybrid_sharding_sums_across_nodes_what_a_node_has_scattered(tmp_path: Path) -> None:
    """Two nodes of two: within one all is as with two workers; half a block is summed at half the rate, 200 us."""
    path = tmp_path / "nodes.toml"
    path.write_text(NODES)
    graph, options = blocks(), UNITS
    within = simulate(fsdp(graph))
    timeline = simulate(apply(graph, f"fsdp:cluster={path},workers=4,hybrid=true,{options}"))
    moved = drawn(timeline, "network")
    lengths = [(name, end - begin) for name, begin, end in moved]
    assert lengths == [(name, end - begin) for name, begin, end in drawn(within, "network")]
    across = drawn(timeline, "network across nodes")
    assert [(name, end - begin) for name, begin, end in across] == [("all-reduce", 200)] * 2
    scatters = [end for name, _, end in moved if name == SCATTER]
    assert all(begin >= end for (_, begin, _), end in zip(across, scatters, strict=True))
    (update,) = [begin for name, begin, _ in drawn(timeline, "stream 7") if name == "u"]
    assert update == across[-1][2]


def test_hybrid_sharding_needs_nodes(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text(NODES)
    graph = blocks()
    for options in ("workers=4,bandwidth=25Gbps", f"cluster={path.with_name('one.toml')},workers=4"):
        path.with_name("one.toml").write_text(NODES.replace("workers = 2", "workers = 1"))
        with pytest.raises(WhatifError, match="hybrid=true"):
            apply(graph, f"fsdp:{options},hybrid=true")
    one_node = f"fsdp:cluster={path},workers=2"
    assert simulate(apply(graph, f"{one_node},hybrid=true")).makespan_ns == simulate(apply(graph, one_node)).makespan_ns
