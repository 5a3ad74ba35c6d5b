"""The scores of published tables: the order of plans."""

from __future__ import annotations

import pytest

from benchmarks.published.scores import Row, rank_correlation


def plans(predicted: list[float], measured: list[float]) -> list[Row]:
    """Rows of one model, one a plan."""
    return [Row("model", "plan", ours, theirs, ours, ours) for ours, theirs in zip(predicted, measured, strict=True)]


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [([1, 2, 30], 1.0), ([3, 2, 1], -1.0), ([1, 3, 2], 0.5), ([1, 1, 2], 0.75**0.5)],
    ids=["same order", "reversed", "two swapped", "a tie"],
)
def test_rank_correlation(predicted: list[float], expected: float) -> None:
    """Spearman's correlation depends on the order alone; ties share their mean rank."""
    assert rank_correlation(plans(predicted, [10, 20, 21])) == pytest.approx(expected)
