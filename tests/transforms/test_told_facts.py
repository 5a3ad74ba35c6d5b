"""What a changed graph says of itself: whoever reads it, or the file it was saved to, is told the new facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import whatif
from tests.helpers import CPU, STREAM, Build
from whatif import DependencyKind, Phase, TaskGraph
from whatif.kernels import DTYPES, KernelFamily
from whatif.predict import Baseline, apply
from whatif.report.perfetto import write_perfetto

V100, FP32 = "Tesla V100-SXM2-32GB", DTYPES.index("fp32")
METADATA: dict[str, Any] = {
    "gpu": V100, "driver": "550.54", "clocks": {"sm_mhz": 1380.0}, "peak_memory_bytes": 9_000_000_000,
    "batch_size": 8, "input_shape": [8, 3, 32, 32], "precision": {"parameters": "float32", "autocast": None},
    "torch": "2.9.0",
}  # fmt: skip


def recorded(**told: Any) -> TaskGraph:
    """Three products of 500 us in fp32 on a V100, one a phase, recorded with 8 samples."""
    metadata, span = {**METADATA, **told}, {"span": (1_501_000,)}
    build = Build(CPU, STREAM, gpu=V100, n_steps=1, batch_size=8, metadata=metadata, measured_step_ns=span)
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
    told = saved(graph, tmp_path, spec).info.metadata
    assert told["precision"] == {"parameters": "float32", "autocast": "float16"}
    assert "peak_memory_bytes" not in told
    assert saved(graph, tmp_path, "amp:target=bf16", "device:to=H100-SXM-80").info.metadata["gpu"] == "H100-SXM-80"
    assert graph.info.metadata == METADATA  # the recording itself is as it was


def test_a_step_in_tf32_says_so(tmp_path: Path) -> None:
    told = saved(recorded(), tmp_path, "device:to=A100-SXM-80", "tf32").info.metadata["precision"]
    assert told == {"parameters": "float32", "autocast": None, "matmul": "tf32", "conv": "tf32"}


def test_a_step_on_another_device_says_which(tmp_path: Path) -> None:
    info = saved(recorded(), tmp_path, "device:to=A100-SXM-80").info
    assert (info.gpu, info.metadata["gpu"]) == ("A100-SXM-80", "A100-SXM-80")
    assert info.metadata.keys() & {"driver", "clocks", "peak_memory_bytes"} == set()
    assert (info.metadata["torch"], info.metadata["precision"]) == ("2.9.0", METADATA["precision"])


def test_a_larger_batch_says_how_large_and_an_accumulated_one_keeps_its_input(tmp_path: Path) -> None:
    accumulated = "gradient_accumulation:passes=2", [8, 3, 32, 32], True
    for spec, shape, peak in (("batch_size:factor=2", [16, 3, 32, 32], False), accumulated):
        info = saved(recorded(), tmp_path, spec).info
        assert (info.batch_size, info.metadata["batch_size"]) == (16, 16)
        assert info.metadata["input_shape"] == shape
        assert ("peak_memory_bytes" in info.metadata) == peak


@pytest.mark.parametrize("odd", [{"input_shape": [4, 8]}, {"input_shape": "8x3"}, {"precision": "fp32"}])
def test_what_the_recorder_did_not_write_is_left_as_it_is(odd: dict[str, Any], tmp_path: Path) -> None:
    told = saved(recorded(**odd), tmp_path, "batch_size:factor=2", "amp").info.metadata
    assert {key: told[key] for key in odd} == odd


def test_a_real_recording_under_autocast_with_half_the_batch(own_traces: Path, tmp_path: Path) -> None:
    graph = whatif.read(own_traces / "resnet18_cifar_cpu.json.gz")
    info = saved(graph, tmp_path, "batch_size:factor=0.5", "amp").info
    assert (info.batch_size, info.metadata["input_shape"][0]) == (16, 16)
    assert (graph.info.metadata["precision"]["autocast"], info.metadata["precision"]["autocast"]) == (None, "bfloat16")
