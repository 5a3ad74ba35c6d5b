"""Scored rows of the tables of published measurements, and their summaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Row:
    """One prediction and its measurement, in one unit; ``group`` is the group of its summary."""

    group: str
    what: str
    predicted: float
    measured: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Summary:
    """The summary of a group's rows: percent, and the ranges' median high over low."""

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


def rank_correlation(rows: Sequence[Row]) -> float:
    """Return Spearman's correlation of predicted and measured."""
    ranks = _ranks([row.predicted for row in rows]), _ranks([row.measured for row in rows])
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value; ties share their mean rank."""
    every = np.array(values)
    return [float((every < value).sum() + (every <= value).sum() - 1) / 2 for value in values]
