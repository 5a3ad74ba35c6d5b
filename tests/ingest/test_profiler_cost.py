"""What the profiler cost, read from traces alone, beside what was measured."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.helpers import Event, benchmark, mark, op, read_events
from whatif.prediction.baseline import Baseline

MODELS = ["bert-base", "bert-large", "densenet121", "gnmt", "gpt2-small", "resnet50", "vgg19"]


def check(models: list[str], most: float, most_p90: float) -> None:
    module: Any = benchmark("profiler_cost")
    found = module.outcomes(models=models)
    errors = np.abs([one.error for one in found])
    assert len(found) == 16 * len(models)
    assert (np.median(errors) <= most, np.percentile(errors, 90) <= most_p90) == (True, True), module.summary(found)
    assert np.mean([one.inside for one in found]) >= 0.85, module.summary(found)


def test_the_step_without_the_profiler_is_met() -> None:
    check(["vgg19"], 0.03, 0.06)


@pytest.mark.slow
def test_the_step_without_the_profiler_is_met_on_every_model() -> None:
    check(MODELS, 0.05, 0.11)


def wrapped(time_us: float, cost_us: float) -> list[Event]:
    """aten::t calls aten::transpose, which calls aten::as_strided; each begins ``cost_us`` behind its caller."""
    names = ("aten::t", "aten::transpose", "aten::as_strided")
    return [op(name, time_us + i * cost_us, 1 + (2 - i) * cost_us) for i, name in enumerate(names)]


def calls(cost_us: float) -> list[Event]:
    steps = [mark(f"ProfilerStep#{i}", 1000.5 * i, 1000.5) for i in range(5)]
    return [*steps, *(event for i in range(5 * 40) for event in wrapped(0.5 + 25 * i, cost_us))]


@pytest.mark.parametrize("cost_us", [0.5, 2.0])
def test_wrappers_give_an_operators_cost(tmp_path: Path, cost_us: float) -> None:
    graph = read_events(tmp_path, calls(cost_us))
    assert graph.info.profiler is not None
    assert graph.info.profiler.read_from_trace
    assert graph.info.profiler.operator_us == pytest.approx(1.1 * cost_us, rel=0.01)
    per_step_us = graph.profiler_ns[graph.step == 2].sum() / 1e3
    assert per_step_us == pytest.approx(40 * 3 * 1.1 * cost_us, rel=0.05)


def test_the_cost_is_taken_out_and_as_recorded_keeps_it(tmp_path: Path) -> None:
    graph = read_events(tmp_path, calls(2.0))
    baseline, recorded = Baseline.of(graph), Baseline.of(graph, calibrated=False)
    assert baseline.calibration is not None
    assert recorded.step_ns == pytest.approx(1_000_500)
    assert baseline.step_ns == pytest.approx(recorded.step_ns - baseline.calibration.removed_ns, rel=1e-3)
    assert baseline.estimated_ms is not None
    assert baseline.estimated_ms["low"] < baseline.step_ns / 1e6 < baseline.estimated_ms["high"]
    assert recorded.estimated_ms is None
    assert Baseline.of(baseline.graph).calibration is None


def test_what_a_task_is_too_short_for_is_taken_from_those_behind_it(tmp_path: Path) -> None:
    """Nothing is lost where pieces are shorter than what lies in them."""
    graph = read_events(tmp_path, calls(2.0))
    none = graph.replace(profiler_ns=np.where(graph.step == 1, graph.profiler_ns, 0))
    removed_ns = Baseline.of(none).calibration.removed_ns * 5  # type: ignore[union-attr]
    assert removed_ns == pytest.approx(none.profiler_ns.sum(), rel=0.02)


def test_a_trace_without_wrappers_of_an_unknown_version_keeps_its_times(tmp_path: Path) -> None:
    graph = read_events(tmp_path, [op("aten::mm", 10 * i, 5) for i in range(100)])
    assert graph.info.profiler is None
    assert not graph.profiler_ns.any()


def test_a_known_version_without_wrappers_has_constants(tmp_path: Path) -> None:
    events = [op("aten::mm", 10 * i, 5) for i in range(100)]
    path = tmp_path / "known.json"
    path.write_text(json.dumps({"record_shapes": 1, "traceEvents": events}))
    graph = whatif.read(path)
    assert graph.info.profiler is not None
    assert not graph.info.profiler.read_from_trace
    assert graph.info.profiler.operator_us == pytest.approx(0.78)
    # Without steps the sentence is of the whole recording.
    calibration = Baseline.of(graph).calibration
    assert calibration is not None
    assert "about 0.08 ms of CPU time in all (" in calibration.sentence


def test_own_recordings_are_left_to_what_was_measured(own_traces: Path) -> None:
    graph = whatif.read(own_traces / "transformer_cpu.json.gz")
    assert graph.info.profiler is None
    assert not graph.profiler_ns.any()


def test_stacks_inside_operators_count_by_their_frames(tmp_path: Path) -> None:
    """torch 1.8 walked the stack behind the start stamp: 1 us a stack and 1.09 us a frame, inside the operator."""
    events = calls(2.0)
    with_stack = [op("aten::add", 6000 + 100 * i, 50, **{"Call stack": "a.py(1): f;b.py(2): g"}) for i in range(10)]
    path = tmp_path / "stacks.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, *with_stack]}).encode()))
    graph = whatif.read(path)
    inside = graph.profiler_ns[[name == "aten::add" for name in (graph.names[code] for code in graph.name)]]
    assert inside.tolist() == pytest.approx([3180] * 10, abs=2)
