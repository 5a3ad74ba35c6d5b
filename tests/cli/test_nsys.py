"""The commands on a report of Nsight Systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_commands import report as as_json
from tests.ingest.nsys_report import Report
from whatif.cli.main import main


@pytest.fixture
def report(tmp_path: Path) -> str:
    """Five steps of 1 ms: a launch, a kernel of 800 us inside a layer's range, a synchronisation until its end."""
    made = Report()
    made.add("TARGET_INFO_GPU", vmId=0, id=0, name="Tesla V100-SXM2-32GB", totalMemory=34_089_730_048, cuDevice=0)
    for step in range(5):
        t, at = 1_000_000 * step, 10 * step
        made.range(t, t + 999_000, f"iteration {step}")
        made.range(t + 5_000, t + 90_000, "fc")
        made.call(t + 20_000, t + 30_000, "cudaLaunchKernel_v7000", at + 1)
        made.kernel(t + 32_000, t + 832_000, "volta_sgemm_128x64_nn", at + 1)
        made.call(t + 100_000, t + 836_000, "cudaDeviceSynchronize_v3020", at + 2)
    return str(made.write(tmp_path / "five steps.sqlite"))


def test_info(report: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "info", report)
    assert (found["gpu"], found["steps"], found["layers"]) == ("Tesla V100-SXM2-32GB", 5, 1)
    assert found["measured_ms"] == pytest.approx(1.0)
    assert found["gpu_time_with_layer_pct"] == 100
    assert abs(found["replay_error_pct"]) < 0.1


def test_apply(report: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The synchronisation waits for the kernel: 400 us less of it are 400 us less of the step."""
    found = as_json(capsys, "apply", "scale:kind=gpu,factor=0.5", report)
    assert found["baseline_ms"] - found["predicted_ms"] == pytest.approx(0.4, abs=0.001)


def test_explain(report: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "explain", report)
    assert [layer["layer"] for layer in found["layers"]] == ["fc"]
    assert main(["explain", report]) == 0
    assert "fc" in capsys.readouterr().out


@pytest.mark.parametrize("by", ["line", "file"])
def test_a_report_of_nsys_has_no_lines(by: str, report: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", report, "--by", by]) == 1
    assert "got a report of Nsight Systems; record with `whatif collect --lines`" in capsys.readouterr().err


def test_another_database_is_refused_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sqlite3

    connection = sqlite3.connect(tmp_path / "mine.sqlite")
    connection.execute("CREATE TABLE t (x INTEGER)")
    connection.commit()
    connection.close()
    assert main(["info", str(tmp_path / "mine.sqlite")]) == 1
    said = capsys.readouterr().err
    assert "database of another tool" in said
    assert said.count("\n") == 1
