"""``whatif compare`` on the command line: text, JSON, errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers import call, kernel, launched, mark, write_trace
from whatif.cli.main import main


def steps(folder: Path, name: str, kernels: dict[str, int], n_steps: int = 6) -> str:
    """A trace of steps of 1 ms, each of some kernels one after the other, us."""
    events = []
    for step in range(n_steps):
        begin = step * 1000
        events.append(mark(f"ProfilerStep#{step}", begin, 999))
        at, number = begin + 20, step * 100
        for kernel_name, duration in kernels.items():
            events += launched(kernel_name, at - 15, 5, at, duration, number)
            at, number = at + duration + 20, number + 1
    return str(write_trace(folder / name, events))


def test_text_and_json_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = steps(tmp_path, "before.json", {"gemm": 300, "relu": 100})
    after = steps(tmp_path, "after.json", {"gemm": 200, "gelu": 50})
    assert main(["compare", before, after]) == 0
    text = capsys.readouterr().out
    assert main(["compare", before, after, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_clock"] == "gpu"
    assert found["a"]["trace"] == before
    operations = {row["name"]: row for row in found["operations"]}
    assert {name: row["status"] for name, row in operations.items()} == {
        "gemm": "both", "relu": "gone", "gelu": "new",
    }  # fmt: skip
    assert operations["relu"]["b"] is None
    assert operations["relu"]["a"]["gpu_ms"] == pytest.approx(-operations["relu"]["change_gpu_ms"])
    assert operations["gemm"]["change_tasks"] == 0
    shown = re.search(r"^ {2}relu +([\d.]+) +– +-([\d.]+) +gone, 1$", text, re.MULTILINE)
    assert shown is not None
    assert shown[1] == shown[2] == f"{operations['relu']['a']['gpu_ms']:.3f}"
    assert f"{found['a']['step_ms']:,.4f} → {found['b']['step_ms']:,.4f} ms a step" in text
    assert found["what_if"]["sentence"].split()[0] in text


def test_a_recording_beside_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = steps(tmp_path, "one.json", {"gemm": 300})
    assert main(["compare", trace, trace, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["change_ms"], found["differences"]) == (0, [])
    assert found["what_if"] == {
        "found": None, "closest": [], "sentence": "the two are alike: there is no change to describe",
    }  # fmt: skip
    assert all(row["change_gpu_ms"] == 0 for row in found["operations"])


def test_a_prediction_is_held_against_its_recording(
    own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both without the profiler, and what the prediction's recording says of itself rules nothing out."""
    recording, exported = str(own_traces / "transformer_cpu.json.gz"), str(tmp_path / "fused.json")
    assert main(["export", recording, "fused_adam", "-o", exported, "--quiet"]) == 0
    again = str(tmp_path / "again.json")
    assert main(["export", exported, "-o", again, "--quiet"]) == 0
    capsys.readouterr()
    for changed in (exported, again):
        assert main(["compare", recording, changed, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["a"]["measured_by"] in ("cpu", "wall")
        assert found["what_if"]["found"]["what_ifs"] == ["fused_adam"]
        assert abs(found["what_if"]["found"]["error_pct"]) < 0.01
        assert not any("only A" in text for text in found["warnings"])
    assert main(["compare", recording, exported, "--quiet"]) == 0
    assert re.search(r"^  B .* simulated$", capsys.readouterr().out, re.MULTILINE)


def test_a_prediction_is_held_against_the_run_that_it_predicts(
    own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prediction's recorded precision and input are those before its what-ifs, and its error is no change."""
    recording, exported = str(own_traces / "resnet18_cifar_cpu.json.gz"), str(tmp_path / "predicted.json")
    for what_if, real in (("amp", "bf16"), ("batch_size:factor=2", "batch64")):
        assert main(["export", recording, what_if, "-o", exported, "--quiet"]) == 0
        capsys.readouterr()
        assert main(["compare", str(own_traces / f"resnet18_cifar_cpu_{real}.json.gz"), exported, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert abs(found["change_pct"]) < 5
        assert found["differences"] == []
        assert found["what_if"]["found"] is None


def test_a_prediction_with_the_profiler_in_it_is_compared_as_recorded(
    own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording, exported = str(own_traces / "transformer_cpu.json.gz"), str(tmp_path / "as_recorded.json")
    assert main(["export", recording, "--no-calibration", "-o", exported, "--quiet"]) == 0
    capsys.readouterr()
    assert main(["compare", recording, exported, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["a"]["measured_by"] == found["b"]["measured_by"] == "mark"
    assert abs(found["change_pct"]) < 1
    assert any("compared as recorded" in text for text in found["warnings"])


def test_a_prediction_from_a_stock_trace_is_held_against_the_step_without_the_profiler(
    shared_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are without the profiler's estimated cost: a change of nothing does not look like the profiler's."""
    recording = str(shared_traces / "kineto-resnet50-v100" / "num_workers_4.2021-06.pt.trace.json.gz")
    exported = str(tmp_path / "same.json")
    assert main(["export", recording, "scale:kind=cpu,factor=1.001", "-o", exported, "--quiet"]) == 0
    for pair, side in (((recording, exported), "a"), ((exported, recording), "b")):
        capsys.readouterr()
        assert main(["compare", *pair, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found[side]["measured_by"] == "estimate"
        assert found[side]["step_ms"] == pytest.approx(found[side]["baseline_ms"])
        assert abs(found["change_pct"]) < 0.1
        assert not any("clock" in text or "as recorded" in text for text in found["warnings"])
    assert main(["compare", recording, exported, "--json", "--as-recorded"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("their difference contains it" in text for text in found["warnings"])


def test_other_devices_are_compared_and_said_to_be_others(
    shared_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shared_traces / "tracelens-h100-mi300"
    bert = "gaunernst_bert-small-uncased__1016001.json.gz"
    assert main(["compare", str(folder / f"h100.{bert}"), str(folder / f"mi300.{bert}")]) == 0
    out, err = capsys.readouterr()
    assert "no what-if was tried: the recordings differ in device" in out
    assert "the work or the machines differ: device: NVIDIA H100 80GB HBM3 → AMD Instinct MI300X VF" in err


def test_a_hostile_name_stays_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "[bold]gemm\x1b[31m\u202e"
    before = steps(tmp_path, "before.json", {"relu": 100})
    assert main(["compare", before, steps(tmp_path, "after.json", {hostile: 300})]) == 0
    out = capsys.readouterr().out
    assert "[bold]gemm" in out
    assert "\x1b" not in out
    assert "\u202e" not in out


@pytest.mark.parametrize("place", [0, 1])
def test_what_cannot_be_read_is_one_sentence(place: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [steps(tmp_path, "one.json", {"gemm": 300}), str(tmp_path / "nowhere.json")]
    files = files if place else files[::-1]
    for command in (["compare", *files], ["check", "--baseline", *files]):
        assert main(command) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "nowhere.json: expected a readable trace file" in err


def test_a_clock_that_only_one_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marked = steps(tmp_path, "marked.json", {"gemm": 300})
    bare = [call("cudaLaunchKernel", 0, 5, 1), kernel("gemm", 10, 100, 1)]
    other = str(write_trace(tmp_path / "bare.json", bare))
    assert main(["compare", marked, other, "--clock", "mark"]) == 1
    assert "no steps by the clock 'mark'" in capsys.readouterr().err
    assert main(["compare", marked, other]) == 0


@pytest.mark.parametrize("options", [[], ["--markdown"]])
def test_of_several_ranks_it_says_whose_layers_are_shown(
    options: list[str], own_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layers are rank 0's, without a word, where rank 1 is the one that changed."""
    even, slow = (str(own_traces / "ranks_cpu" / name) for name in ("even", "sleeping"))
    for command in (["compare", even, slow], ["check", "--baseline", even, slow]):
        main([*command, *options])
        assert "operators or kernels are the work of the first rank" in " ".join(capsys.readouterr().out.split())
