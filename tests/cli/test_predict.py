"""``whatif predict``: text, JSON keys, what-ifs on a step that never ran, a saved step, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.predicting import refused, report
from tests.helpers import need
from whatif.cli.main import main
from whatif.hardware.gpu import load_gpu

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_database")]

MODELS = Path(__file__).resolve().parent.parent / "operator_graph" / "predicted_models.py"
TWO = f"{MODELS}:TwoLinear"
RESNET = f"{MODELS}:resnet50"
# The keys of `whatif apply`, and those of a step that was not measured.
KEYS = {
    "trace", "transforms", "steps", "measured_ms", "untraced_ms", "baseline_ms", "replay_error_pct", "predicted_ms",
    "low_ms", "high_ms", "speedup", "step_clock", "gpu_busy_ms", "unexplained_wait_pct", "breakdown", "warnings",
    "device", "kernels", "answered_by", "unknown_operators", "peak_bytes", "fits", "flops", "mfu_pct", "notes",
    "samples_per_s", "tokens_per_s", "flops_count",
}  # fmt: skip


def test_json_has_the_keys_that_scripts_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    prediction = report(capsys, TWO, "--input", "32,8", "--device", "V100-SXM2-32")
    assert prediction.keys() >= KEYS
    assert prediction["measured_ms"] is None
    assert prediction["replay_error_pct"] is None
    assert prediction["low_ms"] < prediction["predicted_ms"] < prediction["high_ms"]
    assert prediction["device"] == "V100-SXM2-32"
    assert sum(prediction["answered_by"].values()) == prediction["kernels"] > 0
    # Three products of the backward pass and two of the forward one, a multiply-add is two.
    assert prediction["flops"] == 2 * 32 * (8 * 16 * 2 + 16 * 4 * 3)
    assert prediction["fits"] is True


def test_a_board_of_two_dies_is_reported_and_amd_rests_on_data_sheets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for device, warned in (("MI250X", True), ("MI250X-GCD", False)):
        found = report(capsys, TWO, "--input", "32,8", "--device", device)
        assert any("--device MI250X-GCD" in warning for warning in found["warnings"]) == warned
        assert list(found["answered_by"]) == ["analytic"]  # the models that ship have seen NVIDIA's devices alone


def test_a_step_takes_the_time_of_what_it_computes(capsys: pytest.CaptureFixture[str]) -> None:
    small = report(capsys, RESNET, "--input", "16,3,224,224", "--optimizer", "momentum", "--device", "V100-SXM2-32")
    large = report(capsys, RESNET, "--input", "64,3,224,224", "--optimizer", "momentum", "--device", "V100-SXM2-32")
    assert large["flops"] == 4 * small["flops"]
    # 4.1 GFLOP of multiply-adds an image forward (He et al., table 1: 3.8e9), and nearly twice that backward.
    assert small["flops"] / 16 == pytest.approx(2 * 4.09e9 * 3, rel=0.02)
    assert 2.5 < large["gpu_busy_ms"]["predicted"] / small["gpu_busy_ms"]["predicted"] < 4.2
    # No kernel beats the peak: 15.7 TFLOP/s, and 2.25 times that with Winograd's 3x3.
    assert large["predicted_ms"] > 1e3 * large["flops"] / (2.25 * 15.7e12)


def test_what_ifs_apply_to_a_step_that_nobody_ran(capsys: pytest.CaptureFixture[str]) -> None:
    words = (RESNET, "--input", "64,3,224,224", "--device", "V100-SXM2-32", "--optimizer", "adam:for-loop")
    prediction = report(capsys, *words, "amp", "fused_adam")
    assert [t["name"] for t in prediction["transforms"]] == ["amp", "fused_adam"]
    assert prediction["predicted_ms"] < prediction["baseline_ms"]
    assert len(prediction["contributions"]) == 2


def test_a_saved_step_is_read_by_the_other_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json.gz"
    prediction = report(capsys, TWO, "--input", "32,8", "--device", "T4", "--save", str(path))
    for command in (["info"], ["explain"], ["apply", "scale:kind=gpu,factor=0.5"], ["memory"]):
        assert main([*command, str(path), "--json"]) == 0, command
        found = json.loads(capsys.readouterr().out)
        if command[0] == "apply":
            assert found["baseline_ms"] == pytest.approx(prediction["predicted_ms"])
        if command[0] == "memory":
            assert found["peak_bytes"] == prediction["peak_bytes"]


def test_a_gpu_that_is_behind_runs_alone_while_the_host_waits_for_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as the launch queue of 1,021 kernels fills, the host is always busy; a step here has about 20."""
    path = str(tmp_path / "step.json.gz")
    prediction = report(capsys, TWO, "--input", "1000000,8", "--device", "H100", "--save", path)
    assert main(["explain", path, "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["breakdown"]
    alone = report(capsys, TWO, "--input", "32,8", "--device", "H100")  # the host's time: its kernels are short
    assert alone["predicted_ms"] < prediction["predicted_ms"] / 2
    together = parts["cpu_gpu_ms"] + parts["cpu_only_ms"]
    assert together == pytest.approx(alone["predicted_ms"], rel=0.05)


def test_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    need("torch")
    assert main(["predict", TWO, "--input", "32,8", "--device", "H100"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith(f"{TWO} on H100-SXM-80: ")
    assert lines[1].endswith("none of it was measured")
    assert any(line.endswith("samples/s") for line in lines)
    assert any("cross entropy over 32 rows of 4 classes" in line for line in lines)
    assert any(re.fullmatch(r"[1-9][\d.]* KiB at the peak, fits 80 GiB", line) for line in lines)


def test_mfu_is_that_of_explain_and_what_beats_the_peak_counts_as_at_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Winograd's algorithm: on a GPU whose cores have no format between fp32 and fp16 a VGG needs fewer products."""
    need("torch")
    script, saved = tmp_path / "vgg.py", str(tmp_path / "vgg.json.gz")
    script.write_text(
        "from torch import nn\n\ndef build():\n    layers = [nn.Conv2d(3, 128, 3, padding=1)]\n"
        "    for _ in range(5):\n        layers += [nn.ReLU(), nn.Conv2d(128, 128, 3, padding=1)]\n"
        "    return nn.Sequential(*layers)\n"
    )
    words = (f"{script}:build", "--input", "32,3,112,112", "--device", "RTX2080Ti", "--save", saved)
    prediction = report(capsys, *words)
    assert prediction["flops"] / 1e12 > load_gpu("RTX2080Ti").fp32_tflops * prediction["predicted_ms"] / 1e3
    assert 60 < prediction["mfu_pct"] < 100
    assert main(["explain", "--efficiency", saved, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mfu_pct"] == pytest.approx(prediction["mfu_pct"], rel=1e-3)
    assert found["convention"] == prediction["flops_count"]


def test_mfu_and_memory_are_those_of_the_device_behind_the_what_ifs(capsys: pytest.CaptureFixture[str]) -> None:
    words = (RESNET, "--input", "64,3,224,224", "--optimizer", "momentum", "--tf32", "none", "--device")
    moved = report(capsys, *words, "T4", "device:to=A100-SXM-80,tf32=no")
    there = report(capsys, *words, "A100-SXM-80")
    assert moved["flops"] == there["flops"]
    assert moved["mfu_pct"] == pytest.approx(there["mfu_pct"] * there["predicted_ms"] / moved["predicted_ms"], rel=0.02)
    assert report(capsys, *words, "P4", "device:to=A100-SXM-80,tf32=no")["fits"] is True


def test_arguments_of_the_model_and_named_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--kwargs", '{"name": "vgg19"}', "--optimizer", "momentum", "--device", "A100-SXM-80")
    prediction = report(capsys, f"{MODELS}:twin", *words)
    assert prediction["notes"] == ["the loss is what the model returns"]
    named = report(capsys, TWO, "--input", "x=32,8:fp32", "--inference")
    assert named["flops"] == 2 * 32 * (8 * 16 + 16 * 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([TWO, "--input", "32x8"], "--input"),
        ([TWO, "--input", "32,8:float7"], "float7"),
        ([TWO, "--input", "32,8", "--kwargs", "{"], "--kwargs"),
        ([TWO, "--input", "32,8", "--kwargs", "[1]"], "JSON object"),
        ([TWO, "--input", "32,8", "--device", "V1000"], "V1000"),
        ([TWO, "--input", "32,8", "no_such_what_if"], "no_such_what_if"),
        ([TWO, "--input", "32,9"], "do the inputs fit"),
        ([TWO, "--input", "32,8", "--inference", "--optimizer", "sgd", "--loss", "mse"], "got --optimizer, --loss"),
        (["nothing.onnx"], "nothing.onnx"),
        (["nothing.json"], "nothing.json"),
        ([TWO, "--input", "32,8", "--save", "/no/such/folder/x.json"], "/no/such/folder"),
    ],
)
def test_what_is_spelled_wrongly_is_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    need("torch")
    assert said in refused(capsys, *words)


def test_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else real(name, *rest))
    assert "expected PyTorch" in refused(capsys, TWO, "--input", "32,8")


def test_nothing_heavy_is_imported_for_help() -> None:
    import subprocess

    code = (
        "import sys; from whatif.cli.main import main; main(['predict', '--help']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_prediction_does_not_warn_that_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    need("torch")
    assert main(["predict", TWO, "--input", "32,8", "--device", "V100-SXM2-32"]) == 0
    assert "predicted, not recorded" not in capsys.readouterr().err
