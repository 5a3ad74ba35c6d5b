"""Predicted steps as baselines of what-ifs: predicted into a file, and read again."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

from whatif.from_module.operations import OperatorGraph
from whatif.from_module.predict_step import predict_step
from whatif.hardware.gpu import load_gpu
from whatif.ingest.read import read
from whatif.opdb.default import estimator
from whatif.prediction.predict import Baseline


def baseline_of(graph: OperatorGraph, device: str, tf32: str = "conv") -> Baseline:
    """Return the step of a network's operators on a device; ``tf32`` as of ``predict_step``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json.gz"
        predict_step(graph, estimator(device), load_gpu(device), tf32=tf32, save=path)
        return Baseline.of(read(path))


def training_step(model: str, inputs: list[tuple[str, tuple[int, ...], str]], device: str, **wanted: Any) -> Baseline:
    """Return the training step of a module on a device with AdamW on fp32 copies; ``wanted``: fields of ``Wanted``."""
    step = importlib.import_module("whatif.instrumentation.trace_module.step")
    capability = float(load_gpu(device).compute_capability)
    graph = step.take_down_step(step.Wanted(model, inputs, optimizer="adamw:master", capability=capability, **wanted))
    assert isinstance(graph, OperatorGraph)
    return baseline_of(graph, device)
