"""The stored results of the lab: predictions within what they reached, and the page that the code writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_and_the_errors_are_what_they_were(own_traces: Path) -> None:
    """Mean error at most 8 %, worst at most 15 %; docs/dts.md holds the table."""
    assert len(list((own_traces / "lab_dts").glob("dnn*-*.json"))) == 10
    command = [sys.executable, str(ROOT / "benchmarks" / "dts_accuracy.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
