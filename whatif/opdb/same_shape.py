"""Transfer from other devices: the ratio of an operator's time to the data sheet's estimate there, applied here.

A shape that a library runs at half of one device's peak seldom runs at the full peak of the next one. So the ratio of
measured time to the data sheet's estimate (``whatif.opdb.data_sheet``, which includes the floor) is computed
for every other device, and the answer is the median of the ratios times the estimate for this device. Its error is
learned by leaving out one of the other devices at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from whatif.graph.described import FAMILIES
from whatif.graph.types import Float64, Int64
from whatif.hardware.gpu import Gpu
from whatif.opdb.data_sheet import analytic_s, bound_s
from whatif.opdb.exact import lower_medians
from whatif.opdb.family_index import FamilyIndex
from whatif.opdb.interpolate import conformal
from whatif.opdb.keys import UInt64
from whatif.opdb.rows import Operators

# The ratio on a single device depends on the device as much as on the operator.
FEWEST_DEVICES = 2
# Fewer operators do not determine the error: the data sheet's range is used instead.
_FEWEST_OPERATORS = 30


class Transfer(Struct, frozen=True):
    """Ratios to the data sheet, of a group's operators on several devices: ``keys`` is sorted; shape (n,) each."""

    keys: UInt64
    log_ratio: Float64  # of measured time to the data sheet's estimate, the median over the devices
    devices: Int64  # the number of devices
    half: float | None  # of the range, log; None: too few operators

    def find(self, keys: UInt64) -> Int64:
        """Return the position of each asked key, shape (q,); -1 if it was not measured on enough devices."""
        place = np.searchsorted(self.keys, keys)
        inside = place < len(self.keys)
        inside[inside] = self.keys[place[inside]] == keys[inside]
        return np.where(inside, place, -1)

    def estimate(self, gpu: Gpu, ops: Operators, place: Int64, *, launch: bool) -> tuple[Float64, Float64, Float64]:
        """Return time, low and high end of the 90 % range of operators at ``place``, seconds, shape (q,) each."""
        sheet, sheet_low, sheet_high = analytic_s(gpu, ops, launch=launch)
        bound = bound_s(gpu, ops, cold=False)
        ratio = np.exp(self.log_ratio[place])
        centre = np.maximum(sheet * ratio, bound)
        if self.half is None:
            low, high = sheet_low * ratio, sheet_high * ratio
        else:
            low, high = centre * np.exp(-self.half), centre * np.exp(self.half)
        return centre, np.minimum(np.maximum(low, bound), centre), np.maximum(high, centre)


def fit_transfer(
    like: Operators, measured: FamilyIndex, sources: Sequence[tuple[int, Gpu]], *, launch: bool
) -> Transfer | None:
    """Fit to a group's rows on other devices; None if no operator was measured on two of them.

    ``like`` is one operator of the group; ``sources`` lists the group's number on each device, and its data sheet.
    """
    parts = [_ratios(like, measured, number, gpu, launch=launch) for number, gpu in sources]
    if len(parts) < FEWEST_DEVICES:
        return None
    keys = np.unique(np.concatenate([keys for keys, _ in parts]))
    table = np.full((len(keys), len(parts)), np.nan)
    for column, (device_keys, ratio) in enumerate(parts):
        table[np.searchsorted(keys, device_keys), column] = ratio
    devices = np.isfinite(table).sum(axis=1)
    enough = devices >= FEWEST_DEVICES
    if not enough.any():
        return None
    table = table[enough]
    return Transfer(keys[enough], np.nanmedian(table, axis=1), devices[enough], _half(table))


def _ratios(like: Operators, measured: FamilyIndex, number: int, gpu: Gpu, *, launch: bool) -> tuple[UInt64, Float64]:
    """Sorted keys of the operators measured on a device, and the log ratios of their median times to the data sheet."""
    rows = measured.sound_rows_of(number)
    sheet, _, _ = analytic_s(gpu, of_sizes(like, np.asarray(measured.log_sizes[rows])), launch=launch)
    keys, ratio = np.asarray(measured.keys[rows]), np.log(measured.t_s[rows] / sheet)
    return lower_medians(keys, ratio)


def of_sizes(like: Operators, log_sizes: Float64) -> Operators:
    """Return the operators of a group from one of them and the sizes of all, log2, shape (n, sizes)."""
    ops = like.take(np.zeros(len(log_sizes), dtype=np.int64))
    sizes = np.rint(np.exp2(log_sizes)).astype(np.int64)
    return Operators(
        ops.family, ops.texts, {**ops.integers, **dict(zip(FAMILIES[ops.family].sizes, sizes.T, strict=True))}
    )


def _half(table: Float64) -> float | None:
    """The half-width of the range: the largest error over the devices that can be left out."""
    halves = []
    for column in range(table.shape[1]):
        others = np.delete(table, column, axis=1)
        # With two devices one predicts the other; with more, at least as many as for an answer.
        fewest = min(FEWEST_DEVICES, others.shape[1])
        usable = np.isfinite(table[:, column]) & (np.isfinite(others).sum(axis=1) >= fewest)
        if usable.sum() >= _FEWEST_OPERATORS:
            halves.append(conformal(np.abs(table[usable, column] - np.nanmedian(others[usable], axis=1))))
    return max(halves) if halves else None
