"""A step of a small transformer on an H100, predicted from its code alone."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.helpers import need
from whatif.cli.main import main
from whatif.ingest.read import read
from whatif.prediction.baseline import Baseline

MODEL = "examples/train_transformer.py:Transformer"
SHAPE = '{"width": 512, "layers": 4, "heads": 8, "context": 128}'
BATCH = 8
CLUSTER = "dgx-h100"


def assert_torchrun_starts(line: str, devices: int) -> None:
    """Check with torchrun's parser that a command starts the given number of processes."""
    need("torch")
    from torch.distributed.run import get_args_parser

    command = shlex.split(line)
    assert command[0] == "torchrun"
    args = get_args_parser().parse_args(command[1:])
    assert int(args.nnodes) * int(args.nproc_per_node) == devices
    assert args.training_script == "train.py"


@pytest.fixture(scope="session")
def predicted_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of the predicted step."""
    need("torch")
    path = tmp_path_factory.mktemp("predicted") / "step.json.gz"
    words = ["--kwargs", SHAPE, "--input", f"{BATCH},128:int64", "--device", "H100-SXM-80", "--save", str(path)]
    assert main(["predict", MODEL, *words, "--json"]) == 0
    return path


@pytest.fixture(scope="session")
def predicted(predicted_file: Path) -> Baseline:
    """Return the predicted step, simulated."""
    return Baseline.of(read(predicted_file))
