"""The width of predicted ranges, with its three constants chosen without the scored group.

``whatif.prediction.ranges`` scales the width from the kernels' ranges, below and above, and adds a constant part
for all steps. Here the constants are chosen again without each family of models (timm) and each device (NeuSight): the
interval score (``benchmarks.ranges``) of the other rows decides, with equal weight of both tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from benchmarks.published.scores import Row
from benchmarks.ranges import MISS
from whatif.prediction.ranges import PREDICTED_REST, PREDICTED_SHARE
from whatif.report.layout import markdown_table

SHARES = np.round(np.arange(0.2, 1.41, 0.1), 2)
RESTS = np.round(np.arange(0.02, 0.161, 0.02), 3)


def table(rows: Mapping[str, Sequence[tuple[str, Row]]]) -> str:
    """Return coverage and width of each table's rows, (group, row) each, for constants chosen without their group."""
    names = [name for name, of in rows.items() for _ in of]
    groups = np.array([f"{name} {group}" for name, of in rows.items() for group, _ in of])
    flat = [row for of in rows.values() for _, row in of]
    weight = np.array([1 / len(rows[name]) for name in names])
    miss = np.array([row.measured / row.predicted - 1 for row in flat])
    units = [_unit(flat, side, PREDICTED_SHARE[side]) for side in (0, 1)]
    grid = list(product(SHARES, SHARES, RESTS))
    ends = [(np.hypot(below * units[0], rest), np.hypot(above * units[1], rest)) for below, above, rest in grid]
    score = np.array(
        [low + high + MISS * np.maximum(np.maximum(-miss - low, miss - high), 0) for low, high in ends]
    )  # (grid, rows)
    inside, width = np.zeros(len(flat), dtype=bool), np.zeros(len(flat))
    for group in np.unique(groups):
        held = groups == group
        low, high = ends[int(np.argmin((score[:, ~held] * weight[~held]).sum(axis=1)))]
        inside[held] = ((-miss <= low) & (miss <= high))[held]
        width[held] = ((1 + high) / np.maximum(1 - low, 1e-3))[held]
    best = grid[int(np.argmin((score * weight).sum(axis=1)))]
    lines = []
    for name in rows:
        part = np.array([of == name for of in names])
        lines.append((name, str(part.sum()), f"{100 * inside[part].mean():.0f}", f"{np.median(width[part]):.2f}"))
    found = markdown_table(("table", "rows", "inside, %", "high over low"), lines)
    return (
        f"{found}\n\nChosen on all of them: shares {best[0]:.1f} and {best[1]:.1f}, rest {best[2]:.2f}; the program "
        f"uses {PREDICTED_SHARE[0]}, {PREDICTED_SHARE[1]} and {PREDICTED_REST}.\n"
    )


def _unit(rows: Sequence[Row], side: int, share: float) -> np.ndarray:
    """The half-width of each row below (0) or above (1) for a factor of 1 and no constant part, shape (n,)."""
    ends = np.array([1 - row.low / row.predicted if side == 0 else row.high / row.predicted - 1 for row in rows])
    return np.asarray(np.sqrt(np.maximum(ends**2 - PREDICTED_REST**2, 0)) / share)
