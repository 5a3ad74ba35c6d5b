"""``whatif collect`` on a real script, without a GPU: the whole way from the script to its explanation."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.instrumentation import warm
from whatif.cli import collect
from whatif.cli.main import main
from whatif.runtime.errors import WhatifError

pytestmark = pytest.mark.slow

if os.environ.get("WHATIF_STRICT") == "1":
    importlib.import_module("torch")
else:
    pytest.importorskip("torch")


def whatif_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.python(["-m", "whatif", *words], folder, {**os.environ, "OMP_NUM_THREADS": "1"})


SCRIPT = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
assert sys.argv[1:] == ["--steps", "9"], sys.argv
for _ in range(200):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
"""


def test_a_script_is_recorded_and_its_recording_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*words: str, said: str = "") -> str:
        found = whatif_in(tmp_path, *words)
        assert found.returncode == 0, found.stderr
        assert said in found.stderr
        return found.stdout

    next_one = "train.json.gz: recorded; next: whatif explain train.json.gz"
    assert run("collect", "train.py", "--steps", "9", said=next_one) == ""
    info = json.loads(run("info", "train.json.gz", "--json"))
    assert (info["steps"], info["time_share_of"]) == (5, "cpu")
    assert info["untraced_ms"] > 0
    layers = {part["layer"] for part in json.loads(run("explain", "train.json.gz", "--json"))["layers"]}
    assert {"0", "2"} <= layers


def test_options_reach_the_recorder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--steps", "3", "--untraced-steps", "4", "--memory", "--measure-operators", "-o", "run.json", "train.py"]
    found = whatif_in(tmp_path, "collect", *words, "--steps", "9")
    assert found.returncode == 0, found.stderr
    recording = json.loads((tmp_path / "run.json").read_text())
    assert recording["whatif"]["untraced_step_ms"]["steps"] == 4
    assert recording["whatif"]["traced_step_ms"]["steps"] == 3
    assert recording["whatif"]["operator_times"]
    assert any(event.get("name") == "[memory]" for event in recording["traceEvents"])


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["--backend", "nsys"], 2, "invalid choice: 'nsys'"),
        (["--backend", "cupti", "--memory"], 1, "expected backend kineto for the memory timeline"),
        (["--untraced-steps", "1"], 1, "expected untraced_steps of at least 2, got 1"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, words: list[str], status: int, sentence: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    found = whatif_in(tmp_path, "collect", *words, "train.py")
    assert (found.returncode, len(found.stderr.splitlines())) == (status, 1)
    assert sentence in found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), WhatifError("expected time, got none; take some.")])
def test_a_recording_without_its_operators_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, error: BaseException
) -> None:
    def measure(path: Path) -> None:
        raise error

    (tmp_path / "train.py").write_text("")
    parts = {
        collect.RECORDER: SimpleNamespace(
            collect=lambda script, args, output, **options: SimpleNamespace(
                recording=output, status=0, steps=9, interrupted=False, stopped=False, caught=False, together=False
            )
        ),
        collect.OPERATOR_TIMES: SimpleNamespace(add_operator_times=measure),
    }
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name, *rest: parts.get(name) or real(name, *rest))
    output = tmp_path / "run.json.gz"
    assert main(["collect", "--measure-operators", "-o", str(output), str(tmp_path / "train.py")]) != 0
    assert f"{output}: recorded, but its operators were not measured" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--debug", "--quiet", "collect"], ["collect", "--debug", "--quiet"]])
def test_flags_before_the_command_reach_the_processes_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command))
    monkeypatch.setattr(collect, "_record", lambda args: 0)
    assert main([*words, "torchrun", "train.py"]) == 0
    assert started[0][started[0].index("whatif") :][:4] == ["whatif", "collect", "--debug", "--quiet"]
