"""The table of docs/performance.md is that of the last run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_page_shows_the_last_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not: ``python benchmarks/run.py --page``."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    run = importlib.import_module("run")
    page = run.PAGE.read_text()
    assert run.with_figures(page) == page
