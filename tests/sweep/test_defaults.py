"""Default ways to spread a step: the requested what-ifs, else data parallelism; and the assumptions made."""

from __future__ import annotations

from pathlib import Path

import pytest

import whatif
from tests.helpers import CPU, STREAM, Build, replace
from whatif import TaskGraph, TaskKind, load_transform
from whatif.graph.memory import LayerMemory, Memory
from whatif.graph.recorded import Recorded
from whatif.prediction.baseline import Baseline
from whatif.prediction.composition import spelled
from whatif.questions.sweep.defaults import WORKERS, bandwidths_of, spread_of
from whatif.questions.sweep.scaling import scaling
from whatif.questions.sweep.sweep import sweep


@pytest.fixture(scope="module")
def recorded(own_traces: Path) -> TaskGraph:
    """A recording that lists its gradients."""
    return whatif.read(own_traces / "transformer_cpu.json.gz")


def names(transforms: tuple[whatif.Transform, ...]) -> list[str]:
    return [spelled(transform) for transform in transforms]


def test_data_parallelism_is_put_beside_what_was_asked_for(recorded: TaskGraph) -> None:
    transforms, assumed = spread_of(recorded, [load_transform("amp:target=bf16")])
    assert names(transforms) == ["amp:target=bf16", "distributed"]
    assert assumed == ()
    assert scaling(Baseline.of(recorded), transforms, (1, 2)).rows[1].step_ms


def test_what_was_asked_for_and_spreads_is_taken_and_its_workers_are_left_open(recorded: TaskGraph) -> None:
    asked = [load_transform("fsdp:workers=4,bandwidth=10Gbps"), load_transform("compile")]
    assert [spelled(t).partition(":")[0] for t in spread_of(recorded, asked)[0]] == ["fsdp", "compile"]
    assert "workers" not in spread_of(recorded, asked)[0][0].options
    transforms, varied, _ = bandwidths_of(recorded, asked)
    assert transforms[0].options["workers"] == 4
    assert varied.option == "bandwidth"


def test_loaders_and_tensors_are_no_machines(recorded: TaskGraph) -> None:
    transforms, _ = spread_of(recorded, [load_transform("data_loading:workers=4")])
    assert names(transforms) == ["data_loading:workers=4", "distributed"]


def test_unknown_gradients_are_as_large_as_the_parameters_that_shapes_show(recorded: TaskGraph) -> None:
    silent = recorded.replace(info=replace(recorded.info, recorded=Recorded(), memory=None, gradient_bytes=()))
    assert names(spread_of(silent)[0]) == ["distributed"]
    layers = (LayerMemory("a", 10, 3_000_000), LayerMemory("b", 10, 1_000_000))
    stated = silent.replace(info=replace(silent.info, memory=Memory(4_000_000, 0, 0, layers)))
    transforms, assumed = spread_of(stated)
    assert names(transforms) == ["distributed"]
    assert len(assumed) == 1
    assert "the memory of a step (-9.1 to +10.0 %)" in assumed[0]
    assert bandwidths_of(stated)[2] == assumed
    assert bandwidths_of(stated)[0][0].options == {"workers": WORKERS}


def test_of_what_communicates_already_only_the_ratio_is_asked() -> None:
    build = Build(CPU, STREAM)
    build.launch(10, 1000, "gemm")
    call = build.task(0, 10, "launch")
    build.edge(call, build.task(1, 4000, "all-reduce", TaskKind.COMMUNICATION))
    build.info = replace(build.info, measured_step_ns={"span": (5000,)})
    graph = build.graph()
    transforms, varied, assumed = bandwidths_of(graph)
    assert names(transforms) == ["bandwidth"]
    assert varied.option == "factor"
    assert len(assumed) == 1
    points = sweep(Baseline.of(graph), transforms, [varied]).points
    steps_ms = [point.step_ms for point in points]
    assert steps_ms == sorted(steps_ms, reverse=True)  # type: ignore[type-var]
    assert steps_ms[0] == pytest.approx(0.001 + 4 * 0.004, rel=0.05)
