"""``whatif advise`` as a user runs it: text, JSON, options, and hostile traces."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_commands import V100, output, report, training
from tests.helpers import mark, op, write_trace
from whatif.cli.main import main

OWN = '''"""A kernel takes half as long.

Source: made for a test.
Model:  every kernel is twice as fast.
Effort: small: write it.
"""

from whatif import TaskGraph


def transform(graph: TaskGraph) -> TaskGraph:
    return graph.scale(graph.on_gpu, 0.5)
'''
KEYS = {
    "trace", "step_clock", "steps", "measured_ms", "baseline_ms", "replay_error_pct", "peak_memory_bytes",
    "memory_capacity_bytes", "verdict", "warm_up", "makes_fit", "advice", "combinations", "no_gain", "too_large",
    "not_applicable", "done_in_part", "elsewhere", "failed", "not_tried", "usual_rates", "waiting_lines",
    "costly_lines", "warnings",
}  # fmt: skip
ENTRY_KEYS = {
    "what_ifs", "gain_pct", "gain_low_pct", "gain_high_pct", "predicted_ms", "low_ms", "high_ms", "batch_factor",
    "recorded_samples_ms", "peak_memory_bytes", "effort", "how", "reason", "notes",
}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Five steps of 1 ms, 0.9 of them one fp32 product on a V100."""
    return str(write_trace(tmp_path / "five [red]steps.json.gz", training(), deviceProperties=V100))


def entry(found: dict[str, Any], name: str) -> dict[str, Any]:
    lists = [*found["advice"], *found["no_gain"]]
    return next(entry for entry in lists if entry["what_ifs"] == [name])


def test_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "advise", trace)
    assert found.keys() == KEYS | {"trust"}
    assert len(found["verdict"]) == 3
    assert found["verdict"][0].startswith("GPU-bound: the GPU is busy 0.90 of 1.00 ms (90 %)")
    assert all(item.keys() >= ENTRY_KEYS for item in found["advice"])
    applied = report(capsys, "apply", "amp:target=fp16", trace)
    amp = entry(found, "amp:target=fp16")
    assert (amp["predicted_ms"], amp["low_ms"], amp["high_ms"]) == pytest.approx(
        (applied["predicted_ms"], applied["low_ms"], applied["high_ms"])
    )
    assert amp["gain_pct"] == pytest.approx(100 * (1 - applied["predicted_ms"] / applied["baseline_ms"]))
    assert amp["gain_low_pct"] <= amp["gain_pct"] <= amp["gain_high_pct"]
    assert amp["effort"] == "small"
    assert amp["how"].startswith("torch.autocast around the forward pass")
    assert {"scale", "kernels"} <= set(found["not_tried"])
    reasons = {item["what_if"]: item["reason"] for item in found["not_applicable"]}
    assert reasons["channels_last"] == "the recording has no convolution or pooling; nothing changes"
    assert found["peak_memory_bytes"] is None
    assert found["memory_capacity_bytes"] == V100[0]["totalGlobalMem"]


def test_savings_at_usual_rates_are_those_of_explain(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The largest first; a family that saves less than a hundredth of the step is left out, and so is a CPU."""
    path = str(own_traces / "predicted" / "resnet50_a100_predicted.json.gz")
    found, explained = report(capsys, "advise", path), report(capsys, "explain", "--efficiency", path)
    saves_ms = {row["family"]: row["usual_saves_ms"] or 0.0 for row in explained["families"]}
    gains_ms = {row["family"]: row["usual_gain_ms"] for row in explained["families"] if "usual_gain_ms" in row}
    least_ms = 0.01 * explained["baseline_ms"]
    named = [row["family"] for row in found["usual_rates"]]
    assert set(named) == {name for name, ms in saves_ms.items() if ms >= least_ms}
    assert named == sorted(named, key=lambda name: -gains_ms[name])
    assert len(named) >= 2
    shown = output(capsys, "advise", path, "--all").partition("What kernels at usual speed would save")[2]
    line = f"- {named[0]}: {gains_ms[named[0]]:,.2f} ms of the step ({saves_ms[named[0]]:,.2f} ms of GPU time) if"
    assert line in " ".join(shown.split())
    assert report(capsys, "advise", str(own_traces / "transformer_cpu.json.gz"))["usual_rates"] == []


def test_text(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "advise", trace, "--all")
    found = report(capsys, "advise", trace)
    flat = " ".join(text.split())
    assert flat.startswith(" ".join(found["verdict"]))
    assert "five [red]steps.json.gz: a step takes" in flat
    assert "Alone: gain in time" in text
    first = found["advice"][0]
    assert f"1 {first['what_ifs'][0]} {first['gain_pct']:.1f} %" in flat
    assert "Does not apply" in text
    assert "Not tried, because these are hypothetical or need several GPUs: bandwidth" in flat
    assert "peak memory" not in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_the_decision_takes_15_lines_and_counts_the_rest(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("transformer_cpu", "resnet18_cifar_cpu_loader0", "predicted/gpt2_h100_predicted"):
        trace = str(own_traces / f"{name}.json.gz")
        lines = output(capsys, "advise", trace).splitlines()
        found = report(capsys, "advise", trace)
        assert len(lines) <= 15
        assert " ".join(lines).startswith(" ".join(found["verdict"]))
        rows = [line.split()[1] for line in lines if re.match(r"  \d   ", line)]
        assert rows == [entry["what_ifs"][0] for entry in found["advice"][:3]]
        rest = {
            "that gain": len(found["advice"]) - 3, "combinations": len(found["combinations"]),
            "without gain": len(found["no_gain"]), "that do not apply": len(found["not_applicable"]),
            "partly done already": len(found["done_in_part"]), "not judged": len(found["elsewhere"]),
            "that failed": len(found["failed"]),
        }  # fmt: skip
        assert all(f"{count} {what}" in " ".join(lines) for what, count in rest.items() if count)


def test_a_script_of_ones_own_is_ranked_with_the_others(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(OWN, encoding="utf-8")
    found = report(capsys, "advise", trace, str(script), "scale:kind=gpu,factor=0.9")
    applied = report(capsys, "apply", str(script), trace)
    assert entry(found, "mine")["predicted_ms"] == pytest.approx(applied["predicted_ms"])
    assert entry(found, "mine")["effort"] == "small"
    assert any("scale:kind=gpu,factor=0.9" in item["what_ifs"] for item in found["advice"])
    assert any("mine" in item["what_ifs"] for item in found["combinations"])
    # What was asked for has its range at any rank.
    shown = report(capsys, "advise", trace, str(script), "--top", "1")["advice"]
    assert [item["what_ifs"] for item in shown if item["low_ms"] is not None] == [shown[0]["what_ifs"], ["mine"]]
    assert main(["advise", trace, str(tmp_path / "none.py")]) == 1
    assert main(["advise", str(script), trace]) == 2
    assert f"try `whatif advise '{trace}' {script}`" in capsys.readouterr().err


def test_top_limits_the_rows_and_the_ranges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [*training(), mark("Optimizer.step#SGD.step", 990, 5)]
    trace = str(write_trace(tmp_path / "trained.json", events, deviceProperties=V100))
    everything, one = report(capsys, "advise", trace), report(capsys, "advise", trace, "--top", "1")
    assert [item["what_ifs"] for item in everything["advice"]] == [item["what_ifs"] for item in one["advice"]]
    assert len(everything["advice"]) > 1
    assert [item["low_ms"] is None for item in one["advice"][:2]] == [False, True]
    text = output(capsys, "advise", trace, "--all", "--top", "1")
    second = everything["advice"][1]["what_ifs"][0]
    table = text[text.index("Alone") : text.index("Does not apply")]
    assert f"  2   {second}" not in table
    for wrong in ("0", "-1", "some"):
        assert main(["advise", trace, "--top", wrong]) == 2
        assert "expected a whole number of 1 or more" in capsys.readouterr().err


def test_another_clock_and_no_calibration(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, "advise", trace, "--clock", "span")["step_clock"] == "span"
    assert report(capsys, "advise", trace, "--no-calibration")["step_clock"] == "gpu"
    assert main(["advise", trace, "--clock", "wall"]) == 2


def test_a_trace_without_much_in_it_is_advised_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_trace(tmp_path / "cpu.json", [op("aten::mm", 0, 60), op("aten::relu", 60, 40)]))
    found = report(capsys, "advise", path)
    assert found["verdict"][0].startswith("CPU-bound: ")
    assert not found["failed"]
    empty = str(write_trace(tmp_path / "none.json", [mark("ProfilerStep#0", 0, 10)]))
    assert main(["advise", empty]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_what_a_trace_says_is_shown_and_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = training(layer="\x1b]0;owned\x07[bold]", kernel="\x1b[2J{}%s")
    path = str(write_trace(tmp_path / "hostile.json", events, deviceProperties=V100))
    text = output(capsys, "advise", path)
    assert "\x1b" not in text
    assert "\x07" not in text


def test_memory_has_a_column_where_the_recording_states_it(
    shared_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz")
    found = report(capsys, "advise", trace)
    assert 10 * 2**30 < found["peak_memory_bytes"] < found["memory_capacity_bytes"]
    twice = entry(found, "batch_size:factor=2")["peak_memory_bytes"]
    assert 1.2 < twice["predicted"] / twice["baseline"] < 2  # parameters stay as they are
    text = output(capsys, "advise", trace, "--all")
    lines = text.splitlines()
    headers = [lines[place + 1] for place, line in enumerate(lines) if line.startswith(("Alone: ", "Together: "))]
    assert len(headers) == 2
    assert all("peak memory" in line for line in headers)
    assert f"{twice['baseline'] / 2**30:.2f} → {twice['predicted'] / 2**30:.2f} GiB" in text


def test_memory_that_a_what_if_does_not_model_is_not_shown_as_unchanged(
    own_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(own_traces / "campaign_cpu" / "resnet50--baseline.trace.json.gz")
    found = report(capsys, "advise", trace)
    assert entry(found, "compile")["memory_not_modelled"] == ["compile"]
    assert entry(found, "channels_last")["memory_not_modelled"] == []
    lines = output(capsys, "advise", trace, "--all").splitlines()
    alone = [line for line in lines if line.split()[1:2] == ["compile"]]
    assert "not modelled" in alone[0]
    assert any(", partial" in line for line in lines)
    in_part = next(e for e in found["combinations"] if "gradient_accumulation" in e["what_ifs"])
    assert in_part["reason"].endswith("; the peak leaves out what compile changes")


def test_the_advice_is_the_same_every_time(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(own_traces / "transformer_cpu.json.gz")
    assert json.dumps(report(capsys, "advise", trace)) == json.dumps(report(capsys, "advise", trace))


def test_what_the_user_names_is_in_the_decision_wherever_it_ranks(
    own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = OWN.replace("graph.on_gpu, 0.5", "graph.on_cpu, 2.0").replace("half as long", "longer")
    (tmp_path / "slower.py").write_text(slower, encoding="utf-8")
    (tmp_path / "little.py").write_text(OWN.replace("graph.on_gpu, 0.5", "graph.on_cpu, 0.98"), encoding="utf-8")
    trace, *names = (
        str(own_traces / "transformer_cpu.json.gz"),
        str(tmp_path / "little.py"),
        str(tmp_path / "slower.py"),
    )
    assert main(["advise", trace, *names, "--top", "1"]) == 0
    lines = [re.sub(r" +", " ", line).strip() for line in capsys.readouterr().out.splitlines()]
    (row,) = [line for line in lines if re.match(r"\d+ little 2\.0 %", line)]
    assert int(row.split()[0]) > 1
    assert any(re.match(r"slower -100\.0 %", line) for line in lines[lines.index("No gain") :])
