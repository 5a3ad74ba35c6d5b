"""Replay and response on steps of a GPU that are written by hand: what the machine would record after the change.

tests/test_real_traces.py asks the same of recordings made by others, where they are at hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import whatif
from tests.cli.test_real_traces import all_commands, report
from tests.helpers import call, kernel, op, replace, write_trace
from tests.written_steps import KINDS, Machine, written
from whatif import Phase, TaskGraph, TaskKind, WhatifError
from whatif.prediction.predict import Baseline
from whatif.simulation.simulator import simulate


def write(folder: Path, machine: Machine, name: str = "trace.json") -> Path:
    (folder / name).write_text(json.dumps(written(machine)))
    return folder / name


def recorded(folder: Path, machine: Machine) -> TaskGraph:
    return whatif.read(write(folder, machine))


def step_ms(folder: Path, machine: Machine) -> float:
    """The step that the trace of a machine has."""
    return Baseline.of(recorded(folder, machine)).measured_ns / 1e6


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_replayed(tmp_path: Path, kind: str) -> None:
    baseline = Baseline.of(recorded(tmp_path, KINDS[kind]))
    assert abs(baseline.replay_error_pct) <= 0.5
    assert baseline.unexplained_wait_pct <= 2.0
    prediction = whatif.apply(baseline, "scale:factor=1")
    assert prediction.predicted_ms == prediction.baseline_ms == baseline.step_ns / 1e6


@pytest.mark.parametrize("kind", KINDS)
def test_faster_gpu_work_never_slows_and_never_beats_the_bounds(tmp_path: Path, kind: str) -> None:
    graph = recorded(tmp_path, KINDS[kind])
    makespans = []
    for factor in (1.0, 0.5, 0.1, 0.0):
        timeline = simulate(graph.scale(graph.on_gpu, factor))
        makespans.append(timeline.makespan_ns)
        assert timeline.makespan_ns >= timeline.busy_ns.max(), factor
    assert makespans == sorted(makespans, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_kernels_of_another_speed_take_the_step_that_would_be_recorded(
    tmp_path: Path, kind: str, factor: float
) -> None:
    machine = KINDS[kind]
    predicted_ms = whatif.apply(recorded(tmp_path, machine), f"scale:kind=gpu,factor={factor}").predicted_ms
    after_ms = step_ms(tmp_path, replace(machine, kernel_us=machine.kernel_us * factor))
    assert predicted_ms == pytest.approx(after_ms, rel=0.01)


def test_a_faster_loader_takes_the_step_that_would_be_recorded(tmp_path: Path) -> None:
    machine = KINDS["loader"]
    prediction = whatif.apply(recorded(tmp_path, machine), "data_loading:time_ms=0.5")
    after_ms = step_ms(tmp_path, replace(machine, loader_us=500.0))
    assert after_ms < 0.6 * prediction.baseline_ms
    assert prediction.predicted_ms == pytest.approx(after_ms, rel=0.01)


def test_a_longer_kernel_lengthens_a_gpu_bound_trace(tmp_path: Path) -> None:
    """Nothing is pinned to its recorded start."""
    graph = recorded(tmp_path, KINDS["gpu-bound"])
    kernels = np.flatnonzero(graph.kind == TaskKind.KERNEL)
    middle = kernels[len(kernels) // 2]
    longer = graph.with_duration(np.array([middle]), graph.duration_ns[middle] + 10_000_000)
    grown_ms = (simulate(longer).makespan_ns - simulate(graph).makespan_ns) / 1e6
    assert grown_ms == pytest.approx(10, abs=0.1)


@pytest.mark.parametrize("change", ["amp", "scale:kind=gpu,factor=0.5"])
def test_a_host_bound_trace_gains_nothing_and_says_why(tmp_path: Path, change: str) -> None:
    prediction = whatif.apply(recorded(tmp_path, KINDS["host-bound"]), change)
    assert prediction.speedup <= 1.01
    assert any("host-bound" in warning for warning in prediction.warnings)


def test_slower_kernels_of_a_host_bound_trace_are_not_called_cpu_work(tmp_path: Path) -> None:
    """A GPU that is 60 times as slow bounds the step: "faster kernels change nothing" was beside the answer."""
    prediction = whatif.apply(recorded(tmp_path, KINDS["host-bound"]), "scale:kind=gpu,factor=60")
    assert prediction.speedup < 0.9
    assert not any("host-bound" in warning for warning in prediction.warnings)


def test_amp_speeds_up_a_gpu_bound_trace(tmp_path: Path) -> None:
    prediction = whatif.apply(recorded(tmp_path, KINDS["gpu-bound"]), "amp")
    assert 1.5 <= prediction.speedup <= 8
    assert prediction.low_ms <= prediction.predicted_ms <= prediction.high_ms


@pytest.mark.parametrize("kind", KINDS)
def test_every_task_has_a_phase(tmp_path: Path, kind: str) -> None:
    graph = recorded(tmp_path, KINDS[kind])
    assert not np.any((graph.phase == Phase.UNKNOWN) & (graph.kind != TaskKind.WAIT))
    if kind in ("gpu-bound", "host-bound", "loader", "amd"):
        kernels = graph.kind == TaskKind.KERNEL
        found = {phase: int((kernels & (graph.phase == phase)).sum()) for phase in (Phase.FORWARD, Phase.BACKWARD)}
        assert found[Phase.FORWARD] == found[Phase.BACKWARD]
        update = kernels & (graph.phase == Phase.UPDATE)
        assert update.sum() * 6 == kernels.sum() - update.sum()


def test_gpu_time_has_a_layer_where_the_trace_has_modules(tmp_path: Path) -> None:
    graph = recorded(tmp_path, KINDS["gpu-bound"])
    gpu_ns = graph.duration_ns * (graph.on_gpu & (graph.phase != Phase.UPDATE))
    assert gpu_ns[graph.layer > 0].sum() >= 0.98 * gpu_ns.sum()


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_answers(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    all_commands(str(write(tmp_path, KINDS[kind])), tmp_path, capsys)


@pytest.mark.parametrize("kind", ["loader", "gpu-bound"])
def test_the_data_loader_is_found(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    explained = report(capsys, "explain", str(write(tmp_path, KINDS[kind])))
    assert explained["verdict"].startswith("loading-bound" if kind == "loader" else "GPU-bound")
    assert explained["critical_path_ms"].get("data_loading", 0) == pytest.approx(KINDS[kind].loader_us / 1e3, abs=0.1)


FOREIGN = {**op("work", 0, 5), "cat": "some_tool"}
MTIA = {**op("work", 0, 5), "cat": "mtia_runtime"}


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([FOREIGN], "another tool"),
        ([call("cudaLaunchKernel", 0, 5, 1), call("cudaLaunchKernel", 9, 5, 2)], "no kernel"),
        ([MTIA], "unsupported device 'mtia'"),
    ],
)
def test_what_holds_no_work_is_refused_in_a_sentence(
    tmp_path: Path, events: list[dict[str, object]], reason: str
) -> None:
    path = write_trace(tmp_path / "trace.json", events)
    with pytest.raises(WhatifError, match=reason) as refusal:
        whatif.read(path)
    assert "\n" not in str(refusal.value)
    work = [*events, *[call("cudaLaunchKernel", 20, 5, 9), kernel("k", 30, 5, 9)]]
    assert len(whatif.read(write_trace(tmp_path / "work.json", work)))
