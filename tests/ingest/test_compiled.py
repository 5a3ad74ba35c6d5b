"""Compiled and graph-launched runs are reported as such, and layers come from the remaining facts."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

import pytest

import whatif
from tests.helpers import Event, call, kernel, launched, mark, module, need, op, read_events
from whatif import Phase, TaskGraph
from whatif.prediction.baseline import Baseline

FUSED = "triton_poi_fused_add_relu_0"
REGION = "(compiled region 0/0)"


def labels(graph: TaskGraph) -> dict[str, tuple[str, Phase]]:
    """Layer and phase of every GPU task by its name."""
    return {
        graph.names[graph.name[i]]: (graph.layers[graph.layer[i]], Phase(int(graph.phase[i])))
        for i in range(len(graph))
        if graph.on_gpu[i]
    }


def share_with_layer(graph: TaskGraph, phase: Phase) -> float:
    chosen = (graph.on_gpu if graph.on_gpu.any() else graph.on_cpu) & (graph.phase == phase)
    return float(graph.duration_ns[chosen & (graph.layer > 0)].sum() / graph.duration_ns[chosen].sum())


def compiled_step(*, inside: str | None) -> list[Event]:
    """Forward on thread 1, inside a module where one is named; backward on thread 2; a head that is not compiled.

    ::

        us        0   10      30   40 50    60 70   100     140
        thread 1  |(module)|region   |  |head |
        thread 2                                |head'|region'|accumulate|
    """
    events = [
        op("Torch-Compiled Region: 0/0", 10, 30),
        op("CompiledFunction", 12, 26, **{"Sequence number": 5}),
        mark("## Call CompiledFxGraph f123 ##", 13, 24),
        *launched(FUSED, 15, 5, 22, 10, 1),
        module("Linear_0", 50, 15),
        op("aten::addmm", 52, 10, **{"Sequence number": 6}),
        *launched("head", 54, 5, 61, 10, 2),
    ]
    if inside:
        events.append(module(inside, 5, 38))
    backward = {"Fwd thread id": 1}
    for ts, dur, sequence, name, number in (
        (70, 20, 6, "AddmmBackward0", 3),
        (92, 30, 5, "CompiledFunctionBackward", 4),
    ):
        events += [
            op(f"autograd::engine::evaluate_function: {name}", ts, dur, 2, **{"Sequence number": sequence}, **backward),
            op(name, ts + 1, dur - 2, 2, **{"Sequence number": sequence}, **backward),
            *launched(f"{name} kernel", ts + 3, 5, ts + 10, 9, number, tid=2),
        ]
    events += [
        op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 124, 10, 2),
        *launched("accumulate", 126, 4, 132, 5, 5, tid=2),
    ]
    return events


def test_a_region_stands_for_the_modules_that_it_hides(tmp_path: Path) -> None:
    graph = read_events(tmp_path, compiled_step(inside=None))
    assert labels(graph) == {
        FUSED: (REGION, Phase.FORWARD),
        "head": ("Linear_0", Phase.FORWARD),
        "AddmmBackward0 kernel": ("Linear_0", Phase.BACKWARD),
        "CompiledFunctionBackward kernel": (REGION, Phase.BACKWARD),
        "accumulate": (REGION, Phase.BACKWARD),
    }


def test_a_module_around_a_region_is_its_layer(tmp_path: Path) -> None:
    graph = read_events(tmp_path, compiled_step(inside="Encoder_0"))
    found = labels(graph)
    for name in (FUSED, "CompiledFunctionBackward kernel", "accumulate"):
        assert found[name][0] == "Encoder_0"
    assert not [name for name in graph.names if name == REGION]


def test_a_compiled_run_is_marked_with_its_share(tmp_path: Path) -> None:
    """Of 43 us on the GPU 19 were launched by compiled code: the fused kernel's 10 and the backward's 9."""
    graph = read_events(tmp_path, compiled_step(inside=None))
    assert graph.info.execution == ("compiled",)
    (sentence,) = [quirk for quirk in graph.info.quirks if quirk.startswith("compiled by")]
    assert sentence.startswith("compiled by torch.compile: 1 region, 44 % of the GPU time;")


def test_an_eager_run_is_eager(tmp_path: Path) -> None:
    graph = read_events(tmp_path, [op("aten::mm", 0, 50), *launched("gemm", 5, 5, 12, 30, 1)])
    assert graph.info.execution == ("eager",)
    assert graph.info.quirks == ()


def test_inductors_kernels_show_where_no_operator_does(tmp_path: Path) -> None:
    events = [*launched(FUSED, 0, 5, 7, 30, 1), *launched("gemm", 40, 5, 47, 10, 2)]
    graph = read_events(tmp_path, events)
    assert graph.info.execution == ("compiled",)
    assert "75 % of the GPU time" in graph.info.quirks[0]


def test_the_recorder_knows_what_no_event_shows(tmp_path: Path) -> None:
    events = launched("gemm", 0, 5, 7, 30, 1)
    graph = read_events(tmp_path, events, whatif={"execution": {"compiled": True, "cuda_graph": "?"}})
    assert graph.info.execution == ("compiled",)
    for odd in (7, "compiled", ["compiled"], {"compiled": 1}):
        assert read_events(tmp_path, events, whatif={"execution": odd}).info.execution == ("eager",)


def test_graph_launches_are_marked_with_their_share(tmp_path: Path) -> None:
    events = [op("aten::mm", 0, 60), *launched("eager", 2, 5, 10, 25, 1), call("cudaGraphLaunch", 20, 9, 2)]
    events += [kernel(f"k{i}", 40 + 30 * i, 25, 2) for i in range(3)]
    graph = read_events(tmp_path, events)
    assert graph.info.execution == ("cuda_graph",)
    assert graph.info.quirks == (
        "launched by CUDA graphs: 3 GPU tasks by 1 launch, 75 % of the GPU time; all tasks of a launch have its "
        "phase and layer",
    )


def mixed(graphs: Collection[int], *, marks: bool) -> list[Event]:
    """Eight steps of 20 kernels; those in ``graphs`` end in a CUDA graph of the last ten."""
    events = []
    for step in range(8):
        at, first = 1000 * step, 100 * step
        if marks:
            events.append(mark(f"ProfilerStep#{step}", at, 990))
        for i in range(10 if step in graphs else 20):
            events += launched(f"k{i}", at + 20 * i, 10, at + 20 * i + 12, 18, first + i)
        if step in graphs:
            events.append(call("cudaGraphLaunch", at + 200, 10, first + 50))
            events += [kernel(f"k{i}", at + 20 * i + 12, 15, first + 50) for i in range(10, 20)]
    return events


@pytest.mark.parametrize("marks", [True, False])
def test_steps_of_which_some_end_in_a_graph(marks: bool, tmp_path: Path) -> None:
    """Without marks no steps were found: a graph's kernels count as one, and so the steps did not repeat."""
    graph = read_events(tmp_path, mixed((4, 5, 6, 7), marks=marks))
    assert graph.info.n_steps == 8
    assert "in 4 of 8 steps alone: the step time is the median of both kinds" in graph.info.quirks[0]
    assert abs(Baseline.of(graph).replay_error_pct) < 0.5
    assert "steps alone" not in read_events(tmp_path, mixed(range(8), marks=marks)).info.quirks[0]


def test_gradients_are_accumulated_behind_their_operator_on_the_main_thread_as_well(tmp_path: Path) -> None:
    """On a CPU the backward pass runs on the main thread, with Python between its operators.

    ::

        us   0      20 22    40     50        70   72           80
        main |layer   |loss |      |fc's back|    |accumulate|     |update
    """
    events = [
        module("Linear_0", 0, 20),
        op("aten::addmm", 0, 17, **{"Sequence number": 1}),
        op("aten::mse_loss", 22, 15, **{"Sequence number": 2}),
        op("autograd::engine::evaluate_function: MseLossBackward0", 41, 8, **{"Sequence number": 2}),
        op("autograd::engine::evaluate_function: AddmmBackward0", 50, 20, **{"Sequence number": 1}),
        op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 72, 8),
        mark("Optimizer.step#SGD.step", 90, 20),
        op("aten::add_", 92, 10),
    ]
    graph = read_events(tmp_path, events)
    layer_at = {int(s): graph.layers[c] for s, c in zip(graph.start_ns.tolist(), graph.layer.tolist(), strict=True)}
    assert layer_at[41_000] == ""
    assert layer_at[50_000] == layer_at[70_000] == layer_at[72_000] == "Linear_0"
    assert layer_at[80_000] == layer_at[92_000] == ""


def test_nanogpt_is_compiled_and_its_backward_kernels_are_backward(shared_traces: Path) -> None:
    graph = whatif.read(shared_traces / "modded-nanogpt-8xh100" / "current.rank0.json.gz")
    assert graph.info.execution == ("compiled",)
    assert any("8 regions, 83 % of the GPU time" in quirk for quirk in graph.info.quirks)
    backward = graph.on_gpu & graph.select(name="(?i)backward|bwd")
    assert backward.sum() > 500
    assert (graph.phase[backward] == Phase.BACKWARD).all()
    assert share_with_layer(graph, Phase.FORWARD) >= 0.75
    assert share_with_layer(graph, Phase.BACKWARD) >= 0.75


def test_graphs_inside_compiled_code_are_both(shared_traces: Path) -> None:
    graph = whatif.read(shared_traces / "hta" / "a100_dlrm_rank0of16.json.gz")
    assert graph.info.execution == ("compiled", "cuda_graph")


@pytest.mark.slow
def test_a_real_compiled_module_on_the_cpu(tmp_path: Path) -> None:
    """Inductor's code for a part of a model: the part is a region in both passes, the head keeps its own operators."""
    torch = need("torch")
    if shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    body = torch.compile(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()))
    head = torch.nn.Linear(16, 4)
    inputs = torch.randn(8, 16)

    def step() -> None:
        hidden = body(inputs)
        with torch.profiler.record_function("whatif::layer::head"):
            loss = head(hidden).sum()
        loss.backward()

    for _ in range(2):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    graph = whatif.read(tmp_path / "trace.json")
    assert graph.info.execution == ("compiled",)
    assert any(quirk.startswith("compiled by torch.compile: 1 region") for quirk in graph.info.quirks)
    both = {(graph.layers[c], Phase(p)) for c, p in zip(graph.layer.tolist(), graph.phase.tolist(), strict=True)}
    (region,) = [layer for layer in graph.layers if layer.startswith("(compiled region ")]
    assert {(layer, phase) for layer in ("head", region) for phase in (Phase.FORWARD, Phase.BACKWARD)} <= both
    accumulates = graph.select(name="AccumulateGrad") & (graph.phase == Phase.BACKWARD)
    assert accumulates.any()
    assert (graph.layer[accumulates] > 0).all()
