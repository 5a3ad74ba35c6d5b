"""Peaks of sharded training: against PyTorch's FSDP2 tracker, and what is left as workers grow."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.helpers import need
from tests.instrumentation import warm
from whatif.cli.main import main
from whatif.graph.memory import peak
from whatif.graph.task_graph import TaskGraph
from whatif.ingest.read import read
from whatif.prediction.baseline import Baseline
from whatif.prediction.composition import compose
from whatif.prediction.transform import load_transform

HERE = Path(__file__).parent
TRANSFORMER = ("examples/train_transformer.py", "Transformer")
LLAMA = ("tests/plan/llama_like.py", "Llama")
# Name, its file and class, sizes, batch.
MODELS = [
    ("activations", *TRANSFORMER, {"width": 512, "layers": 4, "heads": 8, "context": 256}, 8),
    ("parameters", *TRANSFORMER, {"width": 1024, "layers": 4, "heads": 8, "context": 128}, 1),
    ("deep", *TRANSFORMER, {"width": 384, "layers": 12, "heads": 6, "context": 192}, 4),
    ("llama", *LLAMA, {"width": 768, "layers": 3, "heads": 12, "context": 128}, 4),
]
WORKERS = [2, 8, 64]


def peak_bytes(graph: TaskGraph, *what_ifs: str) -> int:
    memory = compose(graph, [load_transform(spec) for spec in what_ifs]).info.memory
    assert memory is not None
    return peak(memory).total


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path", "model", "kwargs", "batch"), MODELS, ids=[row[0] for row in MODELS])
def test_fsdp_as_the_tracker_sees_it(
    tmp_path: Path, name: str, path: str, model: str, kwargs: dict[str, int], batch: int
) -> None:
    need("torch")
    asked = {"path": path, "name": model, "kwargs": kwargs, "batch": batch, "workers": WORKERS}
    words = [str(HERE / "fsdp_tracker.py"), json.dumps(asked)]
    ended = warm.python(words, Path.cwd(), {**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    tracked = json.loads(ended.stdout.splitlines()[-1])
    saved = str(tmp_path / "step.json.gz")
    words = [
        "predict",
        f"{path}:{model}",
        "--kwargs",
        json.dumps(kwargs),
        "--input",
        f"{batch},{kwargs['context']}:int64",
    ]
    assert main([*words, "--device", "H100-SXM-80", "--optimizer", "sgd:for-loop", "--save", saved, "--json"]) == 0
    graph = read(saved)
    for workers, seen in zip(WORKERS, tracked, strict=True):
        assert peak_bytes(graph, f"fsdp:workers={workers}") == pytest.approx(seen, rel=0.05), (name, workers)


def test_nothing_of_the_step_before_stays(predicted: Baseline) -> None:
    """Forward the first layer finds neither the last step's gradients nor the workspace of its update."""
    memory = predicted.graph.info.memory
    assert memory is not None
    assert memory.gradients > 10e6
    assert memory.update_workspace > 10e6
    # The largest is the loss's, twice the logits.
    assert max(max(row.forward_workspace, row.backward_workspace) for row in memory.layers) < 2.1 * 8 * 128 * 4096 * 4


def test_peaks_fall_towards_activations_and_units(predicted: Baseline) -> None:
    graph = predicted.graph
    memory = graph.info.memory
    assert memory is not None
    peaks = [peak_bytes(graph, f"fsdp:workers={2**power}") for power in range(1, 13)]
    assert peaks == sorted(peaks, reverse=True)
    block = 12 * 512**2 * 4
    embeddings = 2 * 4096 * 512 * 4 + 128 * 512 * 4
    most = max(row.forward_workspace + row.backward_workspace for row in memory.layers)
    # Two units gathered, the gradients of one and the buffer of another, the root and its gradients.
    assert peaks[-1] < memory.activations + most + 4.1 * block + 2 * embeddings + memory.inputs
    for stage in (1, 2):
        sharded = [peak_bytes(graph, f"zero:stage={stage},workers={2**power}") for power in range(1, 13)]
        assert sharded == sorted(sharded, reverse=True)
        assert sharded[-1] > memory.parameters
    # ZeRO-2 keeps a bucket of whole gradients, ZeRO-1 all of them.
    last = [
        peak_bytes(graph, f"zero:stage={stage},workers=4096,bucket=1MB", "activation_checkpoint") for stage in (1, 2)
    ]
    assert last[1] < last[0]
