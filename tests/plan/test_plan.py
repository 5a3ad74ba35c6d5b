"""``whatif plan``: the composition of pieces against simulated what-ifs, and the search."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from tests.helpers import replace
from tests.plan.conftest import BATCH, CLUSTER, assert_torchrun_starts
from whatif.cli.main import main
from whatif.ingest.read import read
from whatif.models import add_gradients
from whatif.models.parallel.pipeline_schedule import in_flight_at_most, most_in_flight, order
from whatif.prediction.baseline import Baseline, ends_ns
from whatif.prediction.composition import Kept, compose
from whatif.prediction.predict import apply
from whatif.prediction.ranges import error_sums_between
from whatif.prediction.transform import Transform, load_transform
from whatif.questions.plan import search
from whatif.questions.plan.estimate import Composer, median_step
from whatif.questions.plan.launch import launch_flags
from whatif.questions.plan.search import Row, _key, _row, asked_of, plan, simulated
from whatif.questions.plan.space import DDP, FSDP, HYBRID, LEVELS, ZERO_1, ZERO_2, Plan, micro_batches, plans_of
from whatif.questions.recommend.prices import Prices
from whatif.report.text_plan import reasons
from whatif.runtime.errors import WhatifError


def every(baseline: Baseline, gpus: int, batch: int, tensor: int, *, recompute: bool) -> list[Row]:
    """Return all plans of one way of cutting, estimated, whatever they keep."""
    inner = Plan(tensor, 1, 1, DDP, 1, 1, recompute).inner(CLUSTER)
    composer = Composer(compose(baseline.graph, [load_transform(spec) for spec in inner]), CLUSTER)
    ways = plans_of(
        tensor,
        gpus,
        batch,
        most_stages=composer.most_stages,
        micros=micro_batches(batch, BATCH * 2),
        recompute=recompute,
    )
    asked = asked_of(baseline, gpus, CLUSTER, global_batch=batch)
    return [_row(baseline, asked, one) for one in composer.estimates(ways, None)]


def test_pieces_agree_with_simulated_what_ifs(predicted: Baseline) -> None:
    """On every plan of a small space, peaks too; the step is host-bound here, which is the harder case."""
    errors, peaks = [], []
    for tensor in (1, 2):
        for row in every(predicted, 4, 32, tensor, recompute=False):
            found = simulated(predicted, row)
            errors.append(row.step_ms / found.step_ms - 1)
            peaks.append((row.peak_bytes or 0) / (found.peak_bytes or 1) - 1)
    assert len(errors) > 20
    typical = sorted(abs(error) for error in errors)
    assert typical[len(typical) // 2] < 0.05
    assert sorted(map(abs, peaks))[int(0.9 * len(peaks))] < 0.03


def test_the_best_is_within_five_percent_of_the_exhaustive_best(predicted: Baseline) -> None:
    asked = asked_of(predicted, 4, CLUSTER, global_batch=32)
    found = plan(predicted, [asked]).best
    assert found.simulated
    rows = [
        row
        for tensor in (1, 2, 4)
        for again in (False, True)
        for row in every(predicted, 4, 32, tensor, recompute=again)
    ]
    best = min(simulated(predicted, row).step_ms for row in rows)
    assert best <= found.step_ms * 1.0001 < best * 1.05
    assert found.plan.samples == 32


LAB = Path("traces/lab_pipeline_cpu")


def gigabit(folder: Path) -> str:
    """Write the cluster of the lab's hosts; return its name."""
    link = folder / "link.toml"
    link.write_text('[cluster]\nname = "lab"\n[[level]]\nname = "hosts"\nbandwidth = "1Gbps"\nlatency_us = 50\n')
    return str(link)


@pytest.mark.parametrize("model", ["mlp", "resnet", "vgg"])
def test_the_choice_is_near_the_fastest_that_was_measured(model: str, tmp_path: Path) -> None:
    """Two workers over gloo train the same samples in four ways (docs/plan.md)."""
    record = json.loads((LAB / f"plans-{model}-1000mbit.json").read_text())
    measured = {run["name"]: run["median_ms"] for run in record["ways"]}
    assert set(measured) == {"DDP", "ZeRO-1", "FSDP", "pipeline"}
    baseline = Baseline.of(read(LAB / record["baseline"]["trace"]))
    chosen = plan(baseline, [asked_of(baseline, 2, gigabit(tmp_path), global_batch=2 * record["batch"])]).best.plan
    name = "pipeline" if chosen.pipeline > 1 else LEVELS[chosen.level]
    assert measured[name] <= 1.1 * min(measured.values())


def test_a_pipeline_is_cut_by_its_own_network(predicted: Baseline, tmp_path: Path) -> None:
    """Four parts on two GPUs of a node, then on four of two nodes: the second was cut for messages within a node."""
    pairs = tmp_path / "pairs.toml"
    pairs.write_text(
        '[cluster]\nname = "pairs"\n[[level]]\nname = "node"\nworkers = 2\nbandwidth = "300GB/s"\n'
        '[[level]]\nname = "nodes"\nbandwidth = "100Mbps"\n'
    )
    ways = [Plan(1, 2, 1, DDP, 1, 8, False, chunks=2), Plan(1, 4, 1, DDP, 1, 8, False)]
    both, alone = (Composer(predicted.graph, str(pairs)) for _ in range(2))
    assert [both.parts(way) for way in ways][1] == alone.parts(ways[1])
    assert both._begins(ways[0]).tolist() != both._begins(ways[1]).tolist()


def test_a_pipeline_of_copies_that_fill_a_node_sends_between_nodes(predicted: Baseline, tmp_path: Path) -> None:
    """Stages and copies were both neighbours in one node: two nodes exchanged nothing."""
    nodes = tmp_path / "nodes.toml"
    nodes.write_text(
        '[cluster]\nname = "nodes"\n[[level]]\nname = "node"\nworkers = 4\nbandwidth = "300GB/s"\n'
        '[[level]]\nname = "nodes"\nbandwidth = "1Gbps"\n'
    )
    way = Plan(1, 2, 4, DDP, 1, 8, recompute=False)
    asked = asked_of(predicted, 8, str(nodes), global_batch=32)
    (one,) = Composer(predicted.graph, str(nodes)).estimates(iter([way]), None)
    row = _row(predicted, asked, one)
    found = simulated(predicted, row)
    # Each of eight micro-batches has 128 tokens of 512 numbers, and four copies share the link.
    sent_ms = 8 * 4 * 128 * 512 * 4 * 8 / 1e9 * 1e3
    assert found.step_ms > sent_ms
    assert row.step_ms == pytest.approx(found.step_ms, rel=0.1)
    piped, *others = way.what_ifs(str(nodes), BATCH)
    named = apply(predicted, piped, *others)
    assert [part.options.get("copies") for part in named.transforms] == [4, None]
    assert named.predicted_ms == apply(predicted, f"{piped},copies=4", *others).predicted_ms == found.step_ms
    within = apply(predicted, f"{piped},copies=1", *others)
    assert within.predicted_ms < sent_ms / 2
    # Copies that leave room in a node have their stages there.
    spread = Plan(1, 2, 2, DDP, 1, 16, recompute=False).what_ifs(str(nodes), BATCH)
    assert apply(predicted, *spread).predicted_ms < sent_ms / 2
    with pytest.raises(WhatifError, match="from 1 to 100,000 copies, got 0"):
        apply(predicted, f"pipeline:stages=2,copies=0,cluster={nodes}")


def test_devices_that_fill_no_nodes_are_no_pipelines(predicted: Baseline) -> None:
    """Of 12 GPUs two stages of six copies were counted as within a node of eight. It is not said to be memory."""
    with pytest.raises(WhatifError, match="no groups of 12 devices"):
        plan(predicted, [asked_of(predicted, 12, CLUSTER, global_batch=96)])


@pytest.mark.parametrize("by", ["throughput", "cost"])
def test_of_equally_good_plans_that_without_recomputation_is_first(predicted: Baseline, by: str) -> None:
    prices = Prices("USD", {"H100-SXM-80": 2.0})
    asked = asked_of(predicted, 4, CLUSTER, global_batch=32, prices=prices)
    (one,) = Composer(predicted.graph, CLUSTER).estimates(iter([Plan(1, 1, 4, DDP, 8, 1, recompute=False)]), None)
    row = _row(predicted, asked, one)
    again = structs.replace(row, plan=structs.replace(row.plan, recompute=True))
    assert sorted([again, row], key=_key(by)) == [row, again]
    slower = structs.replace(row, step_ms=2 * row.step_ms, samples_per_s=row.samples_per_s / 2)
    assert sorted([slower, again], key=_key(by)) == [again, slower]


def test_copies_that_share_within_a_node(predicted: Baseline) -> None:
    """Hybrid FSDP on two nodes: its pieces and its peak as simulated, the mesh that launches it, and none on one."""
    composer = Composer(compose(predicted.graph, []), CLUSTER)
    asked = asked_of(predicted, 16, CLUSTER, global_batch=16 * BATCH)
    way = Plan(1, 1, 16, HYBRID, BATCH, 1, recompute=False)
    (one,) = composer.estimates(iter([way]), None)
    row = _row(predicted, asked, one)
    found = simulated(predicted, row)
    assert row.step_ms == pytest.approx(found.step_ms, rel=0.05)
    assert row.peak_bytes == pytest.approx(found.peak_bytes, rel=0.01)
    whole = composer.peak_bytes(replace(way, level=FSDP))
    assert whole is not None
    assert (row.peak_bytes or 0) > whole
    assert 'init_device_mesh("cuda", (2, 8))' in launch_flags(way, CLUSTER)["FSDP2"]
    micros = micro_batches(64, BATCH)
    spaces = [plans_of(1, gpus, 64, most_stages=1, micros=micros, recompute=False, node=8) for gpus in (8, 16)]
    assert [any(one.level == HYBRID for one in space) for space in spaces] == [False, True]


def test_all_micro_batches_that_divide_the_batch_are_tried() -> None:
    """Of powers of two alone a copy's 13 samples left only 13 passes of one sample, which took twice as long."""
    assert micro_batches(24, 12) == [1, 2, 3, 4, 6, 8, 12]
    assert micro_batches(65, 96) == [1, 5, 13, 65]
    assert {(plan.micro_batch, plan.passes) for plan in plans_of(
        1, 5, 65, most_stages=1, micros=micro_batches(65, 96), recompute=False
    )} == {(1, 13), (13, 1)}  # fmt: skip


def test_a_plan_of_two_passes_is_what_its_what_ifs_say(predicted: Baseline) -> None:
    """It was one pass and a piece: another step, and a range that leaves out what passes add."""
    way = Plan(1, 1, 4, ZERO_1, BATCH, 2, recompute=False)
    asked = asked_of(predicted, 4, CLUSTER, global_batch=8 * BATCH)
    (one,) = Composer(predicted.graph, CLUSTER).estimates(iter([way]), None)
    found, applied = simulated(predicted, _row(predicted, asked, one)), apply(predicted, *way.what_ifs(CLUSTER, BATCH))
    assert (found.step_ms, found.low_ms, found.high_ms) == (applied.predicted_ms, applied.low_ms, applied.high_ms)


def test_what_plans_have_in_common_is_applied_once(predicted: Baseline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splitting the blocks took half of the time to simulate a plan, and was done for each of them."""
    rows = every(predicted, 8, 32, 2, recompute=True)[:3]
    alone = [simulated(predicted, row) for row in rows]
    applied = []
    run = Transform._run
    monkeypatch.setattr(Transform, "_run", lambda self, graph: applied.append(self.name) or run(self, graph))
    kept: Kept = {}
    assert [simulated(predicted, row, kept) for row in rows] == alone
    assert applied.count("tensor_parallel") == applied.count("activation_checkpoint") == 1
    assert 2 <= len(kept) <= 4


@pytest.mark.parametrize("way", [Plan(1, 1, 4, DDP, BATCH, 16, recompute=False), Plan(1, 2, 2, DDP, 1, 24, False)])
def test_many_passes_have_the_range_of_their_what_ifs(
    predicted: Baseline, way: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ends grew with the step, whose exchange is there once: ranges were 3 to 8 % narrower than those of apply."""
    monkeypatch.setattr(search, "SIMULATED_PASSES", 0)
    asked = asked_of(predicted, 4, CLUSTER, global_batch=way.samples)
    (one,) = Composer(predicted.graph, CLUSTER).estimates(iter([way]), None)
    found, applied = simulated(predicted, _row(predicted, asked, one)), apply(predicted, *way.what_ifs(CLUSTER, BATCH))
    assert found.step_ms == pytest.approx(applied.predicted_ms, rel=1e-3)
    assert found.low_ms is not None
    assert found.high_ms is not None
    assert found.high_ms - found.low_ms == pytest.approx(applied.high_ms - applied.low_ms, rel=0.01)


def test_pieces_are_those_of_a_usual_step(predicted: Baseline) -> None:
    """They were those of the middle step, however slow: estimates of a public recording were 3 times too long."""
    steps = np.unique(predicted.graph.step[predicted.graph.step >= 0])
    slow = np.flatnonzero(predicted.graph.step == steps[len(steps) // 2])
    baseline = Baseline.of(predicted.graph.scale(slow, 5))
    way = Plan(1, 1, 4, DDP, BATCH, 1, recompute=False)
    (one,) = Composer(median_step(baseline), CLUSTER).estimates(iter([way]), None)
    applied = apply(baseline, *way.what_ifs(CLUSTER, BATCH))
    assert one.parts.step_ms == pytest.approx(applied.predicted_ms, rel=0.05)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_cpu_that_limits_many_passes_alone(predicted: Baseline, chunks: int) -> None:
    """Few passes end with the GPU: steps of many were extrapolated up to 11 % too short, with a bubble below 0."""
    baseline = replace(predicted, graph=predicted.graph.scale(predicted.graph.on_gpu, 5))
    way = Plan(1, 2, 4, DDP, 2, 32, recompute=False, chunks=chunks)
    asked = asked_of(baseline, 8, CLUSTER, global_batch=way.samples)
    (one,) = Composer(median_step(baseline), CLUSTER).estimates(iter([way]), None)
    found, applied = simulated(baseline, _row(baseline, asked, one)), apply(baseline, *way.what_ifs(CLUSTER, BATCH))
    assert (found.step_ms, found.low_ms, found.high_ms) == (applied.predicted_ms, applied.low_ms, applied.high_ms)
    assert one.parts.step_ms == pytest.approx(applied.predicted_ms, rel=0.02)
    assert min(one.parts) >= 0


@pytest.mark.parametrize("passes", [16, 64])
def test_many_passes_of_a_cpu_have_the_range_of_their_what_ifs(passes: int, tmp_path: Path) -> None:
    """Both ends were extrapolated from few passes: the range was up to 5 % too narrow, and the step 1 % too short."""
    link, way = gigabit(tmp_path), Plan(1, 1, 2, DDP, 128, passes, recompute=False)
    baseline = Baseline.of(read(LAB / "mlp.trace.json.gz"))
    asked = asked_of(baseline, 2, link, global_batch=way.samples)
    (one,) = Composer(baseline.graph, link).estimates(iter([way]), None)
    found = simulated(baseline, _row(baseline, asked, one))
    applied = apply(baseline, *way.what_ifs(link, baseline.graph.info.batch_size or 1))
    assert (found.step_ms, found.low_ms, found.high_ms) == (applied.predicted_ms, applied.low_ms, applied.high_ms)


def test_a_range_holds_its_prediction_whatever_is_extrapolated(predicted: Baseline) -> None:
    """Each end on its own line could cross that of the step."""
    graph = predicted.graph
    few, more = (error_sums_between(graph, graph.replace(names=(*graph.names, "new")), np.array([x])) for x in (0, 50))
    assert few.shape == more.shape
    for steps_ns in ([1e6, 2e6, 0.5e6], [1e6, 0.9e6, 0.8e6]):
        low_ns, high_ns = ends_ns(predicted, graph, steps_ns, more)
        assert low_ns <= steps_ns[0] <= high_ns


def test_pieces_agree_where_steps_are_captured(predicted: Baseline) -> None:
    """In a CUDA graph each gradient was added by a launch as long as the graph's, or, simulated, by none at all."""
    way, captured = Plan(1, 2, 2, DDP, 1, 8, recompute=False), load_transform("cuda_graph")
    asked = asked_of(predicted, 4, CLUSTER, global_batch=way.samples, what_ifs=[captured])
    composer = Composer(compose(median_step(predicted), [captured]), CLUSTER)
    assert composer.added.gpu > composer.added.cpu == 0
    (one,) = composer.estimates(iter([way]), None)
    row = _row(predicted, asked, one)
    assert row.step_ms == pytest.approx(simulated(predicted, row).step_ms, rel=0.02)
    added = add_gradients(compose(predicted.graph, [captured]), 1)
    assert len(added) == len(compose(predicted.graph, [captured])) + predicted.graph.info.n_steps


def test_pieces_agree_where_a_cpu_exchanges(tmp_path: Path) -> None:
    """gloo's work lengthens the step, and only DDP sends beside it."""
    link = gigabit(tmp_path)
    baseline = Baseline.of(read(LAB / "mlp.trace.json.gz"))
    composer = Composer(compose(baseline.graph, []), link)
    asked = asked_of(baseline, 2, link, global_batch=256)
    ways = [
        Plan(1, 1, 2, level, 256 // 2 // passes, passes, recompute=False)
        for level in (DDP, ZERO_1, ZERO_2, FSDP)
        for passes in (1, 2)
    ]
    for one in composer.estimates(iter(ways), None):
        row = _row(baseline, asked, one)
        assert row.step_ms == pytest.approx(simulated(baseline, row).step_ms, rel=0.03), row.plan


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_what_is_in_flight_is_that_of_the_whole_order(schedule: str, chunks: int) -> None:
    for stages in (2, 3, 4):
        for count in (stages, 2 * stages, 5 * stages):
            orders = order(schedule, stages, count, chunks)
            for stage, passes in enumerate(orders):
                assert in_flight_at_most(schedule, stage, stages, count, chunks) == most_in_flight(passes)


def test_memory_prunes_and_the_rest_is_said(predicted: Baseline) -> None:
    asked = asked_of(predicted, 8, CLUSTER, global_batch=64)
    whole = plan(predicted, [asked])
    most = whole.best.peak_bytes or 0
    tight = plan(predicted, [replace(asked, memory_bytes=most // 2)])
    assert all((row.peak_bytes or 0) <= most // 2 for row in tight.rows)
    assert tight.best.samples_per_s <= whole.best.samples_per_s
    with pytest.raises(WhatifError, match="expected a plan that fits 8 devices"):
        plan(predicted, [replace(asked, memory_bytes=10**6)])


def test_what_takes_the_least_memory_is_said_where_nothing_fits(predicted: Baseline) -> None:
    asked = replace(asked_of(predicted, 8, CLUSTER, global_batch=64), memory_bytes=10**6)
    with pytest.raises(WhatifError, match=r"of 976\.56 KiB, got at least \d+\.\d\d [MG]iB \(tensor \d, pipeline"):
        plan(predicted, [asked])
    with pytest.raises(WhatifError, match="a global batch of 7 cannot be divided among groups"):
        plan(predicted, [asked_of(predicted, 1009, CLUSTER, global_batch=7)])
    with pytest.raises(WhatifError, match=r"got none: dgx-h100 has no groups of 11"):
        plan(predicted, [asked_of(predicted, 11, "dgx-h100", global_batch=88)])


def test_what_one_of_the_sizes_cannot_be_is_said_of_that_size(predicted: Baseline) -> None:
    asked = [asked_of(predicted, gpus, "dgx-h100", global_batch=8 * gpus) for gpus in (8, 11)]
    found = plan(predicted, asked)
    alone = plan(predicted, asked[:1])
    assert "whole blocks on 11 GPUs of dgx-h100" in found.left_out
    assert "whole blocks" not in found.left_out
    assert {name: why for name, why in found.left_out.items() if " on 11 GPUs" not in name} == alone.left_out


def test_a_span_of_several_steps_is_divided(predicted: Baseline) -> None:
    asked = asked_of(predicted, 4, CLUSTER, global_batch=32)
    span = Baseline.of(predicted.graph, "span")
    found, usual = plan(span, [asked]), plan(predicted, [asked])
    assert found.best.plan == usual.best.plan
    assert found.best.step_ms == pytest.approx(usual.best.step_ms, rel=0.1)
    assert f"by its {predicted.graph.info.n_steps} steps" in found.notes[0]
    assert not usual.notes


def test_a_cpu_recording_is_planned_for_cpus(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a cluster of GPUs it takes the network alone, and says so."""
    path = own_traces / "resnet18_cifar_cpu.json.gz"
    assert main(["plan", str(path), "--gpus", "2", "--cluster", "dgx-h100"]) == 0
    said = capsys.readouterr().out
    assert "2 CPUs like the recorded one, on the network of dgx-h100; " in " ".join(said.split())
    assert "GPU" not in said


def test_a_stock_trace_gives_the_same_table_and_launch_flags(
    shared_traces: Path, predicted_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz"
    answers = []
    for path in (stock, Path("traces/resnet18_cifar_cpu.json.gz"), predicted_file):
        assert main(["plan", str(path), "--gpus", "8", "--cluster", CLUSTER, "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
        assert_torchrun_starts(answers[-1]["launch"]["torchrun"], 8)
    assert {tuple(one) for one in answers} == {tuple(answers[0])}
    assert {tuple(one["plans"][0]) for one in answers} == {tuple(answers[0]["plans"][0])}
    assert [one["unit"] for one in answers] == ["recorded batches", "samples", "samples"]
    assert [bool(one["notes"]) for one in answers] == [True, False, False]
    # Where the batch is unknown a what-if's micro-batch counts recorded batches.
    cut = next(one for one in answers[0]["plans"] if one["pipeline"] > 1)
    assert main(["apply", *cut["what_ifs"], str(stock), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted_ms"] == pytest.approx(cut["predicted_ms"], rel=0.1)
    # The span of the stock trace is one step: its estimate and its simulation are of the same.
    best = answers[0]["plans"][0]
    assert sum(best["parts"].values()) == pytest.approx(best["predicted_ms"], rel=0.05)


def test_passes_of_a_trace_without_steps_are_searched(shared_traces: Path) -> None:
    """Only pipelines were left for 16 passes, with a step 6 % longer, and copies "did not fit"."""
    baseline = Baseline.of(read(shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz"))
    found = plan(baseline, [asked_of(baseline, 64, CLUSTER, global_batch=1024)])
    assert found.best.plan.pipeline == 1
    assert found.best.plan.passes > 1
    assert [isinstance(row, Row) for row in found.plain.values()] == [True, True]


def test_why_plain_copies_do_not_apply_is_said(predicted: Baseline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here copies fit, but a what-if refuses them."""

    def refusing(baseline: Baseline, row: Row, kept: Kept | None = None) -> Row:
        if row.plan.is_plain(DDP):
            raise WhatifError("distributed: refused")
        return simulated(baseline, row, kept)

    monkeypatch.setattr(search, "simulated", refusing)
    found = plan(predicted, [asked_of(predicted, 4, CLUSTER, global_batch=32)], by="throughput")
    assert found.plain["DDP"] == "distributed: refused"
    assert isinstance(found.plain["FSDP"], Row)


def test_cost_counts_all_devices_and_ranks(predicted: Baseline) -> None:
    prices = Prices("USD", {"H100-SXM-80": 3.6, "A100-SXM-80": 1.2})
    asked = [asked_of(predicted, 4, name, global_batch=32, prices=prices) for name in ("dgx-h100", "dgx-a100")]
    found = plan(predicted, asked, by="cost", currency="USD")
    costs = [row.cost for row in found.rows if row.simulated]
    assert costs == sorted(costs)
    assert [row.asked for row in found.each] == sorted(asked, key=lambda one: one.cluster != found.best.asked.cluster)
    assert all(row.simulated for row in found.each)
    assert found.each[0] is found.best
    best = found.best
    price = prices.per_hour["H100-SXM-80" if best.asked.cluster == "dgx-h100" else "A100-SXM-80"]
    assert best.cost == pytest.approx(4 * price / 3600 / best.samples_per_s * 1e6)
    with pytest.raises(WhatifError, match=r"expected a price.*got none for dgx-h100"):
        plan(predicted, [asked_of(predicted, 4, CLUSTER)], by="cost")


def test_a_dearer_plan_may_be_the_faster_one(predicted: Baseline) -> None:
    """Of the cheapest plan's rivals only the throughput was said, and of the faster ones that they are as fast."""
    prices = Prices("USD", {"H100-SXM-80": 3.6, "A100-SXM-80": 1.2})
    asked = [asked_of(predicted, 4, name, global_batch=32, prices=prices) for name in ("dgx-h100", "dgx-a100")]
    found = plan(predicted, asked, by="cost", currency="USD")
    best, other = found.each
    beside = replace(found, rows=(best, replace(other, samples_per_s=best.samples_per_s * 1.25)))
    said = next(sentence for sentence in reasons(beside) if sentence.startswith("next is "))
    assert f"on 4 GPUs of {other.asked.cluster}, 25.0 % faster and costs " in said
    slower = replace(found, rows=(best, replace(other, samples_per_s=best.samples_per_s / 1.25)))
    assert ", 25.0 % slower and costs " in "".join(reasons(slower))
    same = replace(found, rows=(best, replace(best, samples_per_s=best.samples_per_s / 1.25)))
    assert "costs" not in next(sentence for sentence in reasons(same) if sentence.startswith("next is "))


def test_samples_that_no_pipeline_can_divide_are_not_said_to_be_indivisible(predicted: Baseline) -> None:
    with pytest.raises(WhatifError, match=r"as many micro-batches as pipeline stages.*another --global-batch"):
        plan(predicted, [asked_of(predicted, 3, CLUSTER, global_batch=1)])
