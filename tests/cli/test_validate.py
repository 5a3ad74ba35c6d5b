"""The commands that compare predictions with measurements, and that copy a trace to share, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import whatif
from tests.campaign_records import record
from tests.cli.test_commands import V100, output, training
from tests.helpers import write_trace
from tests.test_validate import named_pair
from whatif.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two kinds of pairs, one of them not scored, and runs of which none can be made."""
    runs = tmp_path / "runs"
    record(runs, "baseline")
    record(runs, "amp_bf16", amp="bf16")
    record(runs, "offload [red]x", offload="sync")
    record(runs, "compile", status="failed", reason="out of | memory", untraced=None)
    for name in ("a.json", "b.json"):
        write_trace(runs / name, training(), deviceProperties=V100)
    named_pair(runs, hardware="V100", scored=False, remark="chosen here", question="half [bold]of it")
    return runs


def test_text_shows_every_pair_and_every_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "validate", str(folder))
    assert text.startswith("1 of 2 pairs scored: median error")
    unwrapped = " ".join(text.split())
    assert "the baseline corrected to its step without the profiler, against the changed run's" in unwrapped
    assert "named pairs: the steps of both without the profiler" in unwrapped
    assert "CPU: a step, ms (ok: an error of at most 10 %; –: not scored)" in text  # the hand-made trace has a GPU
    assert "V100: a step, ms" in text
    assert "half [bold]of it: chosen here" in text
    assert "no what-if yet for offload none → sync" in text
    assert "net--offload [red]x" in text
    assert "failed: out of | memory" in text
    (row,) = [line for line in text.splitlines() if line.strip().startswith("–   ")]
    assert "half [bold]of it" in row
    assert "over" in text


@pytest.mark.parametrize("columns", ["30", "60", "100", "200"])
def test_text_fits_the_page(columns: str, folder: Path, capsys: pytest.CaptureFixture[str],
                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", columns)
    text = output(capsys, "validate", str(folder))
    assert max(map(len, text.splitlines())) <= int(columns)
    assert "\x1b" not in text


def test_json_has_every_number(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(output(capsys, "validate", str(folder), "--json"))
    assert found["calibrated"] is True
    named, amp = sorted(found["pairs"], key=lambda pair: pair["hardware"], reverse=True)
    assert amp["what_ifs"] == ["amp:target=bf16"]
    assert amp["measured_by"] == "cpu thread"
    assert amp["measured_ms"] == 11.0
    assert amp["error_pct"] == pytest.approx(100 * (amp["predicted_ms"] / 11.0 - 1))
    assert amp["inside_range"] is (amp["low_ms"] <= 11.0 <= amp["high_ms"])
    assert (named["scored"], named["measured_by"]) == (False, "recorded")
    assert found["score"]["scored"] == 1
    assert found["by_what_if"]["scale"]["median_error_pct"] is None
    assert {row["name"] for row in found["not_compared"]} == {"net--offload [red]x", "net--compile"}
    assert json.loads(output(capsys, "validate", str(folder), "--json", "--no-calibration"))["calibrated"] is False


def test_markdown_is_a_page_of_tables(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "result.md"
    assert "written; 1 of 2 pairs scored" in output(capsys, "validate", str(folder), "--markdown", str(page))
    text = page.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# Validation", "## Pairs", "## By what-if", "## Not compared",
    ]  # fmt: skip
    assert "not scored; chosen here" in text
    assert r"failed: out of \| memory" in text
    for table in text.split("\n\n"):
        rows = [line.replace(r"\|", "") for line in table.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1
    assert list(tmp_path.glob(".*")) == []


def test_the_current_folder_is_the_default(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert "of 2 pairs" in output(capsys, "validate")


def test_a_comparison_of_nothing_is_no_success(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main(["validate", "net--compile.json"]) == 1
    out, err = capsys.readouterr()
    assert "0 pairs, none of them scored" in out
    assert "failed: out of | memory" in out
    assert err.startswith("whatif: net--compile.json: expected a pair of runs to compare, got 1 that cannot be")
    assert main(["validate", "net--compile.json", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["pairs"] == []


def test_what_cannot_be_validated_is_reported_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, reason in (
        (["validate", str(tmp_path)], "expected records of runs"),
        (["validate", str(tmp_path / "none")], "got nothing"),
        (["validate", str(tmp_path), "--markdown", str(tmp_path)], "expected the name of a file"),
    ):
        assert main(words) == 1
        error = capsys.readouterr().err
        assert reason in error
        assert error.count("\n") == 1


def test_anonymize_states_what_it_took_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        *training(layer="Secret_0"),
        {"ph": "X", "cat": "python_function", "name": "x.py(1): f", "ts": 0, "dur": 1},
    ]
    trace = write_trace(tmp_path / "run.json.gz", events, host_name="gpubox7")
    text = output(capsys, "anonymize", str(trace))
    assert "run.anonymous.json.gz: written" in " ".join(text.split())  # the path may be long
    assert [line.split() for line in text.splitlines() if "stack frames" in line] == [["stack", "frames", "1"]]
    assert "fields named 'host_name'" in text
    assert "Names of kernels, operators, layers and annotations" in text
    text = output(capsys, "anonymize", str(trace), "--layers", "-o", str(tmp_path / "b.json"))
    assert "Words of layer names numbered: 1." in " ".join(text.split())
    assert whatif.read(tmp_path / "b.json").layers == ("", "layer1_0")


def test_both_are_commands_that_import_nothing_heavy_for_help() -> None:
    program = (
        "import sys\nfrom whatif.cli.main import main\n"
        "assert main(['validate', '--help']) == 0 and main(['anonymize', '--help']) == 0\n"
        "assert not {'numpy', 'rich', 'msgspec'} & set(sys.modules), sys.modules.keys()"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "--as-recorded" in run.stdout
    assert "--layers" in run.stdout
