"""``whatif plan`` on the command line: its table, what is to be copied, launch flags, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.plan.conftest import CLUSTER, assert_torchrun_starts
from whatif.cli.main import main
from whatif.prediction.baseline import Baseline
from whatif.prediction.composition import spelled
from whatif.questions.plan.launch import launch_flags
from whatif.questions.plan.search import Row, asked_of, plan
from whatif.questions.plan.space import DDP, FSDP, ZERO_1, Plan
from whatif.report.text_plan import print_plan
from whatif.runtime.errors import WhatifError


def test_names_of_plans_are_whole_in_a_narrow_table(
    predicted_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several clusters and a price left so little room that the kind of sharding was cut off."""
    monkeypatch.setenv("COLUMNS", "60")
    words = ["--gpus", "2", "--cluster", f"{CLUSTER},dgx-a100"]
    assert main(["plan", str(predicted_file), *words]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert "ZeRO-1" in out


def test_what_is_to_be_copied_is_on_one_line(
    predicted_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that was wrapped like a sentence ran without its script, and a name was broken in two."""
    monkeypatch.setenv("COLUMNS", "60")
    words = ["plan", str(predicted_file), "--gpus", "16", "--cluster", "ethernet-100g", "--global-batch", "64"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    what_ifs = " ".join(answer["plans"][0]["what_ifs"])
    assert len(what_ifs) > 60
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {f"  {line}" for line in (what_ifs, *answer["launch"].values())} <= set(lines)


def test_a_price_of_some_is_shown_though_the_fastest_has_none(
    predicted_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text left the costs out that --json has, and nothing said which price was missing."""
    prices = tmp_path / "prices.toml"
    prices.write_text('currency = "USD"\n[per_hour]\n"A100-SXM-80" = 1.8\n')
    words = ["--gpus", "2,2", "--cluster", f"{CLUSTER},dgx-a100,{CLUSTER}", "--prices", str(prices), "--top", "1"]
    assert main(["plan", str(predicted_file), *words]) == 0
    printed = capsys.readouterr()
    assert "USD/M" in printed.out
    assert "no price for the GPUs of dgx-h100" in printed.err
    each = printed.out.partition("All plans")[0]
    assert each.count(f" {CLUSTER} ") == each.count(" dgx-a100 ") == 1  # though asked for twice


def test_the_command(predicted_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(predicted_file), "--gpus", "8", "--cluster", CLUSTER, "--global-batch", "64"]
    plot = tmp_path / "plan.svg"
    assert main([*words, "--json", "--plot", str(plot)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert plot.read_text().startswith("<?xml")
    first = answer["plans"][0]
    assert first["devices"] == 8
    assert first["simulated"]
    assert first["samples_per_s"] == pytest.approx(64e3 / first["predicted_ms"])
    assert set(answer["plain"]) == {"DDP", "FSDP"}
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("fastest: ")
    assert "torchrun" in out
    # What it says is what `apply` answers.
    if first["accumulation"] == 1:
        assert main(["apply", *first["what_ifs"], str(predicted_file), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["predicted_ms"] == pytest.approx(first["predicted_ms"])


def test_the_what_ifs_to_copy_are_all_of_a_plan(predicted_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that the user named were missing, and ``device``: `apply` predicted another GPU than the plan's."""
    assert main(["plan", str(predicted_file), "amp", "--gpus", "4", "--cluster", "dgx-a100", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["plans"][0]
    assert first["what_ifs"][:2] == ["device:to=A100-SXM-80", "amp"]
    assert main(["apply", *first["what_ifs"], str(predicted_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted_ms"] == pytest.approx(first["predicted_ms"])


def test_the_usual_cluster_is_of_the_recorded_gpus(predicted: Baseline) -> None:
    """A step on an H200 was planned for H100s, whose preset is also that of H200s."""
    info = replace(predicted.graph.info, gpu="H200-SXM-141", gpu_memory_bytes=141 * 2**30)
    recorded = structs.replace(predicted, graph=predicted.graph.replace(info=info))
    usual, named = asked_of(recorded, 8), asked_of(recorded, 8, CLUSTER)
    assert (usual.cluster, usual.memory_bytes, usual.what_ifs) == (CLUSTER, 141 * 2**30, ())
    assert (named.memory_bytes, [spelled(what_if) for what_if in named.what_ifs]) == (
        80 * 2**30, ["device:to=H100-SXM-80"],
    )  # fmt: skip


def test_of_several_questions_each_has_an_answer(predicted: Baseline, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that no plan fits was left out, plain DDP of the others was "one device has no other"."""
    asked = [structs.replace(asked_of(predicted, gpus), memory_bytes=250 * 2**20) for gpus in (1, 8)]
    found = plan(predicted, asked)
    assert [row.asked.gpus for row in found.each] == [8]
    assert found.plain["DDP"] == "does not fit"
    print_plan(found, 1)
    assert "no plan fits 1 GPU of dgx-h100" in capsys.readouterr().out
    few, many = (
        structs.replace(asked_of(predicted, 8, cluster), memory_bytes=held)
        for cluster, held in (("pcie-4gpu", 2 * 10**6), (CLUSTER, 10**6))
    )
    with pytest.raises(WhatifError, match=r"fits 8 devices of 976\.56 KiB, got at least"):
        plan(predicted, [few, many])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected --gpus N"),
        (["--gpus", "0"], "from 1 to 100,000"),
        (["--gpus", "8", "--cluster", "dgx-h999"], "one of dgx-"),
        (["--gpus", "8", "--memory", "much"], "--memory"),
        (["--gpus", "8", "--by", "cost"], "--prices"),
        (["--gpus", "8", "nothing"], "nothing"),
        (["--gpus", "8", "distributed", "--cluster", "dgx-h100"], "got distributed, which adds devices"),
        (["--gpus", "8", "dts", "--cluster", "dgx-h100"], "got dts, which adds devices"),
        (["--gpus", "8", "bandwidth:factor=2"], "got bandwidth, which changes communication among several"),
        (["--gpus", "8", "amp", "batch_size:factor=2"], "leave the batch as it is, got batch_size; "),
        (
            ["--gpus", "8", "device:to=A100-SXM-80", "--cluster", "dgx-h100"],
            "name a cluster of that GPU with --cluster",
        ),
        (["--gpus", "8", "activation_checkpoint"], "it tries each plan with and without recomputation"),
        (["--gpus", "8", "amp", "gradient_accumulation:passes=2"], "--global-batch instead"),
    ],
)
def test_what_is_wrong_is_said(
    predicted_file: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(predicted_file), *words]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "way",
    [
        Plan(1, 1, 16, FSDP, 2, 1, recompute=True), Plan(8, 2, 4, 1, 1, 8, recompute=False, chunks=2),
        Plan(1, 1, 4, DDP, 1, 1, recompute=False),
    ],
)  # fmt: skip
def test_torchrun_takes_the_flags(way: Plan) -> None:
    assert_torchrun_starts(launch_flags(way, CLUSTER)["torchrun"], way.devices)


def test_megatron_and_deepspeed_flags() -> None:
    flags = launch_flags(Plan(8, 4, 2, 1, 1, 16, recompute=True, chunks=2), CLUSTER)
    assert "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4" in flags["Megatron-LM"]
    assert "--global-batch-size 32" in flags["Megatron-LM"]
    assert "--use-distributed-optimizer" in flags["Megatron-LM"]
    sharded = launch_flags(Plan(1, 1, 8, FSDP, 4, 2, recompute=False), CLUSTER)
    assert json.loads(sharded["DeepSpeed"])["zero_optimization"] == {"stage": 3}
    assert "fully_shard" in sharded["FSDP2"]
    assert "Megatron-LM" not in sharded
    # It refuses 7 blocks on 4 stages, or 12 on 4 stages of two chunks.
    cut = [(1, 7), (1, 12), (2, 12), (2, 16)]
    found = [launch_flags(Plan(1, 4, 2, DDP, 1, 16, False, chunks), CLUSTER, blocks=n) for chunks, n in cut]
    assert ["Megatron-LM" in flags for flags in found] == [False, True, False, True]


def test_flags_of_unknown_batches_name_them() -> None:
    """A number would be taken for samples: one recorded batch is many."""
    flags = launch_flags(Plan(1, 1, 8, ZERO_1, 1, 1, recompute=False), CLUSTER, in_samples=False)
    assert "--micro-batch-size $BATCH --global-batch-size $((8 * $BATCH))" in flags["Megatron-LM"]
    assert json.loads(flags["DeepSpeed"])["train_micro_batch_size_per_gpu"] == "$BATCH"


def test_plans_none_of_which_applies_are_refused_with_the_reason(
    predicted: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(baseline: Baseline, row: Row, kept: object) -> Row:
        raise WhatifError("distributed: expected other collectives.")

    monkeypatch.setattr("whatif.questions.plan.search.simulated", refuse)
    with pytest.raises(WhatifError, match="distributed: expected other collectives"):
        plan(predicted, [asked_of(predicted, 4, CLUSTER, global_batch=32)])


def test_ranks_are_no_step_of_one_gpu(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The work of all ranks was that of one: plans of DLRM on eight V100s had 72 ms of work in steps of 11."""
    ranks = own_traces / "ranks_cpu" / "even"
    for trace, got in (
        (ranks, "the recordings of 2 ranks"),
        (ranks / "rank1.json.gz", "that of one worker of several"),
    ):
        assert main(["plan", str(trace), "--gpus", "4", "--cluster", "dgx-h100"]) == 1
        assert f"expected a step of one GPU, got {got}" in capsys.readouterr().err


def test_inference_needs_no_plan(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = own_traces / "decode_cpu" / "decode_b1.json.gz"
    assert main(["plan", str(trace), "--gpus", "4", "--cluster", "dgx-h100"]) == 1
    assert "expected a recording of training, got one without a backward pass" in capsys.readouterr().err
