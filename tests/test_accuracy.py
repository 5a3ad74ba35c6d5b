"""Predictions against measured pairs, by the program that writes docs/accuracy.md."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
# DESIGN's targets for a single pair, percent of the measured step.
LARGEST_ERROR_PCT = {"V100": 10.0, "CPU": 12.0}


@pytest.fixture(scope="module")
def accuracy(shared_traces: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks" / "accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy"] = module
    spec.loader.exec_module(module)
    return module


def test_no_pair_misses_by_more_than_the_target(accuracy: ModuleType) -> None:
    for pair in accuracy.PAIRS:
        outcome = accuracy.outcome(pair)
        assert abs(outcome.error_pct) <= LARGEST_ERROR_PCT[pair.hardware], pair.question


def test_pages_are_what_the_program_writes(accuracy: ModuleType) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "accuracy.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
