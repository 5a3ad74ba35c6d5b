"""A predicted step as what-ifs take it: predicted into a file, and read again."""

from __future__ import annotations

import tempfile
from pathlib import Path

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
