"""The pairs of recordings that the what-if `device` and CUDA graphs are scored on."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published.gpu_pairs import score
from tests.helpers import extra_data


def test_the_pairs_are_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GPU busy time within 15 % in both directions, a graph's step within 15 %, a compiled one's within 3 %."""
    monkeypatch.setenv("WHATIF_OPDB", str(tmp_path / "none"))
    scores = score(extra_data())
    for row in scores.rows:
        bound = {"device": 0.15, "device, no shapes": 0.15, "launches": 0.15 if "kernels" in row.what else 0.03}[
            row.group
        ]
        assert abs(row.error) <= bound, row
        assert row.low <= row.measured <= row.high, row
    widths = {group.group: group.width for group in scores.groups()}
    assert widths["device"] <= 1.5 < widths["device, no shapes"]
