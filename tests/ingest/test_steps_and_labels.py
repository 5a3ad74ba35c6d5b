"""From tiny traces, drawn above each test in us, to graphs: steps, layers, phases, and traces of a CPU."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import (
    Event,
    kernel,
    launched,
    mark,
    module,
    names,
    op,
    read_events,
)
from tests.ingest.drawn import US, assert_replays, nested, of_name, only, start_us, steps, training, two_passes
from whatif import Phase, TaskKind
from whatif.questions.memory_summary import memory_of
from whatif.runtime.errors import WhatifError

# -- steps ------------------------------------------------------------------------------------------------------------


def test_steps_by_profiler_marks(tmp_path: Path) -> None:
    graph = read_events(tmp_path, steps(5, [mark(f"ProfilerStep#{i}", 100 * i, 100) for i in range(5)]))
    assert (graph.info.step_source, graph.info.n_steps, graph.info.steady) == ("profiler marks", 5, (1, 4))
    assert np.bincount(graph.step[graph.on_gpu]).tolist() == [10] * 5
    assert graph.info.measured_step_ns["mark"] == (100 * US,) * 5
    assert graph.info.measured_step_ns["gpu"] == (100 * US,) * 4
    assert_replays(graph)


def test_a_kernel_belongs_to_the_step_of_its_launch(tmp_path: Path) -> None:
    """The GPU is behind: the last kernel of step 0 runs in step 1."""
    events = [mark("ProfilerStep#0", 0, 50), mark("ProfilerStep#1", 50, 50), op("aten::a", 0, 100)]
    events += [
        *launched("long", 10, 3, 15, 70, 1),
        *launched("late", 20, 3, 86, 5, 2),
        *launched("next", 60, 3, 92, 5, 3),
    ]
    graph = read_events(tmp_path, events)
    assert [int(graph.step[only(graph, name)]) for name in ("long", "late", "next")] == [0, 0, 1]


def test_a_stub_mark_at_the_end_is_no_step(tmp_path: Path) -> None:
    marks = [mark(f"ProfilerStep#{i}", 100 * i, 100) for i in range(4)] + [mark("ProfilerStep#4", 400, 1)]
    assert read_events(tmp_path, steps(4, marks)).info.n_steps == 4


def test_short_steps_among_slow_ones_are_steps(tmp_path: Path) -> None:
    """On a machine that is busy with something else three of five steps may last twenty times the others."""
    starts_us = [0, 2500, 5000, 5100, 5200, 7700]
    marks = [mark(f"ProfilerStep#{i}", at, next_ - at) for i, (at, next_) in enumerate(itertools.pairwise(starts_us))]
    assert read_events(tmp_path, steps(4, marks)).info.n_steps == 5


def test_steps_by_optimizer_marks(tmp_path: Path) -> None:
    """A step ends with its optimizer; the first one began with the recording."""
    graph = read_events(tmp_path, steps(4, [mark("Optimizer.step#SGD.step", 100 * i + 80, 20) for i in range(4)]))
    assert (graph.info.step_source, graph.info.n_steps) == ("optimizer marks", 4)
    assert np.bincount(graph.step[graph.on_gpu]).tolist() == [10] * 4


def test_optimizer_marks_that_are_recorded_twice_count_once(tmp_path: Path) -> None:
    marks = [mark("Optimizer.step#SGD.step", 100 * i + 80, 20) for i in range(4)]
    marks += [mark("Optimizer.step#SGD.step", 100 * i + 81, 18) for i in range(4)]
    assert read_events(tmp_path, steps(4, marks)).info.n_steps == 4


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("execute_96_context_1(95)_generation_1(1)", "execute_32_context_0(0)_generation_32(32)"),
     ("step[EXTEND bs=2 toks=96]", "step[DECODE bs=32]")],
)  # fmt: skip
def test_steps_by_the_annotations_of_a_serving_engine(tmp_path: Path, prefill: str, decode: str) -> None:
    """One step reads a prompt, five add a word to each of 32 sequences; 2 us of the engine's own lie between two.

    ::

        us      0            10           20
        marks   prefill-|    decode--|    decode--| ...
        CPU       mm           mm           mm
    """
    marks = [mark(prefill if n == 0 else decode, 10 * n, 8) for n in range(6)]
    work = [op("aten::mm", 10 * n + 1, 6) for n in range(6)]
    graph = read_events(tmp_path, [*marks, *work])
    assert (graph.info.n_steps, graph.info.step_source, graph.info.batch_size) == (6, "serving marks", 32)
    assert [ns / 1e3 for ns in graph.info.measured_step_ns["mark"]] == [10, 10, 10, 10, 10, 8]
    assert any(f"5 of 6 are {decode}" in text for text in graph.info.quirks)
    alike = read_events(tmp_path, [*marks[1:], *work[1:]])
    assert not any("kinds" in text for text in alike.info.quirks)
    assert read_events(tmp_path, [mark("execute_plan", 0, 8), *work]).info.step_source == "none"


def test_steps_by_repetition(tmp_path: Path) -> None:
    graph = read_events(tmp_path, steps(5, []))
    assert (graph.info.step_source, graph.info.n_steps) == ("repetition", 5)
    assert np.bincount(graph.step[graph.on_gpu] + 1, minlength=6)[1:5].tolist() == [10] * 4


def test_optimizer_marks_without_any_cpu_thread_are_read(tmp_path: Path) -> None:
    """Only kernels and annotations: there is no main thread, and no crash."""
    marks = [mark("Optimizer.step#SGD.step", 100 * i + 80, 20) for i in range(3)]
    graph = read_events(tmp_path, [*[kernel("K", 100 * i, 10, 0) for i in range(3)], *marks])
    assert len(of_name(graph, "K")) == 3


# -- labels -----------------------------------------------------------------------------------------------------------


def annotated(name: str, ts: float, dur: float) -> Event:
    return mark(f"whatif::layer::{name}", ts, dur)


@pytest.mark.parametrize("layer", [module, annotated], ids=["nn.Module events", "own annotations"])
def test_layers_forward_by_their_marks_and_backward_by_sequence_numbers(tmp_path: Path, layer: Any) -> None:
    graph = read_events(tmp_path, training(layer))
    found = {k: graph.layers[graph.layer[only(graph, k)]] for k in ("F1", "F2", "B2", "B1", "U")}
    assert found == {"F1": "Linear_0", "F2": "ReLU_0", "B2": "ReLU_0", "B1": "Linear_0", "U": ""}


def test_phases_of_a_step(tmp_path: Path) -> None:
    graph = read_events(tmp_path, training(module))
    found = {k: Phase(graph.phase[only(graph, k)]).name for k in ("F1", "F2", "B2", "B1", "U")}
    assert found == {"F1": "FORWARD", "F2": "FORWARD", "B2": "BACKWARD", "B1": "BACKWARD", "U": "UPDATE"}
    assert not (graph.phase == Phase.UNKNOWN).any()


def test_work_on_gradients_that_are_zeroed_is_an_update(tmp_path: Path) -> None:
    """SAM moves the weights between two passes: that was forward work. Without zeroing it may be anything."""
    for zeroed, phase in (([mark("Optimizer.zero_grad#SAM.zero_grad", 37, 2)], Phase.UPDATE), ([], Phase.FORWARD)):
        graph = read_events(tmp_path, two_passes([op("aten::sub_", 31, 5), *zeroed]))
        assert graph.phase[only(graph, "aten::sub_")] == phase


def test_the_passes_of_a_closure_are_no_update(tmp_path: Path) -> None:
    """All Python between the operators of a closure was update, and all that builds no autograd graph."""
    numbered = {"Sequence number": 1, "Fwd thread id": 0}
    node = op("autograd::engine::evaluate_function: AddmmBackward0", 45, 10, **numbered | {"Fwd thread id": 1})
    graph = read_events(tmp_path, [
        mark("ProfilerStep#0", 0, 100), mark("Optimizer.step#LBFGS.step", 5, 90), annotated("fc", 10, 20),
        op("aten::empty", 12, 2), op("aten::linear", 15, 10, **numbered), op("aten::ones_like", 35, 5), node,
        op("aten::dot", 60, 10),
        mark("ProfilerStep#1", 100, 100),
    ])  # fmt: skip
    time_ns = [int(graph.duration_ns[graph.phase == phase].sum()) // US for phase in Phase]
    assert graph.phase[only(graph, "aten::ones_like")] == Phase.FORWARD
    assert time_ns[Phase.FORWARD] >= 35, "all from the layer's call to the backward pass"
    assert time_ns[Phase.BACKWARD] == 10
    assert graph.phase[only(graph, "aten::dot")] == Phase.UPDATE


def test_data_loading_is_a_kind_of_its_own(tmp_path: Path) -> None:
    graph = read_events(tmp_path, training(module))
    loading = graph.kind == TaskKind.DATA_LOADING
    assert graph.duration_ns[loading].sum() == 8 * US
    assert (graph.phase[loading] == Phase.DATA).all()
    assert start_us(graph.scale(loading, 0), "U") == 97 - 8


def test_the_whole_step_replays(tmp_path: Path) -> None:
    assert_replays(read_events(tmp_path, training(module)))


# -- without a GPU ----------------------------------------------------------------------------------------------------


def test_a_cpu_trace_is_cut_into_the_own_time_of_its_operators(tmp_path: Path) -> None:
    graph = read_events(tmp_path, nested())
    own = {}
    for task, name in enumerate(names(graph)):
        own[name] = own.get(name, 0) + int(graph.duration_ns[task])
    assert own == {"a": 30 * US, "b": 10 * US, "c": 10 * US, "": 5 * US, "d": 10 * US}
    assert graph.duration_ns.sum() == 65 * US
    assert graph.kind[only(graph, "c")] == TaskKind.CPU_OP
    assert graph.kind[only(graph, "")] == TaskKind.GAP
    assert_replays(graph)


def test_operators_that_cross_still_add_up(tmp_path: Path) -> None:
    """A clock that jumps, a lost end: no time is counted twice or lost."""
    graph = read_events(tmp_path, [op("a", 0, 30), op("b", 20, 30), op("c", 40, 30), op("d", 41, 2)])
    assert graph.duration_ns.sum() == 70 * US
    assert_replays(graph)


def test_a_cpu_trace_has_steps_by_mark(tmp_path: Path) -> None:
    events = [mark(f"ProfilerStep#{i}", 100 * i, 100) for i in range(5)]
    events += [op("aten::conv", 100 * i + 5, 90) for i in range(5)]
    graph = read_events(tmp_path, events)
    assert graph.info.measured_step_ns["mark"] == (100 * US,) * 5
    assert "gpu" not in graph.info.measured_step_ns
    assert_replays(graph)


@pytest.mark.parametrize(
    ("built", "times", "differentiates"),
    [("aten::linear", 1, False), ("aten::mm", 1, True), ("aten::linear", 3, True)],
    ids=["checkpointed", "others", "more"],
)
def test_gradients_that_are_differentiated_are_no_recomputation(
    tmp_path: Path, built: str, times: int, differentiates: bool
) -> None:
    """The products of a gradient penalty, as linear layers call them too, were taken for activation checkpointing."""
    events = []
    for step in range(3):
        at, number = 1000 * step, 10 * step
        builds = [{"Sequence number": number + place, "Fwd thread id": 0} for place in range(times + 1)]
        node = "autograd::engine::evaluate_function: AddmmBackward0"
        events += [
            mark(f"ProfilerStep#{step}", at, 999),
            op("aten::linear", at + 10, 90, **builds[0]), op("aten::mm", at + 20, 60, **builds[0]),
            op(node, at + 200, 500, **{"Sequence number": number, "Fwd thread id": 1}),
        ]  # fmt: skip
        for place, numbers in enumerate(builds[1:]):
            begin = at + 210 + 100 * place
            events += [op(built, begin, 90, **numbers), op("aten::mm", begin + 20, 60, **numbers)]
    graph = read_events(tmp_path, events)
    assert graph.info.differentiates_gradients is differentiates
    assert graph.recomputed.any() != differentiates


def test_what_a_reentrant_checkpoint_recomputes_has_its_layer(tmp_path: Path) -> None:
    """Its forward pass builds no graph of a layer that is recomputed, which was taken for gradients of gradients."""
    events = []
    for step in range(3):
        at, number = 1000 * step, 10 * step
        checkpoint, head, again = ({"Sequence number": number + place} for place in range(3))
        node = "autograd::engine::evaluate_function: CheckpointFunctionBackward"
        layer = mark("whatif::layer::body", at + 20, 80), op("aten::gelu", at + 30, 60)
        recomputed = mark("whatif::layer::body", at + 220, 80), op("aten::gelu", at + 230, 60, **again)
        events += [
            mark(f"ProfilerStep#{step}", at, 999), op("CheckpointFunction", at + 10, 100, **checkpoint), *layer,
            mark("whatif::layer::head", at + 120, 30), op("aten::mm", at + 120, 30, **head),
            op("autograd::engine::evaluate_function: MmBackward0", at + 160, 30, **head, **{"Fwd thread id": 1}),
            op(node, at + 200, 500, **checkpoint, **{"Fwd thread id": 1}), *recomputed,
        ]  # fmt: skip
    graph = read_events(tmp_path, events)
    assert not graph.info.differentiates_gradients
    assert {graph.layers[layer] for layer in graph.layer[graph.recomputed]} == {"body"}
    with pytest.raises(WhatifError, match="whose step recomputes layers: the shapes"):
        memory_of(graph)
