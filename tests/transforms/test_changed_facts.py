"""The facts of a changed graph: its readers, and those of its saved file, get the new values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import whatif
from tests.helpers import CPU, STREAM, Build
from whatif import DependencyKind, Phase, TaskGraph, WhatifError
from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.graph.types import Change
from whatif.ingest.recorded import written
from whatif.models.parallel.stage_gradients import is_pipelined
from whatif.prediction.predict import Baseline, apply
from whatif.report.perfetto import write_perfetto

V100, FP32 = "Tesla V100-SXM2-32GB", DTYPES.index("fp32")
METADATA: dict[str, Any] = {
    "gpu": V100, "driver": "550.54", "clocks": {"sm_mhz": 1380.0}, "peak_memory_bytes": 9_000_000_000,
    "batch_size": 8, "input_shape": [8, 3, 32, 32], "precision": {"parameters": "float32", "autocast": None},
    "torch": "2.9.0",
}  # fmt: skip


def recorded(**facts: Any) -> TaskGraph:
    """Three products of 500 us in fp32 on a V100, one a phase, recorded with 8 samples."""
    span = {"span": (1_501_000,)}
    build = Build(CPU, STREAM, gpu=V100, n_steps=1, batch_size=8, metadata={**METADATA, **facts}, measured_step_ns=span)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):
        call = build.task(0, 1_000, f"call {phase}", phase=phase)
        kernel = build.task(1, 500_000, f"mm {phase}", phase=phase, family=KernelFamily.GEMM, dtype=FP32)
        build.edge(call, kernel, kind=DependencyKind.LAUNCH)
    return build.graph()


def saved(graph: TaskGraph, folder: Path, *specs: str) -> TaskGraph:
    """The prediction of some what-ifs, written and read again."""
    baseline = Baseline.of(graph)
    write_perfetto(folder / "step.json", baseline.timeline, apply(baseline, *specs).timeline, " ".join(specs))
    return whatif.read(folder / "step.json")


@pytest.mark.parametrize("spec", ["amp", "amp:matrix_speedup=3"])
def test_a_step_in_mixed_precision_says_so(spec: str, tmp_path: Path) -> None:
    graph = recorded()
    facts = written(saved(graph, tmp_path, spec).info.recorded)
    assert facts["precision"] == {"parameters": "float32", "autocast": "float16"}
    assert "peak_memory_bytes" not in facts
    assert saved(graph, tmp_path, "amp:target=bf16", "device:to=H100-SXM-80").info.gpu == "H100-SXM-80"
    assert graph.info == recorded().info  # the recording itself is as it was


def test_a_step_in_tf32_says_so(tmp_path: Path) -> None:
    facts = saved(recorded(), tmp_path, "device:to=A100-SXM-80", "tf32").info.recorded
    assert written(facts)["precision"] == {"parameters": "float32", "autocast": None, "matmul": "tf32", "conv": "tf32"}


def test_a_step_on_another_device_says_which(tmp_path: Path) -> None:
    info = saved(recorded(), tmp_path, "device:to=A100-SXM-80").info
    facts = written(info.recorded)
    assert info.gpu == "A100-SXM-80"
    assert facts.keys() & {"driver", "clocks", "peak_memory_bytes"} == set()
    assert (facts["torch"], facts["precision"]) == ("2.9.0", METADATA["precision"])


def test_a_larger_batch_says_how_large_and_an_accumulated_one_keeps_its_input(tmp_path: Path) -> None:
    accumulated = "gradient_accumulation:passes=2", (8, 3, 32, 32), True
    for spec, shape, peak in (("batch_size:factor=2", (16, 3, 32, 32), False), accumulated):
        info = saved(recorded(), tmp_path, spec).info
        assert info.batch_size == 16
        assert info.recorded.input_shape == shape
        assert (info.recorded.peak_memory_bytes is not None) == peak


@pytest.mark.parametrize("odd", [{"input_shape": [4, 8]}, {"input_shape": "8x3"}, {"precision": "fp32"}])
def test_what_the_recorder_did_not_write_is_left_as_it_is(odd: dict[str, Any], tmp_path: Path) -> None:
    info = saved(recorded(**odd), tmp_path, "batch_size:factor=2", "amp").info
    facts = written(info.recorded)
    assert {key: facts[key] for key in odd} == odd


def test_a_real_recording_under_autocast_with_half_the_batch(own_traces: Path, tmp_path: Path) -> None:
    graph = whatif.read(own_traces / "resnet18_cifar_cpu.json.gz")
    info = saved(graph, tmp_path, "batch_size:factor=0.5", "amp").info
    assert (info.batch_size, (info.recorded.input_shape or ())[:1]) == (16, (16,))
    assert graph.info.recorded.precision is not None
    assert info.recorded.precision is not None
    assert (graph.info.recorded.precision.autocast, info.recorded.precision.autocast) == (None, "bfloat16")


def test_a_saved_step_shows_later_what_ifs_what_was_done(own_traces: Path, tmp_path: Path) -> None:
    graph = saved(whatif.read(own_traces / "resnet18_cifar_cpu.json.gz"), tmp_path, "gist:lossy=fp16")
    assert graph.info.changes == (Change.ENCODES,)
    assert [part.changed for part in apply(graph, "gist").applied] == [False]


def test_a_pipeline_that_an_older_version_saved_is_one(own_traces: Path, tmp_path: Path) -> None:
    """Stages were recorded by a column alone, so that what-ifs that need operators silently changed nothing."""
    baseline = Baseline.of(whatif.read(own_traces / "resnet18_cifar_cpu.json.gz"))
    timeline = apply(baseline, "pipeline:stages=2,micro_batches=2").timeline
    old = timeline.graph.replace(info=replace(timeline.graph.info, changes=()))
    write_perfetto(tmp_path / "old.json", baseline.timeline, replace(timeline, graph=old), "pipeline")
    graph = whatif.read(tmp_path / "old.json")
    assert is_pipelined(graph)
    with pytest.raises(WhatifError, match="name amp before pipeline"):
        apply(graph, "amp")
