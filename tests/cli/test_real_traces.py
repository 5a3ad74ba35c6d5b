"""Every command on real recordings: public ones, and those that ship."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from tests.cli.test_commands import APPLY_KEYS, EXPLAIN_KEYS, INFO_KEYS, report
from whatif.cli.main import main

SMALL = [
    "edls-a4000/torch_profiler_trace.json.gz",
    "harryjmoss-a100-batch/bs8.run0.pt.trace.json.gz",
    "hta/alexnet_fwd_a100.json.gz",
    "hta/cpu_only.json.gz",
    "hta/cuda_event_sync_multi_stream.json.gz",
    "hta/mi250_minitoy_train.json.gz",
    "hta/rank_non_gpu.json.gz",
    "hta/step_based_gp100.json.gz",
    "hta/triton_example.json.gz",
    "param-dlrm-8xv100/rank0.json.gz",
    "tracelens-h100-mi300/mi300.gaunernst_bert-small-uncased__1016001.json.gz",
    "triosim-vgg13-h100/vgg13_bs512_adam.json.gz",
]
REFUSED = {
    "edls-a4000/homemade_not_kineto.json.gz": "only events of another tool",
    "zoology-a100/runtime_without_kernels.json.gz": "no kernel",
    "hta/mtia_inference.json.gz": "unsupported device 'mtia'",
}


def all_commands(path: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # One of them lost a third of its kernels: it is answered where its user insists.
    force = ["--force"] if "edls" in path else []
    info = report(capsys, "info", path, *force)
    assert bool(force) == (info["trust"]["level"] == "void")
    explained = report(capsys, "explain", path, *force)
    applied = report(capsys, "apply", "scale:factor=0.5", path, *force)
    assert info.keys() >= INFO_KEYS
    assert explained.keys() >= EXPLAIN_KEYS
    assert applied.keys() >= APPLY_KEYS
    assert info["baseline_ms"] == explained["baseline_ms"] == applied["baseline_ms"]
    step_ms = info["baseline_ms"]
    # The clock's median step stands for all steady steps, so sums meet it but for rounding.
    assert sum(explained["breakdown"].values()) == pytest.approx(step_ms, rel=1e-3, abs=1e-3)
    assert sum(explained["critical_path_ms"].values()) == pytest.approx(step_ms, rel=1e-3, abs=1e-3)
    assert sum(part["critical_ms"] for part in explained["phases"]) <= step_ms * 1.001 + 1e-3
    for words in (["info", *force], ["explain", *force], ["apply", "scale:factor=0.5", *force]):
        assert main([*words, path]) == 0
        out = capsys.readouterr().out
        assert "Traceback" not in out
        assert "nan" not in out.split()
        assert max(map(len, out.splitlines())) <= 100
    output = folder / "out.json.gz"
    assert main(["export", path, "scale:factor=0.5", "-o", str(output), *force]) == 0
    capsys.readouterr()
    events = json.loads(gzip.decompress(output.read_bytes()))["traceEvents"]
    for pid in (1, 2):
        work_us = sum(e["args"].get("duration_us", e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == pid)
        assert work_us > 0


@pytest.mark.parametrize("name", SMALL)
def test_other_peoples_traces(
    name: str, shared_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    all_commands(str(shared_traces / name), tmp_path, capsys)


@pytest.mark.slow
def test_own_traces(
    own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for path in sorted(own_traces.glob("*.json.gz")):
        all_commands(str(path), tmp_path, capsys)
        assert report(capsys, "info", str(path))["untraced_ms"] > 0
        assert report(capsys, "explain", str(path))["layers"]


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.parametrize("words", [["info"], ["explain"], ["apply", "scale"]])
def test_refused_traces_are_refused_in_one_sentence(
    name: str, words: list[str], shared_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, str(shared_traces / name)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("whatif: ")
    assert err.count("\n") == 1
    assert REFUSED[name] in err


def test_the_data_loader_is_found_in_the_kineto_pair(shared_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without workers the step waits for its data; with four it does not."""
    folder = shared_traces / "kineto-resnet50-v100"
    without = report(capsys, "explain", str(folder / "num_workers_0.2021-06.pt.trace.json.gz"))
    four = report(capsys, "explain", str(folder / "num_workers_4.2021-06.pt.trace.json.gz"))
    assert without["verdict_as_recorded"].startswith(
        "loading-bound: the step waits for its data for 44.51 of 149.68 ms"
    )
    assert not four["verdict_as_recorded"].startswith("loading-bound")
    as_recorded = report(capsys, "explain", str(folder / "num_workers_0.2021-06.pt.trace.json.gz"), "--as-recorded")
    assert as_recorded["verdict"] == without["verdict_as_recorded"]
    assert as_recorded["critical_path_ms"]["data_loading"] == pytest.approx(45, abs=2)
    # Without the profiler both wait for the GPU, which does the same work.
    assert {one["verdict"].partition(":")[0] for one in (without, four)} == {"GPU-bound"}
    assert without["baseline_ms"] == pytest.approx(four["baseline_ms"], rel=0.03)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["info"], "harryjmoss-a100-batch/bs8.run0.pt.trace.json.gz"),
        (["info"], "hta/triton_example.json.gz"),
        (["explain", "--efficiency"], "param-dlrm-8xv100/rank3.json.gz"),
        (["explain", "--by", "step"], "nano-vllm-h100/trace_graph.json.gz"),
    ],
)
def test_one_of_a_thing_is_no_plural_and_zero_has_no_sign(
    words: list[str], name: str, shared_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, str(shared_traces / name)]) == 0
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert not re.findall(r"-0\.0+ %|(?<![\d.,])1 (?:layer|kernel|step|worker|time)s", text)
