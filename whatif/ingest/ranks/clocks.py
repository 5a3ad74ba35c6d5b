"""One clock for all ranks: collectives in which all wait for all end everywhere at nearly the same time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from whatif.graph.types import Array, Bool, Int64
from whatif.ingest.ranks.collectives import Collectives
from whatif.ingest.ranks.match import Match

# Collectives that no rank leaves before the last one has arrived.
MEETING = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "allgather",
    "reducescatter",
    "alltoall",
)
# Clocks of computers keep within 100 ppm (crystals); a larger slope is no drift.
MOST_DRIFT = 500e-6
# A drift needs this many collectives, and has to exceed three times the slope that their scatter alone can give.
FEWEST_FOR_DRIFT, SIGNIFICANT = 24, 3.0


class Clock(Struct, frozen=True):
    """How one rank's clock differs from the first rank's: times on it minus ``shift_ns`` are on the common one.

    The shift is ``offset_ns`` plus ``drift`` times (the rank's own time minus ``pivot_ns``).
    """

    offset_ns: int = 0  # between the graphs' own times, which count from their origins
    drift: float = 0.0
    pivot_ns: int = 0
    spread_ns: int = 0  # median distance of the collectives' ends from the first rank's, after the correction
    n_collectives: int = 0  # used to find it; 0: it follows from the clocks' own times

    def common_ns(self, time_ns: Int64) -> Int64:
        """Return the times of a rank's own clock on the common one."""
        drifted = np.rint(self.drift * (time_ns - self.pivot_ns)).astype(np.int64) if self.drift else 0
        return np.asarray(time_ns - self.offset_ns - drifted, dtype=np.int64)


def meetings(ranks: Sequence[Collectives]) -> list[Bool]:
    """Return for each rank a mask of the collectives that no rank leaves before the last one has arrived."""
    return [np.array([name in MEETING for name in c.operation], dtype=np.bool_) for c in ranks]


def find_clocks(ranks: Sequence[Collectives], matched: Match, origins_ns: Sequence[int]) -> list[Clock]:
    """Return the clock of each rank; the first one's is the common one.

    Ranks without a collective in common with the first one are aligned by way of others; those without any keep the
    times of their own clocks.
    """
    meeting = matched.column(meetings(ranks)).astype(np.bool_) if len(matched.rank) else np.zeros(0, dtype=np.bool_)
    collective, rank = matched.collective[meeting], matched.rank[meeting]
    end_ns = matched.column([c.end_ns for c in ranks])[meeting] if len(matched.rank) else np.empty(0, dtype=np.int64)
    clocks = [Clock(offset_ns=origins_ns[0] - origin_ns) for origin_ns in origins_ns]
    known = np.zeros(len(ranks), dtype=np.bool_)
    known[:1] = True
    common_ns = end_ns.copy()
    by_rank = np.argsort(rank, kind="stable")
    bounds = np.searchsorted(rank[by_rank], np.arange(len(ranks) + 1))
    while True:
        reference_ns, has_value = _medians(collective[known[rank]], common_ns[known[rank]], matched.n_collectives)
        new = np.flatnonzero(~known[rank] & has_value[collective])
        if not len(new):
            return clocks
        new = new[np.argsort(rank[new], kind="stable")]
        for rows in np.split(new, np.flatnonzero(np.diff(rank[new])) + 1):
            new_rank = int(rank[rows[0]])
            clocks[new_rank] = _fit(end_ns[rows], reference_ns[collective[rows]])
            known[new_rank] = True
            rank_rows = by_rank[bounds[new_rank] : bounds[new_rank + 1]]
            common_ns[rank_rows] = clocks[new_rank].common_ns(end_ns[rank_rows])


def _fit(own_ns: Int64, reference_ns: Int64) -> Clock:
    """Fit the clock that brings ``own_ns`` closest to ``reference_ns``, by medians, as some ends are late anyway."""
    difference_ns = own_ns - reference_ns
    offset_ns = _median(difference_ns)
    residual_ns = difference_ns - offset_ns
    spread_ns = _median(np.abs(residual_ns))
    plain = Clock(offset_ns, spread_ns=spread_ns, n_collectives=len(own_ns))
    if len(own_ns) < FEWEST_FOR_DRIFT:
        return plain
    order = np.argsort(own_ns, kind="stable")
    third = len(order) // 3
    early, late = order[:third], order[-third:]
    apart_ns = _median(own_ns[late]) - _median(own_ns[early])
    grown_ns = _median(residual_ns[late]) - _median(residual_ns[early])
    if apart_ns <= 0 or abs(grown_ns / apart_ns) > MOST_DRIFT:
        return plain
    drift, pivot_ns = grown_ns / apart_ns, _median(own_ns)
    corrected_ns = residual_ns - np.rint(drift * (own_ns - pivot_ns)).astype(np.int64)
    offset_ns += _median(corrected_ns)
    spread_after_ns = _median(np.abs(corrected_ns - _median(corrected_ns)))
    if abs(grown_ns) <= SIGNIFICANT * max(spread_after_ns, 1) / np.sqrt(third) * 2 or spread_after_ns >= spread_ns:
        return plain
    return Clock(offset_ns, drift, pivot_ns, spread_after_ns, len(own_ns))


def _median(values: Array) -> int:
    """The lower median: one of the values, so that a shift of all shifts it exactly."""
    middle = (len(values) - 1) // 2
    return int(np.partition(values, middle)[middle])


def _medians(group: Int64, values: Int64, n_groups: int) -> tuple[Int64, Bool]:
    """The lower median of each group, shape (n_groups,), and which groups have any value."""
    order = np.lexsort((values, group))
    count = np.bincount(group, minlength=n_groups)
    first = np.cumsum(count) - count
    has_value = count > 0
    result = np.zeros(n_groups, dtype=np.int64)
    result[has_value] = values[order][(first + (count - 1) // 2)[has_value]]
    return result, has_value
