"""Peaks that others measured: each is within a tenth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import need


@pytest.mark.slow
def test_published_peaks() -> None:
    need("torch")
    from benchmarks.published.peaks import score

    rows = score(Path()).rows
    assert len(rows) == 12
    assert all(abs(row.error) < 0.1 for row in rows), [(row.what, row.error) for row in rows]
