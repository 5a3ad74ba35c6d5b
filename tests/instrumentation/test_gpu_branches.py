"""Each branch that a GPU's recording takes: on a GPU in a process of its own, and on the one that is stood in for.

On a GPU a failure names its branch, and all of them take less than two minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.helpers import names, need
from whatif import TaskGraph
from whatif.graph.types import Severity
from whatif.prediction.baseline import Baseline

torch = need("torch")
branches = need("tests.instrumentation.gpu_branches")
machines = need("tests.instrumentation.gpu_machine")
collecting = need("whatif.instrumentation.collect")
measuring = need("whatif.instrumentation.operators.measure")
worker = need("whatif.instrumentation.operators.worker")
times = need("whatif.instrumentation.operators.times")
replaying = need("whatif.instrumentation.operators.replay")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/instrumentation/gpu_branches.py"
# By branch: the options of `collect`.
BRANCHES: dict[str, tuple[str, ...]] = {
    "collect": (), "measured": ("--measure-operators",), "compile": (), "capturable": (), "captured": (),
    "gnmt": (), "bert-base": (), "memory": ("--memory",), "nccl": (), "amp": (),
}  # fmt: skip
# Of a replay that is right: percent of the recorded step.
MOST_REPLAY_PCT = 1.0


def check(branch: str, path: Path, *, real: bool) -> None:
    """Assert what a recording of the branch holds; ``real`` where times and kernels are a GPU's own."""
    graph, recorded = whatif.read(path), whatif_of(path)
    where = f"branch {branch}"
    assert graph.info.n_steps >= 4, where
    assert recorded["gpu"], where
    assert not [f.sentence for f in graph.info.findings if f.severity == Severity.VOIDS], where
    per_step = np.bincount(graph.step[graph.on_gpu & (graph.step >= 0)])
    assert per_step.min() > 0, where
    # A first recorded step may still load something.
    assert len(set(per_step[1:].tolist())) == 1, (where, per_step.tolist())
    if branch != "captured":  # whose step has no layers
        assert np.mean(graph.layer[graph.on_gpu] >= 0) > 0.5, where
    assert (recorded["clocks"] or {}).get("sm_mhz"), where
    if branch == "memory":
        assert any(event.get("name") == "[memory]" for event in json.loads(text_of(path))["traceEvents"]), where
    if branch == "nccl":
        assert recorded["ddp"]["source"] == "ddp", where
    if branch == "measured":
        rows = recorded["operator_times"]
        assert rows, where
        assert all(row["ns"]["recorded"] > 0 for row in rows), where
        assert recorded["update_times_ns"].keys() >= {"for_loop"}, where
    if real:
        _check_times(branch, graph, recorded)


def _check_times(branch: str, graph: TaskGraph, recorded: dict[str, Any]) -> None:
    where, kernels = f"branch {branch}", [name for name, gpu in zip(names(graph), graph.on_gpu, strict=True) if gpu]
    assert abs(Baseline.of(graph, calibrated=False).replay_error_pct) <= MOST_REPLAY_PCT, where
    if branch == "compile":
        assert any(name.startswith("triton_") for name in kernels), where
    if branch == "captured":
        assert any("GraphLaunch" in name for name in names(graph)), where
    if branch == "measured":
        alone_ns = sum(row["ns"]["recorded"] * row["calls_per_step"] for row in recorded["operator_times"])
        busy_ns = int(graph.duration_ns[graph.on_gpu].sum()) / graph.info.n_steps
        # The update's kernels and copies are not among the operators.
        assert 0.3 < alone_ns / busy_ns < 1.5, where


def text_of(path: Path) -> str:
    import gzip

    return gzip.decompress(path.read_bytes()).decode()


def whatif_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text_of(path))["whatif"]
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_on_a_gpu(branch: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    command = [sys.executable, str(SCRIPT), branch, str(path)]
    if branch != "captured":
        options = ["-o", str(path), "--stop", *BRANCHES[branch]]
        command = [sys.executable, "-m", "whatif", "collect", *options, str(SCRIPT), branch]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert run.returncode == 0, f"branch {branch}: {run.stderr[-2000:]}"
    check(branch, path, real=True)


class InProcess:
    """What measures operators, in this process: the GPU that is stood in for has no other. Tensors lie on the CPU."""

    def __init__(self, module: str, setup: dict[str, Any], *, threads: int | None = None) -> None:
        assert setup["cuda"]
        self.ready = {"gpu": machines.NAME}
        self._worker = worker._Worker({**setup, "operators": json.loads(json.dumps(setup["operators"]))})

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None: ...

    def measure(self, line: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self._worker.answer(line["job"])
        return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for the GPU")
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_on_the_machine_that_is_stood_in_for(
    branch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.install(monkeypatch, machines.FakeGpu(), machines.FakeKineto())
    path = tmp_path / "run.json.gz"
    if branch == "captured":
        branches.replay(str(path))
    else:
        monkeypatch.setattr(sys, "argv", list(sys.argv))
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        ended = collecting.collect(str(SCRIPT), [branch], path, stop=True, memory="--memory" in BRANCHES[branch])
        assert ended.recording, ended.failure
    if branch == "measured":
        monkeypatch.setattr(measuring, "MeasuringProcess", InProcess)
        cpu = torch.device("cpu")
        monkeypatch.setattr(worker, "make_replay", lambda call, device, copies: replaying.make_replay(call, cpu, 1))
        updates = worker.measure_updates
        monkeypatch.setattr(worker, "measure_updates", lambda o, s, device, *rest: updates(o, s, cpu, *rest))
        times.add_operator_times(path, ("recorded",), budget_s=8.0)
    check(branch, path, real=False)
