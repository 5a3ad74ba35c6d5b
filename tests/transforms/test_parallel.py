"""Tensor, pipeline and data parallel what-ifs together: order, degrees of one, bytes, links."""

from __future__ import annotations

from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

import whatif
from tests.transforms.pipelines import equal_layers
from whatif import Phase, TaskGraph, TaskKind, WhatifError, load_transform
from whatif.graph.memory import LayerMemory, Memory
from whatif.ingest.ranks.merge import ranks_of
from whatif.models.exchange import more_passes
from whatif.models.exchange.beside_kernels import BESIDE
from whatif.models.exchange.exchanges import tensor_workers
from whatif.models.layers.memory_effects import with_stages
from whatif.prediction.predict import Baseline, Prediction, apply
from whatif.questions.advice.trial import Trial, Trier
from whatif.report.perfetto import write_perfetto
from whatif.simulation.simulator import simulate
from whatif.simulation.transfers import GRADIENTS, hidden_ns, latency_of, workers_of

TRACES = Path(__file__).parents[2] / "traces"
TENSOR = "tensor_parallel:workers=2,bandwidth={tensor}Mbps"
PIPELINE = "pipeline:stages=2,micro_batches=2,bandwidth={pipeline}Mbps"
DATA = "{data}workers=4,bandwidth={rate}Mbps"


@cache
def gpt2() -> Baseline:
    return Baseline.of(whatif.read(TRACES / "campaign_cpu" / "gpt2-small--baseline.trace.json.gz"))


def three(data: str = "distributed:", *, tensor: int = 1000, pipeline: int = 1000, rate: int = 1000) -> tuple[str, ...]:
    return (TENSOR.format(tensor=tensor), PIPELINE.format(pipeline=pipeline), DATA.format(data=data, rate=rate))


def sent(graph: TaskGraph, name: str) -> int:
    """Bytes of the communication tasks of that name in one step."""
    step = int(graph.info.steady[0]) if len(graph.info.steady) else int(graph.step[0])
    chosen = (graph.kind == TaskKind.COMMUNICATION) & graph.select(name=f"^{name}$") & (graph.step == step)
    return int(graph.size_bytes[chosen].sum())


@pytest.mark.parametrize("data", ["distributed:", "zero:stage=1,"])
def test_any_order_gives_the_same_step(data: str) -> None:
    found = [apply(gpt2(), *specs) for specs in permutations(three(data))]
    assert len({one.predicted_ms for one in found}) == 1
    assert {tuple(t.name for t in one.transforms) for one in found} == {
        ("tensor_parallel", "pipeline", data.partition(":")[0])
    }


def test_what_stands_between_keeps_its_place_ahead_of_the_outer_axis() -> None:
    specs = ("distributed:workers=2", "activation_checkpoint", "pipeline:stages=2,micro_batches=2", "scale:factor=0.5")
    names = [transform.name for transform in apply(gpt2(), *specs).transforms]
    assert names == ["activation_checkpoint", "pipeline", "distributed", "scale"]


@pytest.mark.parametrize("outer", ["fsdp:workers=4", "pipeline:stages=2,micro_batches=2"])
def test_passes_that_are_recomputed_lie_inside_of_what_gathers_or_cuts_them(outer: str) -> None:
    """Behind fsdp they would start before the parameters that they need are there."""
    before, behind = apply(gpt2(), "activation_checkpoint", outer), apply(gpt2(), outer, "activation_checkpoint")
    assert behind.predicted_ms == before.predicted_ms > apply(gpt2(), outer).predicted_ms


def test_what_is_recomputed_is_cut_first() -> None:
    tensor = "tensor_parallel:workers=2"
    found = [apply(gpt2(), *specs) for specs in ((tensor, "activation_checkpoint"), ("activation_checkpoint", tensor))]
    assert found[0].predicted_ms == found[1].predicted_ms


def test_no_axis_is_dropped() -> None:
    """Each one's transfers are there, and slower links lengthen the step by them."""
    together = apply(gpt2(), *three())
    for number, name in enumerate(("sum of activations", "send", "all-reduce")):
        assert sent(together.graph, name) > 0
        slower = dict.fromkeys((("tensor", "pipeline", "rate")[number],), 20)
        assert apply(gpt2(), *three(**slower)).predicted_ms > together.predicted_ms + 1


def test_a_pipeline_has_as_many_copies_as_there_are_workers_if_none_are_named(tmp_path: Path) -> None:
    """The stages were neighbours, beside eight copies."""
    nodes = tmp_path / "nodes.toml"
    node = '[[level]]\nname = "GPUs"\nworkers = 8\nbandwidth = "100Gbps"\n[[level]]\nname = "nodes"\n'
    nodes.write_text(node + 'bandwidth = "1Gbps"\n')
    specs = [
        (f"pipeline:stages=2,micro_batches=2,cluster={nodes}", f"distributed:{workers}cluster={nodes}")
        for workers in ("workers=8,", "")
    ]
    named, left_open = (apply(gpt2(), *pair) for pair in specs)
    assert left_open.predicted_ms == named.predicted_ms
    # `memory` and `advise` try what-ifs one behind another.
    tried = [Trier(gpt2(), may_move=True).attempt(list(map(load_transform, pair))) for pair in specs]
    assert {one.predicted_ms for one in tried if isinstance(one, Trial)} == {named.predicted_ms}
    assert left_open.transforms[0].options["copies"] == 8
    nodes.write_text(node + 'workers = 1\nbandwidth = "1Gbps"\n')
    with pytest.raises(WhatifError, match=r"fills equal groups of 8 x 1, got 16 \(2 groups of 8 neighbours\)"):
        apply(gpt2(), f"pipeline:stages=2,micro_batches=2,cluster={nodes}", f"distributed:cluster={nodes}")


def test_a_stage_that_updates_nearly_all_parameters_makes_a_step_longer() -> None:
    """The cut was taken with which the first stage was ready soonest: the last one had nearly the whole model."""
    gpt2_h100 = Baseline.of(whatif.read(TRACES / "predicted" / "gpt2_h100_predicted.json.gz"))
    found = apply(gpt2_h100, "pipeline:stages=2,micro_batches=1,bandwidth=4000Gbps")
    assert found.predicted_ms < 80
    assert (found.graph.info.peak_bytes or 0) < 0.6 * (gpt2_h100.graph.info.peak_bytes or 0)


def test_the_fullest_stage_of_a_pipeline_is_another_one_once_its_copies_share_their_state(tmp_path: Path) -> None:
    """The memory of the stage with the most state was reported, not that of the one with the most activations."""
    pipeline, zero = load_transform(PIPELINE.format(pipeline=1000)), load_transform("zero:stage=1,workers=8")
    first, last = (Memory(0, state, 0, (LayerMemory("", kept, 0),)) for state, kept in ((0, 900), (800, 200)))
    graph = with_stages(pipeline(gpt2().graph), (first, last))
    assert graph.info.peak_bytes == 1000
    assert zero(graph).info.peak_bytes == 900
    assert "zero: `memory` reports stage 0, now the fullest one" in zero(graph).notes
    exported = str(tmp_path / "stages.json")
    write_perfetto(exported, simulate(graph), None, without_profiler=False)
    assert zero(whatif.read(exported)).info.peak_bytes == 900


def test_a_trial_counts_the_samples_of_all_workers() -> None:
    """The report showed the longer step of one worker as the speed-up."""
    found = Trier(gpt2(), may_move=True).attempt([load_transform("distributed:workers=8")])
    assert isinstance(found, Trial)
    assert (found.samples, found.workers, found.same_training) == (8, 8, False)
    # All wait at once.
    assert structs.replace(found, waiting_ms=1.0).recorded_samples_ms == found.predicted_ms / 8


def test_ddp_adds_a_stages_own_gradients_to_its_memory() -> None:
    """The largest stage's were added to whichever stage was the fullest."""
    graph = load_transform(PIPELINE.format(pipeline=1000))(gpt2().graph)
    size_bytes = np.asarray(graph.attached[GRADIENTS])
    first, last = (int(size_bytes[ranks_of(graph) == stage].max()) for stage in (0, 1))
    assert first != last
    ddp = load_transform("distributed:workers=8")
    for kept in ((1000, 1000), (10**9, 1000), (1000, 10**9)):
        stages = [Memory(0, 0, 0, (LayerMemory("", each, 0),)) for each in kept]
        found = ddp(with_stages(graph, stages)).info.peak_bytes
        assert found == max(kept[0] + first, kept[1] + last)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_degree_of_one_is_as_if_it_were_not_there(gone: int) -> None:
    ones = ("tensor_parallel:workers=1", "pipeline:stages=1,micro_batches=1", "distributed:workers=1")
    specs = list(three())
    without = apply(gpt2(), *specs[:gone], *specs[gone + 1 :]).predicted_ms
    specs[gone] = ones[gone]
    assert apply(gpt2(), *specs).predicted_ms == without


def test_bytes_are_conserved() -> None:
    """What is exchanged is that of each alone, whatever is around it; recomputing sums a block's forward pass again."""
    tensor, pipeline, _ = three()
    alone = sent(apply(gpt2(), tensor).graph, "sum of activations")
    assert sent(apply(gpt2(), *three()).graph, "sum of activations") == alone
    assert sent(apply(gpt2(), tensor, "gradient_accumulation:passes=3").graph, "sum of activations") == 3 * alone
    again = apply(gpt2(), tensor, "activation_checkpoint").graph
    assert sent(again, "sum of activations") == alone
    assert 2 * sent(again, r"recomputed \(activation checkpointing\)") == alone
    assert sent(apply(gpt2(), tensor, f"{pipeline},recompute=true").graph, "sum of activations") == 1.5 * alone
    # All stages together exchange the gradients of the cut model, once a step.
    cut = sum(row.size_bytes or 0 for row in apply(gpt2(), tensor).graph.info.recorded.gradients)
    assert sent(apply(gpt2(), *three()).graph, "all-reduce") == pytest.approx(cut, rel=0.02)


@pytest.mark.parametrize(("data", "name", "times"), [
    ("distributed:", "all-reduce", 1), ("zero:stage=1,", "reduce-scatter of gradients", 1),
    ("zero:stage=2,", "reduce-scatter of gradients", 3), ("zero:stage=2,", "all-gather of parameters", 1),
    ("fsdp:", "reduce-scatter of gradients", 3), ("fsdp:", "all-gather of parameters", 3),
])  # fmt: skip
def test_passes_are_run_again_and_gradients_sent_as_often_as_they_are(
    data: str, name: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP and ZeRO-1 send in the last of three passes, others in each of them; one pass may stand for the first two."""
    spec, accumulated = f"{data}workers=4,bandwidth=1Gbps", "gradient_accumulation:passes=3"
    alone, found, other = apply(gpt2(), spec), apply(gpt2(), accumulated, spec), apply(gpt2(), spec, accumulated)
    assert found.predicted_ms == other.predicted_ms
    assert sent(found.graph, name) == times * sent(alone.graph, name)
    two_more = apply(gpt2(), accumulated).predicted_ms - gpt2().step_ns / 1e6
    expected = times * alone.predicted_ms if data == "fsdp:" else alone.predicted_ms + two_more
    if data == "zero:stage=2,":  # gloo's reduce-scatter is an all-reduce, which takes twice as long as an all-gather
        expected += 2 * 2 / 3 * (alone.predicted_ms - gpt2().step_ns / 1e6)
    assert found.predicted_ms == pytest.approx(expected, rel=0.03)
    monkeypatch.setattr(more_passes, "MOST_TASKS", 1)
    shorter = apply(gpt2(), accumulated, spec)
    assert len(shorter.graph) < len(found.graph)
    assert shorter.predicted_ms == pytest.approx(found.predicted_ms, rel=0.03)
    assert sent(shorter.graph, name) == pytest.approx(sent(found.graph, name), abs=len(found.graph))


def test_two_equal_layers_by_hand() -> None:
    """Two stages of one layer with 4,000 bytes of gradients each; two micro-batches of 100 bytes cross both ways.

    Between four workers a ring takes 6 latencies of 1,000 ns and 1.5 times 4,000 bytes at a byte a nanosecond.
    """
    metadata = {"layers": [{"name": f"Linear_{i}", "type": "Linear", "gradient_bytes": 4_000} for i in range(2)]}
    link = "bandwidth=1GB/s,latency_us=1"
    graph = equal_layers(2, metadata=metadata)
    alone = whatif.load_transform(f"pipeline:stages=2,micro_batches=2,{link},activation_mb=0.0002")(graph)
    copies = whatif.load_transform(f"distributed:workers=4,algorithm=ring,{link}")(alone).check()
    assert sent(copies, "send") == 4 * 100
    assert sent(copies, "all-reduce") == 2 * 4_000
    reduced = np.flatnonzero(copies.select(name="^all-reduce$"))
    assert copies.duration_ns[reduced].tolist() == [6_000 + 6_000] * 2
    assert latency_of(copies)[reduced].tolist() == [6_000] * 2
    assert workers_of(copies)[reduced].tolist() == [4] * 2


@pytest.mark.parametrize("data", ["distributed:", "zero:stage=1,"])
def test_half_of_a_link_never_shortens_a_step(data: str) -> None:
    def step(**rates: int) -> float:
        found: Prediction = apply(gpt2(), *three(data, **rates))
        return found.predicted_ms

    for rate in (4000, 400, 40):
        base = {"tensor": rate, "pipeline": rate, "rate": rate}
        whole = step(**base)
        for name in base:
            assert step(**{**base, name: rate // 2}) >= whole - 1e-6


def test_given_gradients_are_divided_among_the_stages() -> None:
    found = apply(gpt2(), "pipeline:stages=2,micro_batches=2", "distributed:workers=2,gradient_mb=50").graph
    assert sent(found, "all-reduce") == pytest.approx(50e6, abs=2)


def test_the_last_gradient_goes_to_the_stage_before_ahead_of_the_all_reduce() -> None:
    """On a CPU the thread that calls an all-reduce waits for it: those of the stages are side by side all the same."""
    alone, copies = (
        apply(gpt2(), "pipeline:stages=2,micro_batches=2,bandwidth=10Gbps", *others)
        for others in ([], ["distributed:workers=2,bandwidth=50Mbps,spread_pct=0,gradient_mb=20"])
    )
    reduced_ms = copies.graph.duration_ns[copies.graph.select(name="^all-reduce$").mask].max() / 1e6
    assert reduced_ms > alone.predicted_ms
    assert alone.predicted_ms < copies.predicted_ms < alone.predicted_ms + 1.2 * reduced_ms


def test_sequence_parallel_moves_activations_and_its_groups_share_a_clusters_links() -> None:
    """A gather and a scatter for each sum, of as many bytes, and as many workers whose links are shared.

    The input of each part is gathered again for the gradients of its weights: half as much as is summed.
    """
    summed = apply(gpt2(), "tensor_parallel:workers=2").graph
    cut = apply(gpt2(), "tensor_parallel:workers=2,sequence_parallel=true").graph
    assert tensor_workers(cut) == tensor_workers(summed) == 2
    sums = sent(summed, "sum of activations")
    assert (sent(cut, "scatter of activations"), sent(cut, "gather of activations")) == (sums, 1.5 * sums)
    assert not sent(cut, "all-gather of parameters")


def test_what_is_gathered_again_is_hidden_by_a_product() -> None:
    """On a GPU it takes kernels' memory traffic alone, in a pipeline too, until the link is too slow to hide it."""
    recorded = Baseline.of(whatif.read(next((TRACES / "predicted").glob("gpt2*.json.gz"))))
    spec = "tensor_parallel:workers=2,sequence_parallel=true,bandwidth={}GB/s"
    cut = apply(recorded, spec.format(300)).graph
    gathers = np.flatnonzero(cut.select(name="^gather of activations$"))
    beside = hidden_ns(cut, gathers, cut.duration_ns.astype(np.float64)) > 0
    assert beside.sum() == len(gathers) // 3 == cut.select(name=f"^{BESIDE}$").mask.sum()
    assert (cut.phase[gathers[beside]] == Phase.BACKWARD).all()
    stages = "pipeline:stages=2,micro_batches=2"
    steps = [apply(recorded, spec.format(rate), stages).predicted_ms for rate in (300, 30, 3)]
    assert steps == sorted(steps)


@pytest.mark.parametrize("factor", [0.5, 4])
def test_another_batch_is_summed_in_its_own_size(factor: float) -> None:
    tensor, batch = "tensor_parallel:workers=2,bandwidth=200Mbps", f"batch_size:factor={factor}"
    before, behind = apply(gpt2(), batch, tensor), apply(gpt2(), tensor, batch)
    assert sent(before.graph, "sum of activations") == sent(behind.graph, "sum of activations")
    assert behind.predicted_ms == pytest.approx(before.predicted_ms, rel=0.02)


def test_micro_batches_of_any_size() -> None:
    """As many samples in all: the same step; twice as many: twice the work of each pass."""
    size = gpt2().graph.info.batch_size
    assert size is not None
    divided = apply(gpt2(), "pipeline:stages=2,micro_batches=2")
    named = apply(gpt2(), f"pipeline:stages=2,micro_batches=2,micro_batch={size // 2}")
    assert named.predicted_ms == divided.predicted_ms
    whole = apply(gpt2(), f"pipeline:stages=2,micro_batches=2,micro_batch={size}")
    assert whole.graph.info.batch_size == 2 * size
    assert sent(whole.graph, "send") == 2 * sent(divided.graph, "send")


@pytest.mark.parametrize(
    ("specs", "sentence"),
    [
        (("pipeline:stages=2,micro_batches=2", "fsdp"), "fsdp: expected steps of a whole model"),
        (("pipeline:stages=2,micro_batches=2", "zero:stage=3"), "zero:stage=3: expected steps of a whole model"),
        (("pipeline:stages=2,micro_batches=2", "distributed:compress=fp16"), "after pipeline"),
        (("pipeline:stages=2,micro_batches=2", "zero"), "zero:stage=2: .* distributed and zero:stage=1 are modelled"),
        (("pipeline:stages=2,micro_batches=2", "zero:stage=1,gradient_mb=0"), "gradient_mb above 0"),
        (("distributed", "zero"), "exchange no gradients yet"),
        (("pipeline:stages=2,micro_batches=2", "pipeline:stages=2"), "a pipeline's stages"),
        (("gradient_accumulation", "pipeline:stages=2,micro_batches=2"), "leave gradient_accumulation out"),
        (("pipeline:stages=2,micro_batches=2,micro_batch=0",), "expected a micro_batch of"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(specs: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(WhatifError, match=sentence):
        apply(gpt2(), *specs)


@pytest.mark.parametrize("spec", ["amp", "batch_size:factor=2", "fused_adam"])
def test_what_looks_into_passes_is_applied_before_they_are_one_task_each(spec: str) -> None:
    name, stages = spec.partition(":")[0], "pipeline:stages=2,micro_batches=2"
    with pytest.raises(WhatifError, match=f"name {name} before pipeline"):
        load_transform(spec)(apply(gpt2(), stages).graph)
    assert apply(gpt2(), stages, spec).predicted_ms == apply(gpt2(), spec, stages).predicted_ms
