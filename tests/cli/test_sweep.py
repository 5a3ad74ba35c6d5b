"""``whatif sweep`` and ``whatif scaling`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whatif.cli.main import main

TRACE = "resnet18_cifar_cpu.json.gz"


@pytest.fixture
def trace(own_traces: Path) -> str:
    return str(own_traces / TRACE)


def test_sweep_prints_a_table(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "distributed", trace, "--vary", "bandwidth=1Gbps,10Gbps"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("distributed: shortest with bandwidth=10Gbps: ")
    assert any(line.split()[:1] == ["1Gbps"] and "…" in line for line in lines)
    assert max(map(len, lines)) <= 100


def test_sweep_as_json_and_plot(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "sweep.svg"
    words = ["sweep", "distributed", trace, "--vary", "workers=2,4", "--vary", "bandwidth=1Gbps..8Gbps:7"]
    assert main([*words, "--json", "--plot", str(plot)]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert as_json["varied"] == ["workers", "bandwidth"]
    assert len(as_json["points"]) == 14
    assert set(as_json["points"][0]) == {
        "workers", "bandwidth", "predicted_ms", "low_ms", "high_ms", "speedup", "samples_factor",
        "samples_per_s", "devices", "energy_j", "peak_memory_bytes",
    }  # fmt: skip
    assert as_json["plot"] == str(plot)
    assert plot.read_bytes().startswith(b"<?xml")


def test_a_long_sweep_is_shown_in_part(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "distributed", trace, "--vary", "bandwidth=1Gbps..8Gbps:200"]) == 0
    out = capsys.readouterr().out
    assert "40 of 200 values; --json and --plot have all of them" in out
    rows = [line.split()[0] for line in out.splitlines()[4:44]]
    assert (rows[0], rows[-1], len(set(rows))) == ("1Gbps", "8Gbps", 40)


def test_scaling_prints_a_table(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "scaling.png"
    words = ["scaling", trace, "distributed:bandwidth=1Gbps", "--workers", "1..64:4", "--plot", str(plot)]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "workers" in lines[0]
    assert [line.split()[0] for line in lines[5:9]] == ["1", "4", "16", "64"]
    assert max(map(len, lines)) <= 100
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_scaling_as_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scaling", trace, "--workers", "1,2", "--strong", "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert as_json["scaling"] == "strong"
    assert as_json["rows"][0]["efficiency_pct"] == pytest.approx(100.0)
    assert as_json["rows"][1]["throughput"] == pytest.approx(
        as_json["rows"][0]["predicted_ms"] / as_json["rows"][1]["predicted_ms"]
    )


@pytest.mark.parametrize(
    ("words", "status", "part"),
    [
        (["sweep", "distributed", "TRACE"], 2, "expected --vary OPTION=a,b,c"),
        (["sweep", "TRACE", "--vary", "workers=2"], 2, "expected NAME and TRACE"),
        (["sweep", "TRACE", "distributed", "--vary", "workers=2"], 2, "try `whatif sweep distributed "),
        (["sweep", "distributed", "TRACE", "--vary", "worker=2"], 1, "did you mean 'workers'"),
        (["sweep", "distributed", "TRACE", "--vary", "workers=2", "--jobs", "0"], 2, "--jobs"),
        (["sweep", "distributed", "TRACE", "--vary", "workers=2", "--plot", "a.txt"], 1, "ends in .png"),
        (["scaling", "TRACE", "--workers", "0"], 1, "--workers: expected numbers from 1"),
        (["scaling", "distributed", "TRACE"], 2, "try `whatif scaling TRACE distributed`"),
        (["scaling", "TRACE", "amp"], 1, "expected a what-if with the option workers"),
    ],
)
def test_what_is_wrong_is_reported_in_a_sentence(
    words: list[str], status: int, part: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([trace if word == "TRACE" else word for word in words]) == status
    assert part in capsys.readouterr().err.replace(trace, "TRACE")


def test_bandwidth_without_communication_is_answered_for_workers(
    own_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(own_traces / "transformer_cpu.json.gz")
    assert main(["apply", "bandwidth:factor=4", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["workers"], row["bandwidth"]) for row in found["points"]] == [
        (str(count), rate) for count in (2, 4, 8, 16) for rate in ("25Gbps", "100Gbps")
    ]
    steps = [row["predicted_ms"] for row in found["points"]]
    assert all(fast <= slow for slow, fast in zip(steps[::2], steps[1::2], strict=True))
    assert "the recording has no communication: DDP on" in found["assumed"][0]
    # With a what-if that puts transfers in, it is about these.
    assert main(["apply", "distributed:workers=4,bandwidth=1Gbps", "bandwidth", path, "--json"]) == 0
    assert "points" not in json.loads(capsys.readouterr().out)


def test_a_value_that_does_not_apply_is_no_value_with_that_step(
    own_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(own_traces / "predicted" / "gpt2_h100_predicted.json.gz")
    assert main(["sweep", "distributed", path, "--vary", "workers=0,2"]) == 0
    assert "ms with every value that applies (" in capsys.readouterr().out
