"""On a GPU: the CUPTI backend sees the kernels that Kineto sees, each backend in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from whatif.instrumentation.cupti.names import demangle

import whatif
from tests.helpers import names
from whatif import TaskGraph

TRAINING = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from whatif.instrumentation.tracer import make_tracer
from whatif.instrumentation.whole_steps import TRACER_WARMUP_STEPS

backend, path, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
    nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
).cuda()
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
images, labels = torch.randn(32, 3, 64, 64), torch.randint(0, 10, (32,))

def train():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images.cuda(non_blocking=True)), labels.cuda())
    loss.backward()
    optimizer.step()
    return loss.item()

for _ in range(5):
    train()
torch.cuda.synchronize()
tracer = make_tracer(
    backend, model, optimizer, cuda=True, steps=steps, memory=False, scratch=path.with_suffix(".scratch")
)
tracer.start()
for _ in range(TRACER_WARMUP_STEPS + steps):
    train()
    tracer.step()
tracer.stop()
path.write_text(json.dumps(tracer.trace()))
"""
STEPS = 6


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = tmp_path_factory.mktemp("backends")
    paths = {}
    for backend in ("cupti", "kineto"):
        paths[backend] = folder / f"{backend}.json"
        command = [sys.executable, "-c", TRAINING, backend, str(paths[backend]), str(STEPS)]
        # CUPTI's callbacks and Python's lock could wait for each other: then this ends, and not the whole test run.
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
    return paths


@pytest.fixture(scope="module")
def graphs(recordings: dict[str, Path]) -> dict[str, TaskGraph]:
    return {backend: whatif.read(path) for backend, path in recordings.items()}


def steady_tasks(graph: TaskGraph) -> np.ndarray[Any, Any]:
    first, last = graph.info.steady
    return np.flatnonzero(graph.on_gpu & (graph.step >= first) & (graph.step < last))


def time_of_kernels(graph: TaskGraph) -> dict[str, list[int]]:
    """The durations of the GPU tasks of the steady steps, ns, by name."""
    found: dict[str, list[int]] = {}
    task_names = names(graph)
    for task in steady_tasks(graph).tolist():
        # Kineto leaves very long symbols as they are.
        found.setdefault(demangle(task_names[task]), []).append(int(graph.duration_ns[task]))
    return found


@pytest.mark.gpu
def test_both_backends_see_the_same_kernels(graphs: dict[str, TaskGraph]) -> None:
    cupti, kineto = (time_of_kernels(graphs[backend]) for backend in ("cupti", "kineto"))
    assert graphs["cupti"].info.n_steps == graphs["kineto"].info.n_steps == STEPS
    assert {name: len(times) for name, times in cupti.items()} == {name: len(times) for name, times in kineto.items()}


@pytest.mark.gpu
def test_both_backends_measure_the_same_times(graphs: dict[str, TaskGraph]) -> None:
    """Medians a kernel: the first one on a cold clock may be slower in one process."""
    cupti, kineto = (time_of_kernels(graphs[backend]) for backend in ("cupti", "kineto"))
    totals = [sum(len(times) * float(np.median(times)) for times in found.values()) for found in (cupti, kineto)]
    assert totals[0] == pytest.approx(totals[1], rel=0.01)


@pytest.mark.gpu
def test_both_backends_find_the_same_layers(graphs: dict[str, TaskGraph]) -> None:
    """Kernels by layer and phase; the loss and what torch does between layers may fall to either side."""
    counts = []
    for backend in ("cupti", "kineto"):
        graph = graphs[backend]
        tasks = steady_tasks(graph)
        labels = zip(graph.layer[tasks].tolist(), graph.phase[tasks].tolist(), strict=True)
        counts.append(Counter((graph.layers[layer], phase) for layer, phase in labels))
    shared = (counts[0] & counts[1]).total()
    assert shared >= 0.9 * max(counts[0].total(), counts[1].total())


@pytest.mark.gpu
def test_cupti_lost_nothing(recordings: dict[str, Path]) -> None:
    trace = json.loads(recordings["cupti"].read_text())
    assert trace["cupti"]["dropped_records"] == 0
    assert trace["cupti"]["launches_without_gpu_task"] == 0
    assert trace["cupti"]["gpu_tasks_without_call"] == 0


@pytest.mark.gpu
def test_steps_are_alike(graphs: dict[str, TaskGraph]) -> None:
    graph = graphs["cupti"]
    steps = graph.step[steady_tasks(graph)]
    assert len(set(np.bincount(steps)[graph.info.steady[0] :].tolist())) == 1


@pytest.mark.gpu
def test_external_ids_and_times_give_the_same_layer(recordings: dict[str, Path]) -> None:
    """The clock of the stamps is the clock of the records: a call lies in the span whose id it carries."""
    events = [event for event in json.loads(recordings["cupti"].read_text())["traceEvents"] if event["ph"] == "X"]
    spans = {
        event["args"]["External id"]: event
        for event in events
        if event["cat"] in ("user_annotation", "cpu_op") and "External id" in event["args"]
    }
    calls = [event for event in events if event["cat"] == "cuda_runtime" and "External id" in event["args"]]
    found = [(event, spans[event["args"]["External id"]]) for event in calls if event["args"]["External id"] in spans]
    inside = [
        call["tid"] == span["tid"]
        and span["ts"] - 1 <= call["ts"]
        and call["ts"] + call["dur"] <= span["ts"] + span["dur"] + 1
        for call, span in found
    ]
    assert len(inside) >= 20 * STEPS
    assert np.mean(inside) > 0.99
