"""ZeRO: its stages by hand, what they send and what they keep against the paper's formulas, and real recordings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import apply, equal
from tests.transforms.sharded_steps import LINK, blocks, blocks_on_cpu, drawn, keeps_the_step, sent_bytes, training
from whatif import GraphInfo, TaskGraph, WhatifError, simulate
from whatif.graph.memory import LayerMemory, Memory, peak
from whatif.models.parallel.sharded_memory import with_sharded_gradients, with_sharded_parameters, with_sharded_state
from whatif.prediction.predict import Baseline

pytestmark = pytest.mark.usefixtures("equal_gpus")

GATHER, SCATTER = "all-gather of parameters", "reduce-scatter of gradients"
COPY_IN = "copy gradients into their buffer"


def test_a_bucket_is_scattered_beside_the_backward_pass() -> None:
    """Two buckets of a block each; a call takes 55 us; behind the update all is gathered for the next step.

    ::

        us       1,002   2,002         4,002  4,012         6,012 6,022  6,122  6,374            6,574
        stream   |f0----|f1-----------|b1----|i|b0---------------|i|       |u----|
        network                                |scatter 1|         |scatter 0|    |gather 0 and 1---|next step...
    """
    timeline = simulate(apply(blocks(steps=2), f"zero:{LINK},bucket=3MB"))
    start = drawn(timeline, "stream 7")[1][1]
    rows = [(name, begin - start, end - start) for name, begin, end in drawn(timeline, "network")][:3]
    assert rows == [(SCATTER, 4010, 4110), (SCATTER, 6020, 6120), (GATHER, 6372, 6572)]
    work = [(name, begin - start, end - start) for name, begin, end in drawn(timeline, "stream 7")][1:9]
    assert work == [
        ("f0", 0, 1000), ("f1", 1000, 2000), ("b1", 2000, 4000), (COPY_IN, 4000, 4010), ("b0", 4010, 6010),
        (COPY_IN, 6010, 6020), ("u", 6120, 6372), ("data", 6572, 6573),
    ]  # fmt: skip
    # The stream that updates waits for the new parameters before the next step's batch is copied.
    assert drawn(timeline, "stream 7")[9][:2] == ("f0", start + 6573)


def test_one_bucket_of_all_is_scattered_behind_the_pass() -> None:
    rows = drawn(simulate(apply(blocks(), f"zero:{LINK}")), "network")
    assert [(name, end - start) for name, start, end in rows] == [(SCATTER, 200), (GATHER, 200)]


def test_without_overlap_all_is_sent_behind_the_backward_pass() -> None:
    timeline = simulate(apply(blocks(), f"zero:{LINK},bucket=3MB,overlap=false"))
    ends = {name: end for name, _, end in drawn(timeline, "stream 7")}
    assert all(start >= ends["b0"] for _, start, _ in drawn(timeline, "network"))
    copies = [start for name, start, _ in drawn(timeline, "stream 7") if name == COPY_IN]
    assert len(copies) == 2
    assert min(copies) >= ends["b0"]


def test_without_overlap_copies_are_launched_in_the_order_of_the_stream() -> None:
    """They ran as gradients got ready but were launched behind the pass: a cycle where launches wait for the GPU."""
    graph = blocks()
    limited = graph.replace(info=replace(graph.info, queue_depth=1))
    changed = apply(limited, f"zero:{LINK},bucket=3MB,overlap=false")
    launches = changed.launch_of[np.flatnonzero(changed.on_gpu & (changed.launch_of >= 0))]
    assert launches.tolist() == sorted(launches.tolist())


def test_stages_1_and_2_take_the_same_time() -> None:
    first, second = (apply(blocks(), f"zero:{LINK},stage={stage}") for stage in (1, 2))
    assert simulate(first).makespan_ns == simulate(second).makespan_ns


def test_only_stage_2_sends_gradients_in_every_pass() -> None:
    """Its workers keep a part of the gradients between passes; each pass took one exchange for all of them."""
    for stage, scatters in ((1, 2), (2, 6)):
        graph = apply(blocks(), "gradient_accumulation:passes=3", f"zero:{LINK},bucket=3MB,stage={stage}")
        timeline = simulate(graph)
        sent = drawn(timeline, "network")
        assert [name for name, _, _ in sent] == [SCATTER] * scatters + [GATHER]
        # Of each pass the first bucket is sent while its second block works.
        works = [row for row in drawn(timeline, "stream 7") if row[0] == "b0"][-scatters // 2 :]
        assert len(works) == scatters // 2
        for (_, begin, end), (_, start, _) in zip(works, sent[::2], strict=False):
            assert begin - 50 <= start <= end


def test_stage_3_is_fsdp() -> None:
    assert equal(apply(blocks(), f"zero:{LINK},stage=3"), apply(blocks(), f"fsdp:{LINK}"))


def test_on_a_cpu_nothing_runs_beside_anything() -> None:
    timeline = simulate(apply(blocks_on_cpu(), f"zero:{LINK},bucket=3MB"))
    assert int(timeline.graph.duration_ns.sum()) == timeline.makespan_ns
    # gloo's reduce-scatter is an all-reduce, of each of two blocks, and the gather is of both together: messages of
    # 225 us, and 8 copies at the 10 GB/s of a core, which take longer than the link.
    expected = [2 * (225 + 1584), 2 * (225 + 1584), 225 + 2 * 1584]
    assert [end - start for _, start, end in drawn(timeline, "network")] == expected


# -- the paper's formulas --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
def test_as_much_is_sent_as_in_data_parallel_training(stage: int) -> None:
    """Section 7.2.1: psi for the reduce-scatter, psi for the all-gather; an all-reduce is both."""
    sizes = {f"h.{n}": (n + 1) * 1_000_000 for n in range(6)}
    found = sent_bytes(apply(blocks(sizes), f"zero:workers=4,stage={stage},bucket=4MB"), 4)
    psi, share = sum(sizes.values()), 3 / 4
    assert found == {SCATTER: pytest.approx(psi * share), GATHER: pytest.approx(psi * share)}


PSI = 7_500_000_000
# Figure 1 of the paper: 7.5 B parameters on 64 GPUs take 120 GB, 31.4, 16.6 and 1.9.
FIGURE_1_GB = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}


def mixed_precision(parameters: int) -> Memory:
    """Section 3.1: 2 bytes for a parameter and for its gradient, 12 for Adam's state, fp32 copy included."""
    return Memory(2 * parameters, 12 * parameters, 0, (LayerMemory("h.0", 0, 2 * parameters),))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_is_that_of_figure_1(stage: int) -> None:
    workers, memory = 64, mixed_precision(PSI)
    formulas = {
        0: 16 * PSI,
        1: 4 * PSI + 12 * PSI / workers,
        2: 2 * PSI + 14 * PSI / workers,
        3: 16 * PSI / workers,
    }
    if stage == 1:
        memory = with_sharded_state(memory, workers)
    elif stage == 2:
        memory = with_sharded_gradients(memory, workers, 0)
    elif stage == 3:
        sizes = {-1: 0, 0: 2 * PSI}
        memory = with_sharded_parameters(memory, workers, {"h.0": 0}, sizes, limit=1, resharded=True, share=1.0)
    kept = memory.parameters + memory.optimizer_state + memory.gradients
    assert kept == pytest.approx(formulas[stage], abs=3)
    assert kept / 1e9 == pytest.approx(FIGURE_1_GB[stage], abs=0.05)


def three_blocks(**options: int) -> Memory:
    """Three blocks of 100 bytes and 10 of the root before them; each block leaves 7 bytes for its backward work."""
    rows = [LayerMemory("embedding", 0, 10), *(LayerMemory(f"h.{n}", 7, 100) for n in range(3))]
    memory = Memory(310, 620, 5, tuple(rows))
    units = {f"h.{n}": n for n in range(3)}
    settings_ = {"limit": 2, "resharded": True, "share": 1.0, **options}
    return with_sharded_parameters(memory, 10, units, {-1: 10, 0: 100, 1: 100, 2: 100}, **settings_)


def test_units_are_in_memory_while_they_work() -> None:
    memory = three_blocks()
    assert (memory.parameters, memory.optimizer_state, memory.gradients) == (31, 62, 31)
    # Forward the root and two blocks; the last block has none behind it.
    assert [row.forward_workspace for row in memory.layers] == [10, 210, 210, 110]
    # Backward too, beside a block's whole gradients in place of its tenth, and the buffer that the block before is sent
    # from.
    assert [row.backward_workspace for row in memory.layers] == [
        10 + 9 + 100 + 100, 10 + 100 + 90 + 100, 10 + 200 + 90 + 100, 10 + 200 + 90
    ]  # fmt: skip


def test_units_that_stay_gathered_fill_up_the_memory() -> None:
    memory = three_blocks(resharded=False)
    assert [row.forward_workspace for row in memory.layers] == [10, 210, 310, 310]
    assert all(row.backward_workspace >= 310 for row in memory.layers)


def test_one_block_at_a_time_needs_less() -> None:
    assert peak(three_blocks(limit=1)).total < peak(three_blocks(limit=2)).total


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=6), st.integers(2, 1024), st.integers(0, 10**9))
def test_each_stage_keeps_less_than_the_one_before(gradients: list[int], workers: int, state: int) -> None:
    rows = tuple(LayerMemory(f"h.{n}", 5, size) for n, size in enumerate(gradients))
    memory = Memory(sum(gradients), state, 0, rows)
    units = {f"h.{n}": n for n in range(len(gradients))}
    sizes = {-1: 0, **dict(enumerate(gradients))}
    stages = [
        memory,
        with_sharded_state(memory, workers),
        with_sharded_gradients(memory, workers, 0),
        with_sharded_parameters(memory, workers, units, sizes, limit=2, resharded=True, share=1.0),
    ]
    kept = [one.parameters + one.optimizer_state + one.gradients for one in stages]
    assert kept == sorted(kept, reverse=True)


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=6),
    st.integers(2, 1024), st.integers(0, 10**9), st.booleans(),
)  # fmt: skip
def test_sharding_gradients_too_never_takes_more(
    layers: list[tuple[int, int]], workers: int, bucket_bytes: int, stay: bool
) -> None:
    """The bucket was there before the first gradient: stage 2 took 25 MiB more than stage 1."""
    rows = tuple(LayerMemory(f"h.{n}", *sizes) for n, sizes in enumerate(layers))
    memory = Memory(0, 0, 0, rows, gradients_stay=stay)
    one, two = with_sharded_state(memory, workers), with_sharded_gradients(memory, workers, bucket_bytes)
    assert peak(two).total <= peak(one).total


# -- properties ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(training(), st.sampled_from([1, 2, 3]), st.booleans(), st.integers(2, 64))
def test_the_step_is_kept_and_more_bandwidth_is_never_slower(
    graph: TaskGraph, stage: int, overlap: bool, workers: int
) -> None:
    options = f"stage={stage},workers={workers},overlap={str(overlap).lower()}"
    slow, fast = (apply(graph, f"zero:{options},bandwidth={rate}Gbps") for rate in (10, 400))
    for changed in (slow, fast):
        keeps_the_step(graph, changed)
    assert simulate(fast).makespan_ns <= simulate(slow).makespan_ns


def test_one_worker_changes_nothing_and_steps_that_communicate_are_refused() -> None:
    graph = blocks()
    assert equal(apply(graph, "zero:workers=1"), graph)
    for first in ("zero", "distributed"):
        with pytest.raises(WhatifError, match="exchange no gradients yet"):
            apply(graph, first, "zero")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [("zero:stage=4", "stage 1, 2 or 3"), ("zero:workers=0", "workers"), ("zero:bucket=0MB", "size"),
     ("zero:bandwidth=3", "bandwidth"), ("zero:gradient_mb=0", "gradient_mb")],
)  # fmt: skip
def test_options_that_make_no_sense_are_one_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(WhatifError, match=sentence):
        apply(blocks(), spec)


def test_steps_without_gradients_are_one_sentence() -> None:
    with pytest.raises(WhatifError, match="zero:gradient_mb="):
        apply(blocks().replace(info=GraphInfo()), "zero")


# -- real recordings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gpt2-small", "bert-large", "resnet50"])
def test_cpu_recordings(own_traces: object, model: str) -> None:
    baseline = Baseline.of(whatif.read(f"{own_traces}/campaign_cpu/{model}--baseline.trace.json.gz"))
    stages = [whatif.apply(baseline, f"zero:stage={stage},workers=8,bandwidth=10Gbps") for stage in (1, 2, 3)]
    assert stages[0].predicted_ms == stages[1].predicted_ms > stages[0].baseline_ms
    memories = [baseline.graph.info.memory, *(one.graph.info.memory for one in stages)]
    kept = [one.parameters + one.optimizer_state + one.gradients for one in memories if one]
    assert len(kept) == 4
    assert kept == sorted(kept, reverse=True)
    assert kept[3] == pytest.approx(kept[0] / 8, rel=0.01)
    assert peak(memories[1]).total < peak(memories[0]).total  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["kineto-resnet50-v100/num_workers_4.2021-06.pt.trace.json.gz", "param-2080ti/linear_kineto.json.gz",
             "triosim-vgg13-h100/vgg13_bs512_adam.json.gz", "hta/step_based_gp100.json.gz"]
)  # fmt: skip
def test_gpu_recordings(shared_traces: object, name: str) -> None:
    baseline = Baseline.of(whatif.read(f"{shared_traces}/{name}"))
    times = {
        overlap: whatif.apply(baseline, f"zero:gradient_mb=102,overlap={overlap}").predicted_ms
        for overlap in ("true", "false")
    }
    assert times["true"] <= times["false"]
