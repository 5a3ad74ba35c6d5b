"""An execution trace that PyTorch itself writes, as a second input; and files that are none."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers import need
from whatif.from_module.chakra import read_chakra
from whatif.from_module.gpu_work import kernels_of
from whatif.from_module.operations import OperatorGraph
from whatif.graph.types import Phase
from whatif.runtime.errors import WhatifError


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One training step of a small convolutional network, as PyTorch's own observer writes it."""
    torch = need("torch")
    nn = torch.nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    x, y = torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)
    path = tmp_path_factory.mktemp("chakra") / "step.json"
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
    for step in range(2):
        if step:
            observer.start()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    observer.stop()
    observer.unregister_callback()
    return path


def phases(graph: OperatorGraph, phase: Phase) -> Counter[str]:
    return Counter(operation.name for operation in graph.operations if operation.phase == phase)


def test_the_operators_of_a_step_are_found(recorded: Path) -> None:
    graph = read_chakra(recorded)
    forward, backward = phases(graph, Phase.FORWARD), phases(graph, Phase.BACKWARD)
    for name in ("conv2d", "native_batch_norm", "linear", "_log_softmax", "nll_loss_forward"):
        assert forward[f"aten::{name}"] == 1, name
    for name in ("convolution_backward", "native_batch_norm_backward", "threshold_backward", "nll_loss_backward"):
        assert backward[f"aten::{name}"] == 1, name
    assert backward["aten::mm"] == 2
    assert backward["aten::sum"] == 1  # the bias's gradient, and not what it calls
    assert phases(graph, Phase.UPDATE) == {"aten::add_": 6}  # one a parameter
    kernels = [kernel for operation in graph.operations for kernel in kernels_of(operation)]
    # The image has no gradient: the convolution's backward work is that of its weights alone.
    assert [k.what.phase for k in kernels if k.what.family == "conv"] == ["fwd", "wgrad"]
    assert all(kernel.known for kernel in kernels)


def test_a_compressed_trace_is_the_same(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "step.json.gz"
    path.write_bytes(gzip.compress(recorded.read_bytes()))
    assert read_chakra(path).operations == read_chakra(recorded).operations


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": "1.0", "nodes": []}', "\x1f\x8b broken"])
def test_other_files_are_refused_with_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(WhatifError) as error:
        read_chakra(path)
    assert str(error.value).count("\n") == 0
    assert "expected an execution trace" in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match="No such file"):
        read_chakra(tmp_path / "none.json")


def test_damaged_nodes_cost_themselves_alone(recorded: Path, tmp_path: Path) -> None:
    document = json.loads(recorded.read_text())
    sound = len(read_chakra(recorded).operations)
    loop = {"id": 10**6, "ctrl_deps": 10**6 + 1, "name": "aten::add", "inputs": {}, "outputs": {}}
    document["nodes"] += [None, 5, {"id": "x"}, loop, {**loop, "id": 10**6 + 1, "ctrl_deps": 10**6}]
    broken = next(node for node in document["nodes"] if node and node["name"] == "aten::linear")
    broken["inputs"] = {"values": 5, "shapes": [], "types": None}
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(document))
    assert len(read_chakra(path).operations) == sound - 1
