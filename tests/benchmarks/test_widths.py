"""Constants of predicted ranges chosen without the group that is scored."""

from __future__ import annotations

import numpy as np

from benchmarks.published.scores import Row
from benchmarks.published.widths import table
from whatif.prediction.ranges import PREDICTED_REST, PREDICTED_SHARE


def rows(missed: float, n: int) -> list[tuple[str, Row]]:
    """Predictions of 100 whose kernels' ranges are 30 % wide, half of them too high."""
    low, high = (100 * np.hypot(0.3 * share, PREDICTED_REST) for share in PREDICTED_SHARE)
    measured = [100 * (1 + missed * (-1) ** place) for place in range(n)]
    return [(f"group {place % 4}", Row("", "", 100, ms, 100 - low, 100 + high)) for place, ms in enumerate(measured)]


def test_ranges_are_as_wide_as_the_other_groups_miss() -> None:
    width = {}
    for missed in (0.02, 0.25):
        line = next(line for line in table({"one": rows(missed, 40)}).splitlines() if line.startswith("| one"))
        _, _, count, inside, high_over_low, _ = (word.strip() for word in line.split("|"))
        assert (count, inside) == ("40", "100")
        width[missed] = float(high_over_low)
    assert 1.04 < width[0.02] < 1.2
    assert 1.6 < width[0.25] < 1.9
