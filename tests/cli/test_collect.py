"""``whatif collect`` on a real script, without a GPU: the whole way from the script to its explanation."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if os.environ.get("WHATIF_STRICT") == "1":
    importlib.import_module("torch")
else:
    pytest.importorskip("torch")

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

    def run(*words: str) -> str:
        found = subprocess.run(
            [sys.executable, "-m", "whatif", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert found.returncode == 0, found.stderr
        return found.stdout

    assert "train.json.gz: recorded; next: whatif explain train.json.gz" in run("collect", "train.py", "--steps", "9")
    info = json.loads(run("info", "train.json.gz", "--json"))
    assert (info["steps"], info["time_share_of"]) == (5, "cpu")
    assert info["untraced_ms"] > 0
    layers = {part["layer"] for part in json.loads(run("explain", "train.json.gz", "--json"))["layers"]}
    assert {"0", "2"} <= layers
