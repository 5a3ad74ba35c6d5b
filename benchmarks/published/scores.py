"""The rows that every table of published measurements is scored by, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Row:
    """One prediction beside what was measured, in one unit; ``group`` is what it is summarised under."""

    group: str
    what: str
    predicted: float
    measured: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Summary:
    """What is said of the rows of a group: percent, and the ranges' median high over low."""

    group: str
    rows: int
    mean_pct: float
    median_pct: float
    bias_pct: float
    coverage_pct: float
    width: float


@dataclass(frozen=True)
class Scores:
    """A scored table: its name, in ``unit``."""

    name: str
    unit: str
    rows: tuple[Row, ...]

    def groups(self) -> list[Summary]:
        """Summarise each group, in order of appearance."""
        names = dict.fromkeys(row.group for row in self.rows)
        return [summary(name, [row for row in self.rows if row.group == name]) for name in names]


def summary(group: str, rows: Sequence[Row]) -> Summary:
    """Summarise rows."""
    error = 100 * np.array([row.error for row in rows])
    inside = [row.low <= row.measured <= row.high for row in rows]
    width = [row.high / row.low if row.low > 0 else np.inf for row in rows]
    miss = np.abs(error)
    return Summary(
        group, len(rows), float(miss.mean()), float(np.median(miss)), float(error.mean()),
        100 * float(np.mean(inside)), float(np.median(width)),
    )  # fmt: skip
