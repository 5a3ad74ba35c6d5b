"""The step without the profiler in reports, and --no-calibration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.test_commands import report
from tests.helpers import mark, op, write_trace
from whatif.cli.main import main


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Six steps of 100 us with the profiler, 80 of CPU time without it; two events a step cost 5 us each."""
    events = []
    for at in range(0, 600, 100):
        events += [mark(f"ProfilerStep#{at}", at, 100), op("aten::mm", at + 20, 60)]
    metadata = {
        "threads": 1,
        "untraced_step_ms": {"median": 0.082, "q25": 0.081, "q75": 0.083},
        "untraced_cpu_ms": {"median": 0.08, "q25": 0.08, "q75": 0.08},
        "profiler_cost_ns": {"per_event": 5_000},
    }
    return str(write_trace(tmp_path / "run.json", events, whatif=metadata))


COMMANDS = (["info"], ["explain"], ["apply", "scale:factor=0.5"])


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_report_is_of_the_step_without_the_profiler(
    words: list[str], trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, *words, trace)
    assert found["baseline_ms"] == pytest.approx(0.08, rel=1e-3)
    assert found["measured_ms"] == pytest.approx(0.1)
    assert found["replay_error_pct"] == 0
    done = found["calibration"]
    assert (done["untraced_clock"], done["untraced_ms"], done["event_cost_us"]) == ("cpu", 0.08, 5.0)
    assert done["reason"] == ""


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_without_calibration_it_is_of_the_recorded_step(
    words: list[str], trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, *words, trace, "--no-calibration")
    assert found["baseline_ms"] == found["measured_ms"] == pytest.approx(0.1)
    assert "calibration" not in found


def test_info_shows_all_four_steps_and_explains(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", trace]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "without the profiler 0.0820 ms" in text
    assert "recorded 0.1000 ms" in text
    assert "replayed 0.1000 ms" in text
    assert "calibrated 0.0800 ms" in text
    assert "are the profiler's overhead (5.00 µs an event, measured with the recording) and are removed" in text
    assert main(["info", trace, "--no-calibration"]) == 0
    text = capsys.readouterr().out
    assert "calibrated" not in text
    assert "profiler's own" not in text


def test_apply_and_explain_show_both_steps(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", "scale:factor=0.5", trace]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "without the profiler 0.0820 ms; recorded 0.1000 ms" in text
    assert "baseline calibrated to the CPU time of the step without the profiler (0.0800 ms)" in text
    assert main(["explain", trace]) == 0
    assert "a step takes 0.0800 ms (mark to mark), 0.1000 ms with the profiler" in capsys.readouterr().out


def test_a_step_that_is_not_met_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 100 us; other programs took half of that. Without the profiler one took 150 us of CPU time."""
    events = []
    for at in range(0, 600, 100):
        events += [mark(f"ProfilerStep#{at}", at, 100), op("aten::mm", at + 20, 60)]
    untraced = {name: {"median": ms} for name, ms in (("untraced_step_ms", 0.15), ("untraced_cpu_ms", 0.15))}
    halved = {"traced_step_ms": {"median": 0.1}, "traced_cpu_ms": {"median": 0.05}}
    path = str(write_trace(tmp_path / "run.json", events, whatif={"threads": 1, **untraced, **halved}))
    assert main(["apply", "scale:factor=0.5", path]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "baseline calibrated within 33.3 % of the CPU time of the step without the profiler (0.1500 ms)" in text
    untraced["untraced_cpu_ms"] = {"median": 0.03}
    path = str(write_trace(tmp_path / "paced.json", events, whatif={"threads": 1, **untraced, **halved}))
    assert main(["info", path]) == 0
    text = " ".join(capsys.readouterr().out.split())
    whole, own = re.findall(r"scaled (?:to|by) (0\.\d+)", text)
    assert float(whole) == pytest.approx(float(own) / 2, abs=0.01)
    assert f"CPU work is scaled by {own}, beside what other programs took" in text


def test_export_shows_the_corrected_timeline(trace: str, tmp_path: Path) -> None:
    lengths = []
    for option in ([], ["--no-calibration"]):
        path = tmp_path / "timeline.json"
        assert main(["export", trace, "-o", str(path), *option]) == 0
        events = json.loads(path.read_text())["traceEvents"]
        lengths.append(max(e["ts"] + e["dur"] for e in events if e.get("ph") == "X"))
    assert lengths[0] < lengths[1]
