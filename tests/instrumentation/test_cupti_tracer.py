"""The whole way on a machine without a GPU: a real model trains, every operator files the records of a launch and a
kernel of its name, and the reader has to find out what belongs where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from whatif.instrumentation.cupti import session
from whatif.instrumentation.cupti.tracer import CuptiTracer
from whatif.instrumentation.whole_steps import TRACER_WARMUP_STEPS

import whatif
from tests.helpers import names
from tests.instrumentation.cupti_machine import Gpu, Library, no_gpu_to_wait_for
from tests.instrumentation.test_cupti_layers import small_cnn
from whatif import Phase, TaskGraph
from whatif.graph.types import Severity

STEPS = 4


@contextmanager
def driver() -> Iterator[Library]:
    """A driver beneath the binding, and a process that has not used it."""
    found = Library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "load_cupti", lambda: found)
        no_gpu_to_wait_for(patch)
        yield found


def traced(library: Library, steps: int = TRACER_WARMUP_STEPS + STEPS) -> dict[str, Any]:
    model = small_cnn(4)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    tracer = CuptiTracer(model, optimizer)
    with Gpu(library):
        tracer.start()
        for _ in range(steps):
            optimizer.zero_grad()
            output = model(torch.randn(2, 3, 8, 8))
            nn.functional.cross_entropy(output, torch.randint(0, 10, (2,))).backward()
            optimizer.step()
            tracer.step()
        torch.ones(3).add_(1)  # after the last step
        tracer.stop()
    return tracer.trace()


@pytest.fixture(scope="module")
def trace() -> dict[str, Any]:
    with driver() as library:
        return traced(library)


@pytest.fixture(scope="module")
def graph(trace: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> TaskGraph:
    path = tmp_path_factory.mktemp("cupti") / "run.json"
    path.write_text(json.dumps(trace))
    return whatif.read(path)


def kernels(graph: TaskGraph, name: str) -> set[tuple[str, Phase]]:
    """Layers and phases of the kernels of an operator."""
    tasks = np.flatnonzero(graph.on_gpu)
    return {(graph.layers[graph.layer[task]], Phase(graph.phase[task])) for task in tasks if names(graph)[task] == name}


def test_kernels_find_their_layers_and_phases(graph: TaskGraph) -> None:
    layers = ("0", "1.conv", "2.conv")
    assert graph.info.n_steps == STEPS
    assert kernels(graph, "aten.convolution.default") == {(layer, Phase.FORWARD) for layer in layers}
    assert kernels(graph, "aten.convolution_backward.default") == {(layer, Phase.BACKWARD) for layer in layers}
    assert kernels(graph, "aten.addmm.default") == {("5", Phase.FORWARD)}
    assert kernels(graph, "aten._log_softmax.default") == {("", Phase.FORWARD)}
    assert kernels(graph, "aten._log_softmax_backward_data.default") == {("", Phase.BACKWARD)}
    assert kernels(graph, "aten.addcdiv_.default") | kernels(graph, "aten.lerp_.Scalar") == {("", Phase.UPDATE)}


def test_every_kernel_of_the_recorded_steps_is_there(graph: TaskGraph, trace: dict[str, Any]) -> None:
    assert trace["cupti"] | {"package": ""} == {
        "launches_without_gpu_task": 0, "gpu_tasks_without_call": 0, "dropped_records": 0, "package": "",
    }  # fmt: skip
    steps = graph.step[graph.on_gpu]
    counts = np.bincount(steps[steps >= 0])
    assert len(counts) == STEPS
    assert len(set(counts.tolist())) == 1


def test_buffers_that_arrive_out_of_order_change_nothing(tmp_path: Path) -> None:
    with driver() as library:
        library.shuffles = True
        trace = traced(library)
    assert trace["cupti"]["launches_without_gpu_task"] == trace["cupti"]["gpu_tasks_without_call"] == 0
    path = tmp_path / "run.json"
    path.write_text(json.dumps(trace))
    graph = whatif.read(path)
    test_kernels_find_their_layers_and_phases(graph)
    test_every_kernel_of_the_recorded_steps_is_there(graph, trace)


def test_buffers_that_are_dropped_void_the_recording(tmp_path: Path) -> None:
    """CUPTI counts what it drops; the reader sees launches without kernels, and trusts nothing that follows."""
    with driver() as library:
        library.loses = 5
        trace = traced(library)
    assert trace["cupti"]["dropped_records"] > 0
    assert trace["cupti"]["launches_without_gpu_task"] > 0
    path = tmp_path / "run.json"
    path.write_text(json.dumps(trace))
    found = {finding.check: finding.severity for finding in whatif.read(path).info.findings}
    assert found["launches without kernels"] == Severity.VOIDS


def test_external_ids_and_times_give_the_same_span(trace: dict[str, Any]) -> None:
    """Two independent ways from a launch to the span around it."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    spans = {
        event["args"]["External id"]: event
        for event in events
        if event["cat"] in ("user_annotation", "cpu_op") and "External id" in event["args"]
    }
    calls = [event for event in events if event["cat"] == "cuda_runtime"]
    joined = [event for event in calls if "External id" in event["args"]]
    assert len(joined) > 0.8 * len(calls)
    for event in joined:
        span = spans[event["args"]["External id"]]
        assert event["tid"] == span["tid"]
        assert span["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= span["ts"] + span["dur"]


def test_the_trace_goes_to_any_viewer(trace: dict[str, Any]) -> None:
    assert json.loads(json.dumps(trace)) == trace
    steps = [event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep#")]
    assert steps == [f"ProfilerStep#{TRACER_WARMUP_STEPS + number}" for number in range(STEPS)]
    assert all(event["ts"] >= 0 for event in trace["traceEvents"] if "ts" in event)


def test_a_run_that_ends_in_its_warm_up_has_an_empty_trace() -> None:
    with driver() as library:
        trace = traced(library, steps=TRACER_WARMUP_STEPS)
    assert [event for event in trace["traceEvents"] if event["ph"] == "X"] == []


def test_stopping_takes_everything_off() -> None:
    model = small_cnn(4)
    with driver() as library:
        tracer = CuptiTracer(model, None)
        tracer.stop()  # not started: nothing to stop
        tracer.start()
        assert model._forward_hooks
        tracer.stop()
        tracer.stop()
        assert not library.enabled
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_lost_records_are_reported() -> None:
    with driver() as library:
        library.dropped = 12
        assert traced(library, steps=TRACER_WARMUP_STEPS + 1)["cupti"]["dropped_records"] == 12
