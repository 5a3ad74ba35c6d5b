"""Which runs make a pair, what is compared with what, and that nothing is left out silently."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import whatif
from tests.campaign_records import SGD, Options, pairs_of, reasons, record
from tests.cli.test_commands import V100, training
from tests.helpers import write_trace
from whatif import WhatifError
from whatif.cli.main import main
from whatif.prediction.predict import Baseline
from whatif.questions.validate.validate import Score, validate
from whatif.questions.validate.validate_pairs import Unpaired, find_pairs
from whatif.questions.validate.validate_records import DEFAULT_OPTIONS, read_run
from whatif.questions.validate.validate_what_ifs import is_plain, what_ifs_between

# -- from options to what-ifs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"batch_factor": 0.5}, ("batch_size:factor=0.5",)),
        ({"batch_factor": 0.5}, {"batch_factor": 2.0}, ("batch_size:factor=4",)),
        ({}, {"channels_last": True}, ("channels_last",)),
        ({}, {"amp": "fp16"}, ("amp:target=fp16",)),
        ({}, {"amp": "bf16"}, ("amp:target=bf16",)),
        ({}, {"implementation": "foreach"}, ("fused_adam:to=foreach",)),
        ({}, {"implementation": "fused"}, ("fused_adam",)),
        ({"implementation": "foreach"}, {"implementation": "fused"}, ("fused_adam",)),
        ({}, {"checkpoint": True}, ("activation_checkpoint",)),
        ({}, {"accumulate": 4}, ("gradient_accumulation:passes=4",)),
        ({}, {"bn_eval": True}, ("batch_norm_eval",)),
        ({"loader_workers": 0}, {"loader_workers": 2}, ("data_loading:workers=2",)),
        ({}, {"update_in_backward": True, "implementation": "fused"}, ("fused_adam", "optimizer_in_backward")),
        ({}, {"precision": "tf32"}, ("tf32",)),
        ({"attention": "math"}, {}, ("flash_attention",)),
        ({"attention": "math"}, {"amp": "bf16"}, ("amp:target=bf16", "flash_attention")),
        ({}, {"offload": "stream"}, ("vdnn:layers=all,sync=false",)),
        ({"precision": "default"}, {"precision": "tf32"}, ("tf32",)),
        ({"precision": "default"}, {"precision": "default", "amp": "bf16"}, ("amp:target=bf16",)),
        ({}, {"execution": "cuda_graph"}, ("cuda_graph",)),
        ({}, {"execution": "cuda_graph", "capturable": True}, ("cuda_graph",)),
        ({"capturable": True}, {"execution": "cuda_graph", "capturable": True}, ("cuda_graph",)),
        ({}, {"execution": "compile", "amp": "bf16"}, ("amp:target=bf16", "compile")),
        ({}, {"execution": "compile with CUDA graphs"}, ("compile:mode=reduce-overhead",)),
        (
            {},
            {"checkpoint": True, "implementation": "fused", "amp": "bf16", "channels_last": True, "batch_factor": 2.0},
            ("batch_size:factor=2", "channels_last", "amp:target=bf16", "fused_adam", "activation_checkpoint"),
        ),
    ],
)
def test_what_ifs_of_options(before: Options, after: Options, expected: tuple[str, ...]) -> None:
    assert what_ifs_between({**DEFAULT_OPTIONS, **before}, {**DEFAULT_OPTIONS, **after}) == (expected, [])


@pytest.mark.parametrize(
    ("before", "after", "missing"),
    [
        ({"precision": "tf32"}, {}, ["precision tf32 → ieee"]),
        ({}, {"precision": "default"}, ["precision ieee → default"]),
        ({}, {"capturable": True}, ["capturable false → true"]),
        ({"capturable": True}, {"execution": "cuda_graph"}, ["capturable true → false"]),
        ({"execution": "cuda_graph"}, {"execution": "compile"}, ["execution cuda_graph → compile"]),
        ({"execution": "compile"}, {}, ["execution compile → eager"]),
        ({"offload": "sync"}, {"offload": "stream"}, ["offload sync → stream"]),
        ({}, {"offload": "sync"}, ["offload none → sync"]),
        ({}, {"loader_workers": 4}, ["loader_workers -1 → 4"]),
        ({"channels_last": True}, {}, ["channels_last true → false"]),
        ({"amp": "bf16"}, {"amp": "fp16"}, ["amp bf16 → fp16"]),
        ({"implementation": "fused"}, {"implementation": "for"}, ["implementation fused → for"]),
        (SGD, {}, ["optimizer sgd → adam", "implementation foreach → for"]),
        ({}, {"accumulate": "many"}, ["accumulate 1 → many"]),
        ({}, {"attention": "math"}, ["attention none → math"]),
        ({}, {"cudnn_benchmark": True}, ["cudnn_benchmark none → true"]),
    ],
)
def test_changes_without_a_what_if_are_named(before: Options, after: Options, missing: list[str]) -> None:
    assert what_ifs_between({**DEFAULT_OPTIONS, **before}, {**DEFAULT_OPTIONS, **after})[1] == missing


def test_plain_runs_change_nothing_but_the_optimizer() -> None:
    plain = ({}, SGD, {"implementation": "fused"}, {"loader_workers": 0}, {"attention": "math"}, {"capturable": True},
             {"precision": "default", **SGD})  # fmt: skip
    assert all(is_plain({**DEFAULT_OPTIONS, **options}, DEFAULT_OPTIONS) for options in plain)
    others = ({"amp": "bf16"}, {"loader_workers": 2}, {"batch_factor": 2.0}, {"loader_workers": 0, "amp": "bf16"},
              {"precision": "tf32"}, {"precision": "default", "amp": "bf16"})  # fmt: skip
    assert not any(is_plain({**DEFAULT_OPTIONS, **options}, DEFAULT_OPTIONS) for options in others)


# -- which runs make a pair -----------------------------------------------------------------------------------------


def test_baselines_of_a_model_trained_with_sgd(tmp_path: Path) -> None:
    record(tmp_path, "baseline", **SGD)
    record(tmp_path, "adam_for")
    record(tmp_path, "adam_foreach", implementation="foreach")
    record(tmp_path, "adam_fused", implementation="fused")
    record(tmp_path, "amp_bf16", amp="bf16", **SGD)
    record(tmp_path, "amp_bf16_adam_fused", amp="bf16", implementation="fused")
    record(tmp_path, "loader_0", loader_workers=0, **SGD)
    record(tmp_path, "loader_2", loader_workers=2, **SGD)
    found = pairs_of(tmp_path)
    assert {sides: pair.what_ifs for sides, pair in found.items()} == {
        ("adam_for", "adam_foreach"): ("fused_adam:to=foreach",),
        ("adam_for", "adam_fused"): ("fused_adam",),
        ("adam_foreach", "adam_fused"): ("fused_adam",),
        ("baseline", "amp_bf16"): ("amp:target=bf16",),
        ("adam_for", "amp_bf16_adam_fused"): ("amp:target=bf16", "fused_adam"),
        ("loader_0", "loader_2"): ("data_loading:workers=2",),
    }
    assert reasons(tmp_path) == {}
    assert found["adam_foreach", "adam_fused"].question == "net (adam_foreach): fused_adam"
    assert found["baseline", "amp_bf16"].question == "net: amp:target=bf16"


def test_a_pair_is_of_one_model_machine_and_batch(tmp_path: Path) -> None:
    record(tmp_path, "baseline")
    record(tmp_path, "batch_x2", batch_factor=2.0)
    record(tmp_path, "amp_bf16", amp="bf16", batch=16)
    record(tmp_path, "channels_last", channels_last=True, machine={"torch": "2.12"})
    record(tmp_path, "adam_fused", model="other", implementation="fused")
    record(tmp_path / "elsewhere", "adam_foreach", implementation="foreach")
    assert set(pairs_of(tmp_path)) == {("baseline", "batch_x2")}
    alone = reasons(tmp_path)
    assert set(alone) == {"net--amp_bf16", "net--channels_last", "other--adam_fused", "net--adam_foreach"}
    assert alone["net--amp_bf16"].startswith("no baseline")
    assert alone["net--channels_last"].startswith("no baseline")


def test_every_run_that_is_in_no_pair_says_why(tmp_path: Path) -> None:
    record(tmp_path, "baseline")
    record(tmp_path, "offload", offload="sync")
    record(tmp_path, "adam_for", status="skipped", reason="same as baseline", untraced=None)
    record(tmp_path, "compile", status="failed", execution="compile", untraced=None)
    record(tmp_path, "amp_bf16", amp="bf16", untraced={"median_ms": "fast"})
    record(tmp_path, "loader_0", loader_workers=0)
    (tmp_path / "net--compile.json").write_text(
        (tmp_path / "net--compile.json").read_text().replace('"batch"', '"failure": "Traceback\\nno compiler", "batch"')
    )
    assert reasons(tmp_path) == {
        "net--baseline": "a baseline, and no run here builds on it",
        "net--loader_0": "a baseline, and no run here builds on it",
        "net--offload": "no what-if yet for offload none → sync",
        "net--adam_for": "skipped: same as baseline",
        "net--compile": "failed: no compiler",
        "net--amp_bf16": "its record holds no step time",
    }


def test_a_baseline_without_recording_is_reported(tmp_path: Path) -> None:
    record(tmp_path, "baseline", trace=False)
    record(tmp_path, "amp_bf16", amp="bf16")
    assert reasons(tmp_path) == {
        "net--baseline": "a baseline without its recording, so nothing is predicted from it",
        "net--amp_bf16": "its baseline net--baseline has no recording",
    }


def test_a_plain_run_that_lost_its_baseline_is_not_called_one(tmp_path: Path) -> None:
    record(tmp_path, "baseline")
    record(tmp_path, "adam_fused", implementation="fused")
    trace = tmp_path / "net--baseline.trace.json.gz"
    trace.unlink()
    assert reasons(tmp_path)["net--adam_fused"] == "its baseline net--baseline has no recording"
    (tmp_path / "net--baseline.json").unlink()
    assert reasons(tmp_path)["net--adam_fused"].startswith("no baseline: ")


def test_a_damaged_record_beside_its_recording_is_reported(tmp_path: Path) -> None:
    record(tmp_path, "baseline")
    record(tmp_path, "amp_bf16", amp="bf16").write_text("{", encoding="utf-8")
    assert reasons(tmp_path)["net--amp_bf16"] == "it has a recording, but its record cannot be read"


def test_a_folder_named_twice_is_searched_once(tmp_path: Path) -> None:
    record(tmp_path, "baseline")
    record(tmp_path, "amp_bf16", amp="bf16")
    once, _ = find_pairs([tmp_path])
    assert find_pairs([tmp_path, tmp_path / ".", tmp_path / "net--amp_bf16.json"])[0] == once


def test_the_clock_fits_the_question(tmp_path: Path) -> None:
    gpu = {"torch": "2.11", "device": "cuda", "gpu": {"name": "NVIDIA H200"}}
    for folder, machine in (("cpu", {"torch": "2.13"}), ("gpu", gpu)):
        record(tmp_path / folder, "baseline", machine=machine)
        record(tmp_path / folder, "amp_bf16", amp="bf16", machine=machine)
        record(tmp_path / folder, "loader_0", loader_workers=0, machine=machine)
        record(tmp_path / folder, "loader_2", loader_workers=2, machine=machine)
    on_cpu, on_gpu = pairs_of(tmp_path / "cpu"), pairs_of(tmp_path / "gpu")
    amp, loader = ("baseline", "amp_bf16"), ("loader_0", "loader_2")
    assert (on_cpu[amp].clock, on_cpu[loader].clock) == ("cpu thread", "wall")
    assert (on_gpu[amp].clock, on_gpu[loader].clock) == ("wall", "wall")
    measured = on_cpu[amp].changed_untraced, on_cpu[loader].changed_untraced
    assert [time.median_ms for time in measured if time] == [11.0, 20.0]
    assert (on_cpu[amp].hardware, on_gpu[amp].hardware) == ("CPU", "NVIDIA H200")


def test_a_record_without_cpu_time_is_compared_by_the_wall_clock_and_says_so(tmp_path: Path) -> None:
    record(tmp_path, "baseline", cpu_ms=())
    record(tmp_path, "amp_bf16", amp="bf16")
    pair = pairs_of(tmp_path)["baseline", "amp_bf16"]
    assert pair.clock == "wall"
    assert "wall clock" in pair.remark


def test_the_flat_records_of_single_pairs_are_read(tmp_path: Path) -> None:
    for variant in ("baseline", "adam_fused", "loader0", "compile_ro"):
        flat = {"model": "net", "variant": variant, "bs": 8, "median_ms": 5.0, "q25": 4.5, "q75": 5.5, "cpu_ms": [4.0]}
        (tmp_path / f"net-{variant}-bs8.json").write_text(json.dumps(flat), encoding="utf-8")
        write_trace(tmp_path / f"net-{variant}-bs8.trace.json", training())
    pairs, unpaired = find_pairs([tmp_path])
    assert [(pair.baseline.name, pair.changed.name, pair.what_ifs) for pair in pairs] == [
        ("net-baseline-bs8.trace.json", "net-adam_fused-bs8.json", ("fused_adam",)),
        ("net-baseline-bs8.trace.json", "net-compile_ro-bs8.json", ("compile:mode=reduce-overhead",)),
    ]
    assert {item.name for item in unpaired} == {"net-loader0-bs8"}


def test_a_record_names_no_file_outside_its_folder(tmp_path: Path) -> None:
    write_trace(tmp_path / "secret.json.gz", training())
    path = record(tmp_path / "runs", "baseline", trace=False)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "trace": {"file": "../secret.json.gz"}}))
    run = read_run(path)
    assert run is not None
    assert run.trace is None


@pytest.mark.parametrize(
    "change",
    [
        {"options": None}, {"options": {"amp": None, "accumulate": [1], "batch_factor": "x"}}, {"machine": "box"},
        {"machine": {"gpu": 3}}, {"batch": True}, {"batch": 1e400}, {"untraced": []}, {"untraced": {"median_ms": -1}},
        {"untraced": {"median_ms": 1e999}}, {"trace": {"file": 3}}, {"trace": "x"}, {"failure": 7}, {"status": None},
        {"options": {"batch_factor": 0}}, {"untraced": {"median_ms": 1, "cpu_thread_ms": [None, "x", -1]}},
    ],
)  # fmt: skip
def test_absurd_records_end_in_a_reason(change: dict[str, Any], tmp_path: Path) -> None:
    record(tmp_path, "baseline")
    path = record(tmp_path, "amp_bf16", amp="bf16")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    pairs, unpaired = find_pairs([tmp_path])
    assert len(pairs) + len(unpaired) >= 1
    assert all(isinstance(item, Unpaired) and item.reason for item in unpaired)


def test_other_files_of_a_folder_are_no_records(tmp_path: Path) -> None:
    for name, text in (("a.json", "{}"), ("b.json", "[1]"), ("c--d.json", "{"), ("e.json", '{"model": 1}')):
        (tmp_path / name).write_text(text)
    write_trace(tmp_path / "f.json", training(), model="m", variant="v", status="complete")
    with pytest.raises(WhatifError, match="expected records of runs"):
        find_pairs([tmp_path])
    with pytest.raises(WhatifError, match="got nothing"):
        find_pairs([tmp_path / "none"])


# -- pairs that a file names ----------------------------------------------------------------------------------------


def named_pair(folder: Path, **keys: Any) -> Path:
    row = {
        "question": "half",
        "baseline": "a.json",
        "changed": "b.json",
        "what_if": "scale:kind=gpu,factor=0.5",
        **keys,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in row.items()]
    path = folder / "pairs.toml"
    path.write_text("[[pair]]\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_named_pairs_compare_recorded_steps(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        write_trace(tmp_path / name, training(), deviceProperties=V100)
    named_pair(tmp_path, hardware="V100", scored=False, remark="a guess", what_if=["scale:kind=gpu,factor=0.5", "amp"])
    (outcome,) = validate([tmp_path]).outcomes
    measured = Baseline.of(whatif.read(tmp_path / "b.json"), outcome.step_clock, calibrated=False)
    assert outcome.measured_ms == pytest.approx(measured.measured_ns / 1e6)
    expected = whatif.apply(whatif.read(tmp_path / "a.json"), "scale:kind=gpu,factor=0.5", "amp")
    assert outcome.predicted_ms == expected.predicted_ms
    assert (outcome.kind, outcome.bound_pct, outcome.pair.scored) == ("scale + amp", 10.0, False)
    assert outcome.error_pct == pytest.approx(100 * (outcome.predicted_ms / outcome.measured_ms - 1))


def test_a_named_pair_needs_two_runs_and_states_where_they_ran(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        write_trace(tmp_path / name, training(), deviceProperties=V100)
    named_pair(tmp_path)
    (outcome,) = validate([tmp_path]).outcomes
    assert outcome.pair.hardware == "Tesla V100-SXM2-32GB"
    named_pair(tmp_path, what_if="device:to=V100-SXM2-32")
    (outcome,) = validate([tmp_path]).outcomes
    assert outcome.doubts == ("device: the recording is of a V100-SXM2-32 already; no kernel changes",)
    named_pair(tmp_path, changed="./a.json")
    (unpaired,) = validate([tmp_path]).unpaired
    assert unpaired.reason.endswith("got the baseline's once more.")
    assert main(["export", str(tmp_path / "a.json"), "scale:factor=2", "-o", str(tmp_path / "c.json"), "--quiet"]) == 0
    named_pair(tmp_path, changed="c.json")
    (unpaired,) = validate([tmp_path]).unpaired
    assert "got a step that is simulated: nothing was measured" in unpaired.reason


def test_a_named_pair_of_two_models_or_devices_is_doubtful(tmp_path: Path, own_traces: Path) -> None:
    for name in ("resnet18_cifar_cpu", "transformer_cpu"):
        shutil.copy(own_traces / f"{name}.json.gz", tmp_path)
    named_pair(tmp_path, baseline="resnet18_cifar_cpu.json.gz", changed="transformer_cpu.json.gz", what_if="amp")
    (outcome,) = validate([tmp_path]).outcomes
    assert outcome.doubts[0].startswith("the two runs differ in model: 69 layers → 45 layers")
    other = [{**V100[0], "name": "NVIDIA A100-SXM4-80GB"}]
    for name, device in (("a.json", V100), ("b.json", other)):
        write_trace(tmp_path / name, training(), deviceProperties=device)
    named_pair(tmp_path)
    assert "differ in device" in validate([tmp_path]).outcomes[0].doubts[0]
    named_pair(tmp_path, what_if="device:to=A100-SXM-80")
    assert not validate([tmp_path]).outcomes[0].doubts


@pytest.mark.parametrize("what_if", ["./evil.py", "evil.py:x=1", "nothing_of_that_name", ["amp", "evil.py"], 3])
def test_a_folder_of_pairs_runs_no_script(what_if: Any, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    named_pair(tmp_path, what_if=what_if)
    with pytest.raises(WhatifError, match="installed what-if"):
        find_pairs([tmp_path])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[pair]", "TOML"), ("pair = 3", "another kind"), ("[[pair]]\nquestion = 'x'", "got no baseline"),
        ("[[run]]\nremark = 'x'", "got no name"), ("[[run]]\nname = 'x'\nscore = false", "got 'score'"),
        ("[[run]]\nname = 'x'\nscored = 'no'", "true or false, got 'no'"),
        ("[[run]]\nname = 'net/x'\nscored = false", "1: expected the name of a record in the folder.*got 'net/x'"),
        ("[[pair]]\nbaseline = 'a'\nchanged = 'b'\nwhat_if = 'amp'\n" * 2, "pair, got that of ..pair.. 1 again"),
    ],
)  # fmt: skip
def test_a_wrong_file_of_pairs_is_reported_in_one_sentence(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "pairs.toml").write_text(text, encoding="utf-8")
    with pytest.raises(WhatifError, match=reason):
        find_pairs([tmp_path])


def test_a_remark_on_a_run_takes_it_out_of_the_score(tmp_path: Path) -> None:
    record(tmp_path, "baseline")
    record(tmp_path, "amp_bf16", amp="bf16")
    (tmp_path / "pairs.toml").write_text("[[run]]\nname = 'net--amp_bf16'\nscored = false\nremark = 'busy'\n")
    pair = pairs_of(tmp_path)["baseline", "amp_bf16"]
    assert not pair.scored
    assert pair.remark == "busy"


# -- predictions ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory, own_traces: Path) -> Path:
    """Our recordings as a campaign: records with the untraced times that the recordings hold, 2 % off on purpose."""
    folder = tmp_path_factory.mktemp("campaign")
    for model, variant, source, changes in (
        ("transformer", "baseline", "transformer_cpu", {}),
        ("transformer", "adam_foreach", "transformer_cpu_foreach", {"implementation": "foreach"}),
        ("transformer", "adam_fused", "transformer_cpu_fused", {"implementation": "fused"}),
        ("resnet", "baseline", "resnet18_cifar_cpu", SGD),
        ("resnet", "amp_bf16", "resnet18_cifar_cpu_bf16", {"amp": "bf16", **SGD}),
        ("resnet", "loader_0", "resnet18_cifar_cpu_loader0", {"loader_workers": 0, **SGD}),
        ("resnet", "loader_2", "resnet18_cifar_cpu_loader2", {"loader_workers": 2, **SGD}),
        ("resnet", "offload", "resnet18_cifar_cpu", {"offload": "sync", **SGD}),
    ):
        recorded = whatif.read(own_traces / f"{source}.json.gz").info.recorded
        wall = {f"{key}_ms": 1.02 * getattr(recorded.untraced_step, f"{key}_ms") for key in ("median", "q25", "q75")}
        cpu_ms = [1.02 * recorded.untraced_cpu.median_ms]
        untraced = {**wall, "cpu_thread_ms": cpu_ms}
        record(folder, variant, model=model, trace=False, untraced=untraced, **changes)
        shutil.copy(own_traces / f"{source}.json.gz", folder / f"{model}--{variant}.trace.json.gz")
    return folder


def test_real_recordings_as_a_campaign(campaign: Path) -> None:
    result = validate([campaign])
    shown = {outcome.pair.question: outcome for outcome in result.outcomes}
    assert list(shown) == [
        "resnet: amp:target=bf16", "resnet (loader_0): data_loading:workers=2", "transformer: fused_adam:to=foreach",
        "transformer: fused_adam", "transformer (adam_foreach): fused_adam",
    ]  # fmt: skip
    for outcome in result.outcomes:
        untraced = outcome.pair.baseline_untraced
        assert untraced is not None
        # The record's step stands in for the recording's own.
        assert outcome.baseline_ms == pytest.approx(untraced.median_ms, rel=0.01)
        assert outcome.low_ms <= outcome.predicted_ms <= outcome.high_ms
    assert [(item.name, item.reason) for item in result.unpaired] == [
        ("resnet--offload", "no what-if yet for offload none → sync")
    ]
    assert (result.score.pairs, result.score.scored) == (5, 5)
    assert set(result.by_kind) == {"amp", "data_loading", "fused_adam"}
    assert result.by_kind["fused_adam"].pairs == 3


def test_without_calibration_predictions_start_from_the_recorded_step(campaign: Path, own_traces: Path) -> None:
    outcomes = validate([campaign], calibrated=False).outcomes
    recorded = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"), calibrated=False).step_ns / 1e6
    (fused,) = [o for o in outcomes if o.pair.question == "transformer: fused_adam"]
    assert fused.baseline_ms == pytest.approx(recorded)


def test_nothing_of_the_changed_run_goes_into_a_prediction(campaign: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(campaign, copy)
    for trace in copy.glob("*--a*.trace.json.gz"):
        if trace.name != "transformer--adam_foreach.trace.json.gz":  # a baseline itself
            trace.unlink()
    before, after = validate([campaign]).outcomes, validate([copy]).outcomes
    assert [o.predicted_ms for o in after] == [o.predicted_ms for o in before]


def test_a_pair_that_cannot_be_predicted_says_why(tmp_path: Path) -> None:
    record(tmp_path, "baseline")
    record(tmp_path, "checkpoint", checkpoint=True)
    record(tmp_path, "amp_bf16", amp="bf16")
    record(tmp_path, "baseline", model="lost")
    record(tmp_path, "amp_bf16", model="lost", amp="bf16")
    (tmp_path / "lost--baseline.trace.json.gz").write_bytes(b"no trace")
    result = validate([tmp_path])
    assert {outcome.pair.question for outcome in result.outcomes} == {"net: amp:target=bf16"}
    unpaired = {item.name: item.reason for item in result.unpaired}
    assert unpaired["net: activation_checkpoint"].startswith("activation_checkpoint: expected")
    assert "expected JSON" in unpaired["lost: amp:target=bf16"]


def test_progress_counts_pairs(tmp_path: Path) -> None:
    record(tmp_path, "baseline")
    for variant, changes in (("amp_bf16", {"amp": "bf16"}), ("adam_fused", {"implementation": "fused"})):
        record(tmp_path, variant, **changes)
    seen: list[tuple[int, int]] = []
    validate([tmp_path], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_pairs_that_are_not_scored_count_in_no_median(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        write_trace(tmp_path / name, training())
    named_pair(tmp_path, scored=False)
    result = validate([tmp_path])
    assert result.score == Score(1, 0, None, None, 0, 0, None, None, 0)
    assert result.by_kind == {"scale": result.score}


@pytest.mark.parametrize(
    "odd",
    [{"batch": 10**400}, {"batch_factor": 10**400}, {"accumulate": 10**400}, {"loader_workers": -(10**400)},
     {"untraced": {"median_ms": 10**400, "cpu_thread_ms": [10**400]}}, {"machine": {"torch": 10**400}}],
)  # fmt: skip
def test_numbers_that_no_run_has_are_no_traceback(tmp_path: Path, odd: dict[str, Any]) -> None:
    record(tmp_path, "baseline")
    path = record(tmp_path, "odd")
    content = json.loads(path.read_bytes())
    for key, value in odd.items():
        (content["options"] if key in DEFAULT_OPTIONS else content)[key] = value
    path.write_text(json.dumps(content), encoding="utf-8")
    assert "net--odd" in {item.name for item in validate([tmp_path]).unpaired}


def test_a_record_brings_no_pattern_of_its_own(tmp_path: Path) -> None:
    record(tmp_path, "baseline")
    record(tmp_path, "odd", checkpoint="(a+)+$")
    pairs, _ = find_pairs([tmp_path])
    assert [pair.what_ifs for pair in pairs] == [("activation_checkpoint",)]
