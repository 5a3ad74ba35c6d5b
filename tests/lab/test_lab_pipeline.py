"""The lab's pipeline: two stages, each on a thread of its own, train as the whole model does."""

from __future__ import annotations

import json
import queue
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need

torch = need("torch")
models = need("benchmarks.lab.models")
pipeline = need("benchmarks.lab.pipeline")

pytestmark = pytest.mark.slow


class Waiting:
    def __init__(self, found: Any = None) -> None:
        self.wait = found or (lambda: None)


class Queues:
    """A link within one process: a queue for each tag and direction."""

    def __init__(self, out: dict[int, Any], back: dict[int, Any]) -> None:
        self._out, self._back = out, back

    def send(self, tensor: Any, tag: int) -> Waiting:
        self._out[tag].put(tensor.clone())
        return Waiting()

    def receive(self, tensor: Any, tag: int) -> Waiting:
        return Waiting(lambda: tensor.copy_(self._back[tag].get(timeout=20)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_stages_train_as_one_model(schedule: str) -> None:
    """The mean of the micro-batches' gradients is that of the batch: no layer here looks at other samples."""
    down, up = (defaultdict(queue.Queue) for _ in range(2))
    links = (Queues(down, up), Queues(up, down))
    stages = [pipeline.Stage("mlp", number, "4", schedule, 4, links[number]) for number in range(2)]
    threads = [threading.Thread(target=stage.step) for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    whole = models.Training("mlp")
    whole.step()
    found = [parameter for stage in stages for parameter in stage.model.parameters()]
    for parameter, expected in zip(found, whole.model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-7)
    # A quarter of the batch, 1,024 wide, crosses the cut.
    assert {tuple(stage.message.shape) for stage in stages} == {(32, 1024)}
    assert all(box.empty() for box in (*down.values(), *up.values()))


@pytest.mark.parametrize(("model", "cut", "parts"), [("mlp", "4", 4), ("resnet", "stages.1.1.reduce.0", 4)])
def test_halves_are_cut_where_the_what_if_cuts(own_traces: Path, model: str, cut: str, parts: int) -> None:
    assert pipeline.cut_of(own_traces / "lab_cpu" / f"{model}.trace.json.gz", "gpipe", 4, 1000.0) == cut
    training = models.Training(model)
    first, rest = pipeline.halves(training.model, cut)
    assert len(first) == parts  # stem and three blocks, or two layers with their activations
    with torch.no_grad():
        training.model.eval()
        torch.testing.assert_close(rest(first(*training.inputs)), training.model(*training.inputs))


def test_jobs_are_of_chains_alone(tmp_path: Path) -> None:
    assert [job.name for job in pipeline.jobs(tmp_path, ("gpt2", "mlp"))] == [
        "pipeline-mlp-1000mbit", "pipeline-mlp-200mbit",
    ]  # fmt: skip


@pytest.mark.parametrize("model", ["mlp", "resnet", "vgg"])
def test_the_stored_runs_were_cut_where_they_are_predicted(own_traces: Path, model: str) -> None:
    folder = own_traces / "lab_pipeline_cpu"
    record = json.loads((folder / f"pipeline-{model}-200mbit.json").read_text())
    assert len(record["runs"]) == len(pipeline.WAYS)
    for run in record["runs"][:2]:  # 4 and 8 micro-batches
        count = int(run["what_if"][0].rpartition("=")[2])
        assert run["cut"] == pipeline.cut_of(folder / f"{model}.trace.json.gz", "gpipe", count, 200.0)
