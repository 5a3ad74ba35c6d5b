"""Which operators of a trace are measured: hand-made traces, as a GPU and a CPU write them."""

import importlib
from typing import Any

import pytest

from whatif.runtime.errors import WhatifError

op_recording: Any = importlib.import_module("whatif.instrumentation.operators.recording")  # Needs no torch.


def span(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def operator(name: str, ts: float, dur: float, *, dims: Any = None, tid: int = 1, number: int = 0) -> dict[str, Any]:
    inputs = {"Input Dims": dims or [[2]], "Input type": ["float"], "Concrete Inputs": [""]}
    return span(name, ts, dur, tid=tid, **inputs, **{"External id": number})


def found(*events: Any) -> dict[str, Any]:
    steps = [span(f"ProfilerStep#{number}", 100.0 * number, 100.0, "user_annotation") for number in (1, 2)]
    return {each.call.name: each for each in op_recording.distinct_operators({"traceEvents": [*steps, *events]})}


def test_the_outermost_operators_of_the_steps_count() -> None:
    """Time 100: linear(addmm), Optimizer.step#(mul_), DataLoader(stack); 200: linear; 300, after the steps: linear."""
    operators = found(
        operator("aten::linear", 110, 20),
        operator("aten::addmm", 112, 10),
        span("Optimizer.step#Adam.step", 150, 20, "user_annotation"),
        operator("aten::mul_", 155, 5),
        span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 180, 10, "user_annotation"),
        operator("aten::stack", 182, 5),
        operator("aten::linear", 210, 30),
        operator("aten::linear", 310, 1000),
    )
    assert operators.keys() == {"aten::linear"}
    assert operators["aten::linear"].calls_per_step == 1
    assert operators["aten::linear"].recorded_ns == 25e3


def test_autograds_spans_are_the_backward_pass() -> None:
    """On its own thread or not, and also below a node's own span."""
    operators = found(
        operator("aten::mm", 110, 5),
        span("autograd::engine::evaluate_function: MmBackward0", 120, 20),
        span("MmBackward0", 121, 18),
        operator("aten::mm", 122, 5),
        operator("aten::t", 128, 1),
        span("autograd::engine::evaluate_function: MmBackward0", 140, 20, tid=2),
        operator("aten::mm", 142, 5, tid=2),
    )
    assert operators["aten::mm"].call.backward  # Two calls of three.
    assert operators["aten::t"].call.backward
    assert operators["aten::mm"].calls_per_step == 1.5


def test_on_a_gpu_the_work_that_was_launched_counts() -> None:
    """Also what operators inside the outermost one launched."""
    operators = found(
        operator("aten::linear", 110, 20, number=1),
        operator("aten::addmm", 112, 10, number=2),
        operator("aten::relu", 140, 50, number=3),
        operator("aten::to", 195, 2, number=4),
        span("gemm", 500, 40, "kernel", tid=7, **{"External id": 2}),
        span("bias", 550, 4, "kernel", tid=7, **{"External id": 1}),
        span("relu", 560, 6, "kernel", tid=7, **{"External id": 3}),
        span("Memcpy HtoD (Pageable -> Device)", 580, 2, "gpu_memcpy", tid=7, **{"External id": 4}),
    )
    assert [each.call.name for each in operators.values()] == ["aten::linear", "aten::relu", "aten::to"]
    assert [each.recorded_ns for each in operators.values()] == [22e3, 3e3, 1e3]
    assert [each.transfers for each in operators.values()] == [False, False, True]


def test_the_same_operator_on_other_inputs_is_another_one() -> None:
    trace = [span("ProfilerStep#1", 0, 100, "user_annotation")]
    trace += [operator("aten::relu", 10, 5, dims=[[2]]), operator("aten::relu", 20, 9, dims=[[3]])]
    operators = op_recording.distinct_operators({"traceEvents": trace})
    assert [each.call.dims for each in operators] == [[[3]], [[2]]]


def test_the_dearest_make_the_share() -> None:
    operators = list(found(*(operator(f"aten::op{size}", 110 + size, size / 100) for size in (90, 9, 1))).values())
    assert [each.call.name for each in op_recording.most_expensive(operators, 0.95)] == ["aten::op90", "aten::op9"]
    assert op_recording.most_expensive([], 0.95) == []


@pytest.mark.parametrize(
    "events",
    [None, [], [None, 3, {"ph": "X"}], [span("ProfilerStep#1", 0, 9, "user_annotation"), {"ph": "X", "name": 3}]],
)
def test_nothing_to_measure_is_refused(events: Any) -> None:
    with pytest.raises(WhatifError):
        op_recording.distinct_operators({"traceEvents": events})
