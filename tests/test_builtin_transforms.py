"""The transforms that come with the package: applied twice, at the edges, and where they must not invent a gain."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import whatif
from tests.helpers import Event, launched, mark, op, read_events, replace, with_metadata
from whatif import TaskGraph, WhatifError
from whatif.models import backward_ends
from whatif.prediction.baseline import Baseline

RESNET, TRANSFORMER = "resnet18_cifar_cpu.json.gz", "transformer_cpu.json.gz"


@cache
def graph_of(path: Path) -> TaskGraph:
    return whatif.read(path)


@pytest.fixture
def own(own_traces: Path) -> Callable[[str], TaskGraph]:
    return lambda name: graph_of(own_traces / name)


@pytest.mark.parametrize("specs", [["batch_size:factor=1"], ["distributed:workers=4", "bandwidth:factor=1"]])
def test_a_factor_of_one_changes_nothing(own: Callable[[str], TaskGraph], specs: list[str]) -> None:
    found = whatif.apply(own(TRANSFORMER), *specs)
    without = whatif.apply(own(TRANSFORMER), *specs[:-1])
    assert not found.applied[-1].changed
    assert (found.low_ms, found.predicted_ms, found.high_ms) == (without.low_ms, without.predicted_ms, without.high_ms)


@pytest.mark.parametrize(("transform", "name"), [("amp", RESNET), ("fused_adam", TRANSFORMER)])
def test_twice_is_once(own: Callable[[str], TaskGraph], transform: str, name: str) -> None:
    once, twice = whatif.apply(own(name), transform), whatif.apply(own(name), transform, transform)
    assert once.predicted_ms < once.baseline_ms
    assert twice.predicted_ms == once.predicted_ms
    assert any("already" in warning for warning in twice.warnings)


def test_twice_is_once_on_a_gpu(shared_traces: Path) -> None:
    graph = graph_of(shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz")
    for transform in ("amp", "fused_adam"):
        once, twice = whatif.apply(graph, transform), whatif.apply(graph, transform, transform)
        assert twice.predicted_ms == once.predicted_ms


@pytest.mark.parametrize("name", [RESNET, TRANSFORMER, "resnet18_cifar_cpu_loader2.json.gz"])
def test_removing_trivial_loading_slows_nothing(own: Callable[[str], TaskGraph], name: str) -> None:
    baseline = Baseline.of(own(name))
    predicted = [whatif.apply(baseline, f"data_loading:time_ms={ms}").predicted_ms for ms in (0, 0.1, 0.5, 1)]
    assert predicted == sorted(predicted)
    assert predicted[0] <= baseline.step_ns / 1e6


def test_the_recorded_loading_time_changes_nothing(own: Callable[[str], TaskGraph]) -> None:
    graph = own("resnet18_cifar_cpu_loader0.json.gz")
    note = whatif.apply(graph, "data_loading").graph.notes[0]
    assert "67.8 ms a step in the baseline" in note
    prediction = whatif.apply(graph, "data_loading:time_ms=67.8")
    assert prediction.predicted_ms == pytest.approx(prediction.baseline_ms, rel=1e-3)


def test_a_recording_without_steps_is_one_step_of_several_passes(shared_traces: Path) -> None:
    path = shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz"
    graph, marked = graph_of(path), whatif.read(path, step_count=1)
    assert (graph.step < 0).all()
    assert backward_ends(graph).tolist() == backward_ends(marked).tolist() != []
    for names in (["gradient_accumulation:passes=3"], ["gradient_accumulation:passes=8", "zero:workers=64"]):
        found, expected = whatif.apply(graph, *names), whatif.apply(marked, *names)
        assert found.predicted_ms == pytest.approx(expected.predicted_ms, rel=1e-3)
        assert (found.graph.step < 0).all()
        assert found.graph.info.peak_bytes == pytest.approx(expected.graph.info.peak_bytes, rel=1e-6)


def test_an_inference_without_steps_has_no_passes_to_accumulate(shared_traces: Path) -> None:
    graph = graph_of(shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz")
    forward = graph.replace(phase=np.where(graph.phase == whatif.Phase.BACKWARD, whatif.Phase.FORWARD, graph.phase))
    with pytest.raises(whatif.WhatifError, match="a backward pass, got none"):
        whatif.apply(forward, "gradient_accumulation")


def test_loading_before_the_span_is_noted(shared_traces: Path) -> None:
    """The span begins with the first GPU task; 100 ms of loading ahead of it were said to change nothing."""
    graph = graph_of(shared_traces / "param-dlrm-8xv100" / "rank0.json.gz")
    notes = whatif.apply(graph, "data_loading:time_ms=100").notes
    assert any("all loading ends before the first kernel" in note for note in notes)


@pytest.mark.parametrize(
    "name", ["kineto-resnet50-v100/num_workers_4.2020-12.pt.trace.json.gz", "param-2080ti/resnet_kineto.json.gz"]
)
def test_no_step_loads_for_less_than_is_asked_for(shared_traces: Path, name: str) -> None:
    """Scaled with those of the median step, bursts gave a step of 336 ms, and one of 165, with a loading of 500."""
    found = whatif.apply(graph_of(shared_traces / name), "data_loading:time_ms=500")
    assert 500 < found.predicted_ms < found.baseline_ms + 500


def test_loading_can_come_back(own: Callable[[str], TaskGraph]) -> None:
    free = whatif.apply(own(RESNET), "scale:kind=data,factor=0").predicted_ms
    back = whatif.apply(own(RESNET), "scale:kind=data,factor=0", "data_loading:time_ms=5").predicted_ms
    assert back == pytest.approx(free + 5, abs=0.01)


@pytest.mark.parametrize(
    "spec",
    [
        "data_loading:time_ms=nan", "data_loading:time_ms=inf", "data_loading:time_ms=-1", "data_loading:time_ms=1e300",
        "scale:factor=1e300", "scale:factor=nan", "scale:factor=-1", "scale:factor=1e12", "fused_adam:speedup=0",
        "fused_adam:speedup=1e-300", "amp:matrix_speedup=0", "amp:memory_speedup=-2", "scale:layer=nosuchlayer",
        "scale:name=(", "bandwidth:factor=0", "bandwidth", "kernels",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_options_that_make_no_sense_are_one_sentence(own: Callable[[str], TaskGraph], spec: str) -> None:
    with pytest.raises(WhatifError) as error:
        whatif.apply(own(TRANSFORMER), spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("bf16", "slower"), [(2.0, True), (200.0, False), (1e-9, False)])
def test_a_cpu_that_emulates_bf16_gets_slower(own: Callable[[str], TaskGraph], bf16: float, slower: bool) -> None:
    graph = with_metadata(own(RESNET), rates={"fp32_gflops": 100.0, "bf16_gflops": bf16})
    prediction = whatif.apply(graph, "amp")
    assert (prediction.predicted_ms > 3 * prediction.baseline_ms) == slower
    assert prediction.low_ms < prediction.predicted_ms < prediction.high_ms
    notes = [note for note in prediction.warnings if "--measure-operators" in note]
    assert bool(notes) == slower
    again = whatif.apply(graph, "amp", "amp")
    assert again.predicted_ms == pytest.approx(prediction.predicted_ms, rel=0.2)


def updates(kernel: str, count: int, optimizer: str) -> list[Event]:
    """Three steps of a forward product, a backward one and ``count`` kernels of an update; times in us."""
    events: list[Event] = []
    for i in range(4):
        at, corr = 1000 * i, 100 * i + 1
        events += [mark(f"ProfilerStep#{i}", at, 1000), op("aten::mm", at, 50, **{"Sequence number": i}),
                   *launched("sgemm", at + 10, 5, at + 20, 100, corr),
                   op("autograd::engine::evaluate_function: MmBackward0", at + 60, 50),
                   *launched("sgemm", at + 70, 5, at + 125, 100, corr + 1),
                   op("aten::linalg_vector_norm", at + 120, 20),
                   *launched("at::native::reduce_kernel<norm>", at + 125, 5, at + 230, 20, corr + 2),
                   mark(f"Optimizer.step#{optimizer}.step", at + 200, 300)]  # fmt: skip
        for k in range(count):
            events.append(op("aten::add_", at + 210 + 20 * k, 15))
            events += launched(kernel, at + 212 + 20 * k, 5, at + 260 + 22 * k, 20, corr + 10 + k)
    return events


def update_time_ns(graph: TaskGraph) -> int:
    return int(graph.duration_ns[graph.on_gpu & graph.in_optimizer].sum())


def test_the_norm_of_clipping_is_not_fused(tmp_path: Path) -> None:
    graph = read_events(tmp_path, updates("elementwise_kernel<addcdiv>", 5, "Adam"))
    fused = whatif.apply(graph, "fused_adam").graph
    norm = [code for code, name in enumerate(fused.names) if "norm" in name and "reduce" in name]
    assert np.isin(fused.name, norm).sum() == 4
    assert fused.on_gpu.sum() == 4 * (2 + 1 + 1)


def test_plain_sgd_moves_the_same_bytes_fused(tmp_path: Path) -> None:
    """One addition a parameter: fusing saves launches and start-up floors, no traffic."""
    graph = read_events(tmp_path, updates("elementwise_kernel<add>", 5, "SGD"))
    fused = whatif.apply(graph, "fused_adam").graph
    # 5 x 20 us, of which 2 us each is the floor: 5 x 18 + 2.
    assert set(fused.duration_ns[fused.on_gpu & (fused.phase == whatif.Phase.UPDATE) & fused.in_optimizer]) == {92_000}


def test_one_update_kernel_stays(tmp_path: Path) -> None:
    graph = read_events(tmp_path, updates("elementwise_kernel<add>", 1, "SGD"))
    prediction = whatif.apply(graph, "fused_adam")
    assert prediction.predicted_ms == prediction.baseline_ms
    assert any("already" in warning for warning in prediction.warnings)


def test_an_optimizer_that_is_not_modelled_is_refused(tmp_path: Path) -> None:
    graph = read_events(tmp_path, updates("elementwise_kernel<add>", 3, "Adagrad"))
    with pytest.raises(WhatifError, match="Adagrad"):
        whatif.apply(graph, "fused_adam")
    assert whatif.apply(graph, "fused_adam:speedup=2").speedup >= 1


def test_foreach_makes_one_kernel_of_each_operation(tmp_path: Path) -> None:
    graph = read_events(tmp_path, updates("elementwise_kernel<add>", 5, "Adam"))
    changed = whatif.apply(graph, "fused_adam:to=foreach").graph
    update = changed.on_gpu & changed.in_optimizer
    # Moves what it moved: 5 x 18 us above the floor of 2.
    assert changed.duration_ns[update].tolist() == [92_000] * 4
    again = whatif.apply(graph, "fused_adam:to=foreach", "fused_adam:to=foreach")
    assert again.graph.on_gpu.sum() == changed.on_gpu.sum()
    assert any("already" in warning for warning in again.warnings)


def cpu_updates(folder: Path, **metadata: object) -> TaskGraph:
    """Four CPU steps of 1,000 us, in each an update of 400 us: 10 operators of 20 us and Python between them."""
    events: list[Event] = []
    for i in range(4):
        at = 1000 * i
        events += [mark(f"ProfilerStep#{i}", at, 1000), op("aten::mm", at + 10, 300, **{"Sequence number": i}),
                   op("autograd::engine::evaluate_function: MmBackward0", at + 320, 200),
                   mark("Optimizer.step#Adam.step", at + 550, 400),
                   *[op("aten::addcdiv_", at + 560 + 38 * k, 20) for k in range(10)]]  # fmt: skip
    return read_events(folder, events, whatif={"version": 1, **metadata})


@pytest.mark.parametrize(("to", "ratio"), [("foreach", 0.75), ("fused", 0.25)])
def test_an_update_measured_alone_decides_on_a_cpu(tmp_path: Path, to: str, ratio: float) -> None:
    graph = cpu_updates(tmp_path, update_times_ns={"for_loop": 4e5, "foreach": 3e5, "fused": 1e5})
    prediction = whatif.apply(graph, f"fused_adam:to={to}")
    assert prediction.predicted_ms == pytest.approx(1.0 - 0.4 * (1 - ratio), rel=1e-6)
    twice = whatif.apply(graph, f"fused_adam:to={to}", f"fused_adam:to={to}")
    assert twice.predicted_ms == prediction.predicted_ms


def test_a_fused_update_on_a_cpu_runs_no_python_for_each_operator(tmp_path: Path) -> None:
    """The traffic model's ratio, 7 accesses of 20, holds for the whole update of 400 us, not only for its operators."""
    prediction = whatif.apply(cpu_updates(tmp_path), "fused_adam")
    assert prediction.predicted_ms == pytest.approx(1.0 - 0.4 * (1 - 7 / 20), rel=1e-6)


@pytest.mark.parametrize(
    "times",
    [None, 3, {}, {"for_loop": 0, "foreach": 1}, {"for_loop": "1", "foreach": 1}, {"for_loop": 1, "foreach": 1e9}],
)
def test_an_update_that_was_not_measured_says_what_foreach_needs(tmp_path: Path, times: object) -> None:
    prediction = whatif.apply(cpu_updates(tmp_path, update_times_ns=times), "fused_adam:to=foreach")
    assert prediction.predicted_ms == prediction.baseline_ms
    assert any("measure-operators" in warning for warning in prediction.warnings)


def test_a_foreach_update_on_a_cpu_needs_no_measurement_to_stay(own_traces: Path) -> None:
    graph = whatif.read(own_traces / "transformer_cpu_foreach.json.gz")
    prediction = whatif.apply(graph, "fused_adam:to=foreach")
    assert prediction.predicted_ms == prediction.baseline_ms
    assert any("lists of tensors already" in warning for warning in prediction.warnings)


def test_an_optimizer_of_ones_own_has_no_foreach(tmp_path: Path) -> None:
    graph = cpu_updates(tmp_path)
    graph = graph.replace(info=replace(graph.info, optimizer="Lion"))
    with pytest.raises(WhatifError, match="foreach=True, got Lion"):
        whatif.apply(graph, "fused_adam:to=foreach")


def test_an_update_measured_alone_decides_without_marks_as_well(tmp_path: Path) -> None:
    graph = cpu_updates(tmp_path, update_times_ns={"for_loop": 4e5, "foreach": 3e5, "fused": 1e5})
    graph = graph.replace(in_optimizer=np.zeros(len(graph), dtype=np.bool_))
    changed = whatif.apply(graph, "fused_adam").graph
    operators = graph.select(name="addcdiv")
    assert (changed.duration_ns[operators] == 0.25 * graph.duration_ns[operators]).all()
